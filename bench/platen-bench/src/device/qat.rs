//! Pages compressed by a QAT device: the host's cost of a written page, and asynchronous against
//! direct offload over the size of requests.
//!
//! Without `--qat-device` the device is simulated, in two ways. `engine deflate` shows the CPU time
//! of the host and the ratio; `engine stored`, which takes hardly any CPU time, has a latency and
//! shows the cost of waiting. The simulated device's own threads are not in the CPU time, and its
//! throughput is no real device's.

use super::front::{Front, Memory, Own};
use super::measure::{median, percentiles, process_cpu, timed, Aligned};
use super::{jobs, DeviceBenchArgs, Kind, Part, PAGE};
use crate::program::again;
use crate::watch::threads_cpu;
use anyhow::{ensure, Context};
use codec::{Codec, Settings};
use device::OffloadOptions;
use qat::{Libraries, Qat, StartOptions};
use serde::{Deserialize, Serialize};
use serde_json::{json, Value};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pages in flight, in as many requests as that takes.
const UNDER_WAY: usize = 128;

/// The purpose of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Scene {
    /// A device that does deflate.
    Cpu,
    /// A device that does no work, with a latency.
    Waiting,
}

impl Scene {
    /// The simulated device's script.
    fn script(self, args: &DeviceBenchArgs) -> String {
        match self {
            Self::Cpu => format!("engine deflate; latency {}", args.qat_latency),
            Self::Waiting => format!("engine stored; latency {}", args.qat_latency),
        }
    }
}

/// Measures each scene in a separate process, since a process has one device.
pub(super) fn measure(args: &DeviceBenchArgs) -> anyhow::Result<Value> {
    let private = tempfile::tempdir().context("cannot make a private folder")?;
    let scenes: &[Scene] =
        if args.qat_device { &[Scene::Cpu] } else { &[Scene::Cpu, Scene::Waiting] };
    let mut all = Vec::new();
    for scene in scenes {
        let file = private.path().join("figures");
        let script = scene.script(args);
        let mut command = again((!args.qat_device).then_some(&script))?;
        command.args(std::env::args_os().skip(1));
        command.args(["--qat-scene", if *scene == Scene::Cpu { "cpu" } else { "waiting" }]);
        command.arg("--qat-figures").arg(&file);
        let status = command.status().context("cannot run the measurement")?;
        ensure!(status.success(), "the measurement ended with {status}");
        let text = std::fs::read(&file).context("no figures")?;
        all.push(serde_json::from_slice::<Value>(&text)?);
    }
    Ok(json!({ "part": "qat", "simulated": !args.qat_device, "scenes": all }))
}

/// The way in which pages are written and compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Zram,
    Software,
    /// One page in flight on the device, and a thread that waits for it.
    Direct,
    Asynchronous,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::Zram => "zram lzo-rle",
            Self::Software => "deflate in software",
            Self::Direct => "QAT, direct",
            Self::Asynchronous => "QAT, asynchronous",
        }
    }
}

/// One run, or the medians of several, over all writes; microseconds and megabytes.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Figures {
    /// Host CPU for a page, without the simulated device's threads.
    cpu: f64,
    /// Plain megabytes written a second.
    mb_s: f64,
    /// From submission to completion of a request.
    p50: f64,
    p99: f64,
    /// Plain bytes per compressed byte.
    coded: f64,
    /// Share of all pages.
    by_device: f64,
}

/// One scene in this process; its output is printed to the parent's.
pub(super) fn scene(
    args: &DeviceBenchArgs,
    scene: Scene,
    sets: &mut [(String, Aligned)],
) -> anyhow::Result<Value> {
    let libraries = Libraries::load(&args.libraries.location())?;
    let mut ways = vec![Way::Zram, Way::Software, Way::Direct, Way::Asynchronous];
    if super::zram::missing().is_some() {
        ways.remove(0);
    }
    if scene == Scene::Waiting {
        ways.retain(|way| *way != Way::Software);
    }
    let device = match (args.qat_device, scene) {
        (true, _) => "this host's QAT device".to_owned(),
        (false, Scene::Cpu) => {
            "SIMULATED QAT device with real deflate (its CPU time left out)".to_owned()
        }
        (false, Scene::Waiting) => {
            "SIMULATED QAT device without compression, whose answers take".to_owned()
                + &format!(" {} us", args.qat_latency)
        }
    };
    let mut results = Vec::new();
    let mut by_jobs = Vec::new();
    for (name, pages) in sets {
        let pages = &*pages.all();
        if args.parts.contains(&Part::Jobs) && scene == Scene::Cpu {
            by_jobs.push(jobs_on_device(args, &libraries, name, pages)?);
        }
        println!(
            "\n{name}: {} pages written, {UNDER_WAY} under way; {device}; medians of {} runs in turns",
            pages.len() / PAGE,
            args.runs
        );
        println!(
            "{:<22}{:>9}{:>12}{:>10}{:>11}{:>11}{:>8}{:>8}",
            "", "request", "us CPU/page", "MB/s", "p50 us", "p99 us", "coded", "device"
        );
        for kib in &args.qat_requests {
            let each = (*kib as usize * 1024 / PAGE).max(1);
            let mut runs: Vec<Vec<Figures>> = vec![Vec::new(); ways.len()];
            for _ in 0..args.runs {
                for (way, runs) in ways.iter().zip(&mut runs) {
                    let figures = one_run(&libraries, *way, pages, each);
                    runs.push(figures.with_context(|| format!("{}, {name}", way.name()))?);
                }
            }
            let mut rows = Vec::new();
            for (way, runs) in ways.iter().zip(&runs) {
                let of = |field: fn(&Figures) -> f64| median(runs.iter().map(field).collect());
                let middle = Figures {
                    cpu: of(|f| f.cpu),
                    mb_s: of(|f| f.mb_s),
                    p50: of(|f| f.p50),
                    p99: of(|f| f.p99),
                    coded: of(|f| f.coded),
                    by_device: of(|f| f.by_device),
                };
                println!(
                    "{:<22}{:>5} KiB{:>12.2}{:>10.0}{:>11.0}{:>11.0}{:>8.3}{:>7.0}%",
                    way.name(),
                    kib,
                    middle.cpu,
                    middle.mb_s,
                    middle.p50,
                    middle.p99,
                    middle.coded,
                    middle.by_device * 100.0
                );
                rows.push((*way, middle));
            }
            compare(&rows);
            let rows: Vec<Value> = rows
                .iter()
                .zip(&runs)
                .map(|((way, middle), runs)| json!({ "way": way.name(), "median": middle, "runs": runs }))
                .collect();
            results.push(json!({ "set": name, "request_kib": kib, "ways": rows }));
        }
    }
    Ok(json!({ "device": device, "results": results, "jobs": by_jobs }))
}

/// The part jobs on the device of this process.
fn jobs_on_device(
    args: &DeviceBenchArgs,
    libraries: &Libraries,
    name: &str,
    pages: &[u8],
) -> anyhow::Result<Value> {
    let mut runs = Vec::new();
    for run in 0..args.runs {
        let settings = Settings::new(Codec::DeflateQz, Some(1))?;
        let kept = Own::new(settings, (pages.len() / PAGE) as u64, 0)?;
        let qat = on_device(&kept, libraries, OffloadOptions::default().depth)?;
        runs.push(jobs::one_run(
            args,
            &jobs::Target::Own(kept.device()),
            pages,
            u64::from(run) + 1,
            true,
        )?);
        drop(kept);
        drop(qat);
    }
    Ok(jobs::rows(args, name, pages, &[("platen, SIMULATED QAT".to_owned(), runs)]))
}

/// Gives the writes of `kept` to the device; nothing is done in software, so that only the path
/// through the device is measured.
fn on_device(kept: &Own, libraries: &Libraries, depth: usize) -> anyhow::Result<Arc<Qat>> {
    let qat = Qat::start(libraries, &StartOptions::default())?;
    let deadline = Duration::from_secs(10);
    let options =
        OffloadOptions { threads: 1, depth, share: false, deadline, ..Default::default() };
    kept.device().offload(&qat, &options)?;
    while kept.device().offload_stats().is_some_and(|stats| stats.on_device == 0) {
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(qat)
}

fn compare(rows: &[(Way, Figures)]) {
    let of = |way| rows.iter().find(|row| row.0 == way).map(|row| row.1);
    let Some(asynchronous) = of(Way::Asynchronous) else { return };
    let mut words = Vec::new();
    if let Some(zram) = of(Way::Zram) {
        words.push(format!("CPU {:.2} of zram's", asynchronous.cpu / zram.cpu));
    }
    if let Some(direct) = of(Way::Direct) {
        words.push(format!(
            "{:.1} times direct's throughput, CPU {:.2} of direct's",
            asynchronous.mb_s / direct.mb_s,
            asynchronous.cpu / direct.cpu
        ));
    }
    println!("  asynchronous: {}", words.join("; "));
}

/// Writes all pages twice, the first time to allocate memory; `each` of them in a request.
fn one_run(libraries: &Libraries, way: Way, pages: &[u8], each: usize) -> anyhow::Result<Figures> {
    let count = (pages.len() / PAGE) as u64;
    if way == Way::Zram {
        let mut kept = Kind::Zram("lzo-rle".to_owned()).open(count, 0)?;
        // In the kernel a write has completed when its submission returns: more of them in flight
        // make no difference.
        let mut write = |times: &mut Vec<f32>| {
            for (bytes, page) in pages.chunks(each * PAGE).zip((0..).step_by(each)) {
                timed(times, || kept.write(page, bytes))?;
            }
            anyhow::Ok(())
        };
        write(&mut Vec::new())?;
        let mut figures = taken(count, || None, &mut write)?;
        figures.coded = coded(&kept.memory()?);
        return Ok(figures);
    }
    let settings = Settings::new(Codec::DeflateQz, Some(1))?;
    // As many threads for software as there are cores: the baseline for offloading.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let workers = if way == Way::Software { cores - 1 } else { 0 };
    let mut kept = Own::new(settings, count, workers)?;
    let qat = match way {
        Way::Direct | Way::Asynchronous => {
            let depth = if way == Way::Direct { 1 } else { OffloadOptions::default().depth };
            Some(on_device(&kept, libraries, depth)?)
        }
        _ => None,
    };
    let by_device = |kept: &Own| {
        let stats = kept.device().offload_stats().unwrap_or_default();
        stats.engines.iter().map(|engine| engine.by_device).sum::<u64>()
    };
    kept.write_all(pages, each, UNDER_WAY, &mut Vec::new())?;
    let before = by_device(&kept);
    let simulated = qat.as_ref().map(|_| "qat-sim");
    let mut figures =
        taken(count, || simulated, |times| kept.write_all(pages, each, UNDER_WAY, times))?;
    figures.by_device = (by_device(&kept) - before) as f64 / count as f64;
    figures.coded = coded(&kept.memory()?);
    let mut out = vec![0; PAGE];
    for number in (0..count).step_by(37) {
        kept.read(number, &mut out)?;
        let at = usize::try_from(number)? * PAGE;
        ensure!(out == pages[at..at + PAGE], "page {number} has another content");
    }
    drop(kept);
    drop::<Option<Arc<Qat>>>(qat);
    Ok(figures)
}

/// Time, and the CPU time of this process without the threads whose name begins with `left_out`.
fn taken(
    count: u64,
    left_out: impl Fn() -> Option<&'static str>,
    run: impl FnOnce(&mut Vec<f32>) -> anyhow::Result<()>,
) -> anyhow::Result<Figures> {
    let mut times = Vec::with_capacity(usize::try_from(count)?);
    let others = || left_out().map_or(Ok(0.0), threads_cpu);
    let (start, other, cpu) = (Instant::now(), others()?, process_cpu());
    run(&mut times)?;
    let (seconds, cpu) = (start.elapsed().as_secs_f64(), process_cpu() - cpu);
    let cpu = (cpu - (others()? - other)) / count as f64;
    let (p50, p99) = percentiles(&mut times);
    let mb_s = count as f64 * PAGE as f64 / 1e6 / seconds;
    Ok(Figures { cpu, mb_s, p50, p99, ..Figures::default() })
}

fn coded(memory: &Memory) -> f64 {
    memory.plain as f64 / memory.compressed.max(1) as f64
}
