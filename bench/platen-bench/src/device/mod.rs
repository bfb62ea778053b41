//! `platen-bench device`: the CPU time and memory of a page, against the kernel's zram.
//!
//! The same real pages go to both, in the same order, in turns: every page is written once in order
//! of its number, then each is overwritten with another page in random order, then each is read in
//! random order and compared. CPU time is the whole process's, so it includes threads that prepare
//! memory; for zram it includes the kernel's work for us and the system call. Pages that repeat one
//! word are left out: neither side compresses them, and the kernel's swap never sends zeros.

mod front;
mod fuse;
mod idle;
mod jobs;
mod large;
mod measure;
mod nbd;
mod nbd_client;
mod pages;
mod qat;
mod zram;

use crate::program::QatLibraries;
use anyhow::{ensure, Context};
use clap::Args;
use codec::{Codec, Settings};
use corpus::{is_same_filled, Corpus};
use front::{Front, Own};
pub(super) use measure::process_cpu;
use measure::Aligned;
use serde_json::json;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use zram::Zram;

use device::PAGE;

/// Arguments of `platen-bench device`.
#[derive(Args, Debug)]
pub(super) struct DeviceBenchArgs {
    /// Sets of pages: guest, redis, text, code, ... (see bench/corpus); A+B is both as one
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "guest,redis,text+source+xml+chemistry,code+database+image"
    )]
    sets: Vec<String>,
    /// zram:ALGORITHM, zram (each algorithm that this kernel's zram names), CODEC or CODEC:LEVEL
    #[arg(
        long,
        value_delimiter = ',',
        allow_hyphen_values = true,
        default_value = "zram,lz4,zstd:-3,zstd:-1,zstd:1,zstd:3,zlib:1"
    )]
    fronts: Vec<Wanted>,
    /// Pages of each set at most
    #[arg(long, default_value_t = 24_000, value_parser = clap::value_parser!(u32).range(64..=4_000_000))]
    pages: u32,
    /// Runs of each; medians are shown
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Parts to measure: pages (each page alone), large (512 KiB requests), nbd (against nbdkit),
    /// idle (recompressed by the policy), qat (compressed by a QAT device, simulated unless told
    /// otherwise), fuse (the same jobs on a loop device over FUSE as on zram's disk), jobs (several
    /// threads that write and read, in order and at random; with qat also on the device)
    #[arg(long, value_delimiter = ',', default_value = "pages,large,nbd,idle,qat,fuse")]
    parts: Vec<Part>,
    /// Numbers of threads of the part jobs
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16", value_parser = clap::value_parser!(u16).range(1..=32))]
    jobs: Vec<u16>,
    /// Each thread of the part jobs takes its pages as many times as there are threads, so that
    /// many threads are measured for as long as one
    #[arg(long)]
    steady: bool,
    /// Pages in the groups that the part idle makes: 1, or 8 to 32
    #[arg(long, value_delimiter = ',', default_value = "1,8,16,24")]
    groups: Vec<usize>,
    /// zstd's level for idle pages
    #[arg(long, default_value_t = 14)]
    idle_level: i32,
    /// Sizes of the requests of the part qat, KiB
    #[arg(long, value_delimiter = ',', default_value = "4,16,64,256,1024,4096", value_parser = clap::value_parser!(u32).range(4..=32768))]
    qat_requests: Vec<u32>,
    /// The part qat on this host's QAT device instead of a simulated one
    #[arg(long)]
    qat_device: bool,
    /// The simulated device's latency, microseconds
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(0..=100_000))]
    qat_latency: u32,
    #[command(flatten)]
    libraries: QatLibraries,
    /// One scene of the part qat in this process, its figures to a file
    #[arg(long, hide = true, requires = "qat_figures")]
    qat_scene: Option<qat::Scene>,
    #[arg(long, hide = true)]
    qat_figures: Option<PathBuf>,
    /// Write the figures to FILE as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    Pages,
    Large,
    Nbd,
    Idle,
    Qat,
    Fuse,
    Jobs,
}

/// The store that is measured.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Zram(String),
    Own(Settings),
}

/// A store that is to be measured.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Wanted {
    /// Each algorithm that zram names.
    EveryZram,
    One(Kind),
}

impl FromStr for Wanted {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "zram" => Ok(Self::EveryZram),
            text => text.parse().map(Self::One),
        }
    }
}

/// The stores, each once.
fn expanded(fronts: &[Wanted], algorithms: &[String]) -> Vec<Kind> {
    let mut all: Vec<Kind> = Vec::new();
    for front in fronts {
        let these = match front {
            Wanted::EveryZram => algorithms.iter().cloned().map(Kind::Zram).collect(),
            Wanted::One(front) => vec![front.clone()],
        };
        for one in these {
            if !all.contains(&one) {
                all.push(one);
            }
        }
    }
    all
}

/// The algorithms of which "zram's best" is the best.
fn best_of(fronts: &[Kind]) -> String {
    let name = |front: &Kind| match front {
        Kind::Zram(algorithm) => Some(algorithm.clone()),
        _ => None,
    };
    let names: Vec<String> = fronts.iter().filter_map(name).collect();
    let without = if names.iter().any(|name| name == "zstd") { "" } else { ", without zstd" };
    format!("best of zram's {}{without}", names.join(", "))
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("zram", algorithm)) => Ok(Self::Zram(algorithm.to_owned())),
            Some((codec, level)) => {
                let level = level.parse().map_err(|_| format!("'{level}' is no level"))?;
                let codec: Codec = codec.parse().map_err(|error| format!("{error}"))?;
                Settings::new(codec, Some(level)).map(Self::Own).map_err(|error| error.to_string())
            }
            None => {
                let codec: Codec = text.parse().map_err(|error| format!("{error}"))?;
                Settings::new(codec, None).map(Self::Own).map_err(|error| error.to_string())
            }
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zram(algorithm) => f.pad(&format!("zram {algorithm}")),
            Self::Own(settings) => f.pad(&format!("{} {}", settings.codec(), settings.level())),
        }
    }
}

impl Kind {
    fn open(&self, pages: u64, workers: usize) -> anyhow::Result<Box<dyn Front>> {
        Ok(match self {
            Self::Zram(algorithm) => Box::new(Zram::new(algorithm, pages * PAGE as u64)?),
            Self::Own(settings) => Box::new(Own::new(*settings, pages, workers)?),
        })
    }
}

pub(super) fn run(args: &DeviceBenchArgs) -> anyhow::Result<()> {
    zram::remove_at_signals()?;
    let corpus = Corpus::load();
    let missing = zram::missing();
    let algorithms = match &missing {
        None if args.fronts.contains(&Wanted::EveryZram) => Zram::algorithms()?,
        _ => Vec::new(),
    };
    let mut fronts = expanded(&args.fronts, &algorithms);
    if let Some(why) = missing {
        println!("zram is left out: {why}");
        fronts.retain(|front| matches!(front, Kind::Own(_)));
    }
    ensure!(!fronts.is_empty(), "nothing is left to measure");
    let mut results = Vec::new();
    let mut sets = Vec::new();
    for name in &args.sets {
        let mut plain = Vec::new();
        for part in name.split('+') {
            let Some(set) = corpus.set(part) else {
                println!(
                    "set {part} is left out: {} have {}",
                    corpus.origin(),
                    corpus.names().join(", ")
                );
                continue;
            };
            let pages = set.pages().chunks_exact(PAGE);
            pages
                .filter(|page| !is_same_filled(page))
                .for_each(|page| plain.extend_from_slice(page));
        }
        if plain.len() < 64 * PAGE {
            continue;
        }
        // Spread over the whole set, so that a short measurement covers all of it.
        let count = plain.len() / PAGE;
        let step = count.div_ceil(args.pages as usize).max(1);
        let chosen: Vec<u8> = plain.chunks_exact(PAGE).step_by(step).flatten().copied().collect();
        let mut pages = Aligned::of(&chosen);
        if args.qat_scene.is_some() {
            sets.push((name.clone(), pages));
            continue;
        }
        let pages = &*pages.all();
        if args.parts.contains(&Part::Pages) {
            results.push(pages::measure(args, &fronts, name, pages)?);
        }
        if args.parts.contains(&Part::Large) {
            results.push(large::measure(args, &fronts, name, pages)?);
        }
        if args.parts.contains(&Part::Jobs) {
            results.push(jobs::measure(args, &fronts, name, pages)?);
        }
        if args.parts.contains(&Part::Idle) {
            results.push(idle::measure(args, &fronts, name, pages)?);
        }
        if args.parts.contains(&Part::Nbd) {
            results.extend(nbd::pages(args, name, pages)?);
        }
        if args.parts.contains(&Part::Fuse) {
            results.extend(fuse::measure(args, &fronts, name, pages)?);
        }
    }
    if let (Some(scene), Some(file)) = (args.qat_scene, &args.qat_figures) {
        let figures = qat::scene(args, scene, &mut sets)?;
        return Ok(std::fs::write(file, figures.to_string())?);
    }
    if args.parts.contains(&Part::Qat) {
        results.push(qat::measure(args)?);
    }
    if args.parts.contains(&Part::Nbd) {
        results.extend(nbd::made(args)?);
    }
    if let Some(path) = &args.json {
        let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let all = json!({
            "corpus": corpus.origin().to_string(),
            "cpus": std::thread::available_parallelism().map_or(1, usize::from),
            "load": load.trim(),
            "runs": args.runs,
            "results": results,
        });
        std::fs::write(path, format!("{all:#}\n"))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Bench {
        #[command(flatten)]
        args: DeviceBenchArgs,
    }

    /// A zram with zstd must not be compared with its LZO and LZ4 alone.
    #[test]
    fn the_default_fronts_have_every_algorithm_of_zram() {
        let Bench { args } = Bench::parse_from(["device"]);
        let known = ["lzo-rle", "lzo", "lz4", "zstd"].map(str::to_owned);
        let fronts = expanded(&args.fronts, &known);
        for algorithm in known {
            assert!(fronts.contains(&Kind::Zram(algorithm.clone())), "{algorithm}");
        }
        assert_eq!(best_of(&fronts), "best of zram's lzo-rle, lzo, lz4, zstd");
        let both = [Wanted::One(Kind::Zram("lz4".into())), Wanted::EveryZram];
        let fronts = expanded(&both, &["lzo".to_owned(), "lz4".to_owned()]);
        assert_eq!(fronts, [Kind::Zram("lz4".into()), Kind::Zram("lzo".into())]);
        assert_eq!(best_of(&fronts), "best of zram's lz4, lzo, without zstd");
    }

    #[test]
    fn fronts_are_zram_or_a_codec_with_a_level() {
        assert_eq!("zram:lz4".parse(), Ok(Kind::Zram("lz4".into())));
        assert_eq!("zstd:-3".parse::<Kind>().unwrap().to_string(), "zstd -3");
        assert_eq!("lz4".parse::<Kind>().unwrap().to_string(), "lz4 1");
        assert!("zstd:99".parse::<Kind>().is_err() && "lzo".parse::<Kind>().is_err());
    }
}
