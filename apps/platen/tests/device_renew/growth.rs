//! Devices that grow in use.

use super::*;

/// By NBD, whose clients see the size of the device when they connect.
#[test]
fn a_device_grows_in_use_and_its_size_persists() {
    let served = Served::start_by(&["--mem-limit", "64M"], None, false);
    let own = Path::new(env!("CARGO_BIN_EXE_platen"));
    let mib = || served.status()["disksize"].as_u64().unwrap() >> 20;
    let load = Load::start(served.disk(), nothing_written());
    for (size, expected) in [("16M", 16), ("16M", 16), ("128M", 128)] {
        load.goes_on();
        let (done, said) = served.ask(own, &["set", "--size", size]);
        assert!(done, "{said}");
        load.goes_on();
        assert_eq!(mib(), expected);
    }
    drop(load.end());
    // The new pages, which another server takes over.
    let (mut disk, last) = (served.disk(), (128 << 8) - 1);
    for page in [PAGES, last] {
        disk.write(page, &mut content(page, 1));
    }
    let there = |disk: &mut Disk| {
        for page in [PAGES, last] {
            let mut got = vec![0; PAGE];
            disk.read(page, &mut got);
            assert!(got == content(page, 1), "page {page} is not what was written");
        }
    };
    let pid = served.status()["pid"].clone();
    let number = i32::try_from(pid.as_i64().unwrap()).unwrap();
    kill_process(Pid::from_raw(number).unwrap(), Signal::KILL).unwrap();
    wait("no other server", || served.stat().is_some_and(|stat| stat["pid"] != pid));
    assert_eq!(mib(), 128);
    there(&mut disk);
    let (done, said) = served.ask(&served.copy(), &["upgrade"]);
    assert!(done, "{said}");
    assert_eq!(mib(), 128);
    there(&mut disk);
    for (size, why) in [("64M", "are fewer"), ("129M", "room for 134217728 bytes")] {
        let (done, said) = served.ask(own, &["set", "--size", size]);
        assert!(!done && said.contains(why), "{size}: {said}");
    }
    served.end();
}

#[test]
fn a_server_killed_while_its_device_grows_leaves_one_of_both_sizes_and_every_page() {
    // A release build has no steps to be killed at.
    if !cfg!(debug_assertions) {
        return;
    }
    let own = Path::new(env!("CARGO_BIN_EXE_platen"));
    for (step, expected) in [
        ("successor stands by", 8),
        ("successor goes", 8),
        ("successor alone", 8),
        ("store grown", 16),
    ] {
        let served = Served::start_by(&[], Some(step), false);
        let load = Load::start(served.disk(), nothing_written());
        load.goes_on();
        let mib = || served.status()["disksize"].as_u64().unwrap() >> 20;
        let (done, said) = served.ask(own, &["set", "--size", "16M"]);
        assert!(!done && served.path("killed").exists(), "{step}: {said}");
        load.goes_on();
        assert_eq!(mib(), expected, "{step}");
        let (done, said) = served.ask(own, &["set", "--size", "16M"]);
        assert!(done, "{step}: {said}");
        load.goes_on();
        assert_eq!(mib(), 16, "{step}");
        drop(load.end());
        served.end();
    }
}
