//! Child processes: started in a namespace, logged to a file, accounted for, and never left
//! running.

use std::fs::File;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use rustix::process::{kill_process, kill_process_group, Pid};

use crate::cleanup::{register, Leftover, Ticket};

pub use rustix::process::Signal;

/// A running child process, killed with its whole group when dropped.
#[derive(Debug)]
pub struct Proc {
    name: String,
    child: Child,
    pid: Pid,
    log: PathBuf,
    ended: Option<Ended>,
    ticket: Option<Ticket>,
}

/// How a process ended, and its total cost.
#[derive(Debug, Clone, Copy)]
pub struct Ended {
    /// Its exit status.
    pub status: ExitStatus,
    /// User and system seconds of all its threads, to 10 ms.
    pub cpu: f64,
}

impl Proc {
    /// Starts `argv` after `prefix` (the command that enters a namespace; may be empty), with its
    /// output in a file of `folder` named after `name`.
    ///
    /// # Errors
    /// When the program cannot be started.
    pub fn spawn(name: &str, prefix: &[String], argv: &[String], folder: &Path) -> Result<Self> {
        let log = folder.join(format!("{name}.log"));
        let out = File::create(&log).with_context(|| format!("cannot create {}", log.display()))?;
        // The kernel kills the child if the harness is killed. setpriv and ip both exec, so that
        // the process id, and with it all accounting, is the program's own.
        let mut words: Vec<&str> = prefix.iter().map(String::as_str).collect();
        words.extend(["setpriv", "--pdeathsig", "KILL", "--"]);
        words.extend(argv.iter().map(String::as_str));
        let child = Command::new(words[0])
            .args(&words[1..])
            .stdin(Stdio::null())
            .stdout(out.try_clone()?)
            .stderr(out)
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {name} ({})", words.join(" ")))?;
        let raw = i32::try_from(child.id()).context("process id")?;
        let pid = Pid::from_raw(raw).context("process id 0")?;
        let ticket = Some(register(Leftover::Group(pid)));
        Ok(Self { name: name.into(), child, pid, log, ended: None, ticket })
    }

    /// The name under which it was started.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Its output so far.
    pub fn output(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// The last lines of its output, for error messages.
    pub fn tail(&self) -> String {
        let output = self.output();
        let lines: Vec<&str> = output.lines().collect();
        let from = lines.len().saturating_sub(8);
        format!("{} said: {}", self.name, lines[from..].join(" | "))
    }

    /// Waits until it has written `text`.
    ///
    /// # Errors
    /// When it ends first or does not within `limit`.
    pub fn wait_for_output(&mut self, text: &str, limit: Duration) -> Result<()> {
        let deadline = Instant::now() + limit;
        while !self.output().contains(text) {
            if let Some(ended) = self.poll()? {
                bail!("{} ended with {} before {text:?}; {}", self.name, ended.status, self.tail());
            }
            if Instant::now() > deadline {
                bail!("{} did not say {text:?} within {limit:?}; {}", self.name, self.tail());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// How it ended, if it has.
    ///
    /// # Errors
    /// When the kernel will not say.
    pub fn poll(&mut self) -> Result<Option<Ended>> {
        if self.ended.is_none() {
            // Waiting adds the child's CPU time to this process's total of ended children. The
            // difference is the child's, because only one thread of the harness waits here.
            let before = ended_children_cpu()?;
            if let Some(status) = self.child.try_wait()? {
                let cpu = ended_children_cpu()? - before;
                self.ended = Some(Ended { status, cpu });
                self.ticket = None;
            }
        }
        Ok(self.ended)
    }

    /// Waits up to this long for its end; returns whether it came.
    ///
    /// # Errors
    /// When the kernel will not say.
    pub fn ends_within(&mut self, limit: Duration) -> Result<bool> {
        let deadline = Instant::now() + limit;
        while self.poll()?.is_none() {
            if Instant::now() > deadline {
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(true)
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// When it is still there after `limit`.
    pub fn wait(&mut self, limit: Duration) -> Result<Ended> {
        self.ends_within(limit)?;
        match self.ended {
            Some(ended) => Ok(ended),
            None => bail!("{} is still running after {limit:?}; {}", self.name, self.tail()),
        }
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// When it has ended.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        if let Some(ended) = self.ended {
            bail!("{} has ended with {}", self.name, ended.status);
        }
        kill_process(self.pid, signal).with_context(|| format!("cannot signal {}", self.name))
    }

    /// Kills it and waits.
    ///
    /// # Errors
    /// When it does not go.
    pub fn kill(&mut self) -> Result<Ended> {
        if self.poll()?.is_none() {
            // The group: with all processes that it may have started.
            let _ = kill_process_group(self.pid, Signal::KILL);
        }
        self.wait(Duration::from_secs(300))
    }

    /// User and system seconds so far, with those of its children that have ended.
    ///
    /// # Errors
    /// When it has ended.
    pub fn cpu_with_children(&self) -> Result<f64> {
        let stat = PathBuf::from(format!("/proc/{}/stat", self.child.id()));
        Ok(stat_fields(&stat, 13)? + stat_fields(&stat, 15)?)
    }

    /// User and system seconds so far, without the threads that run the guest's CPUs.
    ///
    /// # Errors
    /// When it has ended.
    pub fn host_cpu(&self) -> Result<f64> {
        let root = PathBuf::from(format!("/proc/{}", self.child.id()));
        let mut cpu = stat_cpu(&root.join("stat"))?;
        for task in std::fs::read_dir(root.join("task")).context(self.name.clone())? {
            let task = task?.path();
            // A thread may end between the listing and the read; a vCPU's does not.
            let Ok(name) = std::fs::read_to_string(task.join("comm")) else { continue };
            if name.starts_with("CPU ") {
                cpu -= stat_cpu(&task.join("stat"))?;
            }
        }
        Ok(cpu)
    }
}

impl Ended {
    /// The signal that ended it, if one did.
    pub fn killed_by(&self) -> Option<i32> {
        self.status.signal()
    }
}

impl Drop for Proc {
    fn drop(&mut self) {
        if let Err(error) = self.kill() {
            eprintln!("cannot stop {}: {error}", self.name);
        }
    }
}

/// utime and stime of a /proc stat file, in seconds.
fn stat_cpu(path: &Path) -> Result<f64> {
    stat_fields(path, 13)
}

/// cutime and cstime of this process: the CPU time of children that were waited for.
fn ended_children_cpu() -> Result<f64> {
    stat_fields(Path::new("/proc/self/stat"), 15)
}

/// The sum of two neighbouring clock-tick fields, counted from 0 as in proc(5) minus 1, in seconds.
fn stat_fields(path: &Path, first: usize) -> Result<f64> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    // The command's name, field 1, may contain blanks and brackets; field 2 follows the last
    // bracket.
    let rest = text.rsplit_once(')').context("no ) in stat")?.1;
    let mut fields = rest.split_whitespace().skip(first - 2);
    let mut ticks = 0u32;
    for _ in 0..2 {
        ticks += fields.next().context("stat is too short")?.parse::<u32>()?;
    }
    // The kernel reports in USER_HZ, which is 100 on every Linux architecture that QEMU/TCG runs
    // this guest on.
    Ok(f64::from(ticks) / 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_time_of_an_ended_child_is_its_own() {
        let (folder, _ticket) = crate::scratch::folder().expect("a folder");
        let spin =
            ["sh", "-c", "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done"].map(String::from);
        let mut proc = Proc::spawn("spin", &[], &spin, &folder).expect("sh starts");
        let ended = proc.wait(Duration::from_secs(600)).expect("it ends");
        assert!(ended.status.success() && ended.cpu > 0.02 && ended.cpu < 30.0, "{ended:?}");
        assert!(folder.join("spin.log").exists());
        std::fs::remove_dir_all(folder).expect("the folder");
    }
}
