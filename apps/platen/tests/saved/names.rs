//! Wrong names of images and reports: refused, with a remedy, and without the loss of a file.

use super::*;

#[test]
fn a_report_never_takes_the_place_of_an_image() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, image)) = saved(folder) else { return };
    let whole = fs::read(&image).unwrap();
    let (address, new) = (source.address(), folder.join("new").display().to_string());
    let run = |words: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_platen"));
        let output = command.args(words).stdin(Stdio::null()).output().unwrap();
        (output.status.success(), said(&output))
    };
    let (done, text) = run(&["save", &new, "--qmp", &address, "--json", &new]);
    assert!(!done && text.contains("this is the image"), "{text}");
    let (done, text) = run(&["save", &new, "--qmp", &address, "--json", &image]);
    assert!(!done && text.contains("name another file"), "{text}");
    assert!(!Path::new(&new).exists());
    let (done, text) = run(&["save", &new, "--qmp", &address, "--json", "/nowhere/report"]);
    assert!(!done && text.contains("its folder does not exist"), "{text}");
    assert!(!Path::new(&new).exists());
    // By another name of the same file it is found only when the image is there.
    std::os::unix::fs::symlink(folder, folder.join("link")).unwrap();
    let other = format!("{}/link/new", folder.display());
    let (done, text) = run(&["save", &new, "--qmp", &address, "--json", &other]);
    assert!(done && text.contains("it is no report: it stays as it is"), "{text}");
    assert!(works(folder, &["image", "verify", &new]).0.contains("sound"));
    drop(source);
    let waiting = Qemu::start(folder, "waits", &[&MACHINE[..], &WAITS].concat()).unwrap();
    let (done, text) = run(&["restore", &image, "--qmp", &waiting.address(), "--json", &image]);
    assert!(!done && text.contains("name another file"), "{text}");
    assert_eq!(waiting.monitor().query_status().unwrap().status, "inmigrate");
    assert!(fs::read(&image).unwrap() == whole);
}

#[test]
fn a_name_at_which_no_image_can_be_is_refused_with_the_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some(source) = Qemu::start(folder, "source", &MACHINE) else { return };
    let address = source.address();
    let save = |name: &str, expected| fails(folder, &["save", name, "--qmp", &address], expected);
    save("-", "not written to standard output");
    save(folder.to_str().unwrap(), "is a folder: name a file in it");
    save("/nowhere/image", "its folder does not exist");
    fails(folder, &["image", "import", "/dev/null", "-"], "not written to standard output");
    let store = folder.join("store").display().to_string();
    works(folder, &["image", "init", &store]);
    let (verified, _) = works(folder, &["image", "verify", &store]);
    assert!(verified.contains("store: this store has no image"), "{verified}");
    // The folder of a store's packs, by any name, and what is in it.
    std::os::unix::fs::symlink(folder.join("store/packs"), folder.join("link")).unwrap();
    fs::create_dir(folder.join("store/packs/deep")).unwrap();
    for path in ["store/packs", "store/packs/x", "store/packs/deep/x", "link/x", "link"] {
        let path = folder.join(path).display().to_string();
        let why = format!("{path} belongs to the packs of store {store}");
        fails(folder, &["save", &path, "--qmp", &address], &why);
        save(&path, "name the image");
        fails(folder, &["image", "import", "/dev/null", &path], "belongs to the packs");
    }
    fs::remove_dir(folder.join("store/packs/deep")).unwrap();
    assert_eq!(fs::read_dir(folder.join("store/packs")).unwrap().count(), 0);
    for name in ["platen-store", ".x"] {
        save(&format!("{store}/{name}"), "cannot be the name of a save");
    }
    // A folder of this name elsewhere is like any other.
    fs::create_dir(folder.join("packs")).unwrap();
    works(folder, &["save", folder.join("packs/x").to_str().unwrap(), "--qmp", &address]);
    fails(folder, &["image", "init", &store], "is a store already");
    fails(folder, &["image", "gc", folder.to_str().unwrap()], "is no store: a store is a folder");
    fails(folder, &["image", "info", &store], "it is a folder");
    fails(folder, &["image", "rm", &store], "it is a folder");
    let waiting = Qemu::start(folder, "waits", &[&MACHINE[..], &WAITS].concat()).unwrap();
    fails(folder, &["restore", &store, "--qmp", &waiting.address()], "STORE/NAME");
    // Nothing is known of the bytes of a file that cannot be opened.
    for (path, expected) in [("/nowhere/image", "No such file"), (&store[..1], "is a folder")] {
        let (output, _) = platen(folder, &["image", "verify", path]);
        let text = said(&output);
        assert!(!output.status.success() && text.contains(expected), "{text}");
        assert!(!text.contains("damaged"), "{text}");
    }
    // Each save has one line.
    works(folder, &["save", &format!("{store}/a\nb"), "--qmp", &address]);
    let (list, _) = works(folder, &["image", "list", &store]);
    assert!(list.lines().count() == 3 && list.contains("a\\nb "), "{list}");
}

/// Such a VM may have been migrated: it would run twice.
#[test]
fn a_vm_that_may_have_been_migrated_is_not_just_let_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some(source) = Qemu::start(folder, "source", &MACHINE) else { return };
    let (image, other) = (folder.join("image"), folder.join("other"));
    let save = |image: &Path| {
        let image = image.display().to_string();
        platen(folder, &["save", &image, "--qmp", &source.address(), "--then", "pause"]).0
    };
    assert!(save(&image).status.success());
    let text = said(&save(&other));
    assert!(text.contains("'postmigrate'") && text.contains("runs at the destination"), "{text}");
    let waiting = Qemu::start(folder, "waits", &[&MACHINE[..], &WAITS].concat()).unwrap();
    let words = ["save", other.to_str().unwrap(), "--qmp", &waiting.address()];
    fails(folder, &words, "has none to save");
    assert!(!other.exists());
}

/// Whether the process has the file open that becomes an image in `folder`.
fn has_begun(process: u32, folder: &Path) -> bool {
    let files = fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten();
    let names = files.filter_map(|file| fs::read_link(file.ok()?.path()).ok());
    names.map(|name| name.display().to_string()).any(|name| {
        name.starts_with(folder.to_str().unwrap())
            && (name.ends_with("(deleted)") || name.contains(".partial-"))
    })
}

/// The other file may be another VM's image.
#[test]
fn a_save_whose_name_another_process_takes_does_not_call_its_image_complete() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some(source) = Qemu::start(folder, "source", &MACHINE) else { return };
    let image = folder.join("image");
    let deadline = Instant::now() + LONG;
    for then in ["continue", "pause", "quit"] {
        loop {
            let mut command = Command::new(env!("CARGO_BIN_EXE_platen"));
            command.arg("save").arg(&image).args(["--qmp", &source.address(), "--then", then]);
            let mut save = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
            while !has_begun(save.id(), folder) && save.try_wait().unwrap().is_none() {}
            let taken = File::create_new(&image).and_then(|mut file| file.write_all(b"other"));
            let output = save.wait_with_output().unwrap();
            if taken.is_err() {
                // The image was there before. With `quit` there is no second attempt.
                assert!(output.status.success() && Instant::now() < deadline);
                if then == "quit" {
                    return;
                }
                let _ = source.monitor().execute("cont", None);
                fs::remove_file(&image).unwrap();
                continue;
            }
            let text = said(&output);
            assert!(!output.status.success() && text.contains("no image was made"), "{text}");
            assert_eq!(fs::read(&image).unwrap(), b"other");
            assert!(source.monitor().query_status().unwrap().running, "{then}: {text}");
            fs::remove_file(&image).unwrap();
            break;
        }
    }
}

/// Every file in a store's folder counts as a save: a stream there would keep all packs for ever.
#[test]
fn an_export_into_a_store_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, image)) = saved(folder) else { return };
    drop(source);
    let store = folder.join("store").display().to_string();
    works(folder, &["image", "init", &store]);
    std::os::unix::fs::symlink(&store, folder.join("link")).unwrap();
    for path in ["store/stream", "store/packs/stream", "link/stream"] {
        let path = folder.join(path).display().to_string();
        for flags in [&[][..], &["--mapped-ram"]] {
            let words = [&["image", "export", &image, &path][..], flags].concat();
            fails(folder, &words, "would count as a save");
            assert!(!Path::new(&path).exists(), "{path}");
        }
    }
    works(folder, &["image", "export", &image, &folder.join("stream").display().to_string()]);
    works(folder, &["image", "gc", &store]);
}
