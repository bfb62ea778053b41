//! Measures unit sizes: compression ratio against the time that a page fault waits for its unit.
//!
//! ```text
//! cargo run --release -p image --example unit_size [-- CORPUS_SET...]
//! ```
//!
//! Times are the thread's CPU time for decoding a unit with both checksums, as the reader does.
//! Medians and 99th percentiles cover three rounds over all units of the set, in random order.

use std::time::Duration;

use codec::{checksum, Codec, Decoder, Encoder, Settings, UnitHeader};
use corpus::Corpus;
use rustix::time::{clock_gettime, ClockId};
use zstd_safe::{CCtx, CParameter};

fn cpu() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).expect("a thread's time is positive")
}

fn main() {
    let corpus = Corpus::load();
    let mut names: Vec<String> = std::env::args().skip(1).collect();
    if names.is_empty() {
        names = ["guest", "redis"].map(String::from).to_vec();
    }
    println!("| pages | codec | unit | ratio | encode s/GiB | decode p50 us | p99 us |");
    println!("|---|---|--:|--:|--:|--:|--:|");
    for name in &names {
        let set = corpus.set(name).expect("a set of the corpus");
        // Same-filled pages have no slot.
        let pages: Vec<u8> = set
            .pages()
            .chunks_exact(4096)
            .filter(|page| pages::same_filled(page).is_none())
            .flatten()
            .copied()
            .collect();
        for (level, long) in [(1, false), (1, true), (9, true)] {
            whole(name, &pages, level, long);
        }
        let settings = [(Codec::Zstd, 1), (Codec::Zstd, 3), (Codec::Zstd, 9), (Codec::Lz4, 1)];
        for (codec, level) in settings {
            for kib in [64, 128, 256, 512] {
                measure(name, &pages, Settings::new(codec, Some(level)).expect("a level"), kib);
            }
        }
    }
}

/// All pages in one frame, as `zstd` compresses a stream: what units that are read alone cannot
/// exceed. `long` finds matches at any distance.
fn whole(name: &str, pages: &[u8], level: i32, long: bool) {
    let mut context = CCtx::create();
    context.set_parameter(CParameter::CompressionLevel(level)).expect("a level");
    if long {
        context.set_parameter(CParameter::WindowLog(27)).expect("128 MiB");
        context.set_parameter(CParameter::EnableLongDistanceMatching(true)).expect("a switch");
    }
    let mut out = vec![0; zstd_safe::compress_bound(pages.len())];
    let begin = cpu();
    let len = context.compress2(&mut out[..], pages).expect("room for any bytes");
    let encoding = cpu() - begin;
    println!(
        "| {name} | zstd {level}{} | all | {:.3} | {:.2} | | |",
        if long { " --long=27" } else { "" },
        pages.len() as f64 / len as f64,
        encoding.as_secs_f64() * (1_u64 << 30) as f64 / pages.len() as f64,
    );
}

fn measure(name: &str, pages: &[u8], settings: Settings, kib: usize) {
    let unit = kib << 10;
    let mut encoder = Encoder::new(settings).expect("contexts");
    let mut out = vec![0; unit];
    let (mut units, mut stored, mut encoding) = (Vec::new(), 0, Duration::ZERO);
    for plain in pages.chunks_exact(unit) {
        let begin = cpu();
        let encoded = encoder.encode(plain, &mut out);
        encoding += cpu() - begin;
        let payload = if encoded.codec == Codec::Raw { plain } else { &out[..encoded.len] };
        stored += UnitHeader::LEN + encoded.len;
        units.push((UnitHeader::of(plain, encoded), payload.to_vec(), checksum(payload)));
    }
    let mut decoder = Decoder::new();
    let mut plain = vec![0; unit];
    let mut times = Vec::new();
    let mut at = 0;
    for _ in 0..3 * units.len() {
        at = (at + 7919) % units.len();
        let (header, payload, sum) = &units[at];
        let begin = cpu();
        assert_eq!(checksum(payload), *sum);
        decoder.decode(header, payload, &mut plain).expect("just encoded");
        times.push(cpu() - begin);
    }
    times.sort();
    let bytes = units.len() * unit;
    println!(
        "| {name} | {} {} | {kib} KiB | {:.3} | {:.2} | {} | {} |",
        settings.codec(),
        settings.level(),
        bytes as f64 / stored as f64,
        encoding.as_secs_f64() * (1_u64 << 30) as f64 / bytes as f64,
        times[times.len() / 2].as_micros(),
        times[times.len() * 99 / 100].as_micros(),
    );
}
