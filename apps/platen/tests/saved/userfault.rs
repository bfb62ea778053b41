//! A host that does not permit userfaultfd.

use super::*;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};

/// Runs `work` on a thread that may not use userfaultfd, nor may its processes: as a user beside
/// root with `vm.unprivileged_userfaultfd=0`, and without permission for /dev/userfaultfd.
fn without_userfaultfd<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    /// `USERFAULTFD_IOC_NEW`, by which /dev/userfaultfd gives descriptors.
    const NEW: u64 = 0xaa00;
    let new = SeccompCondition::new(1, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, NEW).unwrap();
    let rules = [
        (libc::SYS_userfaultfd, Vec::new()),
        (libc::SYS_ioctl, vec![SeccompRule::new(vec![new]).unwrap()]),
    ];
    let here = std::env::consts::ARCH.try_into().unwrap();
    let refused = SeccompAction::Errno(libc::EPERM.unsigned_abs());
    let filter =
        SeccompFilter::new(rules.into_iter().collect(), SeccompAction::Allow, refused, here);
    let filter: BpfProgram = filter.unwrap().try_into().unwrap();
    let filtered = || {
        seccompiler::apply_filter(&filter).unwrap();
        work()
    };
    thread::scope(|scope| scope.spawn(filtered).join().unwrap())
}

#[test]
fn a_vm_on_a_host_without_userfaultfd_is_loaded_first_with_the_reason() {
    for (nth, program) in multifd::qemus().iter().enumerate() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path();
        let Some(source) = Qemu::start_of(program, folder, "source", &MACHINE) else { continue };
        source.stop();
        drop(source.save(folder, "paused"));
        let image = folder.join("image").display().to_string();
        let (name, flags) = (format!("waits{nth}"), [&MACHINE[..], &WAITS].concat());
        let start = || Qemu::start_of(program, folder, &name, &flags).unwrap();
        let waiting = without_userfaultfd(start);
        let words = ["restore", &image, "--qmp", &waiting.address()];
        let (output, report) = platen(folder, &words);
        let text = said(&output);
        assert!(output.status.success(), "{program}: {text}");
        assert_eq!((&report["mode"], &report["vm"]), (&json!("load"), &json!("paused")));
        let reason = report["fallback"].as_str().unwrap_or_default();
        assert!(reason.contains("Postcopy is not supported"), "{program}: {report}");
        assert!(text.contains(reason), "{program}: {text}");
        clones::has_ram_of(folder, &waiting, &image);
    }
}
