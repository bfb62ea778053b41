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
