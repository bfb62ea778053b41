//! Domains of libvirt, with a made `virsh`. A real libvirt is in tests/libvirt.

use super::*;

/// A `virsh` with the domains `web` and `db` that run, `rest` that is paused, and `off`, by the
/// ends of their names. The migration of `db` fails, that of `rest` lasts until it is interrupted,
/// and that of `deaf` until it is killed.
const VIRSH: &str = r#"#!/bin/sh
echo "$*" >>"${0%/*}/calls"
shift
case "$1 $*" in
domstate*web | domstate*db | domstate*deaf) echo running ;;
domstate*rest) echo paused ;;
domstate*off) echo 'shut off' ;;
domstats*balloon*) echo "Domain: 'x'"; echo '  balloon.current=1048576' ;;
domstats*web*dirtyrate*) echo '  dirtyrate.calc_status=2'; echo '  dirtyrate.megabytes_per_second=50' ;;
domstats*dirtyrate*) echo '  dirtyrate.calc_status=2'; echo '  dirtyrate.megabytes_per_second=3' ;;
domdirtyrate-calc*) ;;
domjobinfo*) echo 'Job type:         None' ;;
migrate*web*) ;;
migrate*rest*) exec sleep 1000 ;;
migrate*deaf*) trap '' INT; exec sleep 1000 ;;
migrate*) echo 'error: operation failed: no such luck' >&2; exit 1 ;;
*) echo "error: failed to get domain" >&2; exit 1 ;;
esac
"#;

pub(super) fn evacuate(rig: &Rig, log: &str, words: &[&str]) -> Evacuate {
    let virsh = rig.at("virsh");
    // Written by another process: one that another test is starting would have a copy of a file
    // that is open for writing here, and the kernel does not execute such a file.
    let make = ["-c", "printf %s \"$1\" >\"$0\" && chmod 755 \"$0\""];
    let made = Command::new("sh").args(make).arg(&virsh).arg(VIRSH).status().unwrap();
    assert!(made.success());
    let path = format!("{}:{}", rig.folder.path().display(), std::env::var("PATH").unwrap());
    let log = rig.at(log);
    let errors = std::fs::File::create(&log).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_platen"));
    command.arg("evacuate").args(words).env("PATH", path).stdout(Stdio::null()).stderr(errors);
    Evacuate { child: command.spawn().unwrap(), log }
}

#[test]
fn domains_move_by_virsh_in_their_order_and_each_failure_is_its_own() {
    let rig = Rig::new();
    let json = rig.json();
    let names = ["web", "db", "off", "gone"].map(|name| rig.domain(name));
    let domains = names.each_ref().map(|name| format!("--domain={name}"));
    let domains = domains.each_ref().map(String::as_str);
    let [web, db, off, gone] = names.each_ref().map(String::as_str);
    let options = ["--libvirt=qemu+ssh://b/system", "--virsh-option=--persistent", "--at-once=1"];
    let limit = ["--max-bandwidth=83886080", &json];
    let mut evacuate = evacuate(&rig, "log", &[&domains[..], &options, &limit].concat());
    assert_eq!(evacuate.ends(), Some(3), "{}", evacuate.said());
    let found = rig.outcomes();
    let shape: Vec<_> = found.iter().map(|(name, outcome, _)| (&name[..], &outcome[..])).collect();
    let expected = [(db, "stayed"), (web, "moved"), (off, "refused"), (gone, "refused")];
    assert_eq!(shape, expected, "{found:?}");
    let causes = ["no such luck", "", "it is 'shut off'", "failed to get domain"];
    for ((.., error), words) in found.iter().zip(causes) {
        assert!(error.contains(words), "{found:?}");
    }
    let said = evacuate.said();
    let turn = format!("turn 1: {db}, RAM 1024 MiB, written to 3.0 MiB/s");
    assert!(said.contains(&turn), "{said}");
    let calls = std::fs::read_to_string(rig.at("calls")).unwrap();
    let migrate = format!(
        "-q migrate --live --persistent --bandwidth 80 --domain {web} --desturi qemu+ssh://b/system"
    );
    assert!(calls.lines().any(|line| line == migrate), "{calls}");
}

#[test]
fn an_interrupt_reaches_virsh_and_the_domain_stays() {
    let rig = Rig::new();
    let json = rig.json();
    let domain = format!("--domain={}", rig.domain("rest"));
    let words = [&domain, "--libvirt=qemu+ssh://b/system", &json];
    let mut evacuate = evacuate(&rig, "log", &words);
    evacuate.says("rest: starts");
    evacuate.signal(Signal::INT);
    assert_eq!(evacuate.ends(), Some(1), "{}", evacuate.said());
    let (_, outcome, error) = &rig.outcomes()[0];
    assert_eq!(outcome, "stayed");
    assert_eq!(error, "its virsh migrate was ended by signal 2");
}

#[test]
fn what_a_domain_cannot_use_is_refused() {
    let rig = Rig::new();
    for (words, says) in [
        (&["--domain=web"][..], "--libvirt"),
        (
            &["--domain=web", "--libvirt=b", "--codec=zstd"],
            "--codec=zstd has no effect on a --domain",
        ),
        (&["--domain=web", "--domain=web", "--libvirt=b"], "web is given twice"),
        (&["--domain=", "--libvirt=b"], "no name of a domain"),
    ] {
        let mut evacuate = evacuate(&rig, "log", words);
        let status = evacuate.ends();
        let said = evacuate.said();
        assert!(matches!(status, Some(1 | 2)) && said.contains(says), "{words:?}: {said}");
    }
    assert!(!rig.at("calls").exists());
}
