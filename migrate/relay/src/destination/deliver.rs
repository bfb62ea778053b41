//! Writes one stream to its connection of the destination QEMU: in order, checked, and by the rules
//! W18 to W20.

mod deltas;
mod main_stream;
mod write;

use super::seed::Filled;
use super::shared::{Event, Shared};
use crate::inbox::{Arrived, Inbox, Receipt};
use crate::packaged::PackagedEnd;
use crate::qemu_socket::QemuSocket;
use crate::stream_kind;
use crate::threads::drop_aside;
use pages::Slot;
use pipeline::Results;
use session::{FrameType, Header, SessionError};
use std::cell::Cell;
use std::collections::VecDeque;
use std::net::Shutdown;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use stream::{Kind, Token, Tokeniser};

/// Writes the frames of one stream until the session ends.
pub(super) fn run(shared: &Arc<Shared>, stream: u16, queue: &Results<Arrived>) {
    let mut inbox = Inbox::new(stream, queue);
    let mut delivery = Delivery {
        shared,
        stream,
        kind: None,
        tokeniser: Tokeniser::new(Kind::Other, shared.page_size),
        tokens: Vec::new(),
        socket: None,
        markers: 0,
        held: VecDeque::new(),
        seen: (0, 0),
        deltas: None,
        has_cache: false,
        has_seeded: false,
        packaged: PackagedEnd::default(),
        awaits_pong: false,
        greeted: Cell::new(0),
    };
    loop {
        let stopped = match inbox.next() {
            // Frames still queued at the end are dropped (W21).
            Ok(None) => return,
            Ok(Some(_)) if shared.has_ended() => return,
            Ok(Some(arrived)) => delivery.take(&mut inbox, arrived),
            Err(error) => Err(error.into()),
        };
        match stopped {
            Ok(()) => {}
            Err(Stop::Session(error)) => return shared.session.fail(delivery.for_peer(error)),
            Err(Stop::Qemu(error)) => {
                let _ = shared.events.send(Event::WriterGone { stream, is_channel: false, error });
                return;
            }
            Err(Stop::Over) => return,
        }
    }
}

enum Stop {
    /// The peer sent something wrong.
    Session(SessionError),
    /// QEMU does not accept the bytes.
    Qemu(String),
    /// The session has ended.
    Over,
}

impl From<SessionError> for Stop {
    fn from(error: SessionError) -> Self {
        Self::Session(error)
    }
}

/// Bytes that may hold the end-of-stream tag, waiting for STILL_OPEN (W20).
struct Held {
    header: Header,
    chunk: Slot,
    /// Offset of the part that waits.
    from: usize,
    /// Barrier markers in it: offset and number.
    markers: Vec<(usize, u64)>,
    receipt: Receipt,
}

/// The error for a delta table where W29 allows none.
fn no_table_here(header: &Header) -> SessionError {
    let detail = "a delta table on a stream that may have none, or in postcopy".into();
    SessionError::Sequence { stream: header.stream, seq: header.seq, detail }
}

struct Delivery<'a> {
    shared: &'a Arc<Shared>,
    stream: u16,
    kind: Option<Kind>,
    tokeniser: Tokeniser,
    tokens: Vec<Token>,
    socket: Option<Arc<QemuSocket>>,
    /// Barrier markers so far.
    markers: u64,
    held: VecDeque<Held>,
    /// Normal and duplicate pages already counted.
    seen: (u64, u64),
    /// Set at the first delta table.
    deltas: Option<delta::Receiver>,
    /// `deltas` has the cache of the session, or all that is left of it: none. On multifd streams
    /// that is the cache of all channels.
    has_cache: bool,
    /// Pages of the seed were put into the stream.
    has_seeded: bool,
    /// Main stream: fed once the packaged state of postcopy begins.
    packaged: PackagedEnd,
    /// Main stream: the source waits for the PONG of the packaged state (W20c).
    awaits_pong: bool,
    /// Bytes of the next write that went out when the connection was made.
    greeted: Cell<usize>,
}

impl Delivery<'_> {
    fn take(&mut self, inbox: &mut Inbox<'_>, arrived: Arrived) -> Result<(), Stop> {
        let header = arrived.header;
        let bad = |detail: &str| SessionError::Sequence {
            stream: header.stream,
            seq: header.seq,
            detail: detail.to_string(),
        };
        let seed = &self.shared.seed;
        let chunk = match &arrived.filling {
            // Only this stream waits for the disk of the seed.
            Some(filling) => Some(seed.wait(filling)),
            None => arrived.chunk,
        };
        match (header.kind, chunk) {
            (FrameType::Open, _) if self.kind.is_none() => {
                self.open(stream_kind::of_flags(header.flags))?;
            }
            (_, _) if self.kind.is_none() => {
                return Err(bad("the first frame of a stream is OPEN").into())
            }
            (FrameType::Data, Some(chunk)) => {
                return self.data(inbox, header, chunk?, arrived.checksum)
            }
            (FrameType::StillOpen, _) => self.release(inbox)?,
            (FrameType::Eof, _) => self.eof(inbox)?,
            _ => return Err(bad("a second OPEN, or DATA without a unit").into()),
        }
        self.written(inbox, inbox.receipt(&header));
        Ok(())
    }

    fn open(&mut self, kind: Kind) -> Result<(), Stop> {
        if kind == Kind::Other {
            let reason = format!("stream {} is none of a QEMU migration", self.stream);
            return Err(SessionError::Local { reason }.into());
        }
        self.kind = Some(kind);
        self.tokeniser = Tokeniser::new(kind, self.shared.page_size);
        match kind {
            Kind::Multifd => self.shared.barriers.handed(self.stream, 0),
            // QEMU 7.2 starts only once it has this connection, which may never carry a byte.
            Kind::Preempt => self.connect(&[])?,
            Kind::Main | Kind::Recovery if !self.shared.beginning.begin() => {
                return Err(Stop::Over)
            }
            Kind::Main | Kind::Recovery => {}
            Kind::Other => {}
        }
        Ok(())
    }

    /// The error that the peer gets. The hash over a page that the peer names and does not have
    /// would be all that W12 asks of it: the page would go to its VM.
    fn for_peer(&self, error: SessionError) -> SessionError {
        match error {
            SessionError::HashMismatch { stream, seq, .. } if self.has_seeded => {
                let reason = format!(
                    "stream {stream}: the running hash after frame {seq}, which may have pages of \
                     the seed, is another one than the source's: nothing of it was written. Start \
                     the migration again, or leave --seed out"
                );
                SessionError::Local { reason }
            }
            error => error,
        }
    }

    fn data(
        &mut self,
        inbox: &mut Inbox<'_>,
        header: Header,
        mut chunk: Slot,
        mut checksum: Option<u64>,
    ) -> Result<(), Stop> {
        if header.table_len > 0 {
            if checksum.is_none() {
                // A chunk that no codec thread had.
                chunk = match self.shared.seed.begin(&header, chunk)? {
                    Filled::Already(chunk) => chunk,
                    Filled::Later(filling) => self.shared.seed.wait(&filling)?,
                };
            }
            self.undo_deltas(&header, &mut chunk)?;
            checksum = None;
        }
        let bytes = &chunk[..header.plain_len as usize];
        let receipt = inbox.check(&header, bytes, checksum)?;
        self.connect(bytes)?;
        self.tokens.clear();
        let before = self.tokeniser.facts().fed;
        self.tokeniser.feed(bytes, &mut self.tokens);
        self.count(bytes.len());
        let facts = self.tokeniser.facts();
        self.shared.return_path.fetch_or(facts.return_path, Ordering::AcqRel);
        self.shared.postcopy.fetch_or(facts.postcopy_running, Ordering::AcqRel);
        if facts.postcopy_running {
            if header.table_len > 0 {
                return Err(no_table_here(&header).into());
            }
            drop_aside(self.deltas.take());
        }
        let (end, fed) = (facts.switch_end, facts.fed);
        if self.is_main() && end > 0 && self.packaged.feed(bytes, fed, end) {
            self.awaits_pong = true;
            self.shared.awaits_pong.store(true, Ordering::Release);
        }
        if !self.is_main() {
            self.write_channel(bytes)?;
            drop(chunk);
            self.written(inbox, receipt);
            return Ok(());
        }
        self.main_data(inbox, header, chunk, receipt, before)
    }

    /// Whether this connection starts the VM.
    fn is_main(&self) -> bool {
        self.kind.is_some_and(Kind::is_main)
    }

    fn eof(&mut self, inbox: &Inbox<'_>) -> Result<(), Stop> {
        if self.kind == Some(Kind::Preempt) {
            if let Some(socket) = &self.socket {
                // QEMU may have closed it first.
                let _ = socket.shutdown(Shutdown::Write);
            }
            return Ok(());
        }
        if self.kind == Some(Kind::Multifd) {
            // QEMU would wait in its barrier for a channel that closes early; the end of the main
            // channel ends all.
            self.shared.barriers.ended(self.stream);
            return Ok(());
        }
        if !self.shared.return_path.load(Ordering::Acquire) {
            self.release(inbox)?;
        }
        let _ = self.shared.events.send(Event::SourceEof);
        if let Some(socket) = &self.socket {
            let _ = socket.shutdown(Shutdown::Write);
        }
        Ok(())
    }

    fn count(&mut self, len: usize) {
        let facts = self.tokeniser.facts();
        let counters = &self.shared.counters;
        counters.plain.fetch_add(len as u64, Ordering::Relaxed);
        counters.ram_is(facts.ram);
        counters.normal.fetch_add(facts.normal - self.seen.0, Ordering::Relaxed);
        counters.duplicate.fetch_add(facts.duplicate - self.seen.1, Ordering::Relaxed);
        self.seen = (facts.normal, facts.duplicate);
    }

    fn written(&self, inbox: &Inbox<'_>, receipt: Receipt) {
        inbox.acknowledge(&self.shared.session, receipt);
    }
}
