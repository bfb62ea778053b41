//! Configurations and commands of `platen host`.

use super::*;

#[test]
fn a_second_service_is_refused_and_a_service_manager_hears() {
    let rig = Rig::new("");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    let _a = rig.start_with(A, &[("NOTIFY_SOCKET", path.to_str().unwrap())]);
    let mut heard = Vec::new();
    while !heard.contains(&"WATCHDOG=1".to_owned()) {
        let mut bytes = [0; 100];
        let got = manager.recv(&mut bytes).unwrap();
        heard.push(String::from_utf8_lossy(&bytes[..got]).into_owned());
    }
    assert_eq!(heard[0], "READY=1");
    let (status, said) = rig.spawn(A, &[]).ends();
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("another process listens there"), "{said}");
}

#[test]
fn commands_about_a_service_that_does_not_run_say_so() {
    let rig = Rig::new("");
    let (code, said) = rig.command(A, &["list"]);
    assert_eq!(code, Some(1));
    assert!(said.contains("it is not served"), "{said}");
    let (code, said) = rig.command(A, &["host", "status"]);
    assert_eq!((code, said.contains("it is not served")), (Some(1), true), "{said}");
    let _a = rig.start(A);
    until(|| {
        let (code, said) = rig.command(A, &["host", "status"]);
        // A machine that stands still is no error of the service's.
        let is_late = said.contains("it does not answer within 30 s");
        assert!(is_late || (code == Some(0) && said.contains("host a: 4 doors")), "{said}");
        !is_late
    });
}

#[test]
fn configurations_are_checked_and_qemu_conf_is_written() {
    let rig = Rig::new("");
    let config = rig.config();
    let run = |args: &[&str]| rig::run(args);
    let (code, said) = run(&["config", "check", &config]);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("in order"), "{said}");
    std::fs::write(rig.at("bad.toml"), "speed = 1\n").unwrap();
    let (code, said) = run(&["config", "check", rig.at("bad.toml").to_str().unwrap()]);
    assert_eq!(code, Some(1));
    assert!(said.contains("bad.toml") && said.contains("speed"), "{said}");
    let add = |words: &[&str]| run(&[&["host", "add", "--config", &config], words].concat());
    let (code, said) = add(&["stranger"]);
    assert!(code == Some(1) && said.contains("no [[host]] has the name 'stranger'"), "{said}");
    assert!(!said.contains("--name"), "no option of this command: {said}");
    assert_eq!(add(&["b", "--port", "0"]).0, Some(2));

    let conf = rig.at("qemu.conf");
    std::fs::write(&conf, "user = \"root\"\n").unwrap();
    let conf_path = conf.to_str().unwrap().to_owned();
    let doors = |what: &str| {
        let name = ["--config", &config, "--name", "b", "--qemu-conf", &conf_path];
        run(&[&["host", "doors", what][..], &name].concat())
    };
    let (code, said) = doors("on");
    assert_eq!((code, said.contains("Restart libvirtd")), (Some(0), true), "{said}");
    let text = std::fs::read_to_string(&conf).unwrap();
    assert!(text.contains(&format!("migration_address = \"{}\"\n", rig.door(B))), "{text}");
    assert!(doors("on").1.contains("as it should be"));
    assert!(doors("off").1.contains("Restart libvirtd"));
    assert_eq!(std::fs::read_to_string(&conf).unwrap(), "user = \"root\"\n");
}
