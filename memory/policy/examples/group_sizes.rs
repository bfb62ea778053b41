//! Measures groups of neighbouring pages: ratio, and the cost of writing and reading one, by size
//! and level.
//!
//! `cargo run --release -p policy --example group_sizes [SET]`

use codec::{Codec, Decoder, Encoder, Settings};
use corpus::{is_same_filled, Corpus, PAGE};
use rustix::time::{clock_gettime, ClockId};

fn cpu() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e6 + time.tv_nsec as f64 / 1e3
}

fn main() {
    let name = std::env::args().nth(1).unwrap_or_else(|| "guest".to_owned());
    let levels: Vec<(Codec, i32)> = match std::env::args().nth(2) {
        Some(list) => list.split(',').map(|l| (Codec::Zstd, l.parse().expect("a level"))).collect(),
        None => [3, 6, 9, 12, 15, 19].map(|level| (Codec::Zstd, level)).to_vec(),
    };
    let corpus = Corpus::load();
    let set = corpus.set(&name).expect("a set of the corpus");
    let pages: Vec<u8> =
        set.pages().chunks_exact(PAGE).filter(|p| !is_same_filled(p)).flatten().copied().collect();
    let mut out = vec![0; 1 << 20];
    let mut back = vec![0; 1 << 20];
    println!("{name}: {} pages; plain bytes by the compressed byte, CPU us a page written, CPU us to read one page of a group", pages.len() / PAGE);
    for (codec, level) in levels {
        let mut encoder =
            Encoder::new(Settings::new(codec, Some(level)).expect("a level")).expect("a context");
        let mut decoder = Decoder::new();
        for size in [1, 8, 16, 32, 64, 128] {
            let (mut coded, mut plain, mut write, mut read, mut reads) = (0, 0, 0.0, 0.0, 0);
            for (number, group) in pages.chunks(size * PAGE).enumerate() {
                if (number * size) % 512 >= 128 {
                    continue;
                }
                let begun = cpu();
                let encoded = encoder.encode(group, &mut out);
                write += cpu() - begun;
                coded += encoded.len;
                plain += group.len();
                if encoded.codec == codec {
                    let begun = cpu();
                    decoder
                        .decode_payload(codec, &out[..encoded.len], &mut back[..group.len()])
                        .expect("ours");
                    read += cpu() - begun;
                    reads += 1;
                    assert!(back[..group.len()] == *group);
                }
            }
            println!(
                "zstd {level:>2}  {size:>3} pages  ratio {:.3}  write {:>6.1}  read {:>6.1}",
                plain as f64 / coded as f64,
                write / (plain / PAGE) as f64,
                read / f64::from(reads)
            );
        }
    }
}
