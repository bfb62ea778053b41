//! The messages of the packages when they are removed.

use super::{make_command, root};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The parts of the packages that run when they are removed, with the arguments of that.
fn removals() -> [(String, &'static str); 4] {
    let text = |path: &str| std::fs::read_to_string(root().join("packaging").join(path)).unwrap();
    let spec = text("rpm/platen.spec");
    let part = |begin: &str, end: &str| {
        spec.split_once(begin).unwrap().1.split_once(end).unwrap().0.to_owned()
    };
    [
        (text("debian/prerm"), "remove"),
        (part("\n%preun\n", "\n%postun\n"), "0"),
        (text("debian/postrm"), "purge"),
        (part("\n%postun\n", "\n%files\n"), "0"),
    ]
}

/// The messages of a script that has `grep` and `rmdir` as its only commands: it changes nothing
/// outside of `folder`. Calls of `rm`, `nft` and `stat` are in the file `calls`; `stat` finds only
/// processes of root.
fn said_by(script: &str, argument: &str, folder: &Path) -> String {
    let commands = folder.join("bin");
    if !commands.exists() {
        std::fs::create_dir(&commands).unwrap();
        for name in ["grep", "rmdir"] {
            std::os::unix::fs::symlink(Path::new("/bin").join(name), commands.join(name)).unwrap();
        }
        for name in ["rm", "nft", "stat"] {
            let calls = folder.join("calls").display().to_string();
            let text = format!("#!/bin/sh\necho {name} \"$*\" >>'{calls}'\n");
            let found = if name == "stat" { "echo root\n" } else { "" };
            make_command(&commands.join(name), &format!("{text}{found}"));
        }
    }
    let path = folder.join("script");
    let at = |path: &str| folder.join(path).display().to_string();
    let script = script
        .replace("/etc/libvirt/qemu.conf", &at("qemu.conf"))
        .replace("/var/lib/platen", &at("state"))
        .replace("/etc/platen", &at("etc"))
        .replace("/run/", &at("run/"));
    std::fs::write(&path, script).unwrap();
    let mut command = Command::new("/bin/sh");
    let out = command.arg(&path).arg(argument).env("PATH", &commands).output().unwrap();
    assert!(out.status.success(), "{out:?}");
    String::from_utf8(out.stderr).unwrap()
}

#[test]
fn a_package_that_is_removed_names_what_stays() {
    let folder = tempfile::tempdir().unwrap();
    let (conf, state) = (folder.path().join("qemu.conf"), folder.path().join("state"));
    let [prerm, preun, postrm, postun] = removals();
    let said = |(script, argument): &(String, &str)| said_by(script, argument, folder.path());
    for script in [&prerm, &preun] {
        std::fs::write(&conf, "user = \"root\"\n").unwrap();
        assert!(!said(script).contains("qemu.conf"), "{}", said(script));
        // As the program writes them.
        let platen = Command::new(env!("CARGO_BIN_EXE_platen"))
            .args(["host", "doors", "on", "--name", "a", "--qemu-conf"])
            .arg(&conf)
            .arg("--config")
            .arg(configuration(folder.path()))
            .output()
            .unwrap();
        assert!(platen.status.success(), "{platen:?}");
        let told = said(script);
        assert!(told.contains("qemu.conf still has the lines"), "{told}");
        // An upgrade keeps them.
        let kept = said_by(&script.0, if script.1 == "0" { "1" } else { "upgrade" }, folder.path());
        assert!(!kept.contains("qemu.conf"), "{kept}");
    }
    for script in [&postrm, &postun] {
        assert_eq!(said(script).matches("state").count(), 0);
        std::fs::create_dir_all(state.join("seed")).unwrap();
        assert!(said(script).contains("state stays. Its seeds have the memory of guests"));
        assert!(state.join("seed").exists());
        std::fs::remove_dir(state.join("seed")).unwrap();
        assert_eq!(said(script).matches("state").count(), 0);
        assert!(!state.exists());
    }
}

/// By a drop-in for the unit the service may be root's.
#[test]
fn a_package_that_is_removed_leaves_a_migration_its_table_and_its_files() {
    let folder = tempfile::tempdir().unwrap();
    let migrations = folder.path().join("run/platen/host/migrations");
    std::fs::create_dir_all(&migrations).unwrap();
    let [prerm, preun, postrm, _] = removals();
    for ((script, argument), takes) in
        [(&prerm, "nft delete table"), (&preun, "nft delete table"), (&postrm, "rm -rf")]
    {
        let calls = || {
            said_by(script, argument, folder.path());
            let calls = folder.path().join("calls");
            let text = std::fs::read_to_string(&calls).unwrap();
            std::fs::remove_file(calls).unwrap();
            text
        };
        let socket = migrations.join("1.sock");
        let runs = UnixListener::bind(&socket).unwrap();
        assert!(!calls().contains(takes), "it runs");
        drop(runs);
        std::fs::remove_file(socket).unwrap();
        assert!(calls().contains(takes), "nothing runs");
    }
}

/// A configuration of one host, `a`.
fn configuration(folder: &Path) -> PathBuf {
    let path = folder.join("platen.toml");
    std::fs::write(&path, "[[host]]\nname = \"a\"\ndoor = \"127.80.0.1\"\nports = \"100-109\"\n")
        .unwrap();
    path
}
