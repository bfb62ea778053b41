//! The supervisor's processes: servers and helpers.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use rustix::cmsg_space;
use rustix::net::{recvmsg, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use rustix::process::{pidfd_open, Pid, PidfdFlags, Signal};

use super::error::{failed, SuperviseError};

pub(super) struct Server {
    pub(super) child: Child,
    pub(super) pidfd: OwnedFd,
    /// Its `/proc` stat file, opened and read once while there is memory: reading it again needs
    /// none, and the supervisor must not wait for memory.
    stat: Option<File>,
    pub(super) channel: UnixStream,
    pub(super) line: Vec<u8>,
    /// The descriptor received with the last message.
    pub(super) sent: Option<OwnedFd>,
    pub(super) ready: Option<Instant>,
    /// When it has to be ready, or gone.
    pub(super) deadline: Option<Instant>,
    /// It missed that deadline and was killed.
    pub(super) killed: bool,
}

impl Server {
    /// The letter of its state in `/proc/PID/stat`: T if stopped.
    pub(super) fn state(&self) -> Option<u8> {
        let mut bytes = [0; 1024];
        let got = self.stat.as_ref()?.read_at(&mut bytes, 0).ok()?;
        // The name may contain brackets and blanks.
        let at = bytes[..got].iter().rposition(|&byte| byte == b')')?;
        bytes[..got].get(at + 2).copied()
    }

    /// Starts a server, with one end of its channel as standard input.
    pub(super) fn spawn(mut command: Command) -> Result<Self, SuperviseError> {
        let (ours, theirs) = UnixStream::pair().map_err(failed("make a socket pair"))?;
        let child = command.stdin(Stdio::from(OwnedFd::from(theirs))).spawn();
        let child = child.map_err(failed("start the server"))?;
        // The command owns its end of the pair; until it is dropped, we would not see the server
        // close it.
        drop(command);
        ours.set_nonblocking(true).map_err(failed("set up a socket"))?;
        let pidfd = watch(&child)?;
        let stat = File::open(format!("/proc/{}/stat", child.id())).ok();
        let line = Vec::with_capacity(128);
        let (ready, deadline) = (None, None);
        let this = Self {
            child,
            pidfd,
            stat,
            channel: ours,
            line,
            sent: None,
            ready,
            deadline,
            killed: false,
        };
        // The kernel retains the buffer that it allocates for the first read.
        this.state();
        Ok(this)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Task {
    Up { first: bool },
    Down,
    Train,
}

pub(super) struct Helper {
    pub(super) child: Child,
    pub(super) pidfd: OwnedFd,
    pub(super) task: Task,
    pub(super) deadline: Option<Instant>,
}

impl Helper {
    /// Kills it, without waiting for its end.
    pub(super) fn dismiss(&mut self) {
        self.deadline = None;
        let _ = self.child.kill();
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

pub(super) fn watch(child: &Child) -> Result<OwnedFd, SuperviseError> {
    let raw = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let pid = raw.expect("a child's number is a positive int");
    // The child is not reaped yet, so the process number is still its own.
    let opened = pidfd_open(pid, PidfdFlags::empty());
    opened.map_err(|error| {
        let _ = rustix::process::kill_process(pid, Signal::KILL);
        failed("watch a process")(error.into())
    })
}
