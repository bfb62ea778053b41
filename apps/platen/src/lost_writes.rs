//! QEMUs that lose writes of their guests during a migration.

use crate::say::say;
use qmp::Qmp;

/// The first QEMU that loses none: its commit 03bfc2188f.
const MENDED: u32 = 9;

/// QEMU takes its short way through the dirty log, which forgets the TLBs of TCG, in RAM of a
/// multiple of this size: 64 pages.
const SHORT_WAY: u64 = 64 * 4096;

/// Prints a warning if this QEMU loses writes of its guest during a migration. The bytes that it
/// sends are delivered unchanged, so no check of platen can find that.
pub(crate) fn warn_of_lost_writes(qmp: &mut Qmp) {
    if loses_writes(qmp) {
        say(&format!(
            "warning: this QEMU {} runs the VM without KVM. Before QEMU 9.0 it then loses writes of the guest while it \
             migrates or saves it, also without platen, and the guest may crash: use QEMU 9.0 or later, pause the VM \
             before (stop), or give it RAM that is no multiple of 256 KiB",
            qmp.version()
        ));
    }
}

fn loses_writes(qmp: &mut Qmp) -> bool {
    // No answer is no reason for a warning.
    qmp.version().major < MENDED
        && qmp.execute("query-kvm", None).is_ok_and(|answer| answer["enabled"] == false)
        && qmp.execute("query-memory-size-summary", None).is_ok_and(|answer| {
            answer["base-memory"].as_u64().is_some_and(|bytes| bytes % SHORT_WAY == 0)
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{json, Value};
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    /// A monitor of that QEMU.
    fn monitor(major: u32, kvm: Value, memory: Value) -> Qmp {
        let (ours, theirs) = UnixStream::pair().unwrap();
        std::thread::spawn(move || {
            let (mut to, from) = (theirs.try_clone().unwrap(), BufReader::new(theirs));
            let version = json!({ "qemu": { "major": major, "minor": 2, "micro": 0 } });
            let greeting = json!({ "QMP": { "version": version, "capabilities": [] } });
            writeln!(to, "{greeting}").unwrap();
            for line in from.lines().map_while(Result::ok) {
                let command: Value = serde_json::from_str(&line).unwrap();
                let answer = match command["execute"].as_str().unwrap() {
                    "query-kvm" => kvm.clone(),
                    "query-memory-size-summary" => memory.clone(),
                    _ => json!({}),
                };
                writeln!(to, "{}", json!({ "return": answer, "id": command["id"] })).unwrap();
            }
        });
        Qmp::over(ours, Duration::from_secs(600)).unwrap()
    }

    #[test]
    fn only_an_old_qemu_without_kvm_loses_writes() {
        let kvm = |enabled: bool| json!({ "enabled": enabled, "present": true });
        let memory = |bytes: u64| json!({ "base-memory": bytes });
        let cases = [
            (7, kvm(false), memory(256 << 20), true),
            (8, kvm(false), memory((256 << 20) + SHORT_WAY), true),
            (7, kvm(false), memory((256 << 20) + 8192), false),
            (7, kvm(true), memory(256 << 20), false),
            (9, kvm(false), memory(256 << 20), false),
            (7, json!({}), memory(256 << 20), false),
            (7, kvm(false), json!({}), false),
        ];
        for (major, kvm, memory, expected) in cases {
            let case = format!("{major} {kvm} {memory}");
            assert_eq!(loses_writes(&mut monitor(major, kvm, memory)), expected, "{case}");
        }
    }
}
