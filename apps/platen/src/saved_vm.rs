//! Functions that `save` and `restore` share.

use crate::restore_clash::NO_UUID;
use crate::restore_recovery::UNANSWERED;
use anyhow::{ensure, Context};
use image::Image;
use qmp::{Qmp, QmpError};
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time limit for a VM that is loaded to leave `inmigrate`.
const STARTS: Duration = Duration::from_secs(60);

/// Time for one answer. QEMU may answer later, too.
const ANSWERS: Duration = Duration::from_secs(1);
/// The error of a QEMU that has loaded the VM and does not answer.
const MAY_RUN: &str =
    "QEMU has loaded the VM, which may run there: look at it (query-status) before \
                       the image is restored again";

/// Capability settings that a plain stream requires, where QEMU has the capability.
pub(crate) const PLAIN: [(&str, bool); 14] = [
    ("events", true),
    ("return-path", true),
    ("multifd", false),
    ("postcopy-ram", false),
    ("postcopy-preempt", false),
    ("xbzrle", false),
    ("compress", false),
    ("zero-copy-send", false),
    ("mapped-ram", false),
    ("background-snapshot", false),
    ("pause-before-switchover", false),
    ("switchover-ack", false),
    // `save` refuses these two. A destination with one of them on would read another block table,
    // or wait for a second VM.
    ("x-ignore-shared", false),
    ("x-colo", false),
];

/// Why a folder cannot be opened as an image.
pub(crate) const FOLDER: &str = "it is a folder: name an image, or a save of a store as STORE/NAME";

/// Why an address cannot be opened as a file.
const REMOTE: &str =
    "this is an address for platen restore: run this command on the host that serves the image, with its file";

/// Opens an image. Errors name its path.
pub(crate) fn open(path: &Path) -> anyhow::Result<Arc<Image>> {
    ensure!(!path.starts_with("platen:"), "image {}: {REMOTE}", path.display());
    ensure!(!path.is_dir(), "image {}: {FOLDER}", path.display());
    let image = Image::open(path).with_context(|| format!("image {}", path.display()))?;
    Ok(Arc::new(image))
}

/// Makes a QEMU that waits listen for a VM at `uri`.
///
/// # Errors
///
/// QEMU refuses: it listens already, for example.
pub(crate) fn listen(qmp: &mut Qmp, uri: &str) -> anyhow::Result<()> {
    const ANEW: &str = "start QEMU with -incoming defer, anew for each restore";
    match qmp.migrate_incoming(uri) {
        Err(refused @ QmpError::Refused { .. }) => Err(refused).context(ANEW),
        listens => Ok(listens?),
    }
}

/// Waits until the VM, which QEMU has loaded, leaves `inmigrate`; returns its run state. A QEMU
/// that answers late is asked again: its main loop may wait for a disk that another host releases.
///
/// # Errors
///
/// QEMU does not answer. The VM may run there all the same.
pub(crate) fn wait_started(qmp: &mut Qmp) -> anyhow::Result<String> {
    let until = Instant::now() + STARTS;
    loop {
        let is_over = Instant::now() > until;
        let answer = match qmp.unanswered() {
            // QEMU reads its monitor no more once too many questions wait there.
            UNANSWERED.. if !is_over => None,
            _ => match qmp.execute_within("query-status", None, ANSWERS) {
                Err(QmpError::TimedOut { .. }) if !is_over => None,
                answer => Some(answer.context(MAY_RUN)?),
            },
        };
        if let Some(answer) = answer {
            let vm = answer["status"].as_str().context(MAY_RUN)?;
            if vm != "inmigrate" || is_over {
                return Ok(vm.to_owned());
            }
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Formats a number of bytes with its unit.
pub(crate) fn bytes(count: u64) -> String {
    match count {
        0..1_048_576 => format!("{} KiB", count.div_ceil(1024)),
        _ => format!("{:.1} MiB", count as f64 / f64::from(1 << 20)),
    }
}

/// Writes a report as one line of JSON. An error is only printed: the exit status shows what became
/// of the VM.
pub(crate) fn write_json(path: Option<&std::path::Path>, report: &Value) {
    let Some(path) = path else { return };
    if let Err(error) = crate::report_file::write_whole(path, &format!("{report}\n")) {
        crate::say::say(&format!("cannot write the report to {}: {error}", path.display()));
    }
}

/// The VM of an image, as QEMU or libvirt names it. Both are `None` if nobody names the VM.
#[derive(Debug, Default)]
pub(crate) struct SavedVm {
    pub(crate) uuid: Option<String>,
    pub(crate) name: Option<String>,
}

impl SavedVm {
    /// Whether a save with these facts is one of this VM. Only the name tells VMs that were started
    /// without a UUID apart. VMs without a name, too, count as one: a page that has little in
    /// common with that of the other save is stored whole, as if there were no other.
    pub(crate) fn is_in(&self, facts: &Value) -> bool {
        let Some(uuid) = &self.uuid else { return false };
        let has_name = facts["name"].as_str() == self.name.as_deref();
        facts["uuid"] == **uuid && (uuid != NO_UUID || has_name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixStream;
    use std::thread;

    #[test]
    fn a_vm_is_told_by_its_uuid_or_else_by_its_name() {
        let is_in = |uuid: Option<&str>, name: Option<&str>, facts: Value| {
            SavedVm { uuid: uuid.map(Into::into), name: name.map(Into::into) }.is_in(&facts)
        };
        let other = "592ef32c-27a5-4f79-ba49-16196c787853";
        // A VM may get another name.
        assert!(is_in(Some(other), Some("b"), json!({ "uuid": other, "name": "a" })));
        assert!(!is_in(Some(other), Some("a"), json!({ "uuid": NO_UUID, "name": "a" })));
        for (saved, name, expected) in [
            (json!("a"), Some("a"), true),
            (json!("a"), Some("b"), false),
            (json!("a"), None, false),
            (json!(null), Some("a"), false),
            (json!(null), None, true),
        ] {
            let facts = json!({ "uuid": NO_UUID, "name": saved });
            assert_eq!(is_in(Some(NO_UUID), name, facts), expected, "{saved} {name:?}");
        }
        assert!(!is_in(None, None, json!({})));
    }

    /// The state that is found at a monitor which answers `late` questions only when the next one
    /// has come.
    fn started(late: usize, states: &'static [&'static str]) -> anyhow::Result<String> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        thread::spawn(move || {
            let (mut to, from) = (theirs.try_clone().unwrap(), BufReader::new(theirs));
            let version = json!({ "qemu": { "major": 7, "minor": 2, "micro": 0 } });
            let greeting = json!({ "QMP": { "version": version, "capabilities": [] } });
            writeln!(to, "{greeting}").unwrap();
            let (mut asked, mut kept) = (0, String::new());
            for line in from.lines().map_while(Result::ok) {
                let command: Value = serde_json::from_str(&line).unwrap();
                let mut answer = json!({});
                if command["execute"] == "query-status" {
                    let state = states[asked.min(states.len() - 1)];
                    answer = json!({ "status": state, "running": state == "running" });
                    asked += 1;
                }
                kept += &format!("{}\n", json!({ "return": answer, "id": command["id"] }));
                if asked == 0 || asked > late {
                    to.write_all(std::mem::take(&mut kept).as_bytes()).unwrap();
                }
            }
        });
        wait_started(&mut Qmp::over(ours, Duration::from_secs(300)).unwrap())
    }

    #[test]
    fn a_vm_has_started_when_it_leaves_inmigrate() {
        assert_eq!(started(0, &["inmigrate", "inmigrate", "running"]).unwrap(), "running");
    }

    /// Its main loop may wait for a disk that another host has just released. Without an answer
    /// the VM may run, and must not be restored again.
    #[test]
    fn a_qemu_that_has_the_vm_and_answers_late_is_asked_again() {
        assert_eq!(started(1, &["inmigrate", "running"]).unwrap(), "running");
    }
}
