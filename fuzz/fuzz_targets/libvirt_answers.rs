//! A hostile daemon of libvirt, and a domain's XML: each answer is a result or an error, and a call
//! never waits for more bytes than there are.
//!
//! Input: one byte, whose lowest bit chooses between XML and a daemon, and whose next bit puts the
//! answers that let us in before the rest; then the XML, or all bytes of the daemon before it
//! closes.
#![no_main]

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use libfuzzer_sys::fuzz_target;
use libvirt::{Connection, Domain, Handover};

const XML: &str =
    "<domain><name>a</name><uuid>592ef32c-27a5-4f79-ba49-16196c787853</uuid></domain>";

/// The answers to the calls of a login (none is wanted) and of a driver.
fn greeted() -> Vec<u8> {
    let login = [36, 0x2000_8086, 1, 66, 1, 1, 0, 1, 0];
    let driver = [28, 0x2000_8086, 1, 1, 1, 2, 0];
    login.iter().chain(&driver).flat_map(|number: &u32| number.to_be_bytes()).collect()
}

fuzz_target!(|input: &[u8]| {
    let [how, said @ ..] = input else { return };
    if how & 1 == 1 {
        if let Ok(domain) = Domain::parse(&String::from_utf8_lossy(said)) {
            assert!(!domain.name().is_empty() && domain.uuid().len() == 36);
        }
        return;
    }
    let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
    theirs.set_nonblocking(true).expect("a socket of ours");
    let all = if how & 2 == 2 { [&greeted()[..], said].concat() } else { said.to_vec() };
    // Bytes that do not fit into the socket's buffer are dropped.
    let _ = (&theirs).write(&all);
    theirs.shutdown(Shutdown::Write).expect("a socket of ours");
    let mut connection = match Connection::over(ours, "qemu:///system") {
        Ok(connection) => connection,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    let domain = Domain::parse(XML).expect("a domain");
    let _ = (connection.owner(), connection.state(&domain));
    let _ = connection.prepare(&domain, "/run/0.sock", Handover::AtOnce);
    let _ = (connection.finish(&domain, Handover::AtOnce), connection.state(&domain));
});
