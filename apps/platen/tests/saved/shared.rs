//! Several VMs from one image.

use super::*;

/// A VM has the MAC address that was saved, whatever its QEMU was given, and does not run while
/// another VM writes to its disk: the restore says so, and so does `cont`.
#[test]
fn a_second_vm_keeps_the_mac_address_and_does_not_run_on_the_disk_of_the_first() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let disk = folder.join("disk");
    File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    let file = format!("driver=file,node-name=disk,filename={}", disk.display());
    let start = |name: &str, mac: &str, extra: &[&str]| {
        let card = format!("virtio-net-pci,netdev=net,mac={mac}");
        let hub = ["-netdev", "hubport,id=net,hubid=0", "-device", &card];
        let block = ["-blockdev", &file, "-device", "virtio-blk-pci,drive=disk"];
        Qemu::start(folder, name, &[&MACHINE[..], &hub, &block, extra].concat())
    };
    let address = "52:54:00:00:00:01";
    let Some(source) = start("source", address, &[]) else { return };
    let image = folder.join("image").display().to_string();
    works(folder, &["save", &image, "--qmp", &source.address(), "--then", "quit"]);
    drop(source);
    for (name, flag) in [("instant", "--no-hot-set"), ("load", "--load")] {
        let first = start(&format!("{name}1"), "52:54:00:00:00:02", &WAITS).unwrap();
        let second = start(&format!("{name}2"), "52:54:00:00:00:03", &WAITS).unwrap();
        let restore = |qemu: &Qemu| {
            let words = ["restore", &image, "--shared", flag, "--qmp", &qemu.address()];
            let (output, report) = platen(folder, &words);
            assert!(output.status.success(), "{}", said(&output));
            (said(&output), report)
        };
        let (text, report) = restore(&first);
        assert_eq!((&report["mode"], &report["vm"]), (&json!(name), &json!("running")), "{text}");
        assert!(!text.contains("could not take a disk"), "{text}");
        let (text, report) = restore(&second);
        assert_eq!((&report["mode"], &report["vm"]), (&json!(name), &json!("paused")), "{text}");
        assert!(text.contains("could not take a disk"), "{text}");
        // The firmware of a VM that runs may reset the card, which then has the address of its
        // QEMU.
        let filters = second.monitor().execute("query-rx-filter", None).unwrap();
        assert_eq!(filters[0]["main-mac"], address);
        let refused = second.monitor().execute("cont", None).unwrap_err().to_string();
        assert!(refused.contains("lock"), "{refused}");
        drop(first);
        second.monitor().execute("cont", None).unwrap();
        assert_eq!(comes_to(&second, &["running"]), "running");
    }
}
