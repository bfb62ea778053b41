//! Messages for a person, from processes that must neither wait for a reader nor end without one,
//! because a VM or a disk depends on them.
//!
//! Standard error may be a full pipe that is not read, a pipe without a reader, a stopped terminal,
//! or a service manager's socket. The process that should read it may be swapped out to the very
//! disk that waits for us. `eprintln!` blocks on the first and panics on the second, so nothing
//! here uses it.

mod writer;

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::fs::{fstat, open, FileType, Mode, OFlags};
use rustix::net::SendFlags;
use std::borrow::Cow;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use writer::Writer;
pub(crate) use writer::STACK;

/// A pipe accepts a write up to this length entirely or not at all.
const MOST: usize = 4096;

/// How to write to a shared descriptor without blocking: its flags are shared with other processes,
/// so `O_NONBLOCK` would affect them too.
#[derive(Debug)]
pub(crate) enum Way {
    /// A socket: each send has its own flag.
    Socket,
    /// A pipe or a terminal, opened again with flags of our own.
    Own(OwnedFd),
    /// A file: writes never wait for a reader. Opened again it would be written from its start.
    Shared,
    /// A file, written by a thread, as its disk may not answer.
    Thread(Writer),
}

/// Whether files are written by a thread: see [`say_by_a_thread`].
static BY_A_THREAD: AtomicBool = AtomicBool::new(false);

impl Way {
    pub(crate) fn to(fd: BorrowedFd<'_>) -> Self {
        let kind = fstat(fd).map(|found| FileType::from_raw_mode(found.st_mode));
        match kind {
            Ok(FileType::Socket) => Self::Socket,
            Ok(FileType::Fifo | FileType::CharacterDevice) => {
                let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd));
                let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
                // Another user's terminal, or a pipe without a reader, cannot be opened: poll
                // before each write.
                open(path, flags, Mode::empty()).map_or(Self::Shared, Self::Own)
            }
            Ok(kind) if is_file(kind) && BY_A_THREAD.load(Ordering::Acquire) => {
                Self::by_a_thread(fd).unwrap_or(Self::Shared)
            }
            _ => Self::Shared,
        }
    }

    fn by_a_thread(fd: BorrowedFd<'_>) -> std::io::Result<Self> {
        let file = fd.try_clone_to_owned()?;
        let write = move |line: &[u8]| {
            // An error cannot be reported anywhere.
            let _ = rustix::io::write(&file, line);
        };
        Writer::start(write).map(Self::Thread)
    }

    /// Writes a line entirely, if that is possible at once; returns whether it was.
    pub(crate) fn write(&self, fd: BorrowedFd<'_>, line: &[u8]) -> bool {
        let written = match self {
            Self::Socket => rustix::net::send(fd, line, SendFlags::DONTWAIT | SendFlags::NOSIGNAL),
            Self::Own(own) => rustix::io::write(own, line),
            Self::Shared if takes(fd) => rustix::io::write(fd, line),
            Self::Shared => return false,
            Self::Thread(writer) => return writer.write(line),
        };
        written.is_ok()
    }
}

/// Whether a write would return at once.
fn takes(fd: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::new(&fd, PollFlags::OUT)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
}

/// Writes a line to standard error, or drops it if it cannot be written at once. Neither blocks nor
/// panics.
pub(crate) fn say(line: &str) {
    let stderr = rustix::stdio::stderr();
    let line = whole(line);
    // An error cannot be reported anywhere.
    let _ = way().get_or_insert_with(|| Way::to(stderr.as_fd())).write(stderr.as_fd(), &line);
}

fn way() -> MutexGuard<'static, Option<Way>> {
    static WAY: Mutex<Option<Way>> = Mutex::new(None);
    WAY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on a thread writes the lines, if standard error is a file: its disk may not answer, or
/// may need memory that only this process can free. Call it when the process has taken its
/// precautions, which the thread is to have, too.
pub(crate) fn say_by_a_thread() {
    BY_A_THREAD.store(true, Ordering::Release);
    let mut way = way();
    *way = Some(Way::to(rustix::stdio::stderr().as_fd()));
}

/// Whether standard error is a file, for which [`say_by_a_thread`] starts a thread.
pub(crate) fn goes_to_a_file() -> bool {
    fstat(rustix::stdio::stderr())
        .is_ok_and(|found| is_file(FileType::from_raw_mode(found.st_mode)))
}

fn is_file(kind: FileType) -> bool {
    matches!(kind, FileType::RegularFile | FileType::BlockDevice)
}

/// Redirects standard error to `log`.
///
/// # Errors
///
/// An error of the kernel.
pub(crate) fn say_to(log: BorrowedFd<'_>) -> std::io::Result<()> {
    let mut way = way();
    rustix::stdio::dup2_stderr(log)?;
    *way = Some(Way::to(log));
    Ok(())
}

/// Escapes control characters, except line feeds and tabs: names and reasons come from other hosts,
/// and a terminal would obey.
pub(crate) fn printable(text: &str) -> Cow<'_, str> {
    let escaped = |c: char| c.is_control() && c != '\n' && c != '\t';
    if !text.contains(escaped) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if escaped(c) {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
    }
    Cow::Owned(out)
}

/// As [`printable`], for a part of a line: line feeds and tabs are escaped, too. Otherwise the text
/// of another host could look like a line, or a column, of this one.
pub(crate) fn printable_part(text: &str) -> Cow<'_, str> {
    match printable(text) {
        text if !text.contains(['\n', '\t']) => text,
        text => Cow::Owned(text.replace('\n', "\\n").replace('\t', "\\t")),
    }
}

/// A message as it is written. Its further lines are indented: a reason of another host may have
/// line feeds, and a line that begins with `platen:` is always a message of this process.
fn whole(line: &str) -> Vec<u8> {
    let text = printable(line.trim_end_matches('\n')).replace('\n', "\n  ");
    let mut whole = format!("platen: {text}").into_bytes();
    whole.truncate(MOST - 1);
    whole.push(b'\n');
    whole
}

/// Reports the precautions that a swap server could not take.
pub(crate) fn say_untaken(untaken: impl IntoIterator<Item = swap::Untaken>) {
    for untaken in untaken {
        say(&format!("precaution not taken: {:#}", anyhow::Error::from(untaken)));
    }
}

/// Reports panics in the same way: a process that blocks on the message of its panic does not end,
/// and is not replaced.
pub(crate) fn say_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        say(&format!("thread {}: {panic}", thread.name().unwrap_or("without a name")));
    }));
}

/// Writes a command's result to standard output. It is no error if the reader has closed it.
///
/// # Errors
///
/// Standard output cannot be written.
pub(crate) fn show(text: &str) -> anyhow::Result<()> {
    use std::io::{stdout, ErrorKind, Write};
    let mut out = stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(anyhow::Error::new(error).context("cannot write to standard output"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    #[test]
    fn output_does_not_wait_for_a_reader_and_restores_the_flags() {
        let (read, write) = rustix::pipe::pipe().unwrap();
        let way = Way::to(write.as_fd());
        assert!(matches!(way, Way::Own(_)), "{way:?}");
        let line = whole("line");
        let mut said = 0;
        while way.write(write.as_fd(), &line) {
            said += 1;
            assert!(said < 1 << 20, "a pipe without an end");
        }
        assert!(said > 100);
        let flags = rustix::fs::fcntl_getfl(&write).unwrap();
        assert!(!flags.contains(OFlags::NONBLOCK), "{flags:?}");
        // Only whole lines were written, and writing works again when there is room.
        let mut reader = File::from(read);
        let mut got = vec![0; line.len() * said];
        reader.read_exact(&mut got).unwrap();
        assert!(got == line.repeat(said));
        assert!(way.write(write.as_fd(), &line));
        drop(reader);
        assert!(!way.write(write.as_fd(), &line));
        assert!(
            !Way::to(write.as_fd()).write(write.as_fd(), &line),
            "without a reader from the beginning"
        );
    }

    #[test]
    fn output_does_not_wait_for_a_full_socket() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let way = Way::to(ours.as_fd());
        assert!(matches!(way, Way::Socket), "{way:?}");
        let mut said = 0;
        while way.write(ours.as_fd(), &whole(&"x".repeat(500))) {
            said += 1;
            assert!(said < 1 << 20, "a socket without an end");
        }
        assert!(said > 10);
        drop(theirs);
        assert!(!way.write(ours.as_fd(), b"x\n"));
    }

    #[test]
    fn output_is_appended_to_a_file_also_by_a_thread() {
        for by_a_thread in [false, true] {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(b"before\n").unwrap();
            let way = match by_a_thread {
                true => Way::by_a_thread(file.as_fd()).unwrap(),
                false => Way::to(file.as_fd()),
            };
            assert!(way.write(file.as_fd(), &whole("after")));
            drop(way);
            std::io::Seek::rewind(&mut file).unwrap();
            let mut text = String::new();
            file.read_to_string(&mut text).unwrap();
            assert_eq!(text, "before\nplaten: after\n");
        }
    }

    #[test]
    fn text_of_another_host_carries_no_terminal_escapes() {
        assert_eq!(printable("a\u{1b}[2Jb\tc\nd\u{9b}"), "a\\u{1b}[2Jb\tc\nd\\u{9b}");
        assert_eq!(whole("a\rb"), b"platen: a\\rb\n");
        assert_eq!(printable_part("a\nb\tc\u{1b}"), "a\\nb\\tc\\u{1b}");
    }

    #[test]
    fn text_of_another_host_is_no_message_of_its_own() {
        let lines = String::from_utf8(whole("b refuses: no\nplaten: all is well\n")).unwrap();
        assert_eq!(lines.lines().filter(|line| line.starts_with("platen:")).count(), 1, "{lines}");
    }

    #[test]
    fn a_long_line_is_cut_to_the_atomic_write_size_of_a_pipe() {
        let line = whole(&"x".repeat(10_000));
        assert_eq!((line.len(), line.last()), (MOST, Some(&b'\n')));
    }
}
