//! The gain of a history: chunks of 128 pages compressed as parts of a few continuing zstd frames,
//! against independent units. Bytes and CPU time of both ends, by level, window, and number of
//! histories.
//!
//! `cargo run --release -p corpus --example zstd_history [-- [--set NAME] [--mib N] [--rounds N]
//! [--only TEXT]]`
//!
//! Every variant compresses the same pages in the same thread, in turns of 4 MiB. Pages of one
//! repeated word are left out, as the relay's packing leaves them out; equal pages stay.

use std::error::Error;

use codec::{Codec, Encoder, Settings};
use corpus::{Corpus, PAGE};
use rustix::time::{clock_gettime, ClockId};
use zstd_safe::{
    CCtx, CParameter, DCtx, DParameter, FrameFormat, InBuffer, OutBuffer, ResetDirective,
};
use zstd_sys::ZSTD_EndDirective::ZSTD_e_flush;

const CHUNK: usize = 128 * PAGE;
const STRETCH: usize = 4 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let (mut set, mut mib, mut rounds, mut only) = ("guest".to_owned(), 0, 3, String::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
        match argument.as_str() {
            "--set" => set = value()?,
            "--only" => only = value()?,
            "--mib" => mib = value()?.parse()?,
            "--rounds" => rounds = value()?.parse::<usize>()?.max(1),
            other => return Err(format!("unknown argument {other}").into()),
        }
    }
    let corpus = Corpus::load();
    let pages = corpus.set(&set).ok_or(format!("no set {set} in {:?}", corpus.names()))?;
    let pages = pages.pages().chunks_exact(PAGE).filter(|page| !corpus::is_same_filled(page));
    let mut pages: Vec<u8> = pages.collect::<Vec<_>>().concat();
    if mib > 0 {
        pages.truncate(mib << 20);
    }
    let mut variants = variants();
    variants.retain(|variant| variant.name == BASE || variant.name.contains(&only));
    let mut table = vec![Vec::new(); variants.len()];
    for _ in 0..rounds {
        for (table, figures) in table.iter_mut().zip(round(&variants, &pages)?) {
            table.push(figures);
        }
    }
    println!(
        "{set}: {} MiB, {rounds} rounds, {:?}, zstd {}; medians of ratios to {BASE} in the same round",
        pages.len() >> 20,
        corpus.origin(),
        zstd_safe::version_string()
    );
    println!(
        "| variant | ratio | bytes | encode CPU | decode CPU | restarts | KiB encoder, decoder |"
    );
    println!("|---|--:|--:|--:|--:|--:|--:|");
    for (variant, rows) in variants.iter().zip(&table) {
        let to = |value: fn(&Figures) -> f64| {
            median(rows.iter().zip(&table[0]).map(|(a, b)| value(a) / value(b)).collect())
        };
        println!(
            "| {} | {:.3} | {:.3} | {:.2} | {:.2} | {} | {}, {} |",
            variant.name,
            pages.len() as f64 / rows[0].bytes as f64,
            to(|figures| figures.bytes as f64),
            to(|figures| figures.encode),
            to(|figures| figures.decode),
            rows[0].restarts,
            rows[0].encoder >> 10,
            rows[0].decoder >> 10,
        );
    }
    Ok(())
}

struct Variant {
    name: String,
    level: i32,
    /// Histories that take chunks in turn; 0: independent units.
    histories: usize,
    parameters: Vec<CParameter>,
}

#[derive(Clone, Copy, Default)]
struct Figures {
    bytes: usize,
    encode: f64,
    decode: f64,
    restarts: usize,
    encoder: usize,
    decoder: usize,
}

const BASE: &str = "zstd 1, units";

fn units(level: i32) -> Variant {
    Variant { name: format!("zstd {level}, units"), level, histories: 0, parameters: Vec::new() }
}

fn history(level: i32, histories: usize, window: u32, more: &[CParameter], what: &str) -> Variant {
    let mut parameters = vec![CParameter::WindowLog(window)];
    parameters.extend_from_slice(more);
    let name = format!("zstd {level}, {histories} x 2^{window}{what}");
    Variant { name, level, histories, parameters }
}

fn variants() -> Vec<Variant> {
    let mut variants: Vec<_> = [1, 3, 5, 6, 7, 9, 12].map(units).into();
    for level in [3, 5, 6, 7, 9] {
        for (histories, window) in [(1, 22), (2, 20), (2, 21), (2, 22), (2, 25), (4, 22), (8, 22)] {
            variants.push(history(level, histories, window, &[], ""));
        }
    }
    variants.push(history(12, 2, 22, &[], ""));
    let wide = [CParameter::HashLog(17), CParameter::MinMatch(6)];
    variants.push(history(1, 2, 22, &[], ""));
    variants.push(history(1, 2, 23, &wide, ", a table of 2^17"));
    let long = [CParameter::EnableLongDistanceMatching(true)];
    for (level, histories) in [(1, 2), (3, 2), (9, 2), (9, 1), (12, 1)] {
        variants.push(history(level, histories, 27, &long, " long"));
    }
    variants
}

enum Runner {
    Units(Box<Encoder>, DCtx<'static>),
    Histories { all: Vec<(CCtx<'static>, DCtx<'static>)>, next: usize, fresh: Vec<bool> },
}

fn round(variants: &[Variant], pages: &[u8]) -> Result<Vec<Figures>, Box<dyn Error>> {
    let mut runners: Vec<_> = variants.iter().map(Variant::start).collect::<Result<_, _>>()?;
    let mut figures = vec![Figures::default(); variants.len()];
    let (mut out, mut back) = (vec![0; CHUNK + 4096], vec![0; CHUNK]);
    for stretch in pages.chunks(STRETCH) {
        for (runner, figures) in runners.iter_mut().zip(&mut figures) {
            for chunk in stretch.chunks(CHUNK) {
                runner.take(chunk, &mut out, &mut back[..chunk.len()], figures)?;
            }
        }
    }
    Ok(figures)
}

impl Variant {
    fn start(&self) -> Result<Runner, Box<dyn Error>> {
        if self.histories == 0 {
            let settings = Settings::new(Codec::Zstd, Some(self.level))?;
            let mut decoder = DCtx::create();
            decoder.set_parameter(DParameter::Format(FrameFormat::Magicless)).map_err(text)?;
            return Ok(Runner::Units(Box::new(Encoder::new(settings)?), decoder));
        }
        let mut all = Vec::new();
        for _ in 0..self.histories {
            let (mut encoder, mut decoder) = (CCtx::create(), DCtx::create());
            let fixed = [
                CParameter::Format(FrameFormat::Magicless),
                CParameter::ContentSizeFlag(false),
                CParameter::CompressionLevel(self.level),
            ];
            for parameter in fixed.iter().chain(&self.parameters) {
                encoder.set_parameter(*parameter).map_err(text)?;
            }
            decoder.set_parameter(DParameter::Format(FrameFormat::Magicless)).map_err(text)?;
            all.push((encoder, decoder));
        }
        Ok(Runner::Histories { all, next: 0, fresh: vec![true; self.histories] })
    }
}

impl Runner {
    fn take(
        &mut self,
        chunk: &[u8],
        out: &mut [u8],
        back: &mut [u8],
        figures: &mut Figures,
    ) -> Result<(), Box<dyn Error>> {
        let start = cpu();
        match self {
            Self::Units(encoder, decoder) => {
                let encoded = encoder.encode(chunk, out);
                let middle = cpu();
                if encoded.codec == Codec::Zstd {
                    decoder.decompress(back, &out[..encoded.len]).map_err(text)?;
                    assert!(back == chunk);
                }
                figures.decode += cpu() - middle;
                figures.encode += middle - start;
                figures.bytes += encoded.len;
            }
            Self::Histories { all, next, fresh } => {
                let at = *next;
                *next = (at + 1) % all.len();
                let (encoder, decoder) = &mut all[at];
                let mut input = InBuffer::around(chunk);
                let mut output = OutBuffer::around(out);
                let left = encoder
                    .compress_stream2(&mut output, &mut input, ZSTD_e_flush)
                    .map_err(text)?;
                let len = output.pos();
                let middle = cpu();
                figures.encode += middle - start;
                if left > 0 || input.pos() < chunk.len() || len >= chunk.len() {
                    // Sent raw; the history starts again.
                    encoder.reset(ResetDirective::SessionOnly).map_err(text)?;
                    decoder.reset(ResetDirective::SessionOnly).map_err(text)?;
                    fresh[at] = true;
                    figures.restarts += 1;
                    figures.bytes += chunk.len();
                    return Ok(());
                }
                let mut input = InBuffer::around(&out[..len]);
                let mut output = OutBuffer::around(&mut *back);
                while output.pos() < chunk.len() {
                    decoder.decompress_stream(&mut output, &mut input).map_err(text)?;
                }
                assert!(input.pos() == len, "{} of {len}", input.pos());
                assert!(back == chunk);
                figures.decode += cpu() - middle;
                figures.bytes += len + 8;
                figures.encoder = encoder.sizeof();
                figures.decoder = decoder.sizeof();
            }
        }
        Ok(())
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Seconds of CPU time of this thread.
fn cpu() -> f64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9
}

fn text(code: usize) -> &'static str {
    zstd_safe::get_error_name(code)
}
