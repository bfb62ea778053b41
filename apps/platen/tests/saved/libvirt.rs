//! The files of `virsh save`, from and to images. Those of a real libvirt are in tests/libvirt.

use super::{fails, saved, works};
use filter::{compress, Format};
use serde_json::{json, Value};
use std::fs;
use std::path::Path;

/// The facts and the blocks of an image.
fn info(folder: &Path, image: &str) -> (Value, Value) {
    let mut info: Value =
        serde_json::from_str(&works(folder, &["image", "info", "--json", image]).0).unwrap();
    (info["facts"].take(), info["blocks"].take())
}

#[test]
fn a_file_of_virsh_save_is_exported_and_imported_in_each_format() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((_source, image)) = saved(folder) else { return };
    let path = |name: &str| folder.join(name).display().to_string();
    let (xml, file) = (path("xml"), path("raw"));
    fs::write(&xml, "<domain type='kvm'>").unwrap();
    works(folder, &["image", "export", &image, &file, "--libvirt", &xml]);
    let whole = fs::read(&file).unwrap();
    let (head, stream) = whole.split_at(4096);
    assert!(head.starts_with(b"LibvirtQemudSave\x02\0\0\0") && stream.starts_with(b"QEVM"));
    let blocks = info(folder, &image).1;
    // The number of the format, and whether the VM ran.
    for (name, number, format) in
        [("gzip", 1, Some(Format::Gzip)), ("zstd", 5, Some(Format::Zstd)), ("plain", 0, None)]
    {
        let mut saved = head.to_vec();
        (saved[24], saved[28]) = (u8::from(number > 0), number);
        match format {
            None => saved.extend(stream),
            Some(format) => {
                let options = filter::Options::new(format, 2);
                compress(&options, &mut &stream[..], &mut saved).unwrap();
            }
        }
        let (file, again) = (path(name), path(&format!("{name}.image")));
        fs::write(&file, &saved).unwrap();
        works(folder, &["image", "import", &file, &again]);
        let (facts, found) = info(folder, &again);
        assert_eq!((&facts["running"], &found), (&json!(number > 0), &blocks), "{name}");
        // A changed byte in the middle: a frame is damaged.
        if format.is_some() {
            let middle = usize::midpoint(4096, saved.len());
            saved[middle] ^= 1;
            fs::write(&file, &saved).unwrap();
            let none = path("none");
            fails(folder, &["image", "import", &file, &none], "frame");
            assert!(!Path::new(&none).exists());
        }
    }
}
