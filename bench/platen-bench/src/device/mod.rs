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
mod nbd;
mod nbd_client;
mod qat;
mod zram;

use crate::program::QatLibraries;
use anyhow::{bail, ensure, Context};
use clap::Args;
use codec::{Codec, Settings};
use corpus::{is_same_filled, Corpus};
use front::{Front, Own};
use rustix::time::{clock_gettime, ClockId};
use serde::Serialize;
use serde_json::json;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Instant;
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
    /// zram:ALGORITHM, CODEC or CODEC:LEVEL
    #[arg(
        long,
        value_delimiter = ',',
        allow_hyphen_values = true,
        default_value = "zram:lzo-rle,zram:lz4,lz4,zstd:-3,zstd:-1,zstd:1,zstd:3,zlib:1"
    )]
    fronts: Vec<Kind>,
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

/// One run of one front over one set. Times are microseconds a page.
#[derive(Clone, Copy, Debug, Serialize)]
struct Figures {
    write_cpu: f64,
    write_p50: f64,
    write_p99: f64,
    read_cpu: f64,
    read_p50: f64,
    read_p99: f64,
    /// Plain bytes per compressed byte.
    coded: f64,
    /// Plain bytes per byte of memory: after filling, after churn, and after compaction.
    filled: f64,
    churned: f64,
    compacted: f64,
}

/// Bytes with the alignment that direct I/O requires.
struct Aligned {
    bytes: Vec<u8>,
    start: usize,
}

impl Aligned {
    fn new(len: usize) -> Self {
        let bytes = vec![0; len + PAGE];
        let start = bytes.as_ptr().align_offset(PAGE);
        Self { bytes, start }
    }

    fn of(plain: &[u8]) -> Self {
        let mut this = Self::new(plain.len());
        this.all().copy_from_slice(plain);
        this
    }

    fn all(&mut self) -> &mut [u8] {
        let len = self.bytes.len() - PAGE;
        &mut self.bytes[self.start..self.start + len]
    }
}

pub(super) fn run(args: &DeviceBenchArgs) -> anyhow::Result<()> {
    zram::remove_at_signals()?;
    let corpus = Corpus::load();
    let mut fronts = args.fronts.clone();
    if let Some(why) = zram::missing() {
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
            results.push(single_pages(args, &fronts, name, pages)?);
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

fn single_pages(
    args: &DeviceBenchArgs,
    fronts: &[Kind],
    name: &str,
    pages: &[u8],
) -> anyhow::Result<serde_json::Value> {
    let mut runs: Vec<Vec<Figures>> = vec![Vec::new(); fronts.len()];
    for run in 0..args.runs {
        for (front, runs) in fronts.iter().zip(&mut runs) {
            let figures = one_run(front, pages, u64::from(run) + 1);
            runs.push(figures.with_context(|| format!("{front} with {name}"))?);
        }
    }
    println!(
        "\n{name}: {} pages, {} runs in turns, microseconds a page (CPU: the whole process)",
        pages.len() / PAGE,
        args.runs
    );
    println!(
        "{:<14}{:>9}{:>8}{:>8}{:>9}{:>8}{:>8}{:>9}{:>8}{:>9}{:>11}",
        "", "write", "p50", "p99", "read", "p50", "p99", "coded", "filled", "churned", "compacted"
    );
    let mut rows = Vec::new();
    for (front, runs) in fronts.iter().zip(&runs) {
        let of = |field: fn(&Figures) -> f64| median(runs.iter().map(field).collect());
        let figures = Figures {
            write_cpu: of(|f| f.write_cpu),
            write_p50: of(|f| f.write_p50),
            write_p99: of(|f| f.write_p99),
            read_cpu: of(|f| f.read_cpu),
            read_p50: of(|f| f.read_p50),
            read_p99: of(|f| f.read_p99),
            coded: of(|f| f.coded),
            filled: of(|f| f.filled),
            churned: of(|f| f.churned),
            compacted: of(|f| f.compacted),
        };
        println!(
            "{:<14}{:>9.2}{:>8.2}{:>8.2}{:>9.2}{:>8.2}{:>8.2}{:>9.3}{:>8.3}{:>9.3}{:>11.3}",
            front.to_string(),
            figures.write_cpu,
            figures.write_p50,
            figures.write_p99,
            figures.read_cpu,
            figures.read_p50,
            figures.read_p99,
            figures.coded,
            figures.filled,
            figures.churned,
            figures.compacted,
        );
        rows.push(json!({ "front": front.to_string(), "median": figures, "runs": runs }));
    }
    compare(fronts, &rows);
    Ok(json!({ "part": "pages", "set": name, "pages": pages.len() / PAGE, "fronts": rows }))
}

/// The important figures, side by side: ratio over zram's best, CPU over lzo-rle's.
fn compare(fronts: &[Kind], rows: &[serde_json::Value]) {
    let value = |row: &serde_json::Value, field: &str| row["median"][field].as_f64().unwrap_or(0.0);
    let both = |row: &serde_json::Value| value(row, "write_cpu") + value(row, "read_cpu");
    let zram = || fronts.iter().zip(rows).filter(|(front, _)| matches!(front, Kind::Zram(_)));
    let best = zram().map(|(_, row)| value(row, "compacted")).fold(0.0, f64::max);
    let lzo = zram().find(|(front, _)| **front == Kind::Zram("lzo-rle".to_owned()));
    let Some((_, lzo)) = lzo else { return };
    for (front, row) in fronts.iter().zip(rows).filter(|(front, _)| matches!(front, Kind::Own(_))) {
        println!(
            "  {front}: ratio {:.2} times zram's best, CPU of a write and a read {:.2} times lzo-rle's",
            value(row, "compacted") / best,
            both(row) / both(lzo)
        );
    }
}

fn one_run(front: &Kind, pages: &[u8], seed: u64) -> anyhow::Result<Figures> {
    let count = (pages.len() / PAGE) as u64;
    let page = |number: u64| {
        let at = usize::try_from(number).expect("in memory") * PAGE;
        &pages[at..at + PAGE]
    };
    let mut random = Random(seed);
    let order = random.order(count);
    // The new contents of each page.
    let other = random.order(count);
    let mut kept = front.open(count, 0)?;
    let mut times = Vec::with_capacity(order.len() * 2);
    let cpu = process_cpu();
    for number in 0..count {
        timed(&mut times, || kept.write(number, page(number)))?;
    }
    let filled = kept.memory()?;
    for &number in &order {
        timed(&mut times, || kept.write(number, page(other[usize::try_from(number)?])))?;
    }
    let write_cpu = (process_cpu() - cpu) / (2.0 * count as f64);
    let (write_p50, write_p99) = percentiles(&mut times);
    let churned = kept.memory()?;
    kept.compact()?;
    let compacted = kept.memory()?;
    times.clear();
    let mut out = Aligned::new(PAGE);
    let out = out.all();
    let mut read_cpu = 0.0;
    for numbers in random.order(count).chunks(256) {
        // The time excludes the comparison.
        let cpu = process_cpu();
        for &number in numbers {
            timed(&mut times, || kept.read(number, out))?;
        }
        read_cpu += process_cpu() - cpu;
        for &number in numbers.iter().step_by(16) {
            kept.read(number, out)?;
            if out != page(other[usize::try_from(number)?]) {
                bail!("page {number} has another content");
            }
        }
    }
    let (read_p50, read_p99) = percentiles(&mut times);
    let ratio = |memory: &front::Memory| memory.plain as f64 / memory.used.max(1) as f64;
    Ok(Figures {
        write_cpu,
        write_p50,
        write_p99,
        read_cpu: read_cpu / count as f64,
        read_p50,
        read_p99,
        coded: compacted.plain as f64 / compacted.compressed.max(1) as f64,
        filled: ratio(&filled),
        churned: ratio(&churned),
        compacted: ratio(&compacted),
    })
}

#[inline]
fn timed<R>(times: &mut Vec<f32>, run: impl FnOnce() -> anyhow::Result<R>) -> anyhow::Result<R> {
    let start = Instant::now();
    let result = run()?;
    times.push(start.elapsed().as_secs_f32() * 1e6);
    Ok(result)
}

/// The median, and the 99th percentile.
fn percentiles(times: &mut [f32]) -> (f64, f64) {
    times.sort_unstable_by(f32::total_cmp);
    let at = |part: usize| times.get(times.len() * part / 100).copied().map_or(0.0, f64::from);
    (at(50), at(99))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => 0.0,
        odd if odd % 2 == 1 => values[middle],
        _ => f64::midpoint(values[middle - 1], values[middle]),
    }
}

/// Microseconds of this process's CPU time.
pub(crate) fn process_cpu() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 * 1e6 + time.tv_nsec as f64 / 1e3
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    /// The numbers below `count`, in random order.
    fn order(&mut self, count: u64) -> Vec<u64> {
        let mut order: Vec<u64> = (0..count).collect();
        for last in (1..order.len()).rev() {
            let other = usize::try_from(self.next() % (last as u64 + 1)).expect("below last");
            order.swap(last, other);
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fronts_are_zram_or_a_codec_with_a_level() {
        assert_eq!("zram:lz4".parse(), Ok(Kind::Zram("lz4".into())));
        assert_eq!("zstd:-3".parse::<Kind>().unwrap().to_string(), "zstd -3");
        assert_eq!("lz4".parse::<Kind>().unwrap().to_string(), "lz4 1");
        assert!("zstd:99".parse::<Kind>().is_err() && "lzo".parse::<Kind>().is_err());
    }

    #[test]
    fn a_run_reads_back_what_it_wrote_and_every_figure_is_one() {
        let corpus = Corpus::made("a test");
        let text = corpus.text();
        let mut pages = Aligned::of(&text.pages()[..256 * PAGE]);
        let figures = one_run(&"zstd:1".parse().unwrap(), pages.all(), 7).unwrap();
        assert!(figures.coded > 1.2 && figures.compacted > 1.0, "{figures:?}");
        assert!(figures.write_cpu > 0.0 && figures.write_p50 <= figures.write_p99);
        assert!(figures.read_cpu > 0.0 && figures.read_p50 <= figures.read_p99);
    }

    #[test]
    fn an_order_is_a_permutation() {
        let mut order = Random(3).order(1000);
        assert_ne!(order, (0..1000).collect::<Vec<_>>());
        order.sort_unstable();
        assert_eq!(order, (0..1000).collect::<Vec<_>>());
        assert_eq!((median(vec![3.0, 1.0, 2.0]), median(vec![4.0, 1.0])), (2.0, 2.5));
    }
}
