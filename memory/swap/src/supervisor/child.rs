//! The supervisor's processes: servers and helpers.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::cmsg_space;
use rustix::net::{recvmsg, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};

use super::error::{failed, SuperviseError};
use super::process::Process;

pub(super) struct Server {
    pub(super) child: Process,
    /// The process's `/proc` stat file. It was opened and read once while there was memory. Reading
    /// it again needs none, and the supervisor must not wait for memory.
    stat: Option<File>,
    pub(super) channel: UnixStream,
    pub(super) line: Vec<u8>,
    /// The descriptor received with the last message.
    pub(super) sent: Option<OwnedFd>,
    pub(super) ready: Option<Instant>,
    /// Whether requests reach the server, once it has reported the client's connections.
    pub(super) connected: Option<bool>,
    /// Whether a successor has sent [`words::NAMES_DISK`](super::words::NAMES_DISK).
    pub(super) names_disk: bool,
    /// Deadline for the server to be ready, or to exit.
    pub(super) deadline: Option<Instant>,
    /// Whether the server missed that deadline and was killed.
    pub(super) killed: bool,
}

impl Server {
    /// The fields of `/proc/PID/stat`, from the process's state on.
    fn stat<'a>(&self, bytes: &'a mut [u8; 1024]) -> Option<&'a [u8]> {
        let got = self.stat.as_ref()?.read_at(bytes, 0).ok()?;
        // The name may contain brackets and blanks.
        let at = bytes[..got].iter().rposition(|&byte| byte == b')')?;
        bytes[..got].get(at + 2..)
    }

    /// The letter of the process's state: T if stopped.
    pub(super) fn state(&self) -> Option<u8> {
        self.stat(&mut [0; 1024])?.first().copied()
    }

    /// CPU time that all threads of the process have used, also those that have ended.
    pub(super) fn ran(&self) -> Option<Duration> {
        let mut bytes = [0; 1024];
        let fields = std::str::from_utf8(self.stat(&mut bytes)?).ok()?;
        // In ticks, which the kernel shows as hundredths of a second.
        let mut ticks = fields.split(' ').skip(11).map_while(|field| field.parse::<u64>().ok());
        Some(Duration::from_millis(10 * (ticks.next()? + ticks.next()?)))
    }

    /// Whether the process is stopped: it would accept a line and not act on it.
    pub(super) fn is_stopped(&self) -> bool {
        self.state() == Some(b'T')
    }

    /// The lines received since the last call.
    pub(super) fn lines(&mut self) -> Vec<String> {
        let mut lines = Vec::new();
        let mut bytes = [0; 256];
        let got = match receive(&self.channel, &mut bytes) {
            // The pidfd reports its exit; a closed channel alone must not make the loop spin.
            Ok((0, _)) => {
                std::thread::sleep(Duration::from_millis(1));
                return lines;
            }
            Ok((got, sent)) => {
                // A descriptor arrives with the first byte of its line.
                self.sent = sent.or_else(|| self.sent.take());
                got
            }
            Err(_) => return lines,
        };
        for &byte in &bytes[..got] {
            if byte == b'\n' {
                lines.push(String::from_utf8_lossy(&self.line).into_owned());
                self.line.clear();
            } else if self.line.len() < 128 {
                // Cuts a line that is longer than any known message.
                self.line.push(byte);
            }
        }
        lines
    }

    /// Adopts a server that this process started before `execve`.
    pub(super) fn adopt(pid: u32, channel: OwnedFd) -> Result<Self, SuperviseError> {
        let child = Process::adopt(pid).map_err(failed("watch a server"))?;
        Ok(Self::with(child, channel.into()))
    }

    fn with(child: Process, channel: UnixStream) -> Self {
        let this = Self {
            stat: File::open(format!("/proc/{}/stat", child.id())).ok(),
            child,
            channel,
            line: Vec::with_capacity(128),
            sent: None,
            ready: None,
            connected: None,
            names_disk: false,
            deadline: None,
            killed: false,
        };
        // The kernel retains the buffer that it allocates for the first read.
        this.state();
        this
    }

    /// Starts a server, whose standard input is the other end of its channel.
    pub(super) fn spawn(mut command: Command) -> Result<Self, SuperviseError> {
        let (ours, theirs) = UnixStream::pair().map_err(failed("make a socket pair"))?;
        let child = Process::spawn(command.stdin(Stdio::from(OwnedFd::from(theirs))));
        let child = child.map_err(failed("start the server"))?;
        // The command still holds the server's end of the pair, which would hide a close by the
        // server.
        drop(command);
        ours.set_nonblocking(true).map_err(failed("set up a socket"))?;
        Ok(Self::with(child, ours))
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Task {
    Up { first: bool },
    Down,
    Train,
}

pub(super) struct Helper {
    pub(super) child: Process,
    pub(super) task: Task,
    /// Deadline for the helper to end, or after its kill to be gone.
    pub(super) deadline: Option<Instant>,
    /// Whether the helper missed its deadline and was killed.
    pub(super) killed: bool,
}

impl Helper {
    /// Kills the process without waiting for its end.
    pub(super) fn dismiss(&mut self) {
        self.deadline = None;
        self.child.kill();
    }

    /// Kills the process, which is late.
    pub(super) fn kill(&mut self, gone: Duration) {
        self.killed = true;
        self.dismiss();
        // Nothing waits for a trainer's end.
        self.deadline = (self.task != Task::Train).then(|| Instant::now() + gone);
    }
}

/// Receives a message of the server, and the descriptor in it.
pub(super) fn receive(
    channel: &UnixStream,
    bytes: &mut [u8],
) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    // Further descriptors are closed here.
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let got = recvmsg(channel, &mut [io::IoSliceMut::new(bytes)], &mut control, flags)?;
    let sent = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut all) => all.next(),
        _ => None,
    });
    Ok((got.bytes, sent))
}
