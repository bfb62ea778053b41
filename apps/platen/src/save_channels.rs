//! The connections of a save: how long they may be silent, and those of a multifd migration.

use crate::stream_keeper::StreamKeeper;
use anyhow::{anyhow, ensure};
use image::Writer;
use recorder::{Ending, Multifd, Recorded};
use std::io::{self, ErrorKind, Read};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Interval at which a thread checks whether it has to end.
pub(crate) const LOOK: Duration = Duration::from_millis(100);
/// Time limit for a QEMU that sends nothing, on a host that hangs.
const SILENCE: Duration = Duration::from_secs(600);

/// The recorded stream, and the connection on which QEMU waits for an answer.
pub(crate) type Outcome = anyhow::Result<(Recorded, Writer, UnixStream)>;

/// First bytes of a main channel.
const MAIN: [u8; 4] = *b"QEVM";

/// The end of the waits for QEMU: an order, or silence of all its connections.
pub(crate) struct Patience {
    stop: Arc<AtomicBool>,
    multifd: Option<Arc<Multifd<Writer>>>,
    /// When QEMU sent something, or could not because its pages were being written.
    heard: Mutex<Instant>,
}

impl Patience {
    pub(crate) fn new(stop: Arc<AtomicBool>) -> Self {
        Self { stop, multifd: None, heard: Mutex::new(Instant::now()) }
    }

    /// Whether the save was ended, or one of its connections has failed.
    pub(crate) fn is_over(&self) -> bool {
        self.is_stopped() || self.multifd.as_ref().is_some_and(|multifd| multifd.has_failed())
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    fn check(&self) -> io::Result<()> {
        if self.is_over() {
            return Err(io::Error::new(ErrorKind::ConnectionAborted, "the save was ended"));
        }
        Ok(())
    }

    fn hear(&self) {
        *self.heard.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    fn is_silent(&self) -> bool {
        if self.multifd.as_ref().is_some_and(|multifd| multifd.is_storing()) {
            self.hear();
        }
        self.heard.lock().unwrap_or_else(PoisonError::into_inner).elapsed() > SILENCE
    }
}

/// Accepts a connection; reads from it end after [`LOOK`].
pub(crate) fn accept(listener: &UnixListener, patience: &Patience) -> io::Result<UnixStream> {
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                stream.set_read_timeout(Some(LOOK))?;
                return Ok(stream);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if patience.is_over() {
                    return Err(io::Error::other("QEMU did not connect"));
                }
                thread::sleep(Duration::from_millis(2));
            }
            Err(error) => return Err(error),
        }
    }
}

/// A reader that fails once its [`Patience`] ends.
pub(crate) struct Patient<'a> {
    stream: &'a UnixStream,
    patience: &'a Patience,
}

impl<'a> Patient<'a> {
    pub(crate) fn new(stream: &'a UnixStream, patience: &'a Patience) -> Self {
        Self { stream, patience }
    }
}

impl Read for Patient<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.patience.check()?;
        self.patience.hear();
        loop {
            match self.stream.read(out) {
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) =>
                {
                    self.patience.check()?;
                    if self.patience.is_silent() {
                        let text = format!("QEMU sent nothing for {} s", SILENCE.as_secs());
                        return Err(io::Error::new(ErrorKind::TimedOut, text));
                    }
                }
                result => {
                    self.patience.hear();
                    return result;
                }
            }
        }
    }
}

/// Records the connections of a multifd migration, each on a thread of its own. The first outcome
/// is that of the save. `is_connected` is set with the first connection. The connections are read
/// until QEMU closes them, also those of a recording that has failed: see
/// [`stream_keeper`](crate::stream_keeper).
///
/// QEMU connects its main channel first. QEMU 7.2 writes to it before the other channels are there;
/// QEMU 9.0 and later wait for them.
pub(crate) fn receive(
    keeper: &StreamKeeper,
    channels: u8,
    multifd: Arc<Multifd<Writer>>,
    stop: Arc<AtomicBool>,
    is_connected: &AtomicBool,
    outcomes: &Sender<Outcome>,
) {
    let patience = Patience { multifd: Some(Arc::clone(&multifd)), ..Patience::new(stop) };
    let has_outcome = AtomicBool::new(false);
    let this = Receiving { multifd: &multifd, patience: &patience, has_outcome: &has_outcome };
    thread::scope(|scope| {
        let mut left = u16::from(channels) + 1;
        while left > 0 {
            let accepted = match keeper.accepted(LOOK) {
                Ok(None) => {
                    if patience.is_over() {
                        this.fail_without_main(outcomes);
                    }
                    if patience.is_stopped() {
                        break;
                    }
                    continue;
                }
                Ok(Some(stream)) => {
                    is_connected.store(true, Ordering::Release);
                    let outcomes = outcomes.clone();
                    let body = move || this.connection(stream, &outcomes);
                    let thread = thread::Builder::new().name("channel".into());
                    thread.spawn_scoped(scope, body).map(drop)
                }
                Err(error) => Err(io::Error::other(format!("{error:#}"))),
            };
            if let Err(error) = accepted {
                multifd.abandon(error);
                this.fail_without_main(outcomes);
                break;
            }
            left -= 1;
        }
    });
}

#[derive(Clone, Copy)]
struct Receiving<'a> {
    multifd: &'a Multifd<Writer>,
    patience: &'a Patience,
    /// Whether an outcome has been sent, or the main channel will send it.
    has_outcome: &'a AtomicBool,
}

impl Receiving<'_> {
    /// Sends the error of a recording that has failed, or is stopped, before its main channel came.
    fn fail_without_main(self, outcomes: &Sender<Outcome>) {
        if !self.has_outcome.swap(true, Ordering::AcqRel) {
            // Its error is the first one, such as that of a channel.
            let outcome = self.multifd.main(io::empty(), Ending::Described);
            let error = outcome.err().map_or_else(|| anyhow!("QEMU did not connect"), Into::into);
            let _ = outcomes.send(Err(error));
        }
    }

    /// Records one connection: the main channel, whose outcome is sent, or a multifd channel.
    fn connection(self, stream: UnixStream, outcomes: &Sender<Outcome>) {
        if let Err(error) = stream.set_read_timeout(Some(LOOK)) {
            return self.multifd.abandon(error);
        }
        let mut reader = Patient::new(&stream, self.patience);
        let mut first = [0; MAIN.len()];
        match reader.read_exact(&mut first) {
            Ok(()) if first == MAIN && !self.has_outcome.swap(true, Ordering::AcqRel) => {
                let mut lost = Lost(Some(outcomes));
                let outcome = self.multifd.main(first.chain(reader), Ending::Described);
                lost.0 = None;
                let outcome =
                    outcome.map_err(anyhow::Error::from).and_then(|(recorded, writer)| {
                        ensure!(recorded.return_path, "QEMU saves without a return path");
                        Ok((recorded, writer))
                    });
                match outcome {
                    Ok((recorded, writer)) => {
                        let _ = outcomes.send(Ok((recorded, writer, stream)));
                        return;
                    }
                    Err(error) => drop(outcomes.send(Err(error))),
                }
            }
            Ok(()) => self.multifd.channel(first.chain(reader)),
            Err(_) => self.multifd.channel(reader),
        }
        self.discard(&stream);
    }

    /// Reads the rest of a connection.
    fn discard(self, mut stream: &UnixStream) {
        let mut room = vec![0; 1 << 16];
        while !self.patience.is_stopped() {
            match stream.read(&mut room) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::Interrupted | ErrorKind::WouldBlock | ErrorKind::TimedOut
                    ) => {}
                Err(_) => return,
            }
        }
    }
}

/// Sends an outcome if the thread of the main channel panics.
struct Lost<'a>(Option<&'a Sender<Outcome>>);

impl Drop for Lost<'_> {
    fn drop(&mut self) {
        if let Some(outcomes) = self.0 {
            let _ = outcomes.send(Err(anyhow!("the thread that records has ended")));
        }
    }
}
