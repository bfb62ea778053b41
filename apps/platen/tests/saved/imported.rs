//! Images of streams that `platen image import` has read.

use super::*;

/// The stream says that the VM was paused. QEMU starts every VM after its postcopy, unless it is
/// told not to.
#[test]
fn a_paused_vm_is_paused_after_its_image_is_exported_imported_and_restored() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, image)) = saved_paused(folder) else { return };
    drop(source);
    let path = |name: &str| folder.join(name).display().to_string();
    for (name, flags) in [("stream", &[][..]), ("mapped", &["--mapped-ram"])] {
        let (stream, again) = (path(name), path(&format!("{name}.image")));
        works(folder, &[&["image", "export", &image, &stream][..], flags].concat());
        works(folder, &["image", "import", &stream, &again]);
        for (mode, load) in [("instant", &[][..]), ("load", &["--load"])] {
            let waiting = format!("{name}-{mode}");
            let waiting = Qemu::start(folder, &waiting, &[&MACHINE[..], &WAITS].concat()).unwrap();
            let address = waiting.address();
            let words = [&["restore", &again, "--qmp", &address][..], load].concat();
            let (_, report) = works(folder, &words);
            assert_eq!(
                (&report["mode"], &report["vm"]),
                (&json!(mode), &json!("paused")),
                "{name}"
            );
        }
    }
}

/// Regression: libvirt pauses a VM before it saves it, and QEMU obeyed that state after a load. The
/// VM stayed paused, and the message blamed an `-S` that QEMU did not have.
#[test]
fn a_vm_that_ran_before_virsh_save_runs_after_a_load_unless_its_qemu_has_s() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, image)) = saved_paused(folder) else { return };
    drop(source);
    let path = |name: &str| folder.join(name).display().to_string();
    works(folder, &["image", "export", &image, &path("stream")]);
    let xml = "<domain><name>vm</name><uuid>00000000-0000-4000-8000-000000000001</uuid></domain>";
    let head = recorder::head(xml.as_bytes(), true).unwrap();
    fs::write(path("saved"), [head, fs::read(path("stream")).unwrap()].concat()).unwrap();
    works(folder, &["image", "import", &path("saved"), &path("again")]);
    for (name, flags, expected) in [("runs", &[][..], "running"), ("stands", &["-S"], "paused")] {
        let flags = [&MACHINE[..], &WAITS, flags].concat();
        let waiting = Qemu::start(folder, name, &flags).unwrap();
        let words = ["restore", &path("again"), "--qmp", &waiting.address(), "--load"];
        let (_, report) = works(folder, &words);
        assert_eq!((&report["mode"], &report["vm"]), (&json!("load"), &json!(expected)));
    }
}

/// Two VMs of one store, each with libvirt's description. A changed word is stored as a difference
/// from the page of the same VM, whichever was imported last.
#[test]
fn an_imported_vm_is_compared_with_its_own_earlier_import() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, image)) = saved_paused(folder) else { return };
    drop(source);
    let path = |name: &str| folder.join(name).display().to_string();
    works(folder, &["image", "export", &image, &path("stream")]);
    let stream = fs::read(path("stream")).unwrap();
    let rom = block(&image, "pc.bios");
    let is_full = |page: &&[u8]| page.chunks(8).filter(|word| **word != [0; 8]).count() > 400;
    let page = rom.chunks(4096).find(is_full).unwrap();
    let at = stream.windows(4096).position(|bytes| bytes == page).unwrap();
    let store = path("store");
    works(folder, &["image", "init", &store]);
    let import = |name: &str, vm: u8, change: &dyn Fn(&mut [u8])| {
        let uuid = format!("00000000-0000-4000-8000-00000000000{vm}");
        let xml = format!("<domain><name>vm{vm}</name><uuid>{uuid}</uuid></domain>");
        let mut file = recorder::head(xml.as_bytes(), false).unwrap();
        let head = file.len();
        file.extend(&stream);
        change(&mut file[head + at..head + at + 4096]);
        fs::write(path(name), file).unwrap();
        let save = format!("{store}/{name}");
        let (output, _) = platen(folder, &["image", "import", &path(name), &save]);
        assert!(output.status.success(), "{}", said(&output));
        said(&output)
    };
    import("a", 1, &|_| {});
    // No word of this page is that of the other VM.
    import("b", 2, &|page| {
        page.iter_mut().enumerate().for_each(|(at, byte)| {
            *byte = byte.wrapping_add(1 + u8::try_from(at % 251).unwrap());
        })
    });
    let said = import("again", 1, &|page| page[8] ^= 1);
    assert!(said.contains("; 1 others are stored as differences"), "{said}");
    let info = works(folder, &["image", "info", "--json", &format!("{store}/again")]).0;
    let info: Value = serde_json::from_str(&info).unwrap();
    assert_eq!(info["facts"]["name"], "vm1");
    assert_eq!(info["facts"]["uuid"], "00000000-0000-4000-8000-000000000001");
}

/// Regression: the import said that it does not understand the stream.
#[test]
fn a_compressed_stream_is_imported_and_an_image_is_named_as_one() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((_source, image)) = saved_paused(folder) else { return };
    let path = |name: &str| folder.join(name).display().to_string();
    works(folder, &["image", "export", &image, &path("stream")]);
    for program in ["zstd", "gzip"] {
        let (packed, again) = (path(program), path(&format!("{program}.image")));
        let output = fs::File::create(&packed).unwrap();
        let packed_as =
            Command::new(program).args(["-1", "-c", &path("stream")]).stdout(output).status();
        assert!(packed_as.unwrap().success());
        works(folder, &["image", "import", &packed, &again]);
        works(folder, &["image", "export", &again, &path(&format!("{program}.stream"))]);
        let plain = fs::read(path(&format!("{program}.stream"))).unwrap();
        assert!(plain == fs::read(path("stream")).unwrap(), "{program}");
        // A file that is cut off leaves no image.
        let packed = fs::read(&packed).unwrap();
        fs::write(path("cut"), &packed[..packed.len() - 100]).unwrap();
        let (output, _) = platen(folder, &["image", "import", &path("cut"), &path("none")]);
        assert!(!output.status.success() && !Path::new(&path("none")).exists(), "{program}");
    }
    fails(folder, &["image", "import", &image, &path("none")], "this is an image already");
}

/// libvirt pauses a VM before it saves it, and only the head of its file says that the VM ran.
#[test]
fn an_export_without_a_head_says_that_a_vm_which_ran_will_be_paused() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, image)) = saved_paused(folder) else { return };
    drop(source);
    let path = |name: &str| folder.join(name).display().to_string();
    works(folder, &["image", "export", &image, &path("stream")]);
    let stream = fs::read(path("stream")).unwrap();
    let xml = "<domain><name>vm</name><uuid>00000000-0000-4000-8000-000000000001</uuid></domain>";
    fs::write(path("xml"), xml).unwrap();
    for (name, ran) in [("ran", true), ("stood", false)] {
        let head = recorder::head(xml.as_bytes(), ran).unwrap();
        fs::write(path("saved"), [&head[..], &stream].concat()).unwrap();
        let image = path(&format!("{name}.image"));
        works(folder, &["image", "import", &path("saved"), &image]);
        let xml = path("xml");
        for (kind, flags, has_head) in [
            ("plain", &[][..], false),
            ("mapped", &["--mapped-ram"], false),
            ("libvirt", &["--libvirt", &xml], true),
        ] {
            let to = path(&format!("{name}.{kind}"));
            let words = [&["image", "export", &image, &to][..], flags].concat();
            let (output, _) = platen(folder, &words);
            assert!(output.status.success(), "{}", said(&output));
            let told = said(&output).contains("will be paused") && said(&output).contains("cont");
            assert_eq!(told, ran && !has_head, "{name} {kind}: {}", said(&output));
        }
    }
}
