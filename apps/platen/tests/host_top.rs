//! `platen top` on a terminal.

#[path = "host/rig.rs"]
mod rig;

use nix::pty::openpty;
use nix::sys::termios::{tcgetattr, LocalFlags};
use rig::{finish_under_way, under_way, until, Rig, A, B, WATCHDOG};
use std::fs::File;
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Instant;

/// A terminal of this size, and what a program draws on it.
struct Terminal {
    ours: File,
    theirs: File,
    pieces: Receiver<Vec<u8>>,
    drawn: Vec<u8>,
}

impl Terminal {
    fn new(columns: u16, rows: u16) -> Self {
        let terminal = openpty(None, None).unwrap();
        let (ours, theirs) = (File::from(terminal.master), File::from(terminal.slave));
        let mut reader = ours.try_clone().unwrap();
        let (send, pieces) = mpsc::channel();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(got @ 1..) = reader.read(&mut bytes) {
                let _ = send.send(bytes[..got].to_vec());
            }
        });
        let terminal = Self { ours, theirs, pieces, drawn: Vec::new() };
        terminal.resize(columns, rows);
        terminal
    }

    fn resize(&self, columns: u16, rows: u16) {
        let size = ["rows", &rows.to_string(), "cols", &columns.to_string()];
        let theirs = Stdio::from(self.theirs.try_clone().unwrap());
        assert!(Command::new("stty").args(size).stdin(theirs).status().unwrap().success());
    }

    fn run(&self, arguments: &[String]) -> Child {
        let theirs = || Stdio::from(self.theirs.try_clone().unwrap());
        Command::new(env!("CARGO_BIN_EXE_platen"))
            .arg("top")
            .args(arguments)
            .stdin(theirs())
            .stdout(theirs())
            .stderr(theirs())
            .spawn()
            .unwrap()
    }

    /// The last whole screen.
    fn screen(&self) -> Vec<String> {
        let drawn = String::from_utf8_lossy(&self.drawn).into_owned();
        let whole = drawn.rsplit("\x1b[H").find(|part| part.contains("\x1b[J")).unwrap_or_default();
        let whole = whole.split("\x1b[J").next().unwrap();
        whole.split("\r\n").map(|line| line.replace("\x1b[K", "")).collect()
    }

    /// Reads until the screen is as wanted.
    fn shows(&mut self, what: &str, wanted: impl Fn(&[String]) -> bool) -> Vec<String> {
        let limit = Instant::now() + WATCHDOG;
        loop {
            let screen = self.screen();
            if wanted(&screen) {
                return screen;
            }
            // It draws once a second, whatever it shows.
            assert!(Instant::now() < limit, "{what} is not shown: {screen:#?}");
            self.drawn.extend(self.pieces.recv_timeout(WATCHDOG).expect("it draws"));
        }
    }
}

/// Waits until it has ended; whether with success.
fn succeeds(top: &mut Child) -> bool {
    let mut status = None;
    until(|| {
        status = top.try_wait().unwrap();
        status.is_some()
    });
    status.is_some_and(|status| status.success())
}

#[test]
fn a_terminal_shows_what_runs_and_what_has_become_of_it_and_is_as_it_was_afterwards() {
    let rig = Rig::new("");
    let _services = (rig.start(A), rig.start(B));
    let mut terminal = Terminal::new(160, 24);
    let before = tcgetattr(&terminal.theirs).unwrap();
    let mut top = terminal.run(&rig.arguments(A));
    terminal.shows("no migration", |screen| screen[0].starts_with("a: 0 migrations run;"));
    assert!(!tcgetattr(&terminal.theirs).unwrap().local_flags.contains(LocalFlags::ICANON));
    let ends = under_way(&rig, 49152);
    let is_line = |line: &String| {
        let words: Vec<_> = line.split_whitespace().collect();
        words.len() > 6 && words[1..4] == ["to", "b", "active"] && words[4].ends_with('%')
    };
    let screen = terminal.shows("the migration", |screen| screen.iter().any(is_line));
    assert!(screen[0].starts_with("a: 1 migrations run;"), "{screen:#?}");
    // A smaller terminal.
    terminal.resize(30, 6);
    terminal.shows("a smaller screen", |screen| {
        screen.len() <= 6 && screen.iter().all(|line| line.chars().count() <= 30)
    });
    terminal.resize(160, 24);
    finish_under_way(ends);
    terminal.shows("its end", |screen| screen.iter().any(|line| line.ends_with(" to b completed")));
    // As fast typing has it.
    terminal.ours.write_all(b"xq").unwrap();
    assert!(succeeds(&mut top));
    let after = tcgetattr(&terminal.theirs).unwrap();
    assert_eq!(after.local_flags, before.local_flags);
    terminal.drawn.clear();
    while !String::from_utf8_lossy(&terminal.drawn).contains("\x1b[?25h\x1b[?1049l") {
        terminal.drawn.extend(terminal.pieces.recv_timeout(WATCHDOG).expect("the former screen"));
    }
}

#[test]
fn a_service_that_goes_is_waited_for_and_without_a_terminal_it_says_what_to_use() {
    let rig = Rig::new("");
    let mut a = rig.start(A);
    let mut terminal = Terminal::new(160, 24);
    let mut top = terminal.run(&rig.arguments(A));
    terminal.shows("no migration", |screen| screen[0].starts_with("a: 0 migrations run;"));
    a.kill();
    terminal.shows("the cause", |screen| screen[1].starts_with("the service does not answer"));
    let _a = rig.start(A);
    terminal.shows("the service", |screen| screen[1].is_empty());
    terminal.ours.write_all(&[3]).unwrap();
    assert!(succeeds(&mut top));
    let (code, said) = rig.command(A, &["top"]);
    assert_eq!((code, said.contains("platen list --json")), (Some(1), true), "{said}");
}
