//! platen's device through FUSE and a loop device, against zram's disk: the same jobs on both,
//! through the kernel.
//!
//! Our own threads write real pages, one request each at a time: fio generates its data, or repeats
//! a few pages. fio then reads these pages; a second series writes fio's own data. CPU is that of
//! the submitter, the server and the kernel's workers (including the loop device's), per 4 KiB;
//! beside it the whole machine's, including other work.

use super::measure::{median, percentiles, process_cpu, timed, Aligned, Random};
use super::zram::Zram;
use super::{DeviceBenchArgs, Kind, PAGE};
use crate::program;
use anyhow::{bail, ensure, Context};
use codec::Settings;
use rustix::fs::OFlags;
use rustix::process::{kill_process, Pid, Signal};
use serde::Serialize;
use serde_json::{json, Value};
use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Pages of a large request: 512 KiB.
const LARGE: usize = 128;

struct Job {
    name: &'static str,
    pages: usize,
    depth: usize,
    /// fio's kind of job; `None`: our threads, with real pages.
    fio: Option<&'static str>,
}

/// In this order: the read jobs read the real pages that the third job wrote.
const JOBS: [Job; 8] = [
    Job { name: "write 4k, 1 on the way", pages: 1, depth: 1, fio: None },
    Job { name: "write 4k, 16", pages: 1, depth: 16, fio: None },
    Job { name: "write 512k in order, 1", pages: LARGE, depth: 1, fio: None },
    Job { name: "read 4k, 1 (fio)", pages: 1, depth: 1, fio: Some("randread") },
    Job { name: "read 4k, 16 (fio)", pages: 1, depth: 16, fio: Some("randread") },
    Job { name: "write 4k, 1 (fio's data)", pages: 1, depth: 1, fio: Some("randwrite") },
    Job { name: "write 4k, 16 (fio's data)", pages: 1, depth: 16, fio: Some("randwrite") },
    Job { name: "write 512k, 1 (fio's data)", pages: LARGE, depth: 1, fio: Some("write") },
];

/// Times in microseconds: percentiles of a request, and CPU of a page.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Outcome {
    mb_s: f64,
    p50: f64,
    p99: f64,
    cpu: f64,
    machine_cpu: f64,
}

/// Why this cannot be measured on this host; `None` if it can.
fn missing() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("loop devices need root".into());
    }
    if !Path::new("/dev/fuse").exists() || !Path::new("/dev/loop-control").exists() {
        return Some("the kernel has no FUSE or no loop devices (try modprobe fuse loop)".into());
    }
    ["fio", "losetup"].into_iter().find_map(|tool| {
        let version = Command::new(tool).arg("--version").stdout(Stdio::null()).status();
        version.is_err().then(|| format!("{tool} is not installed"))
    })
}

pub(super) fn measure(
    args: &DeviceBenchArgs,
    fronts: &[Kind],
    name: &str,
    pages: &[u8],
) -> anyhow::Result<Option<Value>> {
    if let Some(why) = missing() {
        println!("\nFUSE and loop are left out: {why}");
        return Ok(None);
    }
    let pages = &pages[..pages.len() / (LARGE * PAGE) * LARGE * PAGE];
    if pages.is_empty() {
        println!("\nFUSE and loop are left out for {name}: it has less than {LARGE} pages");
        return Ok(None);
    }
    let mut runs: Vec<Vec<[Outcome; JOBS.len()]>> = vec![Vec::new(); fronts.len()];
    for run in 0..args.runs {
        for (front, runs) in fronts.iter().zip(&mut runs) {
            let outcome = one_run(front, pages, u64::from(run) + 1);
            runs.push(outcome.with_context(|| format!("{front} with {name}"))?);
        }
    }
    println!(
        "\n{name}: {} pages on disks of the kernel's, platen's by FUSE and loop, {} runs in turns; microseconds, \
         p50 and p99 of a request, CPU of 4 KiB",
        pages.len() / PAGE,
        args.runs
    );
    println!(
        "{:<28}{:<14}{:>9}{:>9}{:>9}{:>9}{:>12}",
        "", "", "MB/s", "p50", "p99", "CPU", "machine's"
    );
    let mut rows = Vec::new();
    for (nth, job) in JOBS.iter().enumerate() {
        for (front, runs) in fronts.iter().zip(&runs) {
            let of = |field: fn(&Outcome) -> f64| {
                median(runs.iter().map(|run| field(&run[nth])).collect())
            };
            let outcome = Outcome {
                mb_s: of(|o| o.mb_s),
                p50: of(|o| o.p50),
                p99: of(|o| o.p99),
                cpu: of(|o| o.cpu),
                machine_cpu: of(|o| o.machine_cpu),
            };
            println!(
                "{:<28}{:<14}{:>9.0}{:>9.1}{:>9.1}{:>9.1}{:>12.1}",
                job.name,
                front.to_string(),
                outcome.mb_s,
                outcome.p50,
                outcome.p99,
                outcome.cpu,
                outcome.machine_cpu
            );
            let all: Vec<Outcome> = runs.iter().map(|run| run[nth]).collect();
            let front = front.to_string();
            rows.push(json!({ "job": job.name, "front": front, "median": outcome, "runs": all }));
        }
    }
    Ok(Some(json!({ "part": "fuse", "set": name, "pages": pages.len() / PAGE, "rows": rows })))
}

fn one_run(front: &Kind, pages: &[u8], seed: u64) -> anyhow::Result<[Outcome; JOBS.len()]> {
    let folder = tempfile::tempdir()?;
    let count = pages.len() / PAGE;
    let disk = match front {
        Kind::Zram(algorithm) => Disk::Zram(Zram::new(algorithm, pages.len() as u64)?),
        Kind::Own(settings) => Disk::Loop(Loop::new(*settings, pages.len(), folder.path())?),
    };
    let in_order: Vec<u64> = (0..count as u64).collect();
    write(&disk, pages, &in_order, &in_order, &JOBS[2])?;
    let mut random = Random(seed);
    let mut outcomes = [Outcome::default(); JOBS.len()];
    for (job, outcome) in JOBS.iter().zip(&mut outcomes) {
        *outcome = match job.fio {
            Some(kind) => fio(&disk, pages.len(), job, kind, folder.path())?,
            None if job.pages > 1 => write(&disk, pages, &in_order, &in_order, job)?,
            None => {
                let (places, sources) = (random.order(count as u64), random.order(count as u64));
                write(&disk, pages, &places, &sources, job)?
            }
        };
        if job.fio.is_none() && job.pages > 1 {
            compare(&disk, pages)?;
        }
    }
    disk.end()?;
    Ok(outcomes)
}

/// Writes page `sources[i]` to `places[i]`, or as many consecutive pages from there as the job's
/// requests have.
fn write(
    disk: &Disk,
    pages: &[u8],
    places: &[u64],
    sources: &[u64],
    job: &Job,
) -> anyhow::Result<Outcome> {
    let (next, len) = (AtomicUsize::new(0), job.pages * PAGE);
    let path = disk.path();
    let (start, own, others) = (Instant::now(), process_cpu(), Others::now(disk)?);
    let times: anyhow::Result<Vec<f32>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..job.depth)
            .map(|_| {
                scope.spawn(|| -> anyhow::Result<Vec<f32>> {
                    let file = open(&path)?;
                    let mut times = Vec::new();
                    loop {
                        let at = next.fetch_add(job.pages, Ordering::Relaxed);
                        let Some(source) = sources.get(at) else { return Ok(times) };
                        let from = usize::try_from(*source)? * PAGE;
                        timed(&mut times, || {
                            let place = places[at] * PAGE as u64;
                            Ok(file.write_all_at(&pages[from..from + len], place)?)
                        })?;
                    }
                })
            })
            .collect();
        let mut all = Vec::new();
        for thread in threads {
            all.extend(thread.join().expect("its panic ends the process")?);
        }
        Ok(all)
    });
    let (seconds, own) = (start.elapsed().as_secs_f64(), process_cpu() - own);
    let (others, machine) = Others::now(disk)?.since(&others);
    let (p50, p99) = percentiles(&mut times?);
    let count = sources.len() as f64;
    Ok(Outcome {
        mb_s: pages.len() as f64 / 1e6 / seconds,
        p50,
        p99,
        cpu: (own + others) / count,
        machine_cpu: machine / count,
    })
}

fn open(path: &Path) -> anyhow::Result<File> {
    let direct = OFlags::DIRECT.bits().cast_signed();
    let file = OpenOptions::new().read(true).write(true).custom_flags(direct).open(path);
    file.with_context(|| format!("cannot open {}", path.display()))
}

fn compare(disk: &Disk, pages: &[u8]) -> anyhow::Result<()> {
    let file = open(&disk.path())?;
    let mut out = Aligned::new(LARGE * PAGE);
    for (nth, bytes) in pages.chunks_exact(LARGE * PAGE).enumerate() {
        file.read_exact_at(out.all(), (nth * LARGE * PAGE) as u64)?;
        ensure!(out.all() == bytes, "512 KiB number {nth} have another content");
    }
    Ok(())
}

fn fio(disk: &Disk, bytes: usize, job: &Job, kind: &str, folder: &Path) -> anyhow::Result<Outcome> {
    let output = folder.join("fio.json");
    let before = Others::now(disk)?;
    let done = Command::new("fio")
        .args(["--name=bench", "--ioengine=libaio", "--direct=1", "--output-format=json"])
        .args(["--buffer_compress_percentage=60", "--refill_buffers", "--randrepeat=0"])
        // Latency from submission on: zram has completed when the submission returns.
        .args(["--clat_percentiles=0", "--lat_percentiles=1"])
        .arg(format!("--filename={}", disk.path().display()))
        .arg(format!("--rw={kind}"))
        .arg(format!("--bs={}", job.pages * PAGE))
        .arg(format!("--iodepth={}", job.depth))
        .arg(format!("--size={bytes}"))
        .arg("--output")
        .arg(&output)
        .current_dir(folder)
        .stdin(Stdio::null())
        .output()?;
    let said = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "fio on {}: {}: {said}", disk.path().display(), done.status);
    let (others, machine) = Others::now(disk)?.since(&before);
    let text = fs::read_to_string(&output)?;
    let result: Value = serde_json::from_str(&text[text.find('{').context("fio's JSON")?..])?;
    let job = &result["jobs"][0];
    let side = &job[if kind.contains("read") { "read" } else { "write" }];
    let number = |value: &Value| value.as_f64().context("no figure from fio");
    // fio's own count excludes its CPU time before and after the job.
    let own = (number(&job["usr_cpu"])? + number(&job["sys_cpu"])?) / 100.0
        * number(&side["runtime"])?
        * 1e3;
    let count = (bytes / PAGE) as f64;
    let percentile = |name: &str| number(&side["lat_ns"]["percentile"][name]);
    Ok(Outcome {
        mb_s: number(&side["bw_bytes"])? / 1e6,
        p50: percentile("50.000000")? / 1e3,
        p99: percentile("99.000000")? / 1e3,
        cpu: (own + others) / count,
        machine_cpu: machine / count,
    })
}

enum Disk {
    Zram(Zram),
    Loop(Loop),
}

impl Disk {
    fn path(&self) -> PathBuf {
        match self {
            Self::Zram(zram) => zram.disk(),
            Self::Loop(own) => own.disk.clone(),
        }
    }

    fn server(&self) -> Option<u32> {
        match self {
            Self::Zram(_) => None,
            Self::Loop(own) => Some(own.server.id()),
        }
    }

    fn end(self) -> anyhow::Result<()> {
        match self {
            Self::Zram(_) => Ok(()),
            Self::Loop(mut own) => own.end(),
        }
    }
}

/// A server with a file over FUSE, and a loop device on that file.
struct Loop {
    server: Child,
    disk: PathBuf,
    ended: bool,
}

impl Loop {
    fn new(settings: Settings, bytes: usize, folder: &Path) -> anyhow::Result<Self> {
        let file = folder.join("disk");
        let mut command = Command::new(program::platen()?);
        command.args(["device", "serve", "--no-supervisor", "--size", &bytes.to_string()]);
        command.args(["--codec", settings.codec().name()]);
        command.args(["--level", &settings.level().to_string()]);
        command.arg("--fuse").arg(&file).arg("--run-dir").arg(folder.join("run"));
        let log = File::create(folder.join("log"))?;
        let server = command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).spawn()?;
        let mut this = Self { server, disk: PathBuf::new(), ended: false };
        let start = Instant::now();
        while fs::metadata(&file).map_or(0, |file| file.len()) != bytes as u64 {
            if this.server.try_wait()?.is_some() || start.elapsed() > Duration::from_secs(20) {
                bail!("the server does not begin: {}", fs::read_to_string(folder.join("log"))?);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let made = Command::new("losetup")
            .args(["--find", "--show", "--direct-io=on"])
            .arg(&file)
            .output()
            .context("losetup")?;
        ensure!(made.status.success(), "losetup: {}", String::from_utf8_lossy(&made.stderr));
        this.disk = PathBuf::from(String::from_utf8(made.stdout)?.trim());
        Ok(this)
    }

    fn end(&mut self) -> anyhow::Result<()> {
        self.ended = true;
        if !self.disk.as_os_str().is_empty() {
            let done = Command::new("losetup").arg("--detach").arg(&self.disk).output()?;
            ensure!(done.status.success(), "losetup: {}", String::from_utf8_lossy(&done.stderr));
        }
        kill_process(Pid::from_child(&self.server), Signal::TERM)?;
        let status = self.server.wait()?;
        ensure!(status.success(), "the server ended with {status}");
        Ok(())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        if !self.ended {
            if let Err(error) = self.end() {
                eprintln!("platen: {} is left behind: {error:#}", self.disk.display());
            }
        }
    }
}

/// CPU time so far, ns: of the server, of each kernel worker, and of the whole machine.
struct Others {
    server: u64,
    workers: HashMap<u32, u64>,
    machine: f64,
}

impl Others {
    fn now(disk: &Disk) -> anyhow::Result<Self> {
        let mut workers = HashMap::new();
        for entry in fs::read_dir("/proc")?.flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            // Any of them may have ended by now.
            let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            if name.starts_with("kworker/") || name.starts_with("loop") {
                workers.insert(pid, running(&entry.path()));
            }
        }
        let mut server = 0;
        if let Some(pid) = disk.server() {
            for task in fs::read_dir(format!("/proc/{pid}/task"))?.flatten() {
                server += running(&task.path());
            }
        }
        Ok(Self { server, workers, machine: machine()? })
    }

    /// Microseconds used since `before`: by server and workers, and by the machine.
    fn since(&self, before: &Self) -> (f64, f64) {
        let workers = self.workers.iter().map(|(pid, now)| {
            // A worker that was not listed before has started since.
            now.saturating_sub(before.workers.get(pid).copied().unwrap_or(0))
        });
        let used = self.server.saturating_sub(before.server) + workers.sum::<u64>();
        (used as f64 / 1e3, self.machine - before.machine)
    }
}

/// A task's CPU time, ns.
fn running(task: &Path) -> u64 {
    let text = fs::read_to_string(task.join("schedstat")).unwrap_or_default();
    text.split_whitespace().next().and_then(|field| field.parse().ok()).unwrap_or(0)
}

/// Microseconds in which any CPU was not idle, with a resolution of 10 ms.
fn machine() -> anyhow::Result<f64> {
    let text = fs::read_to_string("/proc/stat")?;
    let line = text.lines().next().and_then(|line| line.strip_prefix("cpu "));
    let ticks = line.context("/proc/stat")?.split_whitespace().map(str::parse::<u64>);
    let ticks: Vec<u64> = ticks.collect::<Result<_, _>>()?;
    // User, nice, system, (idle, waiting,) interrupts of both kinds.
    let busy: u64 = [0, 1, 2, 5, 6].into_iter().filter_map(|at| ticks.get(at)).sum();
    Ok(busy as f64 * 1e6 / rustix::param::clock_ticks_per_second() as f64)
}
