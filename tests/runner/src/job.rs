//! Jobs: processes with a log, which are ended if they hang; and tracks of jobs.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::{waitid, Pid, WaitId, WaitIdOptions};

use crate::outcome::{self, Format, Outcome};

/// A job hangs if it prints nothing for so long. A whole job has no limit: the whole-VM scenarios
/// together take more than an hour on a busy machine with two cores. The longest of them takes a
/// quarter of this there.
const SILENCE: Duration = Duration::from_secs(3600);

/// One process.
#[derive(Debug)]
pub(crate) struct Job {
    /// Its part.
    pub(crate) part: &'static str,
    /// Its name, unique within its part; the two names name its log.
    pub(crate) name: String,
    /// The format of its output.
    pub(crate) format: Format,
    command: Command,
}

impl Job {
    /// A job that runs `program` with `arguments` in the repository's root.
    pub(crate) fn new(
        part: &'static str,
        name: impl Into<String>,
        format: Format,
        program: impl AsRef<std::ffi::OsStr>,
        arguments: &[&str],
    ) -> Self {
        // The kernel ends the job if the runner is killed; the job then removes what it has
        // started. setpriv execs, so that the process id is the program's own.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "TERM", "--"]).arg(program).args(arguments);
        command.stdin(Stdio::null());
        Self { part, name: name.into(), format, command }
    }

    /// Sets a variable of its environment.
    pub(crate) fn env(mut self, name: &str, value: impl AsRef<std::ffi::OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// Sets its working folder.
    pub(crate) fn folder(mut self, folder: impl Into<PathBuf>) -> Self {
        self.command.current_dir(folder.into());
        self
    }

    /// Lets other processes go first.
    pub(crate) fn nice(mut self) -> Self {
        let it = std::mem::replace(&mut self.command, Command::new("nice"));
        let command = self.command.args(["-n", "5"]).arg(it.get_program()).args(it.get_args());
        command.stdin(Stdio::null());
        for (name, value) in it.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        if let Some(folder) = it.get_current_dir() {
            command.current_dir(folder);
        }
        self
    }

    /// Runs the job to its end.
    ///
    /// # Errors
    /// If its log cannot be made. A program that cannot be started is a failed job.
    pub(crate) fn run(self) -> Result<Done> {
        self.run_in(&log_folder())
    }

    /// As [`run`](Self::run), with its log in this folder.
    pub(crate) fn run_in(mut self, logs: &Path) -> Result<Done> {
        // A crate and a part may have the same name.
        let name = format!("{} {}.log", self.part, self.name).replace(['/', ' '], "-");
        let log = logs.join(name);
        let file = File::create(&log).with_context(|| log.display().to_string())?;
        self.command.stdout(file.try_clone()?).stderr(file);
        let begin = Instant::now();
        let (error, cpu) = match self.command.spawn() {
            Ok(child) => wait(child, &log),
            Err(error) => {
                (Some(format!("{:?} cannot be started: {error}", self.command.get_program())), 0.0)
            }
        };
        let output = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
        let outcome = outcome::read(&self, error, &output);
        let took = begin.elapsed();
        Ok(Done { part: self.part, name: self.name, took, cpu, outcome, output, log })
    }
}

/// A job that has ended.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) part: &'static str,
    pub(crate) name: String,
    pub(crate) took: Duration,
    /// CPU seconds of its process and of the descendants that were waited for.
    pub(crate) cpu: f64,
    pub(crate) outcome: Outcome,
    /// Its complete output.
    pub(crate) output: String,
    pub(crate) log: PathBuf,
}

/// Waits for the end of a process that writes to `log`; returns the reason if it is a failure, and
/// the CPU seconds.
fn wait(mut child: Child, log: &Path) -> (Option<String>, f64) {
    let (mut printed, mut since) = (0, Instant::now());
    let pid = Pid::from_child(&child);
    // The process stays as a zombie, whose times can be read.
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    while let Ok(None) = waitid(WaitId::Pid(pid), options) {
        let len = fs::metadata(log).map_or(0, |log| log.len());
        if len != printed {
            (printed, since) = (len, Instant::now());
        } else if since.elapsed() > SILENCE {
            let _ = child.kill();
            let _ = child.wait();
            return (Some(format!("killed: it printed nothing for {} s", SILENCE.as_secs())), 0.0);
        }
        thread::sleep(Duration::from_millis(20));
    }
    let cpu = cpu_seconds(child.id()).unwrap_or(0.0);
    match child.wait() {
        Ok(status) => ((!status.success()).then(|| status.to_string()), cpu),
        Err(error) => (Some(error.to_string()), cpu),
    }
}

/// CPU seconds of a process and of its children that were waited for (`proc_pid_stat(5)`).
fn cpu_seconds(pid: u32) -> Option<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may hold anything. utime, stime, cutime and cstime are fields 14 to
    // 17.
    let (_, fields) = stat.rsplit_once(')')?;
    let times = fields.split_whitespace().skip(11).take(4);
    let ticks: f64 = times.filter_map(|ticks| ticks.parse::<f64>().ok()).sum();
    // Ticks of USER_HZ, which is 100 on every architecture that Rust runs on but alpha and ia64.
    Some(ticks / 100.0)
}

/// The folder of the logs.
pub(crate) fn log_folder() -> PathBuf {
    PathBuf::from("target/test-logs")
}

/// Jobs that run in their order, this many at a time.
#[derive(Debug)]
pub(crate) struct Track {
    pub(crate) jobs: Vec<Job>,
    pub(crate) at_once: usize,
}

impl From<Vec<Job>> for Track {
    /// One job after the other.
    fn from(jobs: Vec<Job>) -> Self {
        Self { jobs, at_once: 1 }
    }
}

/// Runs tracks in parallel. `say` is called at each job's end.
///
/// # Errors
/// If logs cannot be written.
pub(crate) fn run_tracks(tracks: Vec<Track>, say: impl Fn(&Done) + Sync) -> Result<Vec<Done>> {
    fs::create_dir_all(log_folder()).context("target/test-logs")?;
    let all = Mutex::new(Vec::new());
    let run = |waiting: &Mutex<std::vec::IntoIter<Job>>| -> Result<()> {
        loop {
            let Some(job) = lock(waiting).next() else { return Ok(()) };
            let done = job.run()?;
            // One lock for both, so that lines of two jobs do not mix.
            let mut all = lock(&all);
            say(&done);
            all.push(done);
        }
    };
    let tracks: Vec<_> =
        tracks.into_iter().map(|t| (Mutex::new(t.jobs.into_iter()), t.at_once)).collect();
    thread::scope(|scope| -> Result<()> {
        let mut threads = Vec::new();
        for (waiting, at_once) in &tracks {
            threads.extend((0..*at_once).map(|_| scope.spawn(|| run(waiting))));
        }
        for thread in threads {
            thread.join().map_err(|_| anyhow::anyhow!("a track has panicked"))??;
        }
        Ok(())
    })?;
    Ok(all.into_inner().unwrap_or_else(PoisonError::into_inner))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
