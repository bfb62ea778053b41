//! Whether a zstd dictionary pays for single pages of 4 KiB: ratio and CPU time, by its size and
//! level.
//!
//! `cargo run --release -p corpus --example zstd_dictionaries [-- SET...]`    (guest redis text
//! code ...)
//!
//! A dictionary is trained on up to 1024 pages and judged by others, without a repeated page.
//! *mixed* takes both from the whole set, as a device that samples itself does; *halves* trains on
//! the first half and judges by the second, as for data that changes after the training. Variants
//! take turns of 256 pages in one thread; its CPU time is summed, and medians of the rounds are
//! shown. A page that does not shrink by 1/32 counts as uncompressed. The ratio excludes the
//! dictionary itself, whose size does not depend on the device's.

use std::collections::HashSet;
use std::error::Error;

use corpus::{is_same_filled, Corpus, PAGE};
use rustix::time::{clock_gettime, ClockId};
use zstd_safe::{train_from_buffer, CCtx, CDict, CParameter, DCtx, DDict, DParameter, FrameFormat};

const ROUNDS: usize = 5;
const JUDGES: usize = 4096;
const SAMPLES: usize = 1024;
const SIZES: [usize; 4] = [4 << 10, 8 << 10, 16 << 10, 32 << 10];
const LEVELS: [i32; 3] = [-1, 1, 3];

struct Variant<'a> {
    name: String,
    encoder: CCtx<'a>,
    decoder: DCtx<'a>,
    stored: usize,
    /// For each round, microseconds of all pages.
    times: Vec<(f64, f64)>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let corpus = Corpus::load();
    let mut sets: Vec<String> = std::env::args().skip(1).collect();
    if sets.is_empty() {
        sets = ["guest", "redis", "text", "code", "source"].map(str::to_owned).to_vec();
    }
    for name in sets {
        let Some(set) = corpus.set(&name) else {
            println!("\n{name}: no such set");
            continue;
        };
        let mut seen = HashSet::new();
        let pages: Vec<&[u8]> = set
            .pages()
            .chunks_exact(PAGE)
            .filter(|page| !is_same_filled(page) && seen.insert(*page))
            .collect();
        let (even, odd): (Vec<_>, Vec<_>) =
            pages.iter().copied().enumerate().partition(|(at, _)| at % 2 == 0);
        let strip = |pages: Vec<(usize, _)>| pages.into_iter().map(|(_, page)| page).collect();
        let (even, odd): (Vec<&[u8]>, Vec<&[u8]>) = (strip(even), strip(odd));
        let (first, second) = pages.split_at(pages.len() / 2);
        judge(&format!("{name}, mixed"), &thin(&even, SAMPLES), &thin(&odd, JUDGES))?;
        judge(&format!("{name}, halves"), &thin(first, SAMPLES), &thin(second, JUDGES))?;
    }
    Ok(())
}

/// At most `most` pages, evenly spread.
fn thin<'a>(pages: &[&'a [u8]], most: usize) -> Vec<&'a [u8]> {
    pages.iter().copied().step_by(pages.len().div_ceil(most).max(1)).collect()
}

fn judge(name: &str, samples: &[&[u8]], judges: &[&[u8]]) -> Result<(), Box<dyn Error>> {
    let wrong = zstd_safe::get_error_name;
    println!(
        "\n{name}: {} pages, trained on {}; microseconds a page\n",
        judges.len(),
        samples.len()
    );
    let mut dictionaries = Vec::new();
    for size in SIZES {
        let mut dictionary = Vec::with_capacity(size);
        let start = cpu();
        match train_from_buffer(&mut dictionary, &samples.concat(), &vec![PAGE; samples.len()]) {
            Ok(_) => println!(
                "{} KiB: trained in {:.0} ms, is {} bytes",
                size >> 10,
                (cpu() - start) / 1e3,
                dictionary.len()
            ),
            Err(code) => {
                println!("{} KiB: {}", size >> 10, wrong(code));
                continue;
            }
        }
        dictionaries.push((size, dictionary));
    }
    let mut prepared = Vec::new();
    for (size, bytes) in &dictionaries {
        for level in LEVELS {
            let (encoder, decoder) = (CDict::create(bytes, level), DDict::create(bytes));
            if level == 1 {
                println!("{} KiB: {} + {} bytes", size >> 10, encoder.sizeof(), decoder.sizeof());
            }
            prepared.push((format!("{level}, {} KiB", size >> 10), level, encoder, decoder));
        }
    }
    let mut variants = Vec::new();
    for level in LEVELS {
        variants.push(variant(format!("{level}"), level, None)?);
    }
    for (name, level, encoder, decoder) in &prepared {
        variants.push(variant(name.clone(), *level, Some((encoder, decoder)))?);
    }
    for _ in 0..ROUNDS {
        round(&mut variants, judges)?;
    }
    println!("\n| level, dictionary | ratio | encode | decode | both |\n|---|--:|--:|--:|--:|");
    for variant in &mut variants {
        let mut median = |of: fn(&(f64, f64)) -> f64| {
            variant.times.sort_by(|a, b| of(a).total_cmp(&of(b)));
            of(&variant.times[variant.times.len() / 2]) / judges.len() as f64
        };
        let (encode, decode) = (median(|both| both.0), median(|both| both.1));
        let ratio = (judges.len() * PAGE) as f64 / variant.stored as f64;
        println!(
            "| {} | {ratio:.3} | {encode:.2} | {decode:.2} | {:.2} |",
            variant.name,
            encode + decode
        );
    }
    Ok(())
}

fn variant<'a>(
    name: String,
    level: i32,
    dictionary: Option<(&'a CDict<'a>, &'a DDict<'a>)>,
) -> Result<Variant<'a>, Box<dyn Error>> {
    let wrong = zstd_safe::get_error_name;
    let (mut encoder, mut decoder) = (CCtx::create(), DCtx::create());
    for parameter in [
        CParameter::Format(FrameFormat::Magicless),
        CParameter::ContentSizeFlag(false),
        CParameter::ChecksumFlag(false),
        CParameter::DictIdFlag(false),
        CParameter::CompressionLevel(level),
    ] {
        encoder.set_parameter(parameter).map_err(wrong)?;
    }
    decoder.set_parameter(DParameter::Format(FrameFormat::Magicless)).map_err(wrong)?;
    if let Some((for_encoder, for_decoder)) = dictionary {
        encoder.ref_cdict(for_encoder).map_err(wrong)?;
        decoder.ref_ddict(for_decoder).map_err(wrong)?;
    }
    Ok(Variant { name, encoder, decoder, stored: 0, times: Vec::new() })
}

fn round(variants: &mut [Variant<'_>], pages: &[&[u8]]) -> Result<(), Box<dyn Error>> {
    let wrong = zstd_safe::get_error_name;
    let mut coded: Vec<Vec<u8>> = (0..256).map(|_| Vec::with_capacity(2 * PAGE)).collect();
    let mut out = vec![0; PAGE];
    for variant in variants.iter_mut() {
        variant.stored = 0;
        variant.times.push((0.0, 0.0));
    }
    for pages in pages.chunks(256) {
        for variant in variants.iter_mut() {
            let start = cpu();
            for (page, coded) in pages.iter().zip(&mut coded) {
                coded.clear();
                variant.encoder.compress2(coded, page).map_err(wrong)?;
            }
            let encoded = cpu();
            for (page, coded) in pages.iter().zip(&coded) {
                let small = coded.len() <= PAGE - PAGE / 32;
                variant.stored += if small { coded.len() } else { PAGE };
                if small {
                    variant.decoder.decompress(&mut out[..], coded).map_err(wrong)?;
                    assert!(out == *page);
                }
            }
            let times = variant.times.last_mut().ok_or("no round")?;
            *times = (times.0 + encoded - start, times.1 + cpu() - encoded);
        }
    }
    Ok(())
}

fn cpu() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e6 + time.tv_nsec as f64 / 1e3
}
