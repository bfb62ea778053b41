//! The guest of the swap tests: a console that runs commands, and programs that use memory and
//! disks.
//!
//! The same binary in another role: `guest swap ROLE ...`. The init is a script that loads modules
//! and then becomes `guest swap console`.
//!
//! ```text
//! run COMMAND...      @ok STATUS OUTPUT     sh -c COMMAND; newlines of the output are sent as 0x1f
//! ping                @ok pong
//! ```
//!
//! All data is compared with its recomputed value ([`content`]): a wrong byte ends a program with
//! status 3 and a message that says where. Other errors end it with status 1.

mod content;
mod disk;
mod eat;
mod latency;
mod redis;

use std::io::{self, BufRead, Write};
use std::process::{Command, ExitCode, Stdio};

/// A wrong byte.
const WRONG: u8 = 3;

/// A failure.
pub(crate) enum Failure {
    /// A byte is wrong.
    Wrong(String),
    /// An operation failed.
    Cannot(String),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Cannot(error.to_string())
    }
}

impl From<rustix::io::Errno> for Failure {
    fn from(error: rustix::io::Errno) -> Self {
        Self::Cannot(error.to_string())
    }
}

/// Runs the role named by the arguments after `swap`.
pub(crate) fn main(words: &[String]) -> ExitCode {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let result = match words.as_slice() {
        ["console"] => return console(),
        ["eat", rest @ ..] => eat::run(rest),
        ["latency", rest @ ..] => latency::run(rest),
        ["disk", path, rest @ ..] => disk::run(path, rest),
        ["redis-fill", socket, rest @ ..] => redis::fill(socket, rest),
        ["redis-check", socket, rest @ ..] => redis::check(socket, rest),
        _ => Err(Failure::Cannot(format!("no such role: {words:?}"))),
    };
    match result {
        Ok(said) => {
            println!("{said}");
            ExitCode::SUCCESS
        }
        Err(Failure::Wrong(what)) => {
            println!("WRONG: {what}");
            ExitCode::from(WRONG)
        }
        Err(Failure::Cannot(what)) => {
            println!("cannot: {what}");
            ExitCode::FAILURE
        }
    }
}

/// The number after `name=` among the arguments, or `default`.
pub(crate) fn option(words: &[&str], name: &str, default: u64) -> Result<u64, Failure> {
    let word = words.iter().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    word.map_or(Ok(default), |word| {
        word.parse().map_err(|error| Failure::Cannot(format!("{name}={word}: {error}")))
    })
}

/// One command a line, one answer a line.
fn console() -> ExitCode {
    if let Err(error) = crate::raw_console() {
        crate::say(&format!("@err console: {error}"));
    }
    crate::say("@ready");
    for line in io::stdin().lock().lines() {
        let Ok(line) = line else { return ExitCode::FAILURE };
        match line.trim().split_once(' ') {
            Some(("run", command)) => run(command),
            None if line.trim() == "ping" => crate::say("@ok pong"),
            None if line.trim().is_empty() => {}
            _ => crate::say(&format!("@err unknown command {line:?}")),
        }
    }
    ExitCode::SUCCESS
}

fn run(command: &str) {
    let ended = Command::new("/bin/sh").args(["-c", command]).stdin(Stdio::null()).output();
    match ended {
        Ok(ended) => {
            let mut said = String::from_utf8_lossy(&ended.stdout).into_owned();
            said.push_str(&String::from_utf8_lossy(&ended.stderr));
            // Of long output only the end matters.
            let from = said.char_indices().rev().nth(20_000).map_or(0, |(at, _)| at);
            let said = said[from..].trim_end().replace('\n', "\x1f").replace('\r', "");
            // A shell whose command was killed exits with 128 plus the signal.
            let status = ended.status.code().unwrap_or(255);
            crate::say(&format!("@ok {status} {said}"));
        }
        Err(error) => crate::say(&format!("@err cannot run sh: {error}")),
    }
    let _ = io::stdout().flush();
}
