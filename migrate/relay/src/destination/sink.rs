//! The calls of the session into a destination relay.

use super::decode::DecodeJob;
use super::deliver;
use super::disk;
use super::shared::{Event, Shared};
use crate::inbox::{self, Arrived};
use crate::threads::spawn;
use codec::{Codec, PartHeader};
use pipeline::Results;
use session::{Incoming, SessionError, Sink, FLAG_HISTORY, FLAG_PACKED};
use std::sync::atomic::{fence, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, OnceLock, Weak};

/// The session needs the sink before the [`Shared`] exists, which refers to the session.
pub(super) struct DestinationSink {
    shared: OnceLock<Weak<Shared>>,
    events: Sender<Event>,
    notice: Notice,
}

/// Receives messages for the user.
pub(crate) type Notice = Box<dyn Fn(&str) + Send + Sync>;

impl DestinationSink {
    pub(super) fn new(events: Sender<Event>, notice: Notice) -> Arc<Self> {
        Arc::new(Self { shared: OnceLock::new(), events, notice })
    }

    /// Call this before the first link is added.
    pub(super) fn set(&self, shared: &Arc<Shared>) {
        let _ = self.shared.set(Arc::downgrade(shared));
    }

    fn send(&self, event: Event) {
        let _ = self.events.send(event);
    }
}

impl Sink for DestinationSink {
    fn frame(&self, frame: Incoming) -> Result<(), SessionError> {
        let Some(shared) = self.shared.get().and_then(Weak::upgrade) else { return Ok(()) };
        take(&shared, frame)
    }

    fn finish(&self, report: &[u8]) {
        self.send(Event::Finished(report.to_vec()));
    }

    fn answers_finish(&self) -> bool {
        true
    }

    fn closed(&self, error: &Arc<SessionError>) {
        if let Some(shared) = self.shared.get().and_then(Weak::upgrade) {
            shared.wake();
        }
        self.send(Event::Closed(error.clone()));
    }

    fn notice(&self, text: &str) {
        (self.notice)(text);
    }
}

/// Passes a frame to its stream, through the codec threads if its unit is encoded.
fn take(shared: &Arc<Shared>, frame: Incoming) -> Result<(), SessionError> {
    let header = frame.header;
    let results = stream(shared, header.stream)?;
    let Some((unit, payload)) = frame.unit else {
        let _ = results.push(Arrived { header, chunk: None, filling: None, checksum: None });
        return Ok(());
    };
    let history = if header.flags & FLAG_HISTORY == 0 {
        None
    } else {
        let bytes = &payload[..unit.payload_len as usize];
        let part = Some(PartHeader::from_bytes(bytes)).filter(|_| unit.codec == Codec::Zstd);
        let part = part.unwrap_or_else(|| Err(format!("a history has no part of {}", unit.codec)));
        let (stream, seq) = (header.stream, header.seq);
        let part = part.map_err(|detail| SessionError::Unit { stream, seq, detail })?;
        Some((part, shared.histories.clone()))
    };
    if unit.codec == Codec::Raw && header.flags & FLAG_PACKED == 0 {
        let _ = results.push(Arrived {
            header,
            chunk: Some(Ok(payload)),
            filling: None,
            checksum: None,
        });
        return Ok(());
    }
    // An honest peer does not exceed its credit, so a buffer is always free (W13).
    let chunk =
        shared.session.plain().take().ok_or(SessionError::Credit { stream: header.stream })?;
    // This waits for the codec threads, which wait for no stream.
    let seed = shared.seed.clone();
    let job = DecodeJob { header, unit, payload, chunk, history, seed };
    shared.pool.submit_wait(job, &results).map_err(|_| {
        let reason = "the codec threads of this receiver have ended".into();
        SessionError::Local { reason }
    })
}

/// The stream's inbox. The stream's writer starts with its first frame, whichever frame that is.
fn stream(shared: &Arc<Shared>, id: u16) -> Result<Arc<Results<Arrived>>, SessionError> {
    let cell = &shared.streams[usize::from(id)];
    if let Some(results) = cell.get() {
        return Ok(results.clone());
    }
    let fresh = inbox::queue();
    let results = cell.get_or_init(|| fresh.clone());
    if Arc::ptr_eq(results, &fresh) {
        // `Destination::run` sets `over` first and then closes the queues, with a fence in between.
        // So either it finds this queue, or `over` shows here. An open queue would keep its thread
        // for ever.
        fence(Ordering::SeqCst);
        if shared.over.load(Ordering::Relaxed) {
            fresh.close();
        }
        let (shared, inbox) = (shared.clone(), fresh.clone());
        let run = if shared.is_disk { disk::run } else { deliver::run };
        spawn("deliver", move || run(&shared, id, &inbox))
            .map_err(|error| SessionError::Local { reason: error.to_string() })?;
    }
    Ok(results.clone())
}
