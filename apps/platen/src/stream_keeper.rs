//! The helper process of `save --snapshot` and `save --channels`: it reads what QEMU sends if the
//! save cannot.
//!
//! During a background-snapshot the thread of QEMU that writes to a page waits until QEMU has sent
//! the page. If the migration fails meanwhile, that thread waits for ever where it holds QEMU's
//! lock: QEMU ends the protection of its RAM under the same lock. Monitor and VM then hang (seen
//! with QEMU 7.2). So the stream of a snapshot has to be read to its end, whatever becomes of the
//! save.
//!
//! With multifd, a QEMU that loses one of its channels may wait for another one for ever: it then
//! refuses every further migration until it ends (seen with QEMU 7.2 and 10.0, if the connections
//! end while the migration begins). So QEMU's channels stay open, and are read, until its migration
//! is over. If the command is killed, the helper that keeps the settings cancels the migration.
//!
//! The helper accepts QEMU's connections and sends the command copies of them. If the command sends
//! [`READ_ON`], or dies before it has ended the helper, the helper reads the rest of each
//! connection and discards it. It closes connections of multifd that are silent for [`SILENCE`]:
//! QEMU waits for an answer then, since nobody has cancelled its migration.

use anyhow::{bail, ensure, Context};
use clap::Args;
use host::Channel;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::fd::{AsFd, OwnedFd};
use std::io::{ErrorKind, Read};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Arguments of the helper's process.
#[derive(Args, Debug)]
pub(crate) struct KeepStreamArgs {
    /// Number of multifd channels
    channels: u8,
}

/// How long a QEMU may take to connect after the command that told it to migrate has died.
const CONNECTS: Duration = Duration::from_secs(30);

/// How long QEMU's connections of a multifd migration may be silent once the command has died.
const SILENCE: Duration = Duration::from_secs(30);

/// The command's message that its own threads may read no more.
const READ_ON: &str = "read on";
/// The helper's message that comes with QEMU's connection.
const ACCEPTED: &str = "accepted";

/// A running helper. Dropping it makes the helper read the rest of the stream.
#[derive(Debug)]
pub(crate) struct StreamKeeper {
    child: Child,
    channel: Channel,
}

impl StreamKeeper {
    /// Starts the helper from this executable, before QEMU connects to `listener`: with one stream,
    /// or with a main channel and that many multifd channels.
    pub(crate) fn start(listener: &UnixListener, channels: u8) -> anyhow::Result<Self> {
        let (channel, theirs) = Channel::pair().context("a socket to the process that reads on")?;
        let listener = OwnedFd::from(listener.try_clone().context("the listening socket")?);
        let mut command = Command::new("/proc/self/exe");
        command.arg0("platen").arg("keep-stream").arg(channels.to_string());
        // Signals to the terminal's processes, or to the command's group, are not for the helper.
        command.process_group(0).stdin(theirs).stdout(Stdio::from(listener));
        let child = command.spawn().context("cannot start the process that reads on")?;
        Ok(Self { child, channel })
    }

    /// Takes QEMU's next connection from the helper; `None` if QEMU has not connected within
    /// `limit`.
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

    /// Makes the helper read the rest of each connection, beside the threads of this process: they
    /// may wait for a disk that hangs.
    pub(crate) fn read_on(&self) {
        // A helper that has ended reads nothing.
        let _ = self.channel.send(&READ_ON, None);
    }

    /// Ends the helper, because QEMU has sent everything.
    pub(crate) fn dismiss(mut self) {
        // This fails only if the helper has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs as the helper: the channel is its standard input, the listener its standard output.
pub(crate) fn run(args: &KeepStreamArgs) -> anyhow::Result<()> {
    let _ = rustix::thread::set_name(c"platen");
    let owned = |fd: rustix::fd::BorrowedFd<'_>| fd.try_clone_to_owned();
    let channel = Channel::from(owned(std::io::stdin().as_fd()).context("standard input")?);
    let listener = UnixListener::from(owned(std::io::stdout().as_fd()).context("the listener")?);
    let all = usize::from(args.channels) + 1;
    let mut streams = Vec::new();
    while streams.len() < all {
        let mut fds = [PollFd::new(&channel, PollFlags::IN), PollFd::new(&listener, PollFlags::IN)];
        match poll(&mut fds, None) {
            Err(rustix::io::Errno::INTR) => continue,
            other => other.context("poll")?,
        };
        if fds[1].revents().is_empty() {
            // QEMU has not made all its connections.
            wait_for_order(&channel)?;
            break;
        }
        let stream = accept(&listener)?;
        let passed = channel.send(&ACCEPTED, Some(stream.as_fd()));
        streams.push(stream);
        if passed.is_err() {
            break;
        }
    }
    if streams.len() == all {
        wait_for_order(&channel)?;
    }
    discard_all(streams, all, &listener)
}

/// Reads the rest of QEMU's connections, of which some may still come.
fn discard_all(
    mut streams: Vec<UnixStream>,
    all: usize,
    listener: &UnixListener,
) -> anyhow::Result<()> {
    let mut missing = all - streams.len();
    let (begin, mut heard) = (Instant::now(), Instant::now());
    let mut room = vec![0; 1 << 18];
    while missing == all || !streams.is_empty() {
        let listens = (missing > 0).then(|| PollFd::new(listener, PollFlags::IN));
        let reads = streams.iter().map(|stream| PollFd::new(stream, PollFlags::IN));
        let mut fds: Vec<_> = reads.chain(listens).collect();
        match poll(&mut fds, Some(&Timespec { tv_sec: 1, tv_nsec: 0 })) {
            Err(rustix::io::Errno::INTR) => continue,
            other => other.context("poll")?,
        };
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        if ready.contains(&true) {
            heard = Instant::now();
        }
        let connects = missing > 0 && ready.last() == Some(&true);
        let mut of_stream = ready.into_iter();
        streams.retain(|stream| of_stream.next() == Some(false) || goes_on(stream, &mut room));
        if connects {
            streams.push(accept(listener)?);
            missing -= 1;
        }
        let is_late = missing == all && begin.elapsed() > CONNECTS;
        if is_late || (all > 1 && heard.elapsed() > SILENCE) {
            break;
        }
    }
    Ok(())
}

/// Reads once from a stream that is ready; false at its end.
fn goes_on(mut stream: &UnixStream, room: &mut [u8]) -> bool {
    match stream.read(room) {
        Ok(len) => len > 0,
        // The command has set a time limit on this socket for itself.
        Err(error) => matches!(
            error.kind(),
            ErrorKind::Interrupted | ErrorKind::WouldBlock | ErrorKind::TimedOut
        ),
    }
}

/// Waits until the command orders this helper to read on, or dies.
fn wait_for_order(channel: &Channel) -> anyhow::Result<()> {
    let message = channel.receive::<String>().context("the command's messages")?;
    ensure!(message.is_none_or(|(word, _)| word == READ_ON), "this command is for platen itself");
    Ok(())
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
