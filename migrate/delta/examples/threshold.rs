//! How much of a page may have changed for its difference to be cheaper than the page.
//!
//! `cargo run --release -p delta --example threshold -- BEFORE AFTER [CODEC LEVEL]`: two files of
//! 4096-byte pages, the same pages at two times. Prints the encoded size of batches of 128 pages,
//! for several limits on the changed words (of 512) up to which a page goes as its difference.

use codec::{Encoder, Settings};

const PAGE: usize = 4096;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [before, after, rest @ ..] = &args[..] else { panic!("BEFORE AFTER [CODEC LEVEL]") };
    let before = std::fs::read(before).expect("BEFORE can be read");
    let after = std::fs::read(after).expect("AFTER can be read");
    let codec = rest.first().map_or("zstd", String::as_str).parse().expect("a codec");
    let level = rest.get(1).map(|level| level.parse().expect("a level"));
    let mut encoder = Encoder::new(Settings::new(codec, level).expect("settings")).expect("memory");
    let mut out = vec![0; 1 << 20];
    println!("changed words | as a difference | bytes of {}", after.len());
    for most in [-1, 0, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512] {
        let (mut total, mut deltas) = (0, 0);
        for (new, old) in after.chunks(128 * PAGE).zip(before.chunks(128 * PAGE)) {
            let mut chunk = Vec::new();
            for (new, old) in new.chunks(PAGE).zip(old.chunks(PAGE)) {
                let changed =
                    new.chunks(8).zip(old.chunks(8)).filter(|(new, old)| new != old).count();
                let as_delta = i64::try_from(changed).is_ok_and(|changed| changed <= most);
                deltas += usize::from(as_delta);
                chunk.extend(
                    new.iter().zip(old).map(|(new, old)| if as_delta { new ^ old } else { *new }),
                );
            }
            total += encoder.encode(&chunk, &mut out).len.min(chunk.len());
        }
        println!("{most:13} | {deltas:15} | {total}");
    }
}
