//! Measures every candidate on real chunks and prints the tables of `tests/sim/tables.rs`.
//!
//! `cargo run --release -p controller --example measure > engine/controller/tests/sim/tables.rs`
//!
//! For each kind of data, some chunks of 512 KiB, evenly spread over its set. For each chunk its
//! class and, per candidate, encoded bytes in 1/10000 of the plain ones and thread CPU time in
//! picoseconds a plain byte: the least of [`ROUNDS`] rounds, since time that other work on the
//! machine adds is no property of the codec. Summaries and the cost of the probe go to stderr.

use std::error::Error;

use codec::{Codec, Encoder, Settings};
use controller::Class;
use corpus::Corpus;
use rustix::time::{clock_gettime, ClockId};

const CHUNK: usize = 512 << 10;
const ROUNDS: usize = 5;
/// The possible candidates: lz4 and zstd of these levels, besides none.
const LZ4: [i32; 4] = [-31, -15, -7, 1];
const ZSTD: [i32; 9] = [-5, -3, -1, 1, 2, 3, 5, 7, 9];
const KINDS: [(&str, usize); 4] = [("text", 12), ("guest", 24), ("redis", 16), ("random", 2)];
fn main() -> Result<(), Box<dyn Error>> {
    let corpus = Corpus::load();
    let mut out = vec![0; CHUNK];
    let mut candidates = vec![Settings::new(Codec::Raw, None)?];
    for (codec, levels) in [(Codec::Lz4, &LZ4[..]), (Codec::Zstd, &ZSTD)] {
        for &level in levels {
            candidates.push(Settings::new(codec, Some(level))?);
        }
    }
    let usual = candidates.len();
    // Additional settings, for comparison.
    for (codec, level) in [(Codec::Zstd, 12), (Codec::Zstd, 15), (Codec::Zlib, 1), (Codec::Zlib, 6)]
    {
        candidates.push(Settings::new(codec, Some(level))?);
    }
    println!(
        "//! Printed by `cargo run --release -p controller --example measure`; from {}.",
        match corpus.origin() {
            corpus::Origin::Files(_) => "corpus files",
            corpus::Origin::Made(_) => "made data",
        }
    );
    println!("\nuse controller::Class;\n");
    println!("/// The settings of the columns: lz4 and zstd of these levels, after none.");
    println!("pub(crate) const LZ4: [i32; {}] = {LZ4:?};", LZ4.len());
    println!("pub(crate) const ZSTD: [i32; {}] = {ZSTD:?};\n", ZSTD.len());
    println!("/// A chunk: its class, and for none and each of these encoded bytes of 10000 and CPU ps a byte.");
    println!("pub(crate) type Row = (Class, [(u32, u64); {usual}]);");
    for (kind, wanted) in KINDS {
        let pages = corpus.set(kind).ok_or("no such set")?.into_pages();
        let chunks: Vec<&[u8]> = pages.chunks_exact(CHUNK).collect();
        let step = (chunks.len() / wanted).max(1);
        let chunks: Vec<&[u8]> = chunks.into_iter().step_by(step).take(wanted).collect();
        let mut table = vec![vec![(u32::MAX, u64::MAX); candidates.len()]; chunks.len()];
        for (at, &settings) in candidates.iter().enumerate() {
            let mut encoder = Encoder::new(settings)?;
            for _ in 0..ROUNDS {
                for (chunk, row) in chunks.iter().zip(&mut table) {
                    let start = cpu();
                    let encoded = encoder.encode(chunk, &mut out);
                    let cost = (cpu() - start) * 1000 / CHUNK as u64;
                    row[at].0 = u32::try_from(encoded.len as u64 * 10_000 / CHUNK as u64)?;
                    row[at].1 = row[at].1.min(cost);
                }
            }
        }
        let start = cpu();
        for _ in 0..100 {
            for chunk in &chunks {
                std::hint::black_box(Class::of(chunk));
            }
        }
        let probe = (cpu() - start) / (100 * chunks.len() as u64);
        eprintln!("{kind}: {} chunks, probe {probe} ns a chunk", chunks.len());
        println!("\n/// Chunks of \"{kind}\".");
        println!("#[rustfmt::skip]\npub(crate) const {}: &[Row] = &[", kind.to_uppercase());
        for (chunk, row) in chunks.iter().zip(&table) {
            let cells: Vec<String> =
                row[..usual].iter().map(|(size, cost)| format!("({size}, {cost})")).collect();
            println!("    (Class::{:?}, [{}]),", Class::of(chunk), cells.join(", "));
        }
        println!("];");
        for (at, settings) in candidates.iter().enumerate() {
            let size: u64 = table.iter().map(|row| u64::from(row[at].0)).sum();
            let cost: u64 = table.iter().map(|row| row[at].1).sum();
            let rows = table.len() as f64;
            eprintln!(
                "  {:>5} {:>3}: size {:.4} ratio {:.3}, {:.3} ns/B",
                settings.codec(),
                settings.level(),
                size as f64 / rows / 1e4,
                rows * 1e4 / size as f64,
                cost as f64 / rows / 1e3
            );
        }
    }
    Ok(())
}

/// Thread CPU time, ns.
fn cpu() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}
