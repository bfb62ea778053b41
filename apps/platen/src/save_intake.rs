//! The socket that a QEMU migrates to, and the threads that record its stream.

use crate::network::private_dir;
use crate::save_channels::{accept, receive, Outcome, Patience, Patient, LOOK};
use crate::stream_keeper::StreamKeeper;
use anyhow::{bail, ensure, Context};
use image::Writer;
use recorder::{record, Ending, Multifd, Recorded};
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Time limit for the threads to end. They may wait for a disk that hangs.
const ENDS: Duration = Duration::from_secs(5);
/// Time limit for QEMU to close its sockets after a cancel.
const CLOSES: Duration = Duration::from_secs(120);

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

    /// Waits until QEMU, which has been told to cancel, closes its sockets. Returns the writer, and
    /// whether more bytes arrived.
    pub(crate) fn close(mut self) -> anyhow::Result<(Writer, bool)> {
        let writer = self.take_writer()?;
        let mut stream = self.stream.take().context("nothing is recorded")?;
        stream.set_read_timeout(Some(CLOSES)).context("QEMU's socket")?;
        let mut more = false;
        loop {
            match stream.read(&mut [0; 4096]) {
                Ok(0) => break,
                Ok(_) => more = true,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => break,
                // After an error, dropping the stream closes this end, and QEMU then has to close
                // its own.
                Err(_) => break,
            }
        }
        drop(stream);
        self.wait_for_channels();
        Ok((writer, more || self.has_late_pages()))
    }

    /// Waits until QEMU, whose migration is over, has closed its multifd channels.
    pub(crate) fn wait_for_channels(&mut self) {
        if self.multifd.is_none() {
            return;
        }
        let until = Instant::now() + CLOSES;
        let thread = self.thread.as_ref();
        while thread.is_some_and(|thread| !thread.is_finished()) && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
        self.end();
    }

    /// Records no more. QEMU's multifd connections stay open, and are read, until [`Intake::end`].
    pub(crate) fn stop_recording(&self) {
        if let Some(multifd) = &self.multifd {
            multifd.abandon(io::Error::new(ErrorKind::ConnectionAborted, "the save was ended"));
            if let Some(keeper) = &self.keeper {
                keeper.read_on();
            }
        }
    }

    /// Ends the helper: QEMU has sent everything.
    pub(crate) fn dismiss_keeper(&mut self) {
        if let Some(keeper) = self.keeper.take().and_then(Arc::into_inner) {
            keeper.dismiss();
        }
    }

    /// Takes note that QEMU has refused to migrate, so it will not connect.
    pub(crate) fn call_off(&mut self) {
        let keeper = self.keeper.take();
        // The thread has the keeper, too.
        self.end();
        self.keeper = keeper;
        self.dismiss_keeper();
    }

    /// Ends the connections and the threads. QEMU's migration then fails, and its VM continues. The
    /// migration of a snapshot does not fail: its keeper reads on. That of multifd is over before.
    pub(crate) fn end(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(connection) = self.connection.get() {
            // The thread that records may wait for a disk, and QEMU for that thread. This fails if
            // QEMU has closed its end.
            let _ = connection.shutdown(Shutdown::Both);
        }
        self.stop_recording();
        self.stream = None;
        self.writer = None;
        if self.multifd.is_none() {
            self.keeper = None;
        }
        if let Some(thread) = self.thread.take() {
            // The threads check `stop` every LOOK, unless they wait for a disk.
            let until = Instant::now() + ENDS;
            while !thread.is_finished() && Instant::now() < until {
                thread::sleep(Duration::from_millis(1));
            }
            if thread.is_finished() {
                let _ = thread.join();
            }
            // Their outcomes own stream and writer.
            while self.outcomes.try_recv().is_ok() {}
        }
        self.dismiss_keeper();
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
