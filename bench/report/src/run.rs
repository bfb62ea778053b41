//! Runs the steps, one after the other, and writes the page after each.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::{kill_process_group, test_kill_process_group, Pid, Signal};

use crate::data::Data;
use crate::load::Watcher;
use crate::plan::Step;
use crate::record::{self, Record, State, StepRecord};

/// How long a program that was told to end may take for it: it removes what it has set up.
const TO_END: Duration = Duration::from_secs(60);

/// Where things are.
#[derive(Clone, Debug)]
pub struct Places {
    /// The folder of the page; its folder `data` has the samples. A run begins by removing the JSON
    /// files in `data`.
    pub out: PathBuf,
    /// The folder of the benchmarks.
    pub programs: PathBuf,
    /// The folder of builds and fetched parts.
    pub target: PathBuf,
}

/// Makes the page from the files of `from` and writes it to `out`/index.html, whole or not at all.
///
/// # Errors
/// A folder that cannot be read or written.
pub fn write_page(from: &Path, out: &Path) -> Result<()> {
    let page = crate::page(&Data::load(from)?);
    write_whole(&out.join("index.html"), page.as_bytes())
}

/// Writes a file so that a reader sees either the old or the new one.
fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let writing = || -> Result<()> {
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        file.write_all(bytes)?;
        // Private by default; a report is to be read.
        let readable = std::os::unix::fs::PermissionsExt::from_mode(0o644);
        file.as_file().set_permissions(readable)?;
        file.persist(path)?;
        Ok(())
    };
    writing().with_context(|| format!("cannot write {}", path.display()))
}

/// Runs `steps`, of which all must have ended after `budget` seconds. `record` has what is known of
/// the machine; the steps are added to it. Stops early, with a page, once `stop` is set.
///
/// # Errors
/// A folder that cannot be written; steps that fail are in the record.
pub fn all(
    places: &Places,
    steps: &[Step],
    budget: u64,
    mut record: Record,
    stop: &AtomicBool,
) -> Result<Record> {
    let samples = places.out.join("data");
    fs::create_dir_all(&samples).with_context(|| format!("cannot create {}", samples.display()))?;
    clear(&samples)?;
    let begin = Instant::now();
    let mut pace = Pace::default();
    for (nth, step) in steps.iter().enumerate() {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let left = budget.saturating_sub(begin.elapsed().as_secs());
        println!(
            "[{} of {}] {}: about {}; {} left",
            nth + 1,
            steps.len(),
            step.title,
            minutes(pace.expected(step.expected)),
            minutes(pace.expected(steps[nth..].iter().map(|step| step.expected).sum()).min(left))
        );
        let done = one(places, &samples, step, left, stop);
        pace.add(step.expected, &done);
        match done.state {
            State::Done => println!("    done in {}", minutes(whole(done.seconds))),
            _ => println!("    {}", done.why),
        }
        record.steps.push(done);
        record.interrupted = stop.load(Ordering::Relaxed);
        record.complete = nth + 1 == steps.len() && !record.interrupted;
        save(places, &samples, &record)?;
    }
    record.interrupted = stop.load(Ordering::Relaxed);
    save(places, &samples, &record)?;
    Ok(record)
}

/// Removes what an earlier run left, also of steps that this run has not: its samples are of
/// another machine or commit, and the page would show them as this run's.
fn clear(samples: &Path) -> Result<()> {
    let listed = fs::read_dir(samples)
        .with_context(|| format!("cannot read the folder {}", samples.display()))?;
    for entry in listed {
        let path = entry.with_context(|| format!("cannot read {}", samples.display()))?.path();
        let kind = path.extension();
        // A killed run leaves the file that its program was writing.
        if kind.is_some_and(|kind| kind == "json" || kind == "part") {
            fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
    }
    Ok(())
}

fn save(places: &Places, samples: &Path, record: &Record) -> Result<()> {
    let text = serde_json::to_string_pretty(record)? + "\n";
    write_whole(&samples.join(record::FILE), text.as_bytes())?;
    write_page(samples, &places.out)
}

/// How much slower than expected this machine is.
#[derive(Default)]
struct Pace {
    expected: f64,
    taken: f64,
}

impl Pace {
    fn add(&mut self, expected: u64, done: &StepRecord) {
        if done.state == State::Done {
            self.expected += expected as f64;
            self.taken += done.seconds;
        }
    }

    fn expected(&self, seconds: u64) -> u64 {
        if self.expected == 0.0 {
            return seconds;
        }
        whole(seconds as f64 * (self.taken / self.expected).clamp(0.25, 8.0))
    }
}

/// Whole seconds; a run has less than a day of them.
fn whole(seconds: f64) -> u64 {
    Duration::try_from_secs_f64(seconds).map_or(0, |duration| duration.as_secs())
}

fn minutes(seconds: u64) -> String {
    match seconds {
        0..=99 => format!("{seconds} s"),
        _ => format!("{} min", seconds.div_ceil(60)),
    }
}

/// Runs one step, of at most `left` seconds.
fn one(places: &Places, samples: &Path, step: &Step, left: u64, stop: &AtomicBool) -> StepRecord {
    let through = step.through.map(|script| format!("scripts/{script}"));
    let words = through.iter().map(String::as_str).chain([step.program]);
    let words = words.chain(step.arguments.iter().map(String::as_str));
    let command = words.collect::<Vec<_>>().join(" ");
    let (name, title) = (step.name.to_owned(), step.title.to_owned());
    let mut done = StepRecord { name, title, command, ..StepRecord::default() };
    let program = places.programs.join(step.program);
    let through = step.through.map(|script| places.target.join("../scripts").join(script));
    let missing = step.needs.iter().find_map(|need| need.missing(&places.target));
    if let Some(why) = missing {
        done.why = why;
        return done;
    }
    if !program.is_file() {
        done.why = format!("the program {} is not built (make report does it)", step.program);
        return done;
    }
    if left < step.expected / 2 {
        done.why =
            format!("it takes {} s, and {left} s were left of the run's time", step.expected);
        return done;
    }
    // Its own name until it is complete: an interrupted program leaves no half file.
    let part = samples.join(format!("{}.part", step.name));
    let kept = samples.join(format!("{}.json", step.name));
    let log = places.out.join(format!("{}.log", step.name));
    let watcher = Watcher::start();
    let begin = Instant::now();
    let ended = start(through.as_deref(), &program, step, &part, &log)
        .and_then(|child| wait(child, Duration::from_secs(left), stop));
    done.seconds = (begin.elapsed().as_secs_f64() * 10.0).round() / 10.0;
    for second in watcher.stop() {
        done.others.push(second.others);
        done.stolen.push(second.stolen);
    }
    (done.state, done.why) = match ended {
        Ok(Ended::Exit(status)) if status.success() => match fs::rename(&part, &kept) {
            Ok(()) => (State::Done, String::new()),
            Err(error) => (State::Failed, format!("it wrote no figures: {error}")),
        },
        Ok(Ended::Exit(status)) => {
            let why = format!("{status}: {}", last_line(&log));
            (State::Failed, why + &keep(&part, &kept))
        }
        Ok(Ended::Late) => (
            State::Failed,
            format!("it did not end in the {left} s that were left of the run's time"),
        ),
        Ok(Ended::Stopped) => (State::Interrupted, "interrupted".to_owned()),
        Err(error) => (State::Failed, format!("{error:#}")),
    };
    // It may not exist.
    let _ = fs::remove_file(&part);
    done
}

/// Keeps the figures that a program wrote before it failed, if they are whole; says so.
fn keep(part: &Path, kept: &Path) -> String {
    let bytes = fs::read(part).unwrap_or_default();
    let is_whole = serde_json::from_slice::<serde::de::IgnoredAny>(&bytes).is_ok();
    match is_whole && fs::rename(part, kept).is_ok() {
        true => "; its figures are those that it wrote before".to_owned(),
        false => String::new(),
    }
}

fn start(
    through: Option<&Path>,
    program: &Path,
    step: &Step,
    json: &Path,
    log: &Path,
) -> Result<Child> {
    let out = File::create(log).with_context(|| format!("cannot create {}", log.display()))?;
    // A group of its own, so that Ctrl-C reaches it through this process only, which then waits.
    Command::new(through.unwrap_or(program))
        .args(through.map(|_| program))
        .args(&step.arguments)
        .arg("--json")
        .arg(json)
        .stdin(Stdio::null())
        .stdout(out.try_clone()?)
        .stderr(out)
        .process_group(0)
        .spawn()
        .with_context(|| format!("cannot start {}", program.display()))
}

enum Ended {
    Exit(ExitStatus),
    /// It was ended after its time.
    Late,
    /// It was ended by the user's wish.
    Stopped,
}

fn wait(mut child: Child, limit: Duration, stop: &AtomicBool) -> Result<Ended> {
    let begin = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Ended::Exit(status));
        }
        let is_stopped = stop.load(Ordering::Relaxed);
        if is_stopped || begin.elapsed() > limit {
            end(&mut child)?;
            return Ok(if is_stopped { Ended::Stopped } else { Ended::Late });
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Tells the program and its children to end, and ends those that do not.
fn end(child: &mut Child) -> Result<()> {
    let group = Pid::from_child(child);
    // An error means that it is gone already.
    let _ = kill_process_group(group, Signal::TERM);
    let begin = Instant::now();
    // A child of the program may outlive it, with something of its own to remove.
    while begin.elapsed() < TO_END {
        let ended = child.try_wait()?.is_some();
        if ended && test_kill_process_group(group).is_err() {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let _ = kill_process_group(group, Signal::KILL);
    child.wait()?;
    Ok(())
}

/// The last line that a program wrote; of a large log, of its end.
fn last_line(log: &Path) -> String {
    const END: u64 = 4096;
    let read = || -> std::io::Result<String> {
        let mut file = File::open(log)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(END)))?;
        let mut bytes = Vec::new();
        file.take(END).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    let text = read().unwrap_or_default();
    let line = text.lines().rev().find(|line| !line.trim().is_empty());
    crate::data::short(line.unwrap_or("it said nothing"))
}
