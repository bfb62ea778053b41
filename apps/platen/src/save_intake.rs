//! The socket that a QEMU migrates to, and the thread that records its stream.

use crate::network::private_dir;
use crate::stream_keeper::StreamKeeper;
use anyhow::{bail, ensure, Context};
use image::Writer;
use recorder::{record, Ending, Recorded};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Interval at which the thread checks whether it has to end.
const LOOK: Duration = Duration::from_millis(100);
/// Time limit for a QEMU that sends nothing, on a host that hangs.
const SILENCE: Duration = Duration::from_secs(600);
/// Time limit for the thread to end. It may wait for a disk that hangs.
const ENDS: Duration = Duration::from_secs(5);
/// Time limit for QEMU to close its socket after a cancel.
const CLOSES: Duration = Duration::from_secs(120);

/// SHUT 0 on the return path: the destination has loaded the VM.
const LOADED: [u8; 8] = [0, 1, 0, 4, 0, 0, 0, 0];

type Outcome = anyhow::Result<(Recorded, Writer, UnixStream)>;

/// The receiving end of one save.
pub(crate) struct Intake {
    uri: String,
    /// The private directory of the socket.
    _dir: tempfile::TempDir,
    stop: Arc<AtomicBool>,
    outcomes: mpsc::Receiver<Outcome>,
    thread: Option<JoinHandle<()>>,
    /// The helper that reads the stream of a snapshot.
    keeper: Option<Arc<StreamKeeper>>,
    /// Set when the stream is recorded; `stream` is set then, too.
    writer: Option<Writer>,
    stream: Option<UnixStream>,
}

impl Intake {
    /// Listens in a private directory, and records the stream of the first client. The stream of a
    /// `snapshot` has no return path, and is read to its end in any case.
    pub(crate) fn listen(mut writer: Writer, snapshot: bool) -> anyhow::Result<Self> {
        let dir = private_dir()?;
        let path = dir.path().join("save.sock");
        let listener = UnixListener::bind(&path)
            .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
            .with_context(|| format!("cannot listen at {}", path.display()))?;
        let uri = format!("unix:{}", path.display());
        let stop = Arc::new(AtomicBool::new(false));
        let (sender, outcomes) = mpsc::channel();
        let ended = Arc::clone(&stop);
        let keeper = snapshot.then(|| StreamKeeper::start(&listener).map(Arc::new)).transpose()?;
        let reads_on = keeper.clone();
        let body = move || {
            let stream = match &reads_on {
                Some(keeper) => accept_from(keeper, &ended),
                None => accept(&listener, &ended),
            };
            // If the save ends while this thread waits for a disk that hangs, the keeper reads on.
            drop(reads_on);
            let ending = if snapshot { Ending::Closed } else { Ending::Described };
            let outcome = stream.and_then(|stream| {
                let reader = Patient { stream: &stream, stop: &ended };
                let recorded = record(reader, &mut writer, ending)?;
                let answered = recorded.return_path || snapshot;
                ensure!(answered, "QEMU saves without a return path");
                Ok((recorded, writer, stream))
            });
            let _ = sender.send(outcome);
        };
        let thread = thread::Builder::new().name("intake".into()).spawn(body);
        let thread = Some(thread.context("cannot start a thread")?);
        Ok(Self { uri, _dir: dir, stop, outcomes, thread, keeper, writer: None, stream: None })
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

    /// Takes the writer, once the stream is recorded.
    pub(crate) fn take_writer(&mut self) -> anyhow::Result<Writer> {
        self.writer.take().context("nothing is recorded")
    }

    /// Fails if QEMU has sent bytes after the recorded stream, or has closed its socket.
    pub(crate) fn is_over(&self) -> anyhow::Result<()> {
        let stream = self.stream.as_ref().context("nothing is recorded")?;
        stream.set_nonblocking(true).context("QEMU's socket")?;
        let more = (&*stream).read(&mut [0]);
        stream.set_nonblocking(false).context("QEMU's socket")?;
        match more {
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(()),
            Ok(0) => bail!("QEMU closed its socket before it was answered: the save was cancelled"),
            Ok(_) => bail!(
                "QEMU sent more behind what looked like the end of its device state: save again"
            ),
            Err(error) => Err(error).context("cannot read QEMU's stream"),
        }
    }

    /// Sends SHUT 0: QEMU then completes the migration.
    pub(crate) fn say_loaded(&mut self) -> anyhow::Result<()> {
        let mut stream = self.stream.as_ref().context("nothing is recorded")?;
        stream.write_all(&LOADED).context("cannot answer QEMU")
    }

    /// Waits until QEMU, which has been told to cancel, closes the socket. Returns the writer, and
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
        Ok((writer, more))
    }

    /// Ends a snapshot: QEMU has sent everything.
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

    /// Ends the connection and the thread. QEMU's migration then fails, and its VM continues. The
    /// migration of a snapshot does not fail: its keeper reads on.
    pub(crate) fn end(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.stream = None;
        self.writer = None;
        self.keeper = None;
        if let Some(thread) = self.thread.take() {
            // The thread checks `stop` every LOOK, unless it waits for a disk. Its outcome, dropped
            // here, owns stream and writer.
            if self.outcomes.recv_timeout(ENDS).err() != Some(RecvTimeoutError::Timeout) {
                let _ = thread.join();
            }
        }
    }
}

/// Takes QEMU's connection from the helper that has accepted it.
fn accept_from(keeper: &StreamKeeper, stop: &AtomicBool) -> anyhow::Result<UnixStream> {
    loop {
        if let Some(stream) = keeper.accepted(LOOK)? {
            stream.set_read_timeout(Some(LOOK)).context("QEMU's socket")?;
            return Ok(stream);
        }
        ensure!(!stop.load(Ordering::Acquire), "QEMU did not connect");
    }
}

fn accept(listener: &UnixListener, stop: &AtomicBool) -> anyhow::Result<UnixStream> {
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false).context("QEMU's socket")?;
                stream.set_read_timeout(Some(LOOK)).context("QEMU's socket")?;
                return Ok(stream);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                ensure!(!stop.load(Ordering::Acquire), "QEMU did not connect");
                thread::sleep(Duration::from_millis(2));
            }
            Err(error) => return Err(error).context("cannot accept QEMU's connection"),
        }
    }
}

/// A reader that fails once `stop` is set, or if QEMU sends nothing for [`SILENCE`].
struct Patient<'a> {
    stream: &'a UnixStream,
    stop: &'a AtomicBool,
}

impl Read for Patient<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let until = Instant::now() + SILENCE;
        loop {
            match self.stream.read(out) {
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) =>
                {
                    if self.stop.load(Ordering::Acquire) {
                        return Err(io::Error::new(
                            ErrorKind::ConnectionAborted,
                            "the save was ended",
                        ));
                    }
                    if Instant::now() > until {
                        let text = format!("QEMU sent nothing for {} s", SILENCE.as_secs());
                        return Err(io::Error::new(ErrorKind::TimedOut, text));
                    }
                }
                result => return result,
            }
        }
    }
}
