//! A hostile monitor: every line is a value, an event or an error, and a call never waits for more
//! bytes than there are.
//!
//! Input: one byte, whose low bit puts a greeting and the first reply before the rest; then all
//! bytes of the monitor before it closes.
#![no_main]

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use qmp::Qmp;

const GREETED: &[u8] =
    br#"{"QMP": {"version": {"qemu": {"micro": 2, "minor": 0, "major": 10}}, "capabilities": []}}
{"return": {}, "id": 1}
"#;
/// Nothing takes this long unless it hangs: libFuzzer reports hangs.
const LONG: Duration = Duration::from_secs(60);

fuzz_target!(|input: &[u8]| {
    let [greeted, said @ ..] = input else { return };
    let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
    theirs.set_nonblocking(true).expect("a socket of ours");
    let all = if greeted & 1 == 1 { [GREETED, said].concat() } else { said.to_vec() };
    // Bytes that do not fit into the socket's buffer are dropped.
    let _ = (&theirs).write(&all);
    theirs.shutdown(Shutdown::Write).expect("a socket of ours");
    let mut qmp = match Qmp::over(ours, LONG) {
        Ok(qmp) => qmp,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    let _ = (qmp.query_status(), qmp.query_name(), qmp.query_uuid());
    for _ in 0..3 {
        if let Ok(info) = qmp.query_migrate() {
            let _ = (info.status().len(), info.is_over(), format!("{info:?}"));
        }
    }
    let _ = (qmp.query_parameters(), qmp.set_capabilities(&[("multifd", true)]));
    let mut events = 0;
    while let Ok(Some(_)) = qmp.poll_event(Duration::ZERO) {
        events += 1;
    }
    assert!(events <= all.len() / 12);
});
