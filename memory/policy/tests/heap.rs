//! The heap memory of a policy: as much as `Settings::memory` says, and not much less. In a file of
//! its own, because the C library counts for the whole process.
#![expect(unsafe_code, reason = "asks the C library")]

use codec::Codec;
use device::{Device, DeviceOptions};
use policy::{Policy, Settings, Trainer};
use store::{Options, Store};

fn heap() -> usize {
    // SAFETY: takes no pointer.
    let info = unsafe { libc::mallinfo2() };
    info.uordblks + info.hblkhd
}

#[test]
fn a_policy_uses_between_half_and_all_of_its_stated_heap() {
    let mut all = vec![];
    for group in [1, 8, 16, 32] {
        all.extend([-5, 1, 3, 9, 12, 14, 19].map(|level| ("zstd", level, group)));
        all.extend([("lz4", 1, group), ("zlib", 1, group), ("zlib", 9, group)]);
    }
    for (codec, level, group) in all {
        let options = Options { reserve: 0, ..Options::default() };
        let store = Store::create(4096, options).unwrap();
        let new = codec::Settings::new(Codec::Zstd, Some(1)).unwrap();
        let options =
            DeviceOptions { settings: new, workers: 0, dictionaries: true, ..Default::default() };
        let device = Device::new(&store, &options).unwrap();
        for trains in [false, true] {
            let settings =
                Settings { codec: codec.to_owned(), level, group, ..Settings::default() };
            let trainer = Trainer { settings: new, start: Box::new(drop), stop: Box::new(|| ()) };
            let before = heap();
            let policy = Policy::start_with(&store, &settings, trains.then_some(trainer)).unwrap();
            let (took, said) = (heap() - before, policy::memory(&settings, trains.then_some(new)));
            println!("{codec} {level}, groups of {group}, trains {trains}: {took} of {said}");
            assert!(
                took <= said && took >= said / 2,
                "{codec} {level}, groups of {group}, trains {trains}: {took}, not {said}"
            );
            drop(policy);
        }
        drop(device);
    }
    let off = Settings { enabled: false, ..Settings::default() };
    assert_eq!(policy::memory(&off, None), 0);
}
