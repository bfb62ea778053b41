//! `make proof PART=memory-matrix`: what redis stores in guests of several sizes, with the kernel's
//! zram and with platen, both with the same codec. The exit status is 1 if zram held what platen
//! did not.
//!
//! The cases are a choice in which each pair of values of two properties occurs; `--all` takes
//! every combination. `--only TEXT` takes those whose name has this text.

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use rustix::process::{kill_process, Pid, Signal};
use vm_tests::swap::{missing, number, Guest, Stage};
use vm_tests::{cleanup, end, table};

const VALUE: u64 = 4000;

/// A guest that makes no progress for so long hangs.
const STILL: Duration = Duration::from_secs(600);

/// How long redis may be filled, or read, by a host CPU that is not limited.
const LIMIT: Duration = Duration::from_secs(900);

#[derive(Debug, Clone, Copy)]
struct Case {
    memory_mib: u64,
    cpus: u32,
    /// The part of its time that the guest's QEMU may run, per cent.
    share: u32,
    way: &'static str,
    codec: &'static str,
}

const WAYS: [&str; 2] = ["ublk", "nbd"];
const CODECS: [&str; 2] = ["zstd", "lz4"];
const MEMORY: [u64; 3] = [256, 128, 512];
const CPUS: [u32; 3] = [2, 1, 8];
const SHARES: [u32; 3] = [100, 50, 25];

impl Case {
    fn name(&self) -> String {
        let Self { memory_mib, cpus, share, way, codec } = self;
        format!("{memory_mib} MiB, {cpus} CPUs at {share} %, {way}, {codec}")
    }
}

/// Each pair of values occurs: a Latin square, and in each cell a way and a codec so chosen.
fn pairs() -> Vec<Case> {
    let ways = [[0, 0, 1], [1, 0, 0], [0, 1, 0]];
    let codecs = [[0, 1, 0], [0, 0, 1], [1, 1, 0]];
    let cell = |row: usize, column: usize| Case {
        memory_mib: MEMORY[row],
        cpus: CPUS[column],
        share: SHARES[(row + column) % 3],
        way: WAYS[ways[row][column]],
        codec: CODECS[codecs[row][column]],
    };
    (0..9).map(|at| cell(at / 3, at % 3)).collect()
}

fn all() -> Vec<Case> {
    let mut all = Vec::new();
    for memory_mib in MEMORY {
        for cpus in CPUS {
            for share in SHARES {
                for way in WAYS {
                    all.extend(CODECS.map(|codec| Case { memory_mib, cpus, share, way, codec }));
                }
            }
        }
    }
    all
}

fn main() -> ExitCode {
    end("swap_matrix", run_all())
}

fn run_all() -> Result<()> {
    cleanup::install()?;
    if let Some(why) = missing() {
        bail!("no guest can be started: {why}");
    }
    let words: Vec<String> = std::env::args().skip(1).collect();
    let (mut cases, only) = match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => (pairs(), ""),
        ["--all"] => (all(), ""),
        ["--only", text] => (all(), text),
        _ => bail!("usage: swap_matrix [--all | --only TEXT]"),
    };
    cases.retain(|case| case.name().contains(only));
    ensure!(!cases.is_empty(), "no case has {only:?} in its name");
    let stage = Stage::new()?;
    let mut rows = Vec::new();
    let mut lost = 0;
    for case in cases {
        println!("{} ...", case.name());
        let zram = run(&stage, case, false).context("with zram")?;
        let platen = run(&stage, case, true).context("with platen")?;
        let holds = platen.kept >= zram.kept;
        lost += usize::from(!holds);
        let cell = |run: &Held| format!("{} ({})", run.stored, run.ended);
        let row = vec![
            case.name(),
            case.keys().to_string(),
            cell(&zram),
            cell(&platen),
            if holds { "holds" } else { "LOST" }.to_owned(),
        ];
        println!("  {}", row[1..].join("  "));
        rows.push(row);
    }
    print!("{}", table::render(&["guest", "values", "zram", "platen", ""], &rows));
    ensure!(lost == 0, "in {lost} of {} guests zram held what platen did not", rows.len());
    Ok(())
}

/// The result of redis.
struct Held {
    stored: u64,
    /// Values that could be read back.
    kept: u64,
    ended: &'static str,
}

impl Case {
    /// One and a half times the memory.
    fn keys(&self) -> u64 {
        self.memory_mib * 3 / 2 * (1 << 20) / VALUE
    }

    fn limit(&self) -> Duration {
        LIMIT * 100 / self.share
    }
}

fn run(stage: &Stage, case: Case, platen: bool) -> Result<Held> {
    let mut guest = stage.boot_with_cpus("matrix", case.memory_mib, case.cpus)?;
    let size = case.memory_mib * 2;
    let way = if case.way == "nbd" { "--nbd unix:/run/platen.nbd" } else { "--ublk" };
    if platen {
        let serve = format!("--size {size}M --codec {} {way} --swap", case.codec);
        guest.serve(&serve, "page-cluster")?;
    } else {
        guest.zram(case.codec, size)?;
    }
    guest.redis()?;
    let _share = Share::limit(guest.vm.process().id(), case.share);
    let (filled, stored) = client(&mut guest, "redis-fill", case)?;
    let held = |kept, ended| Held { stored, kept, ended };
    match filled {
        End::Done => {}
        End::Late => return Ok(held(0, "too slow")),
        End::Killed => return Ok(held(stored, "then killed")),
    }
    Ok(match client(&mut guest, "redis-check", case)?.0 {
        End::Done => held(stored, "all read"),
        End::Late => held(0, "not all read in time"),
        End::Killed => held(0, "killed while read"),
    })
}

enum End {
    Done,
    Killed,
    Late,
}

/// Runs the client until it ends; returns how, and the number of values that it handled.
fn client(guest: &mut Guest, role: &str, case: Case) -> Result<(End, u64)> {
    let keys = case.keys();
    let command = format!("guest swap {role} /tmp/redis.sock keys={keys} size={VALUE}");
    guest.background("client", &command)?;
    let deadline = Instant::now() + case.limit();
    let mut last = (0, Instant::now());
    loop {
        let log = guest.log("client")?;
        ensure!(!log.contains("WRONG"), "{}: {log}", case.name());
        let handled = log
            .lines()
            .rev()
            .find_map(|line| number(line, "keys=").or_else(|| number(line, "stored=")));
        let handled = handled.unwrap_or(0);
        if log.contains("status ") {
            let end = if log.contains("ok keys=") { End::Done } else { End::Killed };
            return Ok((end, handled));
        }
        if handled != last.0 {
            last = (handled, Instant::now());
        }
        // Only the filling reports its progress.
        let is_still = role == "redis-fill" && last.1.elapsed() >= STILL;
        ensure!(!is_still, "{}: no progress in {STILL:?}: {log}", case.name());
        if Instant::now() > deadline {
            return Ok((End::Late, handled));
        }
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// Stops and continues a process so that it runs for a share of the time.
struct Share {
    end: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Share {
    fn limit(pid: u32, share: u32) -> Self {
        let end = Arc::new(AtomicBool::new(false));
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let thread = pid.filter(|_| share < 100).map(|pid| {
            let end = Arc::clone(&end);
            std::thread::spawn(move || {
                while !end.load(Relaxed) {
                    // It may have ended.
                    let _ = kill_process(pid, Signal::STOP);
                    std::thread::sleep(Duration::from_millis(u64::from(100 - share)));
                    let _ = kill_process(pid, Signal::CONT);
                    std::thread::sleep(Duration::from_millis(share.into()));
                }
            })
        });
        Self { end, thread }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.end.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            // It panics nowhere.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pair_of_values_occurs() {
        let properties = |case: &Case| {
            [
                case.memory_mib.to_string(),
                case.cpus.to_string(),
                case.share.to_string() + " %",
                case.way.into(),
                case.codec.into(),
            ]
        };
        let chosen: Vec<[String; 5]> = pairs().iter().map(properties).collect();
        for case in all().iter().map(properties) {
            for (one, other) in (0..5).flat_map(|one| (one + 1..5).map(move |other| (one, other))) {
                assert!(
                    chosen.iter().any(|it| it[one] == case[one] && it[other] == case[other]),
                    "{} with {}",
                    case[one],
                    case[other]
                );
            }
        }
    }
}
