//! Draws on a whole terminal.

use anyhow::Context;
use console::Term;
use nix::sys::termios::{cfmakeraw, tcgetattr, tcsetattr, SetArg, Termios};
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use std::io::Write;
use std::time::Duration;

/// Switches to the alternate screen, hides the cursor and turns line wrapping off. The end brings
/// the former contents back.
const BEGIN: &str = "\x1b[?1049h\x1b[?25l\x1b[?7l";
const END: &str = "\x1b[?7h\x1b[?25h\x1b[?1049l";
const HOME: &str = "\x1b[H";
const CLEAR_LINE: &str = "\x1b[K";
const CLEAR_BELOW: &str = "\x1b[J";

/// A user's command.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Key {
    /// q, Esc, Ctrl-C, Ctrl-D.
    Quit,
    /// Any other key, or a change of the terminal's size.
    Other,
}

/// The terminal. Dropping this restores its former state.
pub(super) struct Screen {
    before: Termios,
}

impl Screen {
    pub(super) fn open() -> anyhow::Result<Self> {
        let stdin = rustix::stdio::stdin();
        let before = tcgetattr(stdin).context("the terminal")?;
        let screen = Self { before };
        let mut raw = screen.before.clone();
        // Keys come at once, and Ctrl-C is one of them.
        cfmakeraw(&mut raw);
        tcsetattr(stdin, SetArg::TCSANOW, &raw).context("the terminal")?;
        write(BEGIN)?;
        Ok(screen)
    }

    /// Columns and rows.
    pub(super) fn size(&self) -> (usize, usize) {
        // 24 and 80 for a terminal that does not know its size.
        let (rows, columns) = Term::stdout().size();
        (columns.into(), rows.into())
    }

    /// Draws these lines, in one write, so that nothing flickers.
    pub(super) fn draw(&self, lines: &[String]) -> anyhow::Result<()> {
        let lines: Vec<_> = lines.iter().map(|line| format!("{CLEAR_LINE}{line}")).collect();
        write(&format!("{HOME}{}{CLEAR_BELOW}", lines.join("\r\n")))
    }

    /// Waits for a key.
    pub(super) fn key(&self, patience: Duration) -> anyhow::Result<Option<Key>> {
        let stdin = rustix::stdio::stdin();
        let mut fds = [PollFd::new(&stdin, PollFlags::IN)];
        match poll(&mut fds, Timespec::try_from(patience).ok().as_ref()) {
            Ok(0) => return Ok(None),
            // The terminal has another size, or a signal is to end the program.
            Err(Errno::INTR) => return Ok(Some(Key::Other)),
            ready => ready.context("the terminal")?,
        };
        let mut bytes = [0; 64];
        Ok(Some(match rustix::io::read(stdin, &mut bytes) {
            // The terminal has gone.
            Ok(0) | Err(Errno::IO) => Key::Quit,
            Ok(got) if quits(&bytes[..got]) => Key::Quit,
            Ok(_) | Err(Errno::INTR | Errno::AGAIN) => Key::Other,
            Err(error) => return Err(error).context("the terminal"),
        }))
    }
}

/// Whether one of these keys quits. Keys that are typed fast come together.
fn quits(keys: &[u8]) -> bool {
    match keys {
        // Esc alone: with more behind, it is an arrow or the like.
        [0x1b, rest @ ..] => rest.is_empty(),
        keys => keys.iter().any(|key| [b'q', b'Q', 3, 4].contains(key)),
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = write(END);
        let _ = tcsetattr(rustix::stdio::stdin(), SetArg::TCSANOW, &self.before);
    }
}

fn write(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("the terminal")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_quits_does_so_among_others_and_an_arrow_does_not() {
        for keys in [&b"q"[..], b"xq", b"Q", b"\x03", b"\x04", b"\x1b"] {
            assert!(quits(keys), "{keys:?}");
        }
        for keys in [&b""[..], b"x", b"\x1b[A", b"\x1bOq"] {
            assert!(!quits(keys), "{keys:?}");
        }
    }
}
