//! An image whose units a simulated QAT device compresses, with every fault of its script.

#[allow(dead_code, reason = "made for the driver's tests, which use all of it")]
#[path = "../../../accel/qat/tests/simulated/matrix.rs"]
mod matrix;
#[allow(dead_code, reason = "made for the driver's tests, which use all of it")]
#[path = "../../../accel/qat/tests/simulated/sim.rs"]
mod sim;

use codec::{Codec, Settings};
use image::{verify, Content, Image, Options, RamBlock, State, Units, Writer};
use matrix::FAULTS;
use sim::Sim;

const PAGE: usize = 4096;
const PAGES: u64 = 400;

/// A page of text, and every tenth one of noise that no codec makes shorter.
fn page(number: u64) -> Vec<u8> {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    if number.is_multiple_of(10) {
        return (0..PAGE / 8).flat_map(|_| next().to_le_bytes()).collect();
    }
    let words = ["page ", "slot ", "unit ", "device "];
    let text = (0..PAGE).flat_map(|_| words[(next() % 4) as usize].bytes());
    text.take(PAGE).collect()
}

#[test]
fn every_page_comes_back_whatever_the_device_does() {
    let sim = Sim::turn();
    let folder = tempfile::tempdir().unwrap();
    let mut by_device = 0;
    for (nth, fault) in FAULTS.iter().enumerate() {
        sim.script("reset");
        sim.script("instances 4; latency 30; seed 7");
        let device = Some(sim.start().unwrap());
        let path = folder.path().join(format!("image{nth}"));
        let settings = Settings::new(Codec::DeflateQz, None).unwrap();
        let options = Options { settings, device, threads: 2, ..Options::default() };
        let mut writer = Writer::create(&path, options).unwrap();
        let accelerators = writer.accelerators().to_vec();
        assert_eq!(accelerators.len(), 2, "{}", fault.name);
        sim.script(fault.script);
        let block = RamBlock { name: "ram".into(), len: PAGES * PAGE as u64, host_page: 0 };
        writer.blocks(PAGE, &[block]).unwrap();
        for number in 0..PAGES {
            writer.page(0, number, &page(number)).unwrap();
        }
        writer.finish(&State::default()).unwrap().link().unwrap();
        by_device += accelerators.iter().map(|of| of.snapshot().by_device).sum::<u64>();
        assert!(verify(&path).findings.is_empty(), "{}", fault.name);
        compare(&path, fault.name);
    }
    assert!(by_device > 0, "the device did nothing");
    assert_eq!(sim.counters().violations, 0);
}

fn compare(path: &std::path::Path, fault: &str) {
    let image = Image::open(path).unwrap();
    let (per, mut units) = (image.shape().unit_pages(), Units::new());
    let mut plain = vec![0; image.shape().unit_bytes()];
    let mut read = None;
    for number in 0..PAGES {
        let content = image.index().blocks[0].content(number).unwrap();
        let Content::Slot(slot) = content else { panic!("{fault}: page {number}: {content:?}") };
        if read != Some(slot / per) {
            units.read(&image, slot / per, &mut plain).unwrap();
            read = Some(slot / per);
        }
        let at = usize::try_from(slot % per).unwrap() * PAGE;
        assert!(plain[at..at + PAGE] == page(number), "{fault}: page {number}");
    }
}
