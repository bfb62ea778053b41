//! `make proof PART=memory-matrix`: what redis stores in guests of several sizes, with the kernel's
//! zram and with platen, both with the same codec. The exit status is 1 if zram held what platen
//! did not, or if redis was killed on platen and not on zram. Where redis is killed on both, the
//! goal is as many values as with zram. platen's servers take 8 MiB, which zram does not need, so
//! there it is short of the goal on the smallest guests; the exit status is 1 if it is further
//! short than today ([`Case::least`]). A guest that is too slow to be filled with platen has stored
//! what it has stored by then.
//!
//! The cases are a choice in which each pair of values of two properties occurs; `--all` takes
//! every combination. `--only TEXT` takes those whose name has this text. Several programs with
//! `--shard` and the same folder of `--claims` share the cases. Beside them, each size of guest is
//! filled until redis is killed, with zstd and the default policy (groups of idle pages): there the
//! goal is 10 % more than zram.

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use rustix::process::{kill_process, Pid, Signal};
use vm_tests::swap::{missing, number, Guest, Stage};
use vm_tests::{cleanup, end, table, Shard};

const VALUE: u64 = 4000;

/// A guest that makes no progress for so long hangs.
const STILL: Duration = Duration::from_secs(600);

/// CPU time of the guest that filling redis, or reading it, may take, seconds: not wall time,
/// which is the load of the host.
const LIMIT: f64 = 3600.0;

#[derive(Debug, Clone, Copy)]
struct Case {
    memory_mib: u64,
    cpus: u32,
    /// The part of its time that the guest's QEMU may run, per cent.
    share: u32,
    way: &'static str,
    codec: &'static str,
    aim: Aim,
}

/// How much redis is asked to store, and what platen has to store of it.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Aim {
    /// One and a half times the guest's memory: what zram stores.
    Hold,
    /// More than fits: a tenth more than zram.
    Fill,
}

const WAYS: [&str; 2] = ["ublk", "nbd"];
const CODECS: [&str; 2] = ["zstd", "lz4"];
const MEMORY: [u64; 3] = [256, 128, 512];
const CPUS: [u32; 3] = [2, 1, 8];
const SHARES: [u32; 3] = [100, 50, 25];

impl Case {
    fn name(&self) -> String {
        let Self { memory_mib, cpus, share, way, codec, aim } = self;
        let full = if *aim == Aim::Fill { ", filled" } else { "" };
        format!("{memory_mib} MiB, {cpus} CPUs at {share} %, {way}, {codec}{full}")
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
        aim: Aim::Hold,
    };
    (0..9).map(|at| cell(at / 3, at % 3)).collect()
}

fn all() -> Vec<Case> {
    let mut all = Vec::new();
    for memory_mib in MEMORY {
        for cpus in CPUS {
            for share in SHARES {
                for way in WAYS {
                    let aim = Aim::Hold;
                    let case = |codec| Case { memory_mib, cpus, share, way, codec, aim };
                    all.extend(CODECS.map(case));
                }
            }
        }
    }
    all
}

/// A guest of each size, filled.
fn filled() -> Vec<Case> {
    let case = |memory_mib| Case {
        memory_mib,
        cpus: 2,
        share: 100,
        way: "ublk",
        codec: "zstd",
        aim: Aim::Fill,
    };
    MEMORY.map(case).to_vec()
}

fn main() -> ExitCode {
    end("swap_matrix", run_all())
}

fn run_all() -> Result<()> {
    cleanup::install()?;
    if let Some(why) = missing() {
        bail!("no guest can be started: {why}");
    }
    let mut words: Vec<String> = std::env::args().skip(1).collect();
    let shard = take_shard(&mut words)?;
    let (mut cases, only) = match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => (pairs(), ""),
        ["--all"] => (all(), ""),
        ["--only", text] => (all(), text),
        _ => bail!("usage: swap_matrix [--all | --only TEXT] [--shard=NUMBER/COUNT --claims=DIR]"),
    };
    cases.extend(filled());
    cases.retain(|case| case.name().contains(only));
    ensure!(!cases.is_empty(), "no case has {only:?} in its name");
    let stage = Stage::new()?;
    let mut rows = Vec::new();
    let mut lost = 0;
    for at in shard.order(cases.len()) {
        if !shard.claim(at)? {
            continue;
        }
        let case = cases[at];
        println!("{} ...", case.name());
        let zram = run(&stage, case, false).context("with zram")?;
        let platen = run(&stage, case, true).context("with platen")?;
        let verdict = case.verdict(&zram, &platen);
        lost += usize::from(verdict == Verdict::Lost);
        let cell = |run: &Held| format!("{} ({})", run.stored, run.ended.said());
        let row = vec![
            case.name(),
            case.keys().to_string(),
            cell(&zram),
            cell(&platen),
            format!("{:+.1} %", 100.0 * (platen.stored as f64 / zram.stored.max(1) as f64 - 1.0)),
            verdict.said().to_owned(),
        ];
        println!("  {}", row[1..].join("  "));
        rows.push(row);
    }
    print!("{}", table::render(&["guest", "values", "zram", "platen", "stored", ""], &rows));
    ensure!(lost == 0, "in {lost} of {} guests platen did not hold what it must", rows.len());
    Ok(())
}

/// Removes `--shard` and `--claims`, by which several programs share the cases, from the arguments.
fn take_shard(words: &mut Vec<String>) -> Result<Shard> {
    let mut shard = Shard::default();
    for word in std::mem::take(words) {
        match word.split_once('=') {
            Some(("--shard", value)) => shard.set(value)?,
            Some(("--claims", folder)) => shard.share(folder),
            _ => words.push(word),
        }
    }
    Ok(shard)
}

/// The result of redis.
struct Held {
    stored: u64,
    ended: Ended,
}

/// The end of redis, the worst first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Ended {
    KilledWhileRead,
    Killed,
    /// The guest was too slow: this says nothing about what the swap holds.
    Late,
    LateWhileRead,
    AllRead,
}

/// The comparison of two runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Holds,
    /// Redis ended no worse than on zram, and platen stored less than the goal, though no less than
    /// [`Case::least`].
    Short,
    Lost,
}

impl Verdict {
    fn said(self) -> &'static str {
        match self {
            Self::Holds => "holds",
            Self::Short => "SHORT of the goal",
            Self::Lost => "LOST",
        }
    }
}

impl Ended {
    fn said(self) -> &'static str {
        match self {
            Self::KilledWhileRead => "killed while read",
            Self::Killed => "then killed",
            Self::Late => "too slow",
            Self::LateWhileRead => "not all read in time",
            Self::AllRead => "all read",
        }
    }

    /// Whether all values were stored.
    fn filled(self) -> bool {
        matches!(self, Self::LateWhileRead | Self::AllRead)
    }
}

impl Case {
    fn keys(&self) -> u64 {
        let bytes = match self.aim {
            Aim::Hold => self.memory_mib * 3 / 2,
            Aim::Fill => self.memory_mib * 4,
        };
        bytes * (1 << 20) / VALUE
    }

    fn verdict(&self, zram: &Held, platen: &Held) -> Verdict {
        let share = 100 * platen.stored / zram.stored.max(1);
        let goal = if self.aim == Aim::Fill { 110 } else { 100 };
        match platen.ended {
            ended if ended < zram.ended => Verdict::Lost,
            ended if ended.filled() => Verdict::Holds,
            _ if share >= goal => Verdict::Holds,
            _ if share >= self.least() => Verdict::Short,
            _ => Verdict::Lost,
        }
    }

    /// The least that platen stores, in per cent of zram's values, where it does not store all.
    fn least(&self) -> u64 {
        if self.memory_mib < 256 {
            78
        } else {
            92
        }
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
    let ended = match filled {
        End::Killed => Ended::Killed,
        End::Late => Ended::Late,
        End::Done => match client(&mut guest, "redis-check", case)?.0 {
            End::Done => Ended::AllRead,
            End::Late => Ended::LateWhileRead,
            End::Killed => Ended::KilledWhileRead,
        },
    };
    Ok(Held { stored, ended })
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
    let begun = guest.cpu()?;
    let mut last = (0, Instant::now());
    loop {
        let log = guest.log("client")?;
        ensure!(!log.contains("WRONG"), "{}: {log}", case.name());
        let handled = log.lines().rev().find_map(|line| {
            ["keys=", "stored=", "read="].iter().find_map(|key| number(line, key))
        });
        let handled = handled.unwrap_or(0);
        if log.contains("status ") {
            let end = if log.contains("ok keys=") { End::Done } else { End::Killed };
            return Ok((end, handled));
        }
        if handled != last.0 {
            last = (handled, Instant::now());
        }
        ensure!(last.1.elapsed() < STILL, "{}: no progress in {STILL:?}: {log}", case.name());
        if guest.cpu()? - begun > LIMIT {
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
    fn platen_holds_what_zram_holds() {
        let case = |aim| Case { aim, ..pairs()[0] };
        let held = |stored, ended| Held { stored, ended };
        let is = |aim, zram, platen| case(aim).verdict(&zram, &platen);
        let late = || held(90, Ended::Late);
        let (killed, all) = (|values| held(values, Ended::Killed), || held(100, Ended::AllRead));
        assert_eq!(is(Aim::Hold, late(), killed(95)), Verdict::Lost, "killed where zram lives");
        assert_eq!(is(Aim::Hold, all(), late()), Verdict::Lost);
        assert_eq!(is(Aim::Hold, all(), held(100, Ended::KilledWhileRead)), Verdict::Lost);
        assert_eq!(is(Aim::Hold, all(), all()), Verdict::Holds);
        assert_eq!(is(Aim::Hold, all(), held(100, Ended::LateWhileRead)), Verdict::Lost);
        assert_eq!(is(Aim::Hold, killed(100), held(100, Ended::LateWhileRead)), Verdict::Holds);
        assert_eq!(is(Aim::Hold, killed(100), killed(100)), Verdict::Holds);
        assert_eq!(is(Aim::Hold, killed(100), killed(99)), Verdict::Short);
        assert_eq!(is(Aim::Hold, killed(100), killed(91)), Verdict::Lost);
        let killed_later = || held(100, Ended::KilledWhileRead);
        assert_eq!(is(Aim::Hold, killed(80), killed_later()), Verdict::Lost);
        assert_eq!(is(Aim::Fill, killed(100), killed(109)), Verdict::Short);
        assert_eq!(is(Aim::Fill, killed(100), killed(110)), Verdict::Holds);
        assert_eq!(is(Aim::Fill, killed(100), all()), Verdict::Holds);
    }

    /// Regression: a guest that was too slow with platen held, however little it had stored, where
    /// redis was killed on zram, or zram's guest was too slow as well.
    #[test]
    fn a_guest_that_is_too_slow_has_stored_what_it_has_stored() {
        let case = pairs()[0];
        let late = |stored| Held { stored, ended: Ended::Late };
        let killed = |stored| Held { stored, ended: Ended::Killed };
        assert_eq!(case.verdict(&killed(100_000), &late(10)), Verdict::Lost);
        assert_eq!(case.verdict(&late(90), &late(10)), Verdict::Lost);
        assert_eq!(case.verdict(&late(100), &late(95)), Verdict::Short);
        assert_eq!(case.verdict(&killed(100), &late(100)), Verdict::Holds);
    }

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
