//! QEMU, libvirt and the kernel.

use super::Finding;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Folders of programs. PATH is not used, since root runs the programs.
const FOLDERS: [&str; 5] =
    ["/usr/bin", "/usr/sbin", "/usr/libexec", "/usr/local/bin", "/usr/local/sbin"];
/// Names of QEMU's program for x86-64 and Arm.
const QEMUS: [&str; 3] = ["qemu-system-x86_64", "qemu-kvm", "qemu-system-aarch64"];
/// Names of libvirt's daemon of QEMU.
pub(super) const LIBVIRTS: [&str; 2] = ["virtqemud", "libvirtd"];
/// The oldest versions that platen is tested with.
const OLDEST_QEMU: (u32, u32) = (7, 2);
const OLDEST_LIBVIRT: (u32, u32) = (9, 0);
const USERFAULTFD: &str = "/proc/sys/vm/unprivileged_userfaultfd";
/// How long a program may take to print its version.
const TOLD: Duration = Duration::from_secs(10);

/// Runs the checks that need no configuration.
pub(super) fn check() -> Vec<Finding> {
    let ask = |names: &[&str]| {
        let found =
            names.iter().flat_map(|name| FOLDERS.map(|folder| Path::new(folder).join(name)));
        found.filter(|path| path.is_file()).find_map(|path| version_of(&path))
    };
    vec![
        qemu(ask(&QEMUS)),
        libvirt(ask(&LIBVIRTS)),
        userfaultfd(fs::read_to_string(USERFAULTFD).ok().as_deref()),
    ]
}

/// Runs a program and returns the version line that it prints.
fn version_of(path: &Path) -> Option<String> {
    let mut child = Command::new(path)
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let until = Instant::now() + TOLD;
    while child.try_wait().ok()?.is_none() {
        if Instant::now() >= until {
            let _ = child.kill();
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut text = String::new();
    // It has exited, so the pipe has all that there is.
    child.stdout.take()?.take(4096).read_to_string(&mut text).ok()?;
    text.lines().next().map(str::to_owned)
}

/// The first number with a point in a line.
fn version(line: &str) -> Option<(u32, u32)> {
    line.split([' ', '-', '(', ')', ',']).find_map(|word| {
        let mut numbers = word.split('.');
        Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
    })
}

fn qemu(told: Option<String>) -> Finding {
    const CHECK: &str = "qemu";
    let Some(line) = told else {
        let found = format!("none of {} was found", QEMUS.join(", "));
        return Finding::warn(CHECK, found, "install QEMU, if libvirt does not bring its own");
    };
    match version(&line) {
        Some(version) if version < OLDEST_QEMU => {
            Finding::warn(CHECK, line, "platen is tested with QEMU 7.2 and later: upgrade")
        }
        Some(_) => Finding::ok(CHECK, line),
        None => Finding::warn(CHECK, line, "its version is not understood: compare with docs"),
    }
}

fn libvirt(told: Option<String>) -> Finding {
    const CHECK: &str = "libvirt";
    let Some(line) = told else {
        let found = format!("none of {} was found", LIBVIRTS.join(", "));
        let advice = "install libvirt; without it use `platen migrate` or `platen relay`";
        return Finding::warn(CHECK, found, advice);
    };
    match version(&line) {
        Some(version) if version >= OLDEST_LIBVIRT => Finding::ok(CHECK, line),
        _ => Finding::warn(CHECK, line, "platen is tested with libvirt 9.0 and later: upgrade"),
    }
}

fn userfaultfd(setting: Option<&str>) -> Finding {
    const CHECK: &str = "userfaultfd";
    match setting.map(str::trim) {
        Some("1") => Finding::ok(CHECK, "vm.unprivileged_userfaultfd = 1: postcopy works"),
        Some(value) => Finding::warn(
            CHECK,
            format!("vm.unprivileged_userfaultfd = {value}: postcopy fails where QEMU is not root"),
            "for postcopy: echo vm.unprivileged_userfaultfd=1 >/etc/sysctl.d/60-platen.conf, then \
             sysctl --system",
        ),
        None => Finding::warn(
            CHECK,
            "the kernel has no vm.unprivileged_userfaultfd: postcopy may fail",
            "for postcopy use a kernel with CONFIG_USERFAULTFD, 5.2 or later",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    #[test]
    fn versions_are_judged() {
        let judged = |line: &str| qemu(Some(line.into())).verdict;
        assert_eq!(judged("QEMU emulator version 7.2.17 (Debian 1:7.2+dfsg-7)"), Verdict::Ok);
        assert_eq!(judged("QEMU emulator version 10.0.0"), Verdict::Ok);
        assert_eq!(judged("QEMU emulator version 6.2.0"), Verdict::Warn);
        assert_eq!(judged("QEMU emulator version 11.1.3"), Verdict::Ok);
        assert_eq!(judged("something else"), Verdict::Warn);
        assert!(qemu(None).advice.is_some());
        let judged = |line: &str| libvirt(Some(line.into())).verdict;
        assert_eq!(judged("/usr/sbin/libvirtd (libvirt) 9.0.0"), Verdict::Ok);
        assert_eq!(judged("virtqemud (libvirt) 8.10.0"), Verdict::Warn);
        assert_eq!(libvirt(None).verdict, Verdict::Warn);
    }

    #[test]
    fn a_program_that_tells_nothing_is_passed_by() {
        assert!(version_of(Path::new("/usr/bin/cat")).unwrap().contains('.'));
        assert_eq!(version_of(Path::new("/nonexistent")), None);
    }

    #[test]
    fn userfaultfd_is_for_postcopy() {
        assert_eq!(userfaultfd(Some("1\n")).verdict, Verdict::Ok);
        assert!(userfaultfd(Some("0\n")).advice.unwrap().contains("sysctl"));
        assert_eq!(userfaultfd(None).verdict, Verdict::Warn);
    }
}
