//! Handing the return path back to the source QEMU, success last of all.

use crate::decode::Arrived;
use crate::return_path::ReturnPath;
use crate::source::{Event, Shared, SourceStream};
use pipeline::{Popped, Reorder, Results};
use session::{FrameType, RunningHash, SessionError};
use std::io::Write;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long the last acknowledgements may take before SHUT reaches the source (W22): they are
/// already on their way, unless the links are lost just now.
const LAST_ACKS: Duration = Duration::from_secs(10);

/// Writes the return path to the source QEMU, in order, and SHUT only when everything sent is
/// acknowledged (W22).
pub(crate) fn run(shared: &Shared, stream: &SourceStream, results: &Results<Arrived>) {
    let session = &shared.session;
    let mut reorder = Reorder::new(2048);
    let mut hash = RunningHash::default();
    let mut sniffer = ReturnPath::default();
    let mut shut_ok = false;
    loop {
        let Popped::Item(arrived) = results.pop_until(None) else { return };
        let seq = arrived.header.seq;
        if let Err(error) = reorder.insert(seq, arrived) {
            return session.fail(SessionError::Sequence {
                stream: stream.id,
                seq,
                detail: error.to_string(),
            });
        }
        while let Some(Arrived { header, chunk }) = reorder.pop() {
            if let Some(chunk) = chunk {
                let slot = match chunk {
                    Ok(slot) => slot,
                    Err(error) => return session.fail(error),
                };
                let bytes = &slot[..header.plain_len as usize];
                hash.add(codec::checksum(bytes));
                if hash.value() != header.hash {
                    let (ours, theirs) = (hash.value(), header.hash);
                    let error = SessionError::HashMismatch {
                        stream: stream.id,
                        seq: header.seq,
                        ours,
                        theirs,
                    };
                    return session.fail(error);
                }
                let found = sniffer.feed(bytes);
                let before = found.map_or(bytes.len(), |(_, before)| before);
                let mut written = (&stream.socket).write_all(&bytes[..before]);
                if let Some((code, _)) = found {
                    let patience = LAST_ACKS + session.resume_timeout();
                    if code == 0 && !session.credits().drained(Instant::now() + patience) {
                        let reason = "the destination confirmed, but not every byte sent to it is acknowledged; \
                                      the success is not passed on"
                            .into();
                        return session.fail(SessionError::Local { reason });
                    }
                    shared.handing_shut.store(code == 0, Ordering::Release);
                    written = written.and_then(|()| (&stream.socket).write_all(&bytes[before..]));
                    shut_ok |= code == 0;
                    let handed =
                        if written.is_ok() { Event::Shut(code) } else { Event::ShutRefused };
                    let _ = shared.events.send(handed);
                }
                // A source that is gone is noticed by its reader.
                let _ = written;
            }
            session.delivered(
                stream.id,
                header.seq + 1,
                header.offset + u64::from(header.plain_len),
                hash.value(),
            );
            if header.kind == FrameType::Eof {
                // Without SHUT(0) the source must see its socket close, or it waits for ever.
                if !shut_ok {
                    let _ = shared.events.send(Event::DestinationEof);
                }
                return;
            }
        }
    }
}
