//! VMs that are restored and saved again.

use super::*;

/// RAM that is saved, restored into a QEMU with -S and saved again is the same, in memory of each
/// kind, restored at once and loaded first.
#[test]
fn ram_that_is_restored_and_saved_again_is_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    for (kind, backend) in [
        ("ram", "memory-backend-ram"),
        ("memfd", "memory-backend-memfd,share=off"),
        ("shared", "memory-backend-memfd,share=on"),
    ] {
        let object = format!("{backend},id=pc.ram,size=16M");
        let machine = ["-machine", "pc,memory-backend=pc.ram", "-object", &object];
        let Some(source) = Qemu::start(folder, kind, &machine) else { return };
        // Any state will do; after a while the firmware has written more of it.
        thread::sleep(Duration::from_millis(300));
        let image = folder.join(format!("{kind}.image")).display().to_string();
        works(folder, &["save", &image, "--qmp", &source.address(), "--then", "quit"]);
        drop(source);
        for (mode, flags) in [("instant", &[][..]), ("load", &["--load"])] {
            let name = format!("{kind}-{mode}");
            let waiting =
                Qemu::start(folder, &name, &[&machine[..], &WAITS, &["-S"]].concat()).unwrap();
            let words = ["restore", &image, "--qmp", &waiting.address()];
            let (_, report) = works(folder, &[&words[..], flags].concat());
            assert_eq!(
                (&report["mode"], &report["vm"]),
                (&json!(mode), &json!("paused")),
                "{kind}"
            );
            let again = folder.join(format!("{name}.image")).display().to_string();
            works(folder, &["save", &again, "--qmp", &waiting.address(), "--then", "quit"]);
            let saved = image::Image::open(Path::new(&image)).unwrap();
            for block_of in &saved.index().blocks {
                let name = &block_of.name;
                assert!(block(&image, name) == block(&again, name), "{kind}, {mode}: {name}");
            }
        }
    }
}

/// Zero pages replace what QEMU itself has put into a ROM, whether they are sent or QEMU discards
/// its RAM first.
#[test]
fn roms_that_qemu_has_loaded_do_not_survive_a_load() {
    const ROM: &str = "0000:00:02.0/e1000.rom";
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let rom = |name: &str, byte: u8| {
        let path = folder.join(name);
        let mut bytes = vec![byte; 64 << 10];
        bytes[5000..5100].fill(7);
        fs::write(&path, bytes).unwrap();
        format!("e1000,addr=2,romfile={}", path.display())
    };
    let ram = |prealloc: &str| format!("memory-backend-ram,id=pc.ram,size=16M,prealloc={prealloc}");
    let flags = |object: &str, device: &str| {
        ["-machine", "pc,memory-backend=pc.ram", "-object", object, "-device", device]
            .map(str::to_owned)
    };
    let start = |name: &str, flags: &[String], more: &[&str]| {
        let flags: Vec<&str> =
            flags.iter().map(String::as_str).chain(more.iter().copied()).collect();
        Qemu::start(folder, name, &flags)
    };
    let Some(source) = start("source", &flags(&ram("off"), &rom("zeros", 0)), &[]) else { return };
    let image = folder.join("image").display().to_string();
    works(folder, &["save", &image, "--qmp", &source.address(), "--then", "quit"]);
    drop(source);
    let expected = block(&image, ROM);
    assert!(expected[..4096].iter().all(|&byte| byte == 0) && expected[5000] == 7);
    let mut sent = Vec::new();
    for prealloc in ["off", "on"] {
        let flags = flags(&ram(prealloc), &rom("others", 0xee));
        let waiting = start(prealloc, &flags, &WAITS).unwrap();
        let words = ["restore", &image, "--qmp", &waiting.address(), "--load"];
        let (_, report) = works(folder, &words);
        assert_eq!((&report["mode"], &report["fallback"]), (&json!("load"), &Value::Null));
        sent.push(report["bytes"].as_u64().unwrap());
        let again = folder.join(prealloc).display().to_string();
        works(folder, &["save", &again, "--qmp", &waiting.address(), "--then", "quit"]);
        assert!(block(&again, ROM) == expected, "preallocated: {prealloc}");
    }
    // The VM has thousands of zero pages.
    assert!(sent[0] + 10_000 < sent[1], "{sent:?}");
}
