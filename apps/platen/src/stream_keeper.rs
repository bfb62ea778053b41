//! The helper process of `save --snapshot`: it reads QEMU's stream to the end if the save cannot.
//!
//! During a background-snapshot the thread of QEMU that writes to a page waits until QEMU has sent
//! the page. If the migration fails meanwhile, that thread waits for ever where it holds QEMU's
//! lock: QEMU ends the protection of its RAM under the same lock. Monitor and VM then hang (seen
//! with QEMU 7.2). So the stream of a snapshot has to be read to its end, whatever becomes of the
//! save.
//!
//! The helper accepts QEMU's connection and sends the command a copy of it. If the command ends
//! without sending [`DONE`], or is killed, the helper reads the rest of the stream and discards it.

use anyhow::{bail, ensure, Context};
use host::Channel;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::fd::{AsFd, OwnedFd};
use std::io::{ErrorKind, Read};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// How long a QEMU may take to connect after the command that told it to migrate has died.
const CONNECTS: Duration = Duration::from_secs(30);

/// The command's message that QEMU has sent everything.
const DONE: &str = "done";
/// The helper's message that comes with QEMU's connection.
const ACCEPTED: &str = "accepted";

/// A running helper. Dropping it makes the helper read the rest of the stream.
#[derive(Debug)]
pub(crate) struct StreamKeeper {
    child: Child,
    channel: Channel,
}

impl StreamKeeper {
    /// Starts the helper from this executable, before QEMU connects to `listener`.
    pub(crate) fn start(listener: &UnixListener) -> anyhow::Result<Self> {
        let (channel, theirs) = Channel::pair().context("a socket to the process that reads on")?;
        let listener = OwnedFd::from(listener.try_clone().context("the listening socket")?);
        let mut command = Command::new("/proc/self/exe");
        command.arg0("platen").arg("keep-stream");
        // Signals to the terminal's processes, or to the command's group, are not for the helper.
        command.process_group(0).stdin(theirs).stdout(Stdio::from(listener));
        let child = command.spawn().context("cannot start the process that reads on")?;
        Ok(Self { child, channel })
    }

    /// Takes QEMU's connection from the helper; `None` if QEMU has not connected within `limit`.
    pub(crate) fn accepted(&self, limit: Duration) -> anyhow::Result<Option<UnixStream>> {
        if !readable(&self.channel, Some(limit))? {
            return Ok(None);
        }
        match self.channel.receive::<String>()? {
            Some((message, Some(stream))) if message == ACCEPTED => Ok(Some(stream.into())),
            Some(_) => bail!("the process that reads on sent something else than a connection"),
            None => bail!("the process that reads QEMU's stream on has ended"),
        }
    }

    /// Ends the helper, because QEMU has sent everything.
    pub(crate) fn dismiss(mut self) {
        // A helper that has ended reads nothing.
        let _ = self.channel.send(&DONE, None);
        let _ = self.child.wait();
    }
}

/// Runs as the helper: the channel is its standard input, the listener its standard output.
pub(crate) fn run() -> anyhow::Result<()> {
    let _ = rustix::thread::set_name(c"platen");
    let owned = |fd: rustix::fd::BorrowedFd<'_>| fd.try_clone_to_owned();
    let channel = Channel::from(owned(std::io::stdin().as_fd()).context("standard input")?);
    let listener = UnixListener::from(owned(std::io::stdout().as_fd()).context("the listener")?);
    let mut fds = [PollFd::new(&channel, PollFlags::IN), PollFd::new(&listener, PollFlags::IN)];
    poll(&mut fds, None).context("poll")?;
    let stream = if fds[1].revents().is_empty() {
        // The command has ended before QEMU has connected.
        if is_done(&channel)? || !readable(&listener, Some(CONNECTS))? {
            return Ok(());
        }
        accept(&listener)?
    } else {
        let stream = accept(&listener)?;
        let passed = channel.send(&ACCEPTED, Some(stream.as_fd()));
        if passed.is_ok() && is_done(&channel)? {
            return Ok(());
        }
        stream
    };
    discard(stream)
}

/// Waits for the command. Returns true if it reports that QEMU has sent everything, and false if it
/// has ended.
fn is_done(channel: &Channel) -> anyhow::Result<bool> {
    let message = channel.receive::<String>().context("the command's messages")?;
    ensure!(
        message.as_ref().is_none_or(|(word, _)| word == DONE),
        "this command is for platen itself"
    );
    Ok(message.is_some())
}

fn accept(listener: &UnixListener) -> anyhow::Result<UnixStream> {
    let (stream, _) = listener.accept().context("cannot accept QEMU's connection")?;
    stream.set_nonblocking(false).context("QEMU's socket")?;
    Ok(stream)
}

/// Waits until `fd` can be read, or for `limit`.
fn readable(fd: &impl AsFd, limit: Option<Duration>) -> anyhow::Result<bool> {
    let limit = limit.map(Timespec::try_from).transpose().context("a time limit")?;
    match poll(&mut [PollFd::new(fd, PollFlags::IN)], limit.as_ref()) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error).context("poll"),
    }
}

/// Reads the rest of a stream.
fn discard(mut stream: UnixStream) -> anyhow::Result<()> {
    let mut room = vec![0; 1 << 18];
    loop {
        match stream.read(&mut room) {
            Ok(0) => return Ok(()),
            Ok(_) => {}
            // The command has set a time limit on this socket for itself.
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::Interrupted | ErrorKind::WouldBlock | ErrorKind::TimedOut
                ) => {}
            // QEMU has ended.
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(()),
            Err(error) => return Err(error).context("QEMU's stream"),
        }
    }
}
