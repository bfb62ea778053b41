//! Saves in a store.

use image::{Options, State, Store, Writer};

use super::*;

/// Waits until the VM's firmware writes to no more than a few pages, in several looks in a row: the
/// saves have the others in common. Between two looks a VM may have got no CPU.
fn rests(folder: &Path, source: &Qemu) {
    let deadline = Instant::now() + LONG;
    let (mut before, mut quiet) = (Vec::new(), 0);
    while quiet < 5 {
        let now = mapped::memory(folder, source, 0, 16 << 20);
        let pages = now.chunks(4096).zip(before.chunks(4096));
        let rests = !before.is_empty() && pages.filter(|(now, before)| now != before).count() < 4;
        quiet = if rests { quiet + 1 } else { 0 };
        assert!(Instant::now() < deadline, "its memory changes all the time");
        before = now;
        thread::sleep(Duration::from_millis(200));
    }
}

/// Makes a store with two saves of a VM, `one` as it runs and `two` as it is paused; returns the VM
/// and the store.
fn two_saves(folder: &Path) -> Option<(Qemu, String)> {
    let source = Qemu::start(folder, "source", &MACHINE)?;
    rests(folder, &source);
    let store = folder.join("store").display().to_string();
    works(folder, &["image", "init", &store]);
    let address = source.address();
    let save = |name: &str, flags: &[&str]| {
        let path = format!("{store}/{name}");
        works(folder, &[&["save", &path, "--qmp", &address][..], flags].concat()).1
    };
    let first = save("one", &[]);
    assert_eq!((&first["status"], &first["differences"]), (&json!("completed"), &json!(0)));
    source.stop();
    let second = save("two", &["--then", "pause"]);
    let count = |report: &Value, what: &str| report[what].as_u64().unwrap();
    assert!(count(&second, "pages") * 4 < count(&first, "pages"), "{first} {second}");
    assert!(count(&second, "shared") > count(&first, "shared"), "{first} {second}");
    Some((source, store))
}

#[test]
fn saves_of_a_store_are_listed_verified_removed_and_restored() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, store)) = two_saves(folder) else { return };
    drop(source);
    let (one, two) = (format!("{store}/one"), format!("{store}/two"));
    let expected = block(&two, "pc.ram");
    let (list, _) = works(folder, &["image", "list", &store]);
    assert!(list.contains("one ") && list.contains("two ") && list.contains("2 saves"), "{list}");
    let (json, _) = works(folder, &["image", "list", "--json", &store]);
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["saves"][1]["name"], "two");
    assert_eq!(json["saves"][1]["facts"]["name"], "source");
    let (sound, _) = works(folder, &["image", "verify", &store]);
    assert_eq!(sound.lines().count(), 2, "{sound}");
    works(folder, &["image", "info", &two]);
    fails(folder, &["image", "rm", &format!("{store}/three")], "three");
    fails(folder, &["image", "rm", "none"], "image none");
    // Nothing but an image is removed.
    let stray = folder.join("stray").display().to_string();
    fs::write(&stray, b"no image").unwrap();
    fails(folder, &["image", "rm", &stray], "not an image of platen");
    assert!(Path::new(&stray).exists());
    fails(folder, &["image", "list", &folder.display().to_string()], "is no store");
    fails(folder, &["image", "init", &store], "is a store already");
    works(folder, &["image", "rm", &one]);
    works(folder, &["image", "verify", &two]);
    assert!(block(&two, "pc.ram") == expected);
    // The stream of a save is that of an image in one file: an import of it shares every page.
    let stream = folder.join("stream").display().to_string();
    works(folder, &["image", "export", &two, &stream]);
    let again = format!("{store}/again");
    works(folder, &["image", "import", &stream, &again]);
    assert!(block(&again, "pc.ram") == expected);
    for flags in [&[][..], &["--load"], &["--verify"]] {
        let waiting = Qemu::start(folder, "waits", &[&MACHINE[..], &WAITS, &["-S"]].concat());
        let waiting = waiting.unwrap();
        let words = ["restore", &two, "--qmp", &waiting.address()];
        works(folder, &[&words[..], flags].concat());
        let saved = folder.join("saved").display().to_string();
        works(folder, &["save", &saved, "--qmp", &waiting.address(), "--then", "quit"]);
        assert!(block(&saved, "pc.ram") == expected, "{flags:?}");
        fs::remove_file(&saved).unwrap();
    }
    works(folder, &["image", "rm", &two, &again]);
    assert_eq!(fs::read_dir(format!("{store}/packs")).unwrap().count(), 0);
}

#[test]
fn a_save_that_is_being_restored_is_not_removed_and_a_damaged_pack_ends_the_restore() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, store)) = two_saves(folder) else { return };
    drop(source);
    let (one, two) = (format!("{store}/one"), format!("{store}/two"));
    let waits = |name| Qemu::start(folder, name, &[&MACHINE[..], &WAITS].concat()).unwrap();
    let first = waits("first");
    let restore = Restore::held(&two, &first, &[]);
    let player = restore.player();
    fails(folder, &["image", "rm", &two], "is in use by process");
    fails(folder, &["image", "rm", &two], &format!("{player} (platen)"));
    // Its packs stay, although the save that made them goes. The save in use keeps no other save,
    // and no pack of another, in the store.
    let alone = format!("{store}/packs/{:032x}", 7);
    fs::write(&alone, b"a pack that no save names").unwrap();
    fails(folder, &["image", "rm", &two, &one], "is in use by process");
    assert!(!Path::new(&one).exists() && !Path::new(&alone).exists());
    works(folder, &["image", "verify", &two]);
    drop(restore);
    kill(player, &two);
    drop(first);
    let mut packs: Vec<_> = fs::read_dir(format!("{store}/packs"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    packs.sort_by_key(|path| path.metadata().unwrap().len());
    let large = packs.pop().unwrap();
    let name = large.file_name().unwrap().to_str().unwrap().to_owned();
    let file = File::options().read(true).write(true).open(&large).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 1000).unwrap();
    file.write_all_at(&[byte[0] ^ 1], 1000).unwrap();
    let waiting = waits("second");
    let words = ["restore", &two, "--qmp", &waiting.address(), "--verify"];
    fails(folder, &words, &format!("pack {name} of its store: unit 0 (bytes 64 to"));
    assert_eq!(waiting.monitor().query_status().unwrap().status, "inmigrate");
    fails(folder, &["image", "verify", &store], "has damaged saves: two");
    fs::remove_file(&large).unwrap();
    fails(folder, &words[..4], &name);
}

#[test]
fn a_save_killed_at_any_moment_leaves_the_other_saves_whole() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, store)) = two_saves(folder) else { return };
    source.monitor().execute("cont", None).unwrap();
    let expected = block(&format!("{store}/one"), "pc.ram");
    let mut whole = 2;
    for step in 0..24 {
        let path = format!("{store}/save{step}");
        let wait = Duration::from_micros(step * step * 800);
        save_killed_after(folder, &source, &path, "continue", wait);
        comes_to(&source, &["running"]);
        whole += usize::from(Path::new(&path).exists());
        if step % 8 == 7 {
            works(folder, &["image", "gc", &store]);
        }
    }
    let (sound, _) = works(folder, &["image", "verify", &store]);
    assert_eq!(sound.lines().count(), whole, "{sound}");
    assert!(block(&format!("{store}/one"), "pc.ram") == expected);
    println!("{} of 24 saves were finished", whole - 2);
    // Nothing stays that belongs to no save.
    let names: Vec<_> = fs::read_dir(&store)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name != "packs" && name != "platen-store")
        .map(|name| format!("{store}/{name}"))
        .collect();
    assert_eq!(names.len(), whole, "{names:?}");
    let words: Vec<&str> =
        ["image", "rm"].into_iter().chain(names.iter().map(String::as_str)).collect();
    works(folder, &words);
    assert_eq!(fs::read_dir(format!("{store}/packs")).unwrap().count(), 0);
}

/// The state of some devices has hundreds of MiB, and a store has many saves.
#[test]
fn a_list_of_saves_with_much_device_state_takes_the_memory_of_one() {
    const SAVES: usize = 24;
    const STATE: usize = 8 << 20;
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(dir.path()).unwrap();
    for nth in 0..SAVES {
        let writer = Writer::create_in(&store, &format!("{nth}"), None, Options::default());
        let state = State { devices: vec![1; STATE], facts: b"{}".to_vec(), ..State::default() };
        writer.unwrap().finish(&state).unwrap().link().unwrap();
    }
    // The limit of memory in KiB: half of what two copies of all states take.
    let limit = (SAVES * STATE) >> 10;
    let mut list = Command::new("sh");
    list.args(["-c", &format!("ulimit -d {limit}; exec \"$@\""), "sh"]);
    list.args([env!("CARGO_BIN_EXE_platen"), "image", "list"]).arg(dir.path());
    let output = list.output().unwrap();
    let listed = String::from_utf8_lossy(&output.stdout);
    assert!(listed.contains(&format!("{SAVES} saves")), "{listed}{}", said(&output));
}

/// QEMU reports the same UUID for every VM that was started without one. Pages with a changed word
/// are stored as differences from those of the VM with the same name, whichever was saved last.
#[test]
fn vms_without_a_uuid_are_told_apart_by_their_names() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let store = folder.join("store").display().to_string();
    works(folder, &["image", "init", &store]);
    let save = |vm: &str, name: &str, pages: &[u8]| {
        let contents = folder.join("contents");
        fs::write(&contents, pages).unwrap();
        let file = contents.display();
        let loader = format!("loader,file={file},addr=0x200000,force-raw=on");
        let extra = [&MACHINE[..], &["-device", &loader]].concat();
        let source = Qemu::start(folder, vm, &extra)?;
        assert_eq!(source.monitor().query_uuid().unwrap(), "00000000-0000-0000-0000-000000000000");
        source.stop();
        let path = format!("{store}/{name}");
        let (_, report) = works(folder, &["save", &path, "--qmp", &source.address()]);
        Some(report["differences"].as_u64().unwrap())
    };
    // More pages than those in which the firmware of two VMs differs by some words.
    let mut pages = Vec::new();
    for number in 0..256_u64 {
        pages.extend(number.to_le_bytes());
        pages.extend((0_u8..251).cycle().take(4088));
    }
    // No word of them is that of the other VM.
    let other: Vec<u8> = pages.iter().map(|byte| byte ^ 0xff).collect();
    let Some(first) = save("a", "a", &pages) else { return };
    pages.chunks_mut(4096).for_each(|page| page[8] ^= 1);
    let second = save("b", "b", &other).unwrap();
    let again = save("a", "again", &pages).unwrap();
    assert!(first == 0 && second < 256 && again >= 256, "{first} {second} {again}");
}
