//! The guest's console: one command a line, one answer a line. The commands are documented in the
//! guest.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};

use crate::monitor::{connect, would_block};

/// A connection to the guest's init.
#[derive(Debug)]
pub struct Console {
    name: String,
    reader: BufReader<UnixStream>,
    line: Vec<u8>,
    /// Lines that were no answers: kernel messages, a panic's message.
    noise: String,
}

/// The result of the guest's check of its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verified {
    /// Pages compared.
    pub pages: u64,
    /// Whole-page rewrites since the memory was filled.
    pub whole: u64,
    /// Small updates since then.
    pub small: u64,
    /// Virtual CPUs that compared at the same time.
    pub cpus: u64,
}

/// The time limit of a short command.
const PATIENCE: Duration = Duration::from_secs(300);

impl Console {
    /// Connects to the serial port at `path`, which may still be about to appear.
    ///
    /// # Errors
    /// If nothing listens there within `limit`.
    pub fn connect(name: &str, path: &Path, limit: Duration) -> Result<Self> {
        let stream = connect(path, limit).with_context(|| format!("console of {name}"))?;
        let reader = BufReader::new(stream);
        Ok(Self { name: name.into(), reader, line: Vec::new(), noise: String::new() })
    }

    /// Waits until the guest has booted.
    ///
    /// # Errors
    /// If it has not within `limit`; the message has the guest's output.
    pub fn wait_ready(&mut self, limit: Duration) -> Result<()> {
        let answer = self.answer(limit).context("the guest does not boot")?;
        match answer.strip_prefix("@ready") {
            Some(_) => Ok(()),
            None => bail!("{} boots with {answer:?}", self.name),
        }
    }

    /// Sends a command and returns the text after `@ok`.
    ///
    /// # Errors
    /// If the guest answers anything else, or not within `limit`.
    pub fn command(&mut self, command: &str, limit: Duration) -> Result<String> {
        self.reader
            .get_mut()
            .write_all(format!("{command}\n").as_bytes())
            .with_context(|| format!("console of {} is gone ({command})", self.name))?;
        let answer = self.answer(limit).with_context(|| format!("guest command {command:?}"))?;
        match answer.strip_prefix("@ok") {
            Some(rest) => Ok(rest.trim().into()),
            None => bail!("guest answers {command:?} with {answer}{}", self.heard()),
        }
    }

    /// Checks that the guest answers.
    ///
    /// # Errors
    /// If it does not.
    pub fn ping(&mut self) -> Result<()> {
        self.command("ping", PATIENCE).map(|_| ())
    }

    /// Fills `mib` MiB with known pages, no two alike, in `shards` parts (one dirtying thread
    /// each).
    ///
    /// # Errors
    /// When the guest refuses or is silent.
    pub fn fill(&mut self, mib: u64, shards: u64) -> Result<()> {
        self.command(&format!("fill {mib} {shards}"), Duration::from_secs(600)).map(|_| ())
    }

    /// Starts dirtying: `rate` updates a second, `whole_percent` of them whole pages, within the
    /// first `mib` MiB.
    ///
    /// # Errors
    /// When the guest refuses or is silent.
    pub fn dirty(&mut self, rate: u64, whole_percent: u64, mib: u64) -> Result<()> {
        self.command(&format!("dirty {rate} {whole_percent} {mib}"), PATIENCE).map(|_| ())
    }

    /// Stops dirtying.
    ///
    /// # Errors
    /// When nothing was dirtying, or the guest is silent.
    pub fn stop(&mut self) -> Result<()> {
        self.command("stop", PATIENCE).map(|_| ())
    }

    /// Recomputes every byte of every page in the guest.
    ///
    /// # Errors
    /// The first bad page, as the guest describes it.
    pub fn verify(&mut self) -> Result<Verified> {
        let answer = self.command("verify", Duration::from_secs(600))?;
        Ok(Verified {
            pages: field(&answer, "pages")?,
            whole: field(&answer, "whole")?,
            small: field(&answer, "small")?,
            cpus: field(&answer, "cpus")?,
        })
    }

    /// A counter of the guest's `work` answer: `beats`, `loops`, `whole` or `small`.
    ///
    /// # Errors
    /// When the guest is silent.
    pub fn work(&mut self, counter: &str) -> Result<u64> {
        let answer = self.command("work", PATIENCE)?;
        field(&answer, counter)
    }

    /// Waits until a counter of [`Self::work`] is above `before`.
    ///
    /// # Errors
    /// When it stands still for minutes.
    pub fn wait_work(&mut self, counter: &str, before: u64) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if self.work(counter)? > before {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        bail!("{} answers, but its {counter} stand still at {before}", self.name)
    }

    /// Checks that the guest's counters move.
    ///
    /// # Errors
    /// When they stand still.
    pub fn assert_alive(&mut self) -> Result<()> {
        let before = self.work("beats")?;
        self.wait_work("beats", before)
    }

    /// The next line that starts with `@`.
    fn answer(&mut self, limit: Duration) -> Result<String> {
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                bail!("{} is silent for {limit:?}{}", self.name, self.heard());
            }
            self.reader.get_ref().set_read_timeout(Some(left))?;
            match self.reader.read_until(b'\n', &mut self.line) {
                Ok(0) => bail!("console of {} closed{}", self.name, self.heard()),
                Ok(_) if self.line.ends_with(b"\n") => {
                    let line = String::from_utf8_lossy(&self.line).trim_end().to_owned();
                    self.line.clear();
                    if line.starts_with('@') {
                        return Ok(line);
                    }
                    self.noise.push_str(&line);
                    self.noise.push('\n');
                }
                Ok(_) => {}
                Err(e) if would_block(&e) => {}
                Err(e) => return Err(e).with_context(|| format!("console of {}", self.name)),
            }
        }
    }

    /// Reads available input without waiting; returns the end of the lines that were no answers,
    /// such as a panic's message.
    pub(crate) fn remaining_output(&mut self) -> String {
        // No answer is expected: the error has the output.
        match self.answer(Duration::from_millis(50)) {
            Ok(answer) => format!("the console said: {answer}"),
            Err(error) => format!("{error:#}"),
        }
    }

    /// The kernel's messages, from the first that names a fault on, or the last ones.
    fn heard(&self) -> String {
        const FAULTS: [&str; 4] = ["BUG: ", "Oops: ", "blocked for more", "Kernel panic"];
        const MOST: usize = 4000;
        let noise = self.noise.trim();
        let fault = FAULTS.iter().filter_map(|fault| noise.find(fault)).min();
        let from = fault.unwrap_or(noise.len().saturating_sub(MOST));
        let said: String = noise.get(from..).unwrap_or("").chars().take(MOST).collect();
        if said.is_empty() {
            return said;
        }
        format!("; the console said: {}", said.replace('\n', " | "))
    }
}

/// The number after `name=`.
fn field(answer: &str, name: &str) -> Result<u64> {
    answer
        .split_whitespace()
        .find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
        .with_context(|| format!("no {name}= in {answer:?}"))?
        .parse()
        .with_context(|| format!("{name} in {answer:?}"))
}
