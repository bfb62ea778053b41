//! The socket that a QEMU migrates to, and the threads that record its stream.

mod close;

use crate::network::private_dir;
use crate::save_channels::{accept, receive, Outcome, Patience, Patient, LOOK};
use crate::stream_keeper::StreamKeeper;
use anyhow::{bail, ensure, Context};
use image::Writer;
use recorder::{record, Ending, Multifd, Recorded};
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// The error of a stream that goes on behind its end.
pub(crate) const MORE: &str =
    "QEMU sent more behind what looked like the end of its device state: save again";

/// SHUT 0 on the return path: the destination has loaded the VM.
const LOADED: [u8; 8] = [0, 1, 0, 4, 0, 0, 0, 0];

/// The connections of a migration.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// One stream with a return path.
    Stream,
    /// One stream without a return path, which is read to its end in any case.
    Snapshot,
    /// A main channel with a return path, and that many multifd channels.
    Multifd(u8),
}

/// The receiving end of one save.
pub(crate) struct Intake {
    uri: String,
    /// The private directory of the socket.
    _dir: tempfile::TempDir,
    stop: Arc<AtomicBool>,
    outcomes: mpsc::Receiver<Outcome>,
    /// The thread that records, and ends after the threads of all connections.
    thread: Option<JoinHandle<()>>,
    /// The recording of a save by multifd.
    multifd: Option<Arc<Multifd<Writer>>>,
    /// The helper that reads the connections of a snapshot or of multifd if this process dies.
    keeper: Option<Arc<StreamKeeper>>,
    /// The connection of a [`Kind::Stream`], also while the thread that records waits for a disk.
    connection: Arc<OnceLock<UnixStream>>,
    /// Whether QEMU has connected.
    is_connected: Arc<AtomicBool>,
    /// Set when the stream is recorded; `stream` is set then, too.
    writer: Option<Writer>,
    stream: Option<UnixStream>,
}

impl Intake {
    /// Listens in a private directory, and records the migration of the first client.
    pub(crate) fn listen(writer: Writer, kind: Kind) -> anyhow::Result<Self> {
        let dir = private_dir()?;
        let path = dir.path().join("save.sock");
        let listener = UnixListener::bind(&path)
            .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
            .with_context(|| format!("cannot listen at {}", path.display()))?;
        let uri = format!("unix:{}", path.display());
        let stop = Arc::new(AtomicBool::new(false));
        let (sender, outcomes) = mpsc::channel();
        let ended = Arc::clone(&stop);
        let (mut keeper, mut multifd) = (None, None);
        let connection = Arc::new(OnceLock::new());
        let is_connected = Arc::new(AtomicBool::new(false));
        let connected = Arc::clone(&is_connected);
        let body: Box<dyn FnOnce() + Send> = match kind {
            Kind::Stream => {
                let connection = Arc::clone(&connection);
                Box::new(move || {
                    let patience = Patience::new(ended);
                    let stream = accept_one(&listener, &patience, &connection);
                    connected.store(stream.is_ok(), Ordering::Release);
                    let outcome =
                        stream.and_then(|stream| record_stream(stream, writer, &patience));
                    if let (Err(_), Some(connection)) = (&outcome, connection.get()) {
                        // QEMU may wait for room with its lock held, and then answers nothing.
                        let _ = connection.shutdown(Shutdown::Both);
                    }
                    let _ = sender.send(outcome);
                })
            }
            Kind::Snapshot => {
                let reads_on = Arc::new(StreamKeeper::start(&listener, 0)?);
                keeper = Some(Arc::clone(&reads_on));
                Box::new(move || {
                    let patience = Patience::new(ended);
                    let stream = accept_from(&reads_on, &patience);
                    connected.store(stream.is_ok(), Ordering::Release);
                    // If the save ends while this thread waits for a disk that hangs, the keeper
                    // reads on.
                    drop(reads_on);
                    let outcome =
                        stream.and_then(|stream| record_snapshot(stream, writer, &patience));
                    let _ = sender.send(outcome);
                })
            }
            Kind::Multifd(channels) => {
                let reads_on = Arc::new(StreamKeeper::start(&listener, channels)?);
                keeper = Some(Arc::clone(&reads_on));
                let recording = Arc::new(Multifd::new(channels, writer));
                multifd = Some(Arc::clone(&recording));
                Box::new(move || {
                    receive(&reads_on, channels, recording, ended, &connected, &sender);
                })
            }
        };
        let thread = thread::Builder::new().name("intake".into()).spawn(body);
        let thread = Some(thread.context("cannot start a thread")?);
        let (writer, stream) = (None, None);
        Ok(Self {
            uri,
            _dir: dir,
            stop,
            outcomes,
            thread,
            keeper,
            multifd,
            connection,
            is_connected,
            writer,
            stream,
        })
    }

    /// The URI for QEMU's `migrate`.
    pub(crate) fn uri(&self) -> &str {
        &self.uri
    }

    /// Waits up to `limit` for the recorded stream; `None` if it is not complete by then.
    pub(crate) fn recorded(&mut self, limit: Duration) -> anyhow::Result<Option<Recorded>> {
        match self.outcomes.recv_timeout(limit) {
            Ok(outcome) => {
                let (recorded, writer, stream) = outcome?;
                (self.writer, self.stream) = (Some(writer), Some(stream));
                Ok(Some(recorded))
            }
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => bail!("the thread that records has ended"),
        }
    }

    /// Whether QEMU has connected. A QEMU that has ended before will not, and nothing is recorded.
    pub(crate) fn is_connected(&self) -> bool {
        self.is_connected.load(Ordering::Acquire)
    }

    /// Takes the writer, once the stream is recorded.
    pub(crate) fn take_writer(&mut self) -> anyhow::Result<Writer> {
        self.writer.take().context("nothing is recorded")
    }

    /// Whether a multifd channel had pages behind the recorded stream.
    fn has_late_pages(&self) -> bool {
        self.multifd.as_ref().is_some_and(|multifd| multifd.has_late_pages())
    }

    /// Fails if QEMU has sent bytes after the recorded stream, or has closed its socket.
    pub(crate) fn is_over(&self) -> anyhow::Result<()> {
        let stream = self.stream.as_ref().context("nothing is recorded")?;
        stream.set_nonblocking(true).context("QEMU's socket")?;
        let more = (&*stream).read(&mut [0]);
        stream.set_nonblocking(false).context("QEMU's socket")?;
        match more {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                ensure!(!self.has_late_pages(), "{MORE}");
                Ok(())
            }
            Ok(0) => bail!("QEMU closed its socket before it was answered: the save was cancelled"),
            Ok(_) => bail!("{MORE}"),
            Err(error) => Err(error).context("cannot read QEMU's stream"),
        }
    }

    /// Sends SHUT 0: QEMU then completes the migration.
    pub(crate) fn say_loaded(&mut self) -> anyhow::Result<()> {
        let mut stream = self.stream.as_ref().context("nothing is recorded")?;
        stream.write_all(&LOADED).context("cannot answer QEMU")
    }
}

/// Accepts QEMU's connection, and keeps a copy in `connection`.
fn accept_one(
    listener: &UnixListener,
    patience: &Patience,
    connection: &OnceLock<UnixStream>,
) -> anyhow::Result<UnixStream> {
    let stream = accept(listener, patience).context("cannot accept a connection")?;
    let copy = stream.try_clone().context("QEMU's socket")?;
    let _ = connection.set(copy);
    // The save may have ended just now, without this connection.
    ensure!(!patience.is_over(), "the save was ended");
    Ok(stream)
}

/// Takes QEMU's connection from the helper that has accepted it.
fn accept_from(keeper: &StreamKeeper, patience: &Patience) -> anyhow::Result<UnixStream> {
    loop {
        if let Some(stream) = keeper.accepted(LOOK)? {
            stream.set_read_timeout(Some(LOOK)).context("QEMU's socket")?;
            return Ok(stream);
        }
        ensure!(!patience.is_over(), "QEMU did not connect");
    }
}

fn record_stream(stream: UnixStream, mut writer: Writer, patience: &Patience) -> Outcome {
    let recorded = record(Patient::new(&stream, patience), &mut writer, Ending::Described)?;
    ensure!(recorded.return_path, "QEMU saves without a return path");
    Ok((recorded, writer, stream))
}

fn record_snapshot(stream: UnixStream, mut writer: Writer, patience: &Patience) -> Outcome {
    let recorded = record(Patient::new(&stream, patience), &mut writer, Ending::Closed)?;
    Ok((recorded, writer, stream))
}

#[cfg(test)]
impl Intake {
    /// One that has recorded a stream of this connection, which waits for SHUT.
    pub(crate) fn recorded_from(stream: UnixStream, writer: Writer) -> Self {
        let connection = OnceLock::from(stream.try_clone().unwrap());
        Self {
            uri: String::new(),
            _dir: private_dir().unwrap(),
            stop: Arc::default(),
            outcomes: mpsc::channel().1,
            thread: None,
            multifd: None,
            keeper: None,
            connection: Arc::new(connection),
            is_connected: Arc::new(AtomicBool::new(true)),
            writer: Some(writer),
            stream: Some(stream),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use image::Options;

    const LONG: Duration = Duration::from_secs(300);

    /// The disk may be full during the switchover. QEMU then waits with its lock held, and hears no
    /// cancel.
    #[test]
    fn a_recording_that_fails_has_closed_the_connection() {
        let folder = tempfile::tempdir().unwrap();
        let writer = Writer::create(&folder.path().join("image"), Options::default()).unwrap();
        let mut intake = Intake::listen(writer, Kind::Stream).unwrap();
        let path = intake.uri().strip_prefix("unix:").unwrap();
        let mut qemu = UnixStream::connect(path).unwrap();
        qemu.write_all(b"no migration").unwrap();
        // The recording fails here at the latest.
        qemu.shutdown(Shutdown::Write).unwrap();
        assert!(intake.recorded(LONG).is_err());
        qemu.set_nonblocking(true).unwrap();
        assert_eq!(qemu.read(&mut [0]).unwrap(), 0);
    }
}
