//! A VM with many devices: saved, restored, and saved again.

use super::*;
use std::collections::BTreeMap;
use std::ops::Range;

/// Devices of each kind that QEMU commonly has, some of them with RAM blocks and ROMs of their own.
const DEVICES: &str = "-smp 4 -m 48M,maxmem=1G,slots=2 \
    -object memory-backend-ram,id=dimm,size=16M -device pc-dimm,memdev=dimm \
    -device VGA -device qemu-xhci -device usb-tablet -device usb-kbd \
    -audiodev none,id=sound -device intel-hda -device hda-duplex,audiodev=sound \
    -device virtio-rng-pci -device virtio-balloon-pci \
    -device virtio-serial-pci -chardev null,id=port -device virtserialport,chardev=port \
    -serial null -netdev user,id=n0 -netdev user,id=n1 -netdev user,id=n2 \
    -device virtio-net-pci,netdev=n0 -device e1000,netdev=n1 -device rtl8139,netdev=n2 \
    -drive driver=null-co,read-zeroes=on,size=64M,if=none,id=d0 -device virtio-blk-pci,drive=d0 \
    -drive driver=null-co,read-zeroes=on,size=64M,if=none,id=d1 -device ide-hd,drive=d1 \
    -drive driver=null-co,read-zeroes=on,size=64M,if=none,id=d2 -device virtio-scsi-pci \
    -device scsi-hd,drive=d2";

/// The sections of a device state, in order.
fn sections(state: &image::State) -> Vec<(String, Range<usize>)> {
    let description: Value = serde_json::from_slice(&state.description).unwrap();
    let mut begins = Vec::new();
    let mut from = 0;
    for device in description["devices"].as_array().unwrap() {
        let name = device["name"].as_str().unwrap();
        // Tag, section id, name with its length, instance.
        let instance = u32::try_from(device["instance_id"].as_u64().unwrap()).unwrap();
        let tail = [&[u8::try_from(name.len()).unwrap()], name.as_bytes(), &instance.to_be_bytes()]
            .concat();
        let rest = &state.devices[from..];
        let at = rest.windows(tail.len()).position(|window| window == tail);
        // The RAM's section and early ones are not among the device sections.
        let Some(at) = at.filter(|&at| at >= 5 && rest[at - 5] == 4) else { continue };
        begins.push((name.to_owned(), from + at - 5));
        from += at + tail.len();
    }
    let ends = begins[1..].iter().map(|&(_, at)| at).chain([state.devices.len()]);
    let ends: Vec<usize> = ends.collect();
    begins.into_iter().zip(ends).map(|((name, at), end)| (name, at..end)).collect()
}

/// The number of bytes that differ, by the section that they are in.
fn differences(one: &image::State, two: &image::State) -> BTreeMap<String, usize> {
    assert_eq!(one.devices.len(), two.devices.len());
    let mut found = BTreeMap::new();
    let (of_one, of_two) = (sections(one), sections(two));
    assert_eq!(of_one, of_two);
    for (name, range) in of_one {
        let pairs = one.devices[range.clone()].iter().zip(&two.devices[range]);
        let count = pairs.filter(|(one, two)| one != two).count();
        if count > 0 {
            *found.entry(name).or_default() += count;
        }
    }
    found
}

/// RAM and device state are those of the first save, byte for byte but for the clock.
#[test]
fn a_vm_with_many_devices_that_is_restored_and_saved_again_is_the_same() {
    for (nth, program) in multifd::qemus().iter().enumerate() {
        // One of them in `make test`, both in `make proof`.
        let machines = if multifd::is_quick() { &["q35"][..] } else { &["pc", "q35"] };
        for machine in machines {
            let dir = tempfile::tempdir().unwrap();
            round_trip(dir.path(), program, nth, machine);
        }
    }
}

fn round_trip(folder: &Path, program: &str, nth: usize, machine: &str) {
    let flags: Vec<&str> = DEVICES.split_whitespace().chain(["-machine", machine]).collect();
    let Some(source) = Qemu::start_of(program, folder, "source", &flags) else { return };
    // Any state will do; after a while the firmware has set up more devices.
    thread::sleep(Duration::from_millis(700));
    source.stop();
    let source = source.save(folder, "paused");
    drop(source);
    let image = folder.join("image").display().to_string();
    for (mode, way) in [("instant", &[][..]), ("load", &["--load"])] {
        let name = format!("{mode}{nth}");
        let more = [&flags[..], &WAITS, &["-S"]].concat();
        let waiting = Qemu::start_of(program, folder, &name, &more).unwrap();
        let words = ["restore", &image, "--qmp", &waiting.address()];
        let (_, report) = works(folder, &[&words[..], way].concat());
        assert_eq!((&report["mode"], &report["vm"]), (&json!(mode), &json!("paused")), "{report}");
        let again = folder.join(&name).display().to_string();
        works(folder, &["save", &again, "--qmp", &waiting.address(), "--then", "quit"]);
        let [one, two] = [&image, &again].map(|path| image::Image::open(Path::new(path)).unwrap());
        for of in &one.index().blocks {
            let is_same = block(&image, &of.name) == block(&again, &of.name);
            assert!(is_same, "{program}, {machine}, {mode}: {}", of.name);
        }
        // The PC's clock has the host's time: in 8 registers, and in the two words of 8 bytes by
        // which QEMU counts it.
        let mut differ = differences(one.state(), two.state());
        let clock = differ.remove("mc146818rtc").unwrap_or(0);
        let text = format!("{program}, {machine}, {mode}: {clock} bytes of the clock, {differ:?}");
        println!("{text}");
        assert!(differ.is_empty() && clock <= 24, "{text}");
    }
}
