//! The heap memory of a device's thread: as much as `thread_heap` says, and not much less. In a
//! file of its own, because the C library counts for the whole process.
#![expect(unsafe_code, reason = "asks the C library")]

use codec::{Codec, Settings};
use device::{thread_heap, Device, DeviceOptions};
use store::{Options, Store};

fn heap() -> usize {
    // SAFETY: takes no pointer.
    let info = unsafe { libc::mallinfo2() };
    info.uordblks + info.hblkhd
}

#[test]
fn a_thread_uses_between_half_and_all_of_its_stated_heap() {
    for (codec, levels) in [
        (Codec::Raw, &[None][..]),
        (Codec::Lz4, &[None, Some(-15)]),
        (Codec::Zlib, &[Some(1), Some(6), Some(9)]),
        (Codec::Zstd, &[Some(-5), Some(1), Some(3), Some(9), Some(15), Some(19)]),
        (Codec::DeflateQz, &[Some(1), Some(9)]),
    ] {
        for level in levels {
            let options = Options { reserve: 0, ..Options::default() };
            let store = Store::create(4096, options).unwrap();
            let settings = Settings::new(codec, *level).unwrap();
            let options = DeviceOptions { settings, workers: 0, ..DeviceOptions::default() };
            let device = Device::new(&store, &options).unwrap();
            let before = heap();
            let queue = device.queue().unwrap();
            let (took, said) = (heap() - before, thread_heap(settings));
            println!("{codec} {level:?}: {took} of {said}");
            assert!(took <= said && took >= said / 2, "{codec} {level:?}: {took}, not {said}");
            drop((queue, device));
        }
    }
}
