//! zstd parameters of level 1 for units of 128 pages: ratio and CPU time of parameter sets, against
//! the streams of QEMU's multifd.
//!
//! `cargo run --release -p corpus --example zstd_params [-- [--all] [--set NAME] [--mib N]
//! [--rounds N]]`
//!
//! Every variant compresses the same pages in the same thread. They take turns every 4 MiB, so that
//! the machine's other work affects all of them alike. Thread CPU time is summed over a round, and
//! the medians of the rounds count, as does the median of the ratio to level 1 in the same round.
//!
//! The model of QEMU's multifd: one context per channel, fed page by page, flushed after each
//! packet of 128 pages, packets going to two channels in turn; all with zstd 1.5.7.

use std::error::Error;

use codec::{Codec, Decoder, Encoder, Settings, UnitHeader};
use corpus::{Corpus, Rounds, PAGE};
use rustix::time::{clock_gettime, ClockId};
use zstd_safe::{
    CCtx, CParameter, DCtx, DParameter, FrameFormat, InBuffer, OutBuffer, ParamSwitch, Strategy,
};
use zstd_sys::ZSTD_EndDirective;

fn main() -> Result<(), Box<dyn Error>> {
    let (mut set, mut mib, mut rounds, mut all) = (None, 0, 5, false);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
        match argument.as_str() {
            "--all" => all = true,
            "--set" => set = Some(value()?),
            "--mib" => mib = value()?.parse()?,
            "--rounds" => rounds = value()?.parse::<usize>()?.max(1),
            other => return Err(format!("unknown argument {other}").into()),
        }
    }
    let pages = sample(pages(&Corpus::load(), set.as_deref())?, mib << 20);
    let variants = if all { grid() } else { contenders() };
    let mut tables = vec![Vec::new(); variants.len()];
    for _ in 0..rounds {
        let figures = round(&variants, &pages)?;
        tables.iter_mut().zip(figures).for_each(|(table, figures)| table.push(figures));
    }
    let base = variants.iter().position(|variant| variant.name == BASE).expect("is among them");
    let gib = pages.len() as f64 / f64::from(1 << 30);
    println!(
        "{} MiB of distinct pages, {rounds} rounds, zstd {}; CPU s/GiB, medians",
        pages.len() >> 20,
        zstd_safe::version_string()
    );
    println!("| variant | ratio | encode | to {BASE} | decode | to {BASE} |");
    println!("|---|--:|--:|--:|--:|--:|");
    for (variant, table) in variants.iter().zip(&tables) {
        let of = |value: fn(&Figures) -> f64| median(table.iter().map(value).collect());
        let to = |value: fn(&Figures) -> f64| {
            median(table.iter().zip(&tables[base]).map(|(a, b)| value(a) / value(b)).collect())
        };
        println!(
            "| {} | {:.4} | {:.3} | {:.3} | {:.3} | {:.3} |",
            variant.name,
            pages.len() as f64 / table[0].bytes as f64,
            of(|figures| figures.encode) / gib,
            to(|figures| figures.encode),
            of(|figures| figures.decode) / gib,
            to(|figures| figures.decode),
        );
    }
    Ok(())
}

/// One way to compress the pages.
struct Variant {
    name: String,
    /// Pages per unit or packet.
    pages: usize,
    how: How,
}

enum How {
    /// Independent frames, with these parameters on top of level 1.
    Units(Vec<CParameter>),
    /// This repository's codec at this level, including header and checksum.
    Ours(i32),
    /// One frame per channel, flushed after each packet.
    Streams(usize),
}

#[derive(Clone, Copy, Default)]
struct Figures {
    bytes: usize,
    encode: f64,
    decode: f64,
}

/// A running variant: compresses and decompresses batches, and checks them.
trait Runner {
    /// Compresses `batch`; returns the length, and stores what `decode` needs.
    fn encode(&mut self, batch: &[u8]) -> Result<usize, Box<dyn Error>>;
    /// Decompresses the last batch, and compares it with `batch`.
    fn decode(&mut self, batch: &[u8]) -> Result<(), Box<dyn Error>>;
}

/// Every variant over all pages, in turns.
fn round(variants: &[Variant], pages: &[u8]) -> Result<Vec<Figures>, Box<dyn Error>> {
    let mut runners: Vec<_> = variants.iter().map(Variant::start).collect::<Result<_, _>>()?;
    let mut figures = vec![Figures::default(); variants.len()];
    for stretch in pages.chunks(STRETCH) {
        for ((variant, runner), figures) in variants.iter().zip(&mut runners).zip(&mut figures) {
            for batch in stretch.chunks(variant.pages * PAGE) {
                let start = cpu();
                figures.bytes += runner.encode(batch)?;
                let middle = cpu();
                runner.decode(batch)?;
                figures.encode += middle - start;
                figures.decode += cpu() - middle;
            }
        }
    }
    Ok(figures)
}

impl Variant {
    fn start(&self) -> Result<Box<dyn Runner>, Box<dyn Error>> {
        let unit = self.pages * PAGE;
        let (out, back) = (vec![0; zstd_safe::compress_bound(unit)], vec![0; unit]);
        Ok(match &self.how {
            How::Units(parameters) => {
                let mut encoder = CCtx::create();
                let fixed = [
                    CParameter::Format(FrameFormat::Magicless),
                    CParameter::ContentSizeFlag(false),
                    CParameter::CompressionLevel(1),
                ];
                for parameter in fixed.iter().chain(parameters) {
                    encoder.set_parameter(*parameter).map_err(text)?;
                }
                let mut decoder = DCtx::create();
                decoder.set_parameter(DParameter::Format(FrameFormat::Magicless)).map_err(text)?;
                Box::new(Units { encoder, decoder, out, back, len: 0 })
            }
            How::Ours(level) => {
                let settings = Settings::new(Codec::Zstd, Some(*level))?;
                let (encoder, decoder) = (Encoder::new(settings)?, Decoder::new());
                Box::new(Ours { encoder, decoder, out, back, header: None })
            }
            How::Streams(channels) => {
                let mut contexts = Vec::new();
                for _ in 0..*channels {
                    let (mut encoder, mut decoder) = (CCtx::create(), DCtx::create());
                    encoder.init(1).map_err(text)?;
                    decoder.init().map_err(text)?;
                    contexts.push((encoder, decoder));
                }
                Box::new(Streams { contexts, packet: 0, out, back, len: 0 })
            }
        })
    }
}

struct Units {
    encoder: CCtx<'static>,
    decoder: DCtx<'static>,
    out: Vec<u8>,
    back: Vec<u8>,
    len: usize,
}

impl Runner for Units {
    fn encode(&mut self, batch: &[u8]) -> Result<usize, Box<dyn Error>> {
        // Too little room for incompressible data, which counts as sent plain.
        let room = batch.len() - 1;
        self.len = self.encoder.compress2(&mut self.out[..room], batch).unwrap_or(batch.len());
        Ok(self.len)
    }

    fn decode(&mut self, batch: &[u8]) -> Result<(), Box<dyn Error>> {
        if self.len < batch.len() {
            let back = &mut self.back[..batch.len()];
            self.decoder.decompress(back, &self.out[..self.len]).map_err(text)?;
            assert!(back == batch);
        }
        Ok(())
    }
}

struct Ours {
    encoder: Encoder,
    decoder: Decoder,
    out: Vec<u8>,
    back: Vec<u8>,
    header: Option<UnitHeader>,
}

impl Runner for Ours {
    fn encode(&mut self, batch: &[u8]) -> Result<usize, Box<dyn Error>> {
        let encoded = self.encoder.encode(batch, &mut self.out);
        self.header = Some(UnitHeader::of(batch, encoded));
        Ok(encoded.len + UnitHeader::LEN)
    }

    fn decode(&mut self, batch: &[u8]) -> Result<(), Box<dyn Error>> {
        let header = self.header.expect("encoded first");
        let payload = match header.codec {
            Codec::Raw => batch,
            _ => &self.out[..header.payload_len as usize],
        };
        self.decoder.decode(&header, payload, &mut self.back[..batch.len()])?;
        assert!(self.back[..batch.len()] == *batch);
        Ok(())
    }
}

struct Streams {
    contexts: Vec<(CCtx<'static>, DCtx<'static>)>,
    packet: usize,
    out: Vec<u8>,
    back: Vec<u8>,
    len: usize,
}

impl Runner for Streams {
    fn encode(&mut self, batch: &[u8]) -> Result<usize, Box<dyn Error>> {
        self.packet += 1;
        let at = self.packet % self.contexts.len();
        let encoder = &mut self.contexts[at].0;
        let mut output = OutBuffer::around(&mut self.out[..]);
        let last = batch.len() / PAGE - 1;
        for (at, page) in batch.chunks_exact(PAGE).enumerate() {
            let end = if at == last {
                ZSTD_EndDirective::ZSTD_e_flush
            } else {
                ZSTD_EndDirective::ZSTD_e_continue
            };
            let mut input = InBuffer::around(page);
            loop {
                let left = encoder.compress_stream2(&mut output, &mut input, end).map_err(text)?;
                if input.pos() == page.len() && (at != last || left == 0) {
                    break;
                }
            }
        }
        self.len = output.pos();
        Ok(self.len)
    }

    fn decode(&mut self, batch: &[u8]) -> Result<(), Box<dyn Error>> {
        let at = self.packet % self.contexts.len();
        let decoder = &mut self.contexts[at].1;
        let mut input = InBuffer::around(&self.out[..self.len]);
        for back in self.back[..batch.len()].chunks_exact_mut(PAGE) {
            let mut output = OutBuffer::around(back);
            while output.pos() < PAGE {
                decoder.decompress_stream(&mut output, &mut input).map_err(text)?;
            }
        }
        assert!(self.back[..batch.len()] == *batch);
        Ok(())
    }
}

/// The variants worth a full run.
fn contenders() -> Vec<Variant> {
    let mut variants = vec![
        streams(2),
        streams(1),
        units(BASE, 128, Vec::new()),
        units("level 1, 256 pages", 256, Vec::new()),
        units("level 2", 128, vec![CParameter::CompressionLevel(2)]),
        units("level 3", 128, vec![CParameter::CompressionLevel(3)]),
    ];
    for (hash, min_match) in [(13, 5), (13, 6), (14, 5), (14, 6)] {
        let parameters = vec![CParameter::HashLog(hash), CParameter::MinMatch(min_match)];
        let name = format!("fast hashLog {hash} minMatch {min_match}");
        variants.push(units(&name, 128, parameters.clone()));
        if (hash, min_match) == (14, 6) {
            variants.push(units(&format!("{name}, 256 pages"), 256, parameters));
        }
    }
    for level in [-1, 1, 2, 3] {
        let name = format!("our level {level}, header and checksum");
        variants.push(Variant { name, pages: 128, how: How::Ours(level) });
    }
    variants
}

/// The whole search.
fn grid() -> Vec<Variant> {
    let mut variants = contenders();
    for strategy in [Strategy::ZSTD_fast, Strategy::ZSTD_dfast] {
        for hash in 13..=17 {
            for min_match in 4..=7 {
                let mut parameters = vec![
                    CParameter::Strategy(strategy),
                    CParameter::HashLog(hash),
                    CParameter::MinMatch(min_match),
                ];
                let name = format!("{strategy:?} hashLog {hash} minMatch {min_match}");
                if strategy == Strategy::ZSTD_dfast {
                    parameters.push(CParameter::ChainLog(hash - 1));
                }
                variants.push(units(&name, 128, parameters));
            }
        }
    }
    for (hash, min_match) in [(13, 5), (13, 6), (14, 5), (14, 6)] {
        let base = [CParameter::HashLog(hash), CParameter::MinMatch(min_match)];
        let name = format!("fast hashLog {hash} minMatch {min_match}");
        for block in [16, 32, 64] {
            let parameters = [&base[..], &[CParameter::MaxBlockSize(block << 10)]].concat();
            variants.push(units(&format!("{name}, blocks of {block} KiB"), 128, parameters));
        }
    }
    // A wider step through unmatched bytes, with literals still entropy coded (a target length
    // switches that off by default).
    for (hash, min_match) in [(13, 5), (14, 5), (15, 5), (16, 5), (14, 6), (15, 6)] {
        let parameters = vec![
            CParameter::HashLog(hash),
            CParameter::MinMatch(min_match),
            CParameter::TargetLength(2),
            CParameter::LiteralCompressionMode(ParamSwitch::Enable),
        ];
        let name = format!("fast hashLog {hash} minMatch {min_match}, step 3");
        variants.push(units(&name, 128, parameters));
    }
    variants
}

fn units(name: &str, pages: usize, parameters: Vec<CParameter>) -> Variant {
    Variant { name: name.to_owned(), pages, how: How::Units(parameters) }
}

fn streams(channels: usize) -> Variant {
    let name = format!("QEMU's streams, level 1, {channels} channel(s)");
    Variant { name, pages: 128, how: How::Streams(channels) }
}

/// All distinct pages, or those of one set that do not repeat one word.
fn pages(corpus: &Corpus, set: Option<&str>) -> Result<Vec<u8>, Box<dyn Error>> {
    let Some(name) = set else { return Ok(corpus.mixed_unique()) };
    let set = corpus.set(name).ok_or(format!("no set {name} in {:?}", corpus.names()))?;
    let pages = set.pages().chunks_exact(PAGE).filter(|page| !corpus::is_same_filled(page));
    Ok(pages.collect::<Vec<_>>().concat())
}

/// `len` bytes in stretches spread over the pages (0: all), renamed as in a migration.
fn sample(unique: Vec<u8>, len: usize) -> Vec<u8> {
    let total = unique.len();
    let rounds = Rounds::new(unique);
    if len == 0 || len >= total {
        return rounds.bytes(total);
    }
    let stretches = len.div_ceil(STRETCH);
    let mut pages = vec![0; stretches * STRETCH];
    for (at, stretch) in pages.chunks_exact_mut(STRETCH).enumerate() {
        rounds.read_at(total.saturating_sub(STRETCH) / PAGE * at / stretches * PAGE, stretch);
    }
    pages
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

const BASE: &str = "level 1";
const STRETCH: usize = 4 << 20;
