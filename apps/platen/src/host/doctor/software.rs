//! QEMU, libvirt and its settings, and the kernel.

use super::Finding;
use host::{doors_missing, setting_of, HostEntry};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Folders of programs. PATH is not used, since root runs the programs.
const FOLDERS: [&str; 5] =
    ["/usr/bin", "/usr/sbin", "/usr/libexec", "/usr/local/bin", "/usr/local/sbin"];
/// Names of QEMU's program for x86-64 and Arm.
const QEMUS: [&str; 3] = ["qemu-system-x86_64", "qemu-kvm", "qemu-system-aarch64"];
/// Names of libvirt's daemon of QEMU.
const LIBVIRTS: [&str; 2] = ["virtqemud", "libvirtd"];
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

/// The checks of libvirt's qemu.conf.
pub(super) fn libvirt_settings(path: &Path, me: &HostEntry) -> Vec<Finding> {
    const CHECK: &str = "qemu.conf";
    let shown = path.display();
    let mut findings = vec![match doors_missing(path, me.door, &me.ports.0) {
        Err(error) => {
            let error = anyhow::Error::from(error);
            Finding::fail(CHECK, format!("{error:#}"), "then: platen host doors on")
        }
        Ok(missing) if missing.is_empty() => {
            Finding::ok(CHECK, format!("{shown} names the door {} and its ports", me.door))
        }
        Ok(missing) => Finding::fail(
            CHECK,
            format!("{shown} does not say {}", missing.join(", ")),
            "platen host doors on, then restart libvirtd (or virtqemud): running VMs go on",
        ),
    }];
    if let Ok(text) = fs::read_to_string(path) {
        findings.extend(forced_tls(&text));
    }
    let changed = fs::metadata(path).and_then(|found| found.modified()).ok();
    let daemon = LIBVIRTS.iter().find_map(|name| started(Path::new("/proc"), name));
    findings.extend(restarted(changed, daemon));
    findings
}

/// Checks libvirt's own encryption, which leaves nothing to compress.
fn forced_tls(text: &str) -> Option<Finding> {
    let forced = setting_of(text, "migrate_tls_force").filter(|value| *value != "0")?;
    Some(Finding::fail(
        "qemu.conf",
        format!(
            "migrate_tls_force = {forced}: libvirt encrypts each migration, and platen resets it"
        ),
        "take the line out: platen encrypts the links between the hosts itself",
    ))
}

/// Checks whether libvirt's daemon has read the file.
fn restarted(changed: Option<SystemTime>, daemon: Option<SystemTime>) -> Option<Finding> {
    const CHECK: &str = "libvirtd";
    let (changed, started) = (changed?, daemon?);
    Some(if changed > started {
        Finding::warn(
            CHECK,
            "it runs since before qemu.conf was changed, and may not have read it",
            "systemctl restart libvirtd (or virtqemud): running VMs go on",
        )
    } else {
        Finding::ok(CHECK, "it was started after the last change of qemu.conf")
    })
}

/// The time at which the process of that name was started.
fn started(proc: &Path, name: &str) -> Option<SystemTime> {
    let processes = fs::read_dir(proc).ok()?.flatten().map(|process| process.path());
    let is_it = |process: &PathBuf| {
        fs::read_to_string(process.join("comm")).is_ok_and(|comm| comm.trim_end() == name)
    };
    let process = processes.filter(|path| path.join("stat").exists()).find(is_it)?;
    let boot = fs::read_to_string(proc.join("stat")).ok()?;
    let boot = boot.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()?;
    let stat = fs::read_to_string(process.join("stat")).ok()?;
    // The fields after the name, which may have spaces and brackets; this is the 22nd field of all.
    let ticks: u64 = stat.rsplit_once(") ")?.1.split(' ').nth(19)?.parse().ok()?;
    let since = Duration::from_secs(ticks / rustix::param::clock_ticks_per_second());
    Some(UNIX_EPOCH + Duration::from_secs(boot) + since)
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

    #[test]
    fn libvirt_s_settings_are_compared() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qemu.conf");
        let text = "[[host]]\nname = \"a\"\ndoor = \"127.80.0.1\"\nports = \"100-109\"\n";
        let config = host::Config::parse(text).unwrap();
        let me = &config.host[0];
        let first = || libvirt_settings(&path, me).remove(0);
        assert_eq!(first().verdict, Verdict::Fail, "no file");
        fs::write(&path, "user = \"root\"\n").unwrap();
        let found = first();
        assert_eq!(found.verdict, Verdict::Fail);
        assert!(found.found.contains("migration_host = \"127.80.0.1\""), "{found:?}");
        host::doors_on(&path, me.door, &me.ports.0).unwrap();
        assert_eq!(first().verdict, Verdict::Ok);
        fs::write(&path, "migration_host = \"10.0.0.1\"\n").unwrap();
        assert!(first().found.contains("line 1"), "{:?}", first());

        assert_eq!(forced_tls("# migrate_tls_force = 1\nmigrate_tls_force = 0\n"), None);
        assert_eq!(forced_tls("migrate_tls_force = 1\n").unwrap().verdict, Verdict::Fail);
    }

    #[test]
    fn a_daemon_that_has_not_read_its_file_is_told() {
        let (early, late) = (UNIX_EPOCH, UNIX_EPOCH + Duration::from_secs(9));
        assert_eq!(restarted(Some(early), Some(late)).unwrap().verdict, Verdict::Ok);
        assert_eq!(restarted(Some(late), Some(early)).unwrap().verdict, Verdict::Warn);
        assert_eq!(restarted(Some(late), None), None);
        // As the kernel writes it.
        let proc = tempfile::tempdir().unwrap();
        let one = proc.path().join("7");
        fs::create_dir(&one).unwrap();
        fs::write(proc.path().join("stat"), "cpu 1 2\nbtime 1000\n").unwrap();
        fs::write(one.join("comm"), "libvirtd\n").unwrap();
        let ticks = 5 * rustix::param::clock_ticks_per_second();
        let fields = (4..22).map(|_| "0").collect::<Vec<_>>().join(" ");
        fs::write(one.join("stat"), format!("7 (libvirtd) S {fields} {ticks} 0\n")).unwrap();
        assert_eq!(started(proc.path(), "libvirtd"), Some(UNIX_EPOCH + Duration::from_secs(1005)));
        assert_eq!(started(proc.path(), "virtqemud"), None);
    }
}
