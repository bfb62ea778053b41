//! `platen-bench codec`: each codec alone on one thread: CPU time of compression and of
//! decompression, and ratio.
//!
//! The codecs take turns, and every run compresses and decompresses the same pages, in units of
//! 4 KiB (as a swap device does) or of 512 KiB (as a relay does). Every byte is compared after the
//! last run. Pages that repeat one word are left out: no codec sees them.

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{ensure, Context};
use clap::Args;
use codec::{Codec, Decoder, Encoder, Settings, UnitHeader};
use corpus::{is_same_filled, Corpus, PAGE};
use qpl::Qpl;
use rustix::time::{clock_gettime, ClockId};
use serde::Serialize;
use serde_json::json;

/// Arguments of `platen-bench codec`.
#[derive(Args, Debug)]
pub(crate) struct CodecArgs {
    /// Set of pages (see bench/corpus); A+B is both as one
    #[arg(long, default_value = "guest")]
    set: String,
    /// MiB of it at most
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1024))]
    mib: u32,
    /// CODEC or CODEC:LEVEL; qpl is zlib's deflate by Intel's libqpl
    #[arg(
        long,
        value_delimiter = ',',
        allow_hyphen_values = true,
        default_value = "lz4,zstd:-1,zstd:1,zstd:3,zlib:1,zlib:6,qatzip:1"
    )]
    codecs: Vec<Chosen>,
    /// File of libqpl, for qpl [default: libqpl.so.1 in the dynamic linker's search path]
    #[arg(long, value_name = "FILE")]
    qpl_library: Option<PathBuf>,
    /// Pages of a unit
    #[arg(long, value_delimiter = ',', default_value = "1,128",
          value_parser = clap::value_parser!(u16).range(1..=256))]
    pages: Vec<u16>,
    /// Runs of each; medians are shown
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Write the figures to FILE as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// A codec with its level, from `CODEC` or `CODEC:LEVEL`.
#[derive(Clone, Copy, Debug)]
struct Chosen(Settings);

impl FromStr for Chosen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "qpl" {
            return Ok(Self(Settings::qpl()));
        }
        let (codec, level) = match text.split_once(':') {
            Some((codec, level)) => {
                (codec, Some(level.parse().map_err(|_| format!("'{level}' is no level"))?))
            }
            None => (text, None),
        };
        let codec: Codec = codec.parse().map_err(|error| format!("{error}"))?;
        Settings::new(codec, level).map(Self).map_err(|error| error.to_string())
    }
}

/// One run: CPU seconds of a GiB of plain bytes.
#[derive(Clone, Copy, Debug, Serialize)]
struct Run {
    compress: f64,
    decompress: f64,
}

/// Runs the benchmark and prints its table.
///
/// # Errors
///
/// A set that the corpus has not, a file that cannot be written, and a unit that does not decode
/// to its input.
pub(crate) fn run(args: &CodecArgs) -> anyhow::Result<()> {
    let corpus = Corpus::load();
    let plain = pages(&corpus, &args.set, args.mib as usize)?;
    println!(
        "{}: {} pages of {}; medians of {} interleaved runs, one thread",
        args.set,
        plain.len() / PAGE,
        corpus.origin(),
        args.runs
    );
    println!(
        "{:<12}{:>9}{:>16}{:>18}{:>10}{:>8}",
        "", "unit", "compress s/GiB", "decompress s/GiB", "faster", "ratio"
    );
    let is_wanted = args.codecs.iter().any(|chosen| chosen.0.is_qpl());
    let qpl = is_wanted.then(|| open(args.qpl_library.as_deref())).transpose()?;
    let mut rows = Vec::new();
    for &unit in &args.pages {
        let unit = usize::from(unit) * PAGE;
        let mut benches = args
            .codecs
            .iter()
            .map(|chosen| Bench::new(chosen.0, unit, qpl.as_ref()))
            .collect::<anyhow::Result<Vec<_>>>()?;
        for _ in 0..args.runs {
            benches.iter_mut().try_for_each(|bench| bench.run(&plain))?;
        }
        for bench in &benches {
            rows.push(bench.row(&plain));
        }
    }
    if let Some(path) = &args.json {
        let figures = json!({
            "set": args.set,
            "corpus": corpus.origin().to_string(),
            "bytes": plain.len(),
            "qpl": qpl.as_ref().map(|qpl| json!({"version": qpl.version(), "path": qpl.path().name()})),
            "rows": rows,
        });
        std::fs::write(path, format!("{figures:#}\n"))
            .with_context(|| format!("cannot write the figures to {}", path.display()))?;
    }
    Ok(())
}

/// libqpl, and a line about it: a column of figures has no room for its path.
fn open(library: Option<&std::path::Path>) -> anyhow::Result<Qpl> {
    let qpl = Qpl::open(Arc::new(qpl::Loaded::new(library)?), qpl::Options::default())?;
    println!("qpl: libqpl {} on its {} path", qpl.version(), qpl.path());
    Ok(qpl)
}

fn pages(corpus: &Corpus, names: &str, mib: usize) -> anyhow::Result<Vec<u8>> {
    let mut plain = Vec::new();
    for name in names.split('+') {
        let set = corpus.set(name).with_context(|| {
            format!(
                "there is no set {name}: {} have {}",
                corpus.origin(),
                corpus.names().join(", ")
            )
        })?;
        let whole = set.pages().chunks_exact(PAGE).filter(|page| !is_same_filled(page));
        whole.for_each(|page| plain.extend_from_slice(page));
    }
    plain.truncate(mib << 20);
    ensure!(!plain.is_empty(), "the set {names} has no page with contents");
    Ok(plain)
}

/// A codec under test, with all that it needs allocated.
struct Bench {
    settings: Settings,
    unit: usize,
    encoder: Encoder,
    decoder: Decoder,
    /// Counters of libqpl.
    made: Option<Arc<qpl::Counters>>,
    /// Header and payload of each unit of the last run.
    units: Vec<(UnitHeader, Vec<u8>)>,
    runs: Vec<Run>,
}

impl Bench {
    fn new(settings: Settings, unit: usize, qpl: Option<&Qpl>) -> anyhow::Result<Self> {
        let (mut encoder, decoder) = (Encoder::new(settings)?, Decoder::new());
        let compressor =
            qpl.filter(|_| settings.is_qpl()).map(|qpl| qpl.compressor(unit)).transpose()?;
        let made = compressor.as_ref().map(|compressor| Arc::clone(compressor.counters()));
        if let Some(compressor) = compressor {
            encoder = encoder.with_deflate(Box::new(compressor));
        }
        let (units, runs) = (Vec::new(), Vec::new());
        Ok(Self { settings, unit, encoder, decoder, made, units, runs })
    }

    fn run(&mut self, plain: &[u8]) -> anyhow::Result<()> {
        self.units.clear();
        let mut out = vec![0; self.unit];
        let mut compress = Duration::ZERO;
        for plain in plain.chunks(self.unit) {
            let before = thread_cpu();
            let encoded = self.encoder.encode(plain, &mut out);
            compress += thread_cpu() - before;
            let payload = if encoded.codec == Codec::Raw { plain } else { &out[..encoded.len] };
            self.units.push((UnitHeader::of(plain, encoded), payload.to_vec()));
        }
        let mut decompress = Duration::ZERO;
        for (plain, (header, payload)) in plain.chunks(self.unit).zip(&self.units) {
            let out = &mut out[..plain.len()];
            let before = thread_cpu();
            self.decoder.decode(header, payload, out)?;
            decompress += thread_cpu() - before;
            ensure!(out == plain, "{} has decoded other bytes", self.settings.name());
        }
        if let Some(seen) = self.made.as_ref().map(|made| made.snapshot()) {
            let why = seen.last_failure.unwrap_or_default();
            ensure!(seen.failures + seen.without == 0, "libqpl has failed: {why}");
        }
        let gib = plain.len() as f64 / f64::from(1 << 30);
        let [compress, decompress] = [compress, decompress].map(|cpu| cpu.as_secs_f64() / gib);
        self.runs.push(Run { compress, decompress });
        Ok(())
    }

    /// Prints the medians and returns all runs.
    fn row(&self, plain: &[u8]) -> serde_json::Value {
        let sent: usize = self.units.iter().map(|(_, payload)| payload.len()).sum();
        let ratio = plain.len() as f64 / sent.max(1) as f64;
        let compress = median(self.runs.iter().map(|run| run.compress).collect());
        let decompress = median(self.runs.iter().map(|run| run.decompress).collect());
        let name = format!("{}:{}", self.settings.name(), self.settings.level());
        println!(
            "{name:<12}{:>5} KiB{compress:>16.2}{decompress:>18.2}{:>9.1}x{ratio:>8.2}",
            self.unit >> 10,
            compress / decompress.max(1e-9)
        );
        json!({ "codec": name, "unit_bytes": self.unit, "ratio": ratio, "runs": self.runs })
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// CPU time of the calling thread so far.
fn thread_cpu() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).expect("clocks are not negative")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_codec_is_measured_in_both_directions() {
        let plain = pages(&Corpus::made("a test"), "text", 1).unwrap();
        for text in ["lz4", "zstd:1", "zlib:1", "qatzip:1"] {
            let mut bench = Bench::new(text.parse::<Chosen>().unwrap().0, PAGE, None).unwrap();
            bench.run(&plain).unwrap();
            let row = bench.row(&plain);
            assert!(row["ratio"].as_f64().unwrap() > 1.1, "{row}");
            assert!(bench.runs[0].compress > 0.0 && bench.runs[0].decompress > 0.0, "{row}");
        }
        assert!("zstd:x".parse::<Chosen>().is_err() && "lzo".parse::<Chosen>().is_err());
        assert!(pages(&Corpus::made("a test"), "nothing", 1).is_err());
    }
}
