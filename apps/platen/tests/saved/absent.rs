//! A save that has died, and whose image lies on a server of files that does not answer.

use super::hung::with_held;
use super::*;

use seccompiler::{SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompRule};

/// The helper does not know whether the VM may continue before the server answers. The user may
/// know it, and needs the monitor then.
#[test]
fn a_helper_that_waits_for_a_server_of_files_keeps_no_monitor() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some(source) = Qemu::start(folder, "source", &MACHINE) else { return };
    let image = folder.join("image");
    let mut save = Command::new(env!("CARGO_BIN_EXE_platen"));
    save.arg("save").arg(&image).args(["--qmp", &source.address(), "--then", "pause"]);
    save.stderr(Stdio::null());
    // The save gives its image no name, and the helper looks for it: both wait. Only a look that
    // follows no symbolic link has the flag.
    let flag = u64::try_from(libc::AT_SYMLINK_NOFOLLOW).unwrap();
    let op = SeccompCmpOp::MaskedEq(flag);
    let look = SeccompCondition::new(2, SeccompCmpArgLen::Dword, op, flag).unwrap();
    let looks = (libc::SYS_statx, vec![SeccompRule::new(vec![look]).unwrap()]);
    let names = [libc::SYS_linkat, libc::SYS_renameat2].map(|call| (call, Vec::new()));
    let calls = [&names[..], &[looks]].concat();
    let (mut save, hung) = with_held(calls, || save.spawn().unwrap());
    let stopped = || {
        let mut monitor = Qmp::connect(&second_monitor(&source.socket), LONG).unwrap();
        monitor.query_status().unwrap().status == "postmigrate"
    };
    loop {
        assert!(hung.wait(), "the save makes no such call");
        if stopped() {
            break;
        }
        // The save looks for its name at the beginning.
        hung.pass();
    }
    save.kill().unwrap();
    save.wait().unwrap();
    assert!(hung.wait(), "the helper does not look for the image");
    // The helper has had the monitor of the save, and waits.
    let mut monitor = source.monitor();
    monitor.execute("cont", None).unwrap();
    assert_eq!(monitor.query_status().unwrap().status, "running");
    drop(hung);
}
