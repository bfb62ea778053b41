//! zstd parameters for a single page of 4 KiB: ratio and CPU time of parameter sets.
//!
//! `cargo run --release -p corpus --example zstd_page_params [-- SET...]`    (guest redis text
//! code)
//!
//! Every variant compresses the same pages in the same thread, in turns of 256 pages; thread CPU
//! time is summed over a round, and medians of the rounds are shown. Stored bytes count: a page
//! that does not shrink by 1/32 is stored uncompressed.

use std::error::Error;

use corpus::{is_same_filled, Corpus, PAGE};
use rustix::time::{clock_gettime, ClockId};
use zstd_safe::{CCtx, CParameter, DCtx, DParameter, FrameFormat, Strategy};

const ROUNDS: usize = 5;
const PAGES: usize = 4096;

struct Variant {
    name: String,
    context: CCtx<'static>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut sets: Vec<String> = std::env::args().skip(1).collect();
    if sets.is_empty() {
        sets = ["guest", "redis", "text", "code", "source"].map(str::to_owned).to_vec();
    }
    let corpus = Corpus::load();
    for name in sets {
        let set = corpus.set(&name).ok_or("no such set")?;
        let pages: Vec<&[u8]> =
            set.pages().chunks_exact(PAGE).filter(|page| !is_same_filled(page)).collect();
        let step = pages.len().div_ceil(PAGES).max(1);
        let pages: Vec<&[u8]> = pages.into_iter().step_by(step).collect();
        let mut variants = variants()?;
        let mut figures = vec![Vec::new(); variants.len()];
        let mut bytes = vec![0; variants.len()];
        for _ in 0..ROUNDS {
            let round = round(&mut variants, &pages)?;
            for ((all, sum), (encode, decode, stored)) in
                figures.iter_mut().zip(&mut bytes).zip(round)
            {
                all.push((encode, decode));
                *sum = stored;
            }
        }
        println!("\n{name}: {} pages; microseconds a page\n", pages.len());
        println!("| variant | ratio | encode | decode | both |\n|---|--:|--:|--:|--:|");
        for ((variant, all), stored) in variants.iter().zip(&figures).zip(&bytes) {
            let of = |value: fn(&(f64, f64)) -> f64| {
                let mut values: Vec<f64> = all.iter().map(value).collect();
                values.sort_by(f64::total_cmp);
                values[values.len() / 2] / pages.len() as f64
            };
            let (encode, decode) = (of(|one| one.0), of(|one| one.1));
            let ratio = (pages.len() * PAGE) as f64 / *stored as f64;
            println!(
                "| {} | {ratio:.3} | {encode:.2} | {decode:.2} | {:.2} |",
                variant.name,
                encode + decode
            );
        }
    }
    Ok(())
}

/// CPU microseconds to encode and to decode all pages, and bytes stored.
type Totals = (f64, f64, usize);

/// The totals of each variant.
fn round(variants: &mut [Variant], pages: &[&[u8]]) -> Result<Vec<Totals>, Box<dyn Error>> {
    let mut decoder = DCtx::create();
    decoder
        .set_parameter(DParameter::Format(FrameFormat::Magicless))
        .map_err(zstd_safe::get_error_name)?;
    let mut totals = vec![(0.0, 0.0, 0); variants.len()];
    let mut coded: Vec<Vec<u8>> = (0..256).map(|_| Vec::with_capacity(2 * PAGE)).collect();
    let mut out = vec![0; PAGE];
    for pages in pages.chunks(256) {
        for (variant, (encode, decode, stored)) in variants.iter_mut().zip(&mut totals) {
            let start = cpu();
            for (page, coded) in pages.iter().zip(&mut coded) {
                coded.clear();
                variant.context.compress2(coded, page).map_err(zstd_safe::get_error_name)?;
            }
            *encode += cpu() - start;
            let start = cpu();
            for (page, coded) in pages.iter().zip(&coded) {
                let small = coded.len() <= PAGE - PAGE / 32;
                *stored += if small { coded.len() } else { PAGE };
                if small {
                    decoder.decompress(&mut out[..], coded).map_err(zstd_safe::get_error_name)?;
                    assert!(out[..64] == page[..64]);
                }
            }
            *decode += cpu() - start;
        }
    }
    Ok(totals)
}

fn variants() -> Result<Vec<Variant>, Box<dyn Error>> {
    let mut all = Vec::new();
    let mut add = |name: String, parameters: &[CParameter]| {
        let mut context = CCtx::create();
        let fixed = [
            CParameter::Format(FrameFormat::Magicless),
            CParameter::ContentSizeFlag(false),
            CParameter::ChecksumFlag(false),
            CParameter::DictIdFlag(false),
        ];
        for parameter in fixed.iter().chain(parameters) {
            context.set_parameter(*parameter).map_err(zstd_safe::get_error_name)?;
        }
        all.push(Variant { name, context });
        Ok::<(), Box<dyn Error>>(())
    };
    for level in [-3, -1, 1, 2, 3] {
        add(format!("level {level}"), &[CParameter::CompressionLevel(level)])?;
    }
    let one = CParameter::CompressionLevel(1);
    for hash in [10, 11, 12, 13] {
        for shortest in [4, 5, 6] {
            let parameters = [one, CParameter::HashLog(hash), CParameter::MinMatch(shortest)];
            add(format!("1, hashLog {hash}, minMatch {shortest}"), &parameters)?;
        }
    }
    for step in [2, 3] {
        let parameters =
            [one, CParameter::HashLog(11), CParameter::MinMatch(5), CParameter::TargetLength(step)];
        add(format!("1, hashLog 11, minMatch 5, step {step}"), &parameters)?;
    }
    for hash in [10, 11] {
        let dfast = [
            one,
            CParameter::Strategy(Strategy::ZSTD_dfast),
            CParameter::HashLog(hash),
            CParameter::ChainLog(hash),
            CParameter::MinMatch(5),
        ];
        add(format!("1, dfast, hashLog {hash}"), &dfast)?;
    }
    Ok(all)
}

fn cpu() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e6 + time.tv_nsec as f64 / 1e3
}
