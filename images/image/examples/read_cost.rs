//! Measures the CPU time of reading an image, step by step, on one thread: what bounds a restore
//! with `--load`.
//!
//! ```sh
//! cargo run --release -p image --example read_cost -- vm.image
//! ```

use std::fs::File;
use std::hint::black_box;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Duration;

use codec::checksum;
use image::{Image, Units};
use rustix::time::{clock_gettime, ClockId};

fn cpu() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).expect("a thread's time is positive")
}

fn main() {
    let path = PathBuf::from(std::env::args_os().nth(1).expect("the path of an image"));
    let image = Image::open(&path).expect("a sound image");
    let file = File::open(&path).expect("as just opened");
    let units = &image.index().units;
    let mut stored = vec![0; image.shape().unit_bytes() * 2];
    let mut plain = vec![0; image.shape().unit_bytes()];
    let mut reader = Units::new();
    let (mut read, mut sum, mut whole, mut plain_sum) =
        (Duration::ZERO, Duration::ZERO, Duration::ZERO, Duration::ZERO);
    let mut bytes = 0;
    for (number, unit) in units.iter().enumerate() {
        let stored = &mut stored[..unit.len as usize];
        let begin = cpu();
        file.read_exact_at(stored, unit.offset).expect("within the file");
        read += cpu() - begin;
        let begin = cpu();
        assert!(checksum(stored) == unit.checksum, "unit {number} is damaged");
        sum += cpu() - begin;
        let begin = cpu();
        let len = reader.read(&image, number as u64, &mut plain).expect("a sound unit");
        whole += cpu() - begin;
        let begin = cpu();
        black_box(checksum(&plain[..len]));
        plain_sum += cpu() - begin;
        bytes += len;
    }
    let mb = bytes as f64 / 1e6;
    println!("{} units, {mb:.1} MB of pages, {} bytes stored", units.len(), image.file_len());
    for (what, time) in [
        ("read the stored bytes", read),
        ("checksum of the stored bytes", sum),
        ("checksum of the plain bytes", plain_sum),
        ("read, decode and both checksums", whole),
    ] {
        println!("{what:32} {:8.1} ms", time.as_secs_f64() * 1e3);
    }
}
