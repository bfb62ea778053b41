//! The hot set of an image.

use super::*;

/// A saved VM, and the path of its hot set.
fn saved(folder: &Path) -> Option<(String, PathBuf)> {
    let (source, image) = super::saved(folder)?;
    drop(source);
    Some((image, folder.join(".image.hot")))
}

/// A background so slow that the VM runs, and asks for pages, before all of them have been sent.
const SLOW: [&str; 2] = ["--push-rate", "262144"];

/// Restores the image to the end; returns the report and the text for people.
fn restore(folder: &Path, image: &str, flags: &[&str]) -> (Value, String) {
    let waiting = Qemu::start(folder, "waits", &[&MACHINE[..], &WAITS].concat()).unwrap();
    let address = waiting.address();
    let words = [&["restore", image, "--qmp", &address], flags, &SLOW].concat();
    let (output, report) = platen(folder, &words);
    let text = said(&output);
    assert!(output.status.success(), "{words:?}: {text}");
    (report, text)
}

/// As `restore`, again and again until a VM has asked for pages. One that gets no CPU asks for none
/// before all of them have been sent, and none of them is hot then.
fn restore_that_asks(folder: &Path, image: &str) -> (Value, String) {
    let deadline = Instant::now() + LONG;
    loop {
        let (report, text) = restore(folder, image, &[]);
        if report["requests"].as_u64().unwrap() > 0 {
            return (report, text);
        }
        assert!(Instant::now() < deadline, "{report}");
    }
}

fn info(folder: &Path, image: &str) -> Value {
    let (text, _) = works(folder, &["image", "info", image, "--json"]);
    serde_json::from_str(&text).unwrap()
}

#[test]
fn a_restore_sends_what_earlier_ones_asked_for_before_the_vm_runs() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((image, hot_set)) = saved(folder) else { return };
    assert_eq!(info(folder, &image)["hot-pages"], 0);
    // Neither used nor written.
    let (report, _) = restore(folder, &image, &["--no-hot-set"]);
    assert_eq!((&report["hot"], hot_set.exists()), (&json!(0), false));
    let (report, _) = restore_that_asks(folder, &image);
    assert_eq!(report["hot"], 0);
    let asked = report["requests"].as_u64().unwrap();
    let pages = info(folder, &image)["hot-pages"].as_u64().unwrap();
    assert!(0 < pages && pages <= asked, "{pages} of {asked}");
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode();
    assert_eq!(mode(&hot_set), mode(Path::new(&image)));
    let (report, _) = restore(folder, &image, &[]);
    assert_eq!(report["hot"], pages, "{report}");
    // The set only grows.
    let more = info(folder, &image)["hot-pages"].as_u64().unwrap();
    assert!(more >= pages && more <= pages + report["requests"].as_u64().unwrap(), "{report}");
    // The one that loads everything first has no use for it.
    let before = fs::read(&hot_set).unwrap();
    restore(folder, &image, &["--load"]);
    assert!(fs::read(&hot_set).unwrap() == before);
    works(folder, &["image", "rm", &image]);
    assert!(!Path::new(&image).exists() && !hot_set.exists());
}

#[test]
fn a_damaged_foreign_or_stale_hot_set_is_ignored_and_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((image, hot_set)) = saved(folder) else { return };
    restore_that_asks(folder, &image);
    let sound = fs::read(&hot_set).unwrap();
    let mut flipped = sound.clone();
    flipped[40] ^= 1;
    // That of an image that had this name before.
    let stale = {
        let other = folder.join("other").display().to_string();
        let stream = folder.join("stream").display().to_string();
        works(folder, &["image", "export", &image, &stream]);
        works(folder, &["image", "import", &stream, &other]);
        restore_that_asks(folder, &other);
        fs::read(folder.join(".other.hot")).unwrap()
    };
    for (bytes, why) in [
        (&flipped[..], "its checksum is wrong"),
        (&sound[..sound.len() / 2], "the hot set"),
        (b"", "cut off"),
        (&stale, "another image"),
    ] {
        fs::write(&hot_set, bytes).unwrap();
        assert!(info(folder, &image)["hot-error"].as_str().unwrap().contains(why), "{why}");
        let (report, text) = restore_that_asks(folder, &image);
        assert!(text.contains(".image.hot is ignored") && text.contains(why), "{text}");
        assert_eq!((&report["hot"], &report["status"]), (&json!(0), &json!("completed")));
        assert_eq!(info(folder, &image)["hot-error"], Value::Null, "{why}: it was not replaced");
    }
}

/// A restore that finds a hot page damaged has told QEMU nothing: it begins with a copy, or ends
/// with the VM as good as before.
#[test]
fn a_damaged_hot_page_is_found_before_the_vm_runs() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((image, hot_set)) = saved(folder) else { return };
    let copy = folder.join("copy").display().to_string();
    fs::copy(&image, &copy).unwrap();
    restore_that_asks(folder, &image);
    // All units: whatever the VM has asked for is damaged.
    let file = File::options().read(true).write(true).open(&image).unwrap();
    let mut place = [0; 8];
    file.read_exact_at(&mut place, file.metadata().unwrap().len() - 96 + 16).unwrap();
    for at in (64 + 30..u64::from_be_bytes(place)).step_by(512) {
        file.write_all_at(b"#", at).unwrap();
    }
    let waiting = Qemu::start(folder, "waits", &[&MACHINE[..], &WAITS].concat()).unwrap();
    let words = ["restore", &image, "--qmp", &waiting.address()];
    fails(folder, &words, "before the VM ran");
    assert_eq!(waiting.monitor().query_status().unwrap().status, "inmigrate");
    drop(waiting);
    let before = fs::read(&hot_set).unwrap();
    let (report, text) = restore(folder, &image, &["--copy", &copy]);
    assert_eq!((&report["status"], &report["deaths"]), (&json!("completed"), &json!(0)));
    assert!(text.contains("another begins from"), "{text}");
    assert!(fs::read(&hot_set).unwrap() == before);
}

/// QEMU counts the pages that it got before the guest ran as received: another player does not send
/// them again, and sends all others.
#[test]
fn another_player_goes_on_after_one_that_has_sent_hot_pages() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, image)) = saved_paused(folder) else { return };
    drop(source);
    let expected = block(&image, "pc.ram");
    let opened = image::Image::open(Path::new(&image)).unwrap();
    let ram = opened.index().blocks.iter().position(|block| block.name == "pc.ram").unwrap();
    let mut set = image::HotSet::default();
    let pages = (0..4096).step_by(3).zip(0..);
    let pages = pages.map(|(page, at)| image::HotPage { at, block: ram, page });
    assert!(set.add(&pages.collect::<Vec<_>>()));
    set.write(Path::new(&image), &opened).unwrap();
    let waiting = Qemu::start(folder, "waits", &[&MACHINE[..], &WAITS].concat()).unwrap();
    // Its background is held back for ever.
    let restore = Restore::held(&image, &waiting, &[]);
    assert!(!restore.text.contains("ignored"), "{}", restore.text);
    let player = restore.player();
    drop(restore);
    kill(player, &image);
    let words = ["restore", &image, "--qmp", &waiting.address(), "--recover"];
    works(folder, &words);
    let again = folder.join("again").display().to_string();
    works(folder, &["save", &again, "--qmp", &waiting.address(), "--then", "quit"]);
    assert!(block(&again, "pc.ram") == expected);
}
