//! libvirt's settings, and whether its daemon has read them.

use super::super::settings::Settings;
use super::software::LIBVIRTS;
use super::Finding;
use host::{doors_missing, has_doors, setting_of, HostEntry};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The checks of libvirt's qemu.conf. A host to which VMs come by another way than its door address
/// needs no line there. Lines that `platen host doors on` has written count all the same.
pub(super) fn check(path: &Path, settings: &Settings) -> Vec<Finding> {
    let me = settings.me();
    let text = match fs::read_to_string(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            let found = format!("{}: {error}", path.display());
            return vec![Finding::fail("qemu.conf", found, "run platen doctor as root")];
        }
        text => text.unwrap_or_default(),
    };
    let is_ours = |address: &str| address.trim_matches('"') == me.door.to_string();
    let other_way = match (&me.intercept, settings.config.sockets) {
        _ if has_doors(&text) => None,
        // Somebody else may have written such a line.
        _ if setting_of(&text, "migration_host").is_some_and(is_ours) => None,
        (Some(_), _) => Some("interception"),
        (None, 1..) => Some("unix sockets"),
        (None, 0) => None,
    };
    let mut findings = match other_way {
        Some(way) => {
            let found = format!("{} names no door, and VMs come by {way}", path.display());
            vec![Finding::ok("qemu.conf", found)]
        }
        None => door_lines(path, me),
    };
    findings.extend(forced_tls(&text));
    findings
}

/// Checks the lines of this host's door, and whether libvirt's daemon has read them.
fn door_lines(path: &Path, me: &HostEntry) -> Vec<Finding> {
    const CHECK: &str = "qemu.conf";
    let shown = path.display();
    let mut findings = vec![match doors_missing(path, me.door, &me.ports.0) {
        Err(error) => {
            let error = anyhow::Error::from(error);
            Finding::fail(CHECK, format!("{error:#}"), "then: platen host doors on --restart")
        }
        Ok(missing) if missing.is_empty() => {
            Finding::ok(CHECK, format!("{shown} names the door {} and its ports", me.door))
        }
        Ok(missing) => Finding::fail(
            CHECK,
            format!("{shown} does not say {}", missing.join(", ")),
            "platen host doors on --restart: libvirtd restarts, and running VMs go on",
        ),
    }];
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
    use std::net::Ipv4Addr;

    #[test]
    fn libvirt_s_settings_are_compared() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qemu.conf");
        let text = "[[host]]\nname = \"a\"\ndoor = \"127.80.0.1\"\nports = \"100-109\"\n";
        let given =
            |text: &str| Settings::given(host::Config::parse(text).unwrap(), "a".into()).unwrap();
        let settings = given(text);
        let me = settings.me();
        let first = || check(&path, &settings).remove(0);
        assert_eq!(first().verdict, Verdict::Fail, "no file");
        fs::write(&path, "user = \"root\"\n").unwrap();
        let found = first();
        assert_eq!(found.verdict, Verdict::Fail);
        assert!(found.found.contains("migration_host = \"127.80.0.1\""), "{found:?}");
        host::doors_on(&path, me.door, &me.ports.0).unwrap();
        assert_eq!(first().verdict, Verdict::Ok);
        fs::write(&path, "migration_host = \"10.0.0.1\"\n").unwrap();
        assert!(first().found.contains("line 1"), "{:?}", first());

        // Regression: a host without door addresses failed for want of lines that it may not have.
        let others = [format!("{text}intercept = \"200-209\"\n"), format!("sockets = 2\n{text}")];
        for text in others {
            let settings = given(&text);
            let judged = || check(&path, &settings).remove(0).verdict;
            for lines in ["", "migration_host = \"10.0.0.1\"\n"] {
                fs::write(&path, lines).unwrap();
                assert_eq!(judged(), Verdict::Ok, "{text} with {lines}");
            }
            fs::write(&path, "").unwrap();
            // Lines of another door, which platen has written, are a fault.
            host::doors_on(&path, Ipv4Addr::new(127, 80, 0, 9), &(1..=2)).unwrap();
            assert_eq!(judged(), Verdict::Fail, "{text}");
            fs::remove_file(&path).unwrap();
            assert_eq!(judged(), Verdict::Ok, "{text} without libvirt");
            // It cannot be read, as by a user who is not root.
            fs::create_dir(&path).unwrap();
            assert_eq!(judged(), Verdict::Fail, "{text} with an unreadable file");
            fs::remove_dir(&path).unwrap();
        }

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
