//! The reading thread of a link: it checks frames and passes them to the sink.

use crate::error::SessionError;
use crate::frame::{AckEntry, Header, FLAG_PACKED, HEADER_BYTES};
use crate::frame_type::FrameType;
use crate::links::LinkState;
use crate::preamble::would_block;
use crate::session::ending::AbortNote;
use crate::session::Session;
use crate::sink::Incoming;
use crate::transport::LinkReader;
use codec::{Codec, UnitHeader};
use pages::Slot;
use std::io::ErrorKind;
use std::net::Shutdown;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The most of a silence that one wait for bytes counts, which ends after half a second. A longer
/// wait shows that this host stood still: the peer's bytes, if the peer stood still too, may come
/// only now.
const MOST_OF_A_WAIT: Duration = Duration::from_secs(1);
/// Bytes of a duplicate frame to read at once.
const SCRATCH: usize = 16 << 10;

/// Reads frames until the link or the session ends.
pub(crate) fn run(session: &Session, state: &Arc<LinkState>, mut link: LinkReader) {
    let result = read_frames(session, state, &mut link);
    match result {
        // No error: both ends are closing.
        Ok(()) | Err(SessionError::LinkLost { .. })
            if session.may_end() && !session.has_failed() =>
        {
            // The writer may still have frames to send.
            if session.links.end(state) {
                session.outbound.close();
            }
        }
        Ok(()) => session.lose(state, session.link_lost("closed by the other end")),
        Err(error) if error.is_of_link() => session.lose(state, error),
        Err(error) => session.fail(error),
    }
    let _ = link.socket.shutdown(Shutdown::Read);
}

fn read_frames(
    session: &Session,
    state: &LinkState,
    link: &mut LinkReader,
) -> Result<(), SessionError> {
    let chunk_bytes = session.grants().chunk_bytes;
    let mut raw = [0; HEADER_BYTES];
    let mut free = Vec::new();
    // Every new link delivers a hello and an ACK, which show no progress.
    let (mut progress, mut noted) = (false, false);
    loop {
        if progress && !noted {
            noted = true;
            session.note_progress(state);
        }
        if !fill(session, link, &mut raw, true)? {
            return Ok(());
        }
        let header = Header::from_bytes(&raw, chunk_bytes)?;
        let length = header.payload_len as usize;
        if header.kind.is_sequenced() {
            if !session.inbound.expects(&header)? {
                skip(session, link, length)?;
                continue;
            }
            let unit = match header.kind {
                FrameType::Data => Some(read_unit(session, link, &header)?),
                _ => None,
            };
            // Recorded only when complete: a link lost in the middle of a frame must not prevent
            // another from delivering that frame.
            if session.inbound.arrived(&header) {
                progress = true;
                // After the end the frames are only read: a link that is closed with unread bytes
                // may lose the ABORT.
                if !session.has_failed() {
                    session.sink.frame(Incoming { header, unit })?;
                }
            }
            continue;
        }
        free.resize(length, 0);
        fill(session, link, &mut free, false)?;
        match header.kind {
            FrameType::Ack => {
                let now = Instant::now();
                for entry in AckEntry::read_all(&free)? {
                    session.credits().acknowledge(&entry, now)?;
                    progress |= session.outbound.unacked.release(entry.stream, entry.seq);
                }
            }
            FrameType::Abort => {
                let note = serde_json::from_slice(&free).unwrap_or(AbortNote {
                    reason: "it gave no reason that can be read".into(),
                    committed: true,
                    asks: true,
                });
                let peer = session.peer.clone();
                return Err(SessionError::Aborted {
                    peer,
                    reason: note.reason,
                    committed: note.committed,
                    asks: note.asks,
                });
            }
            FrameType::Finish => {
                if session.outbound.finish().is_none() && !session.sink.answers_finish() {
                    return Err(SessionError::EarlyFinish { peer: session.peer.clone() });
                }
                // Each new link repeats it (W27). The sink may hold what it gets for a while, and
                // must not hold any number.
                if session.note_peer_finished() {
                    session.sink.finish(&free);
                }
            }
            FrameType::Heartbeat => progress = true,
            FrameType::Seed => session.sink.seed(&free)?,
            _ => {}
        }
    }
}

/// Reads and drops the payload of a frame that has arrived over another link.
fn skip(session: &Session, link: &mut LinkReader, mut length: usize) -> Result<(), SessionError> {
    let mut scratch = [0; SCRATCH];
    while length > 0 {
        let now = length.min(SCRATCH);
        fill(session, link, &mut scratch[..now], false)?;
        length -= now;
    }
    Ok(())
}

/// Reads the unit of a DATA frame into a buffer: a plain one if the payload is the chunk itself.
fn read_unit(
    session: &Session,
    link: &mut LinkReader,
    header: &Header,
) -> Result<(UnitHeader, Slot), SessionError> {
    let mut raw = [0; UnitHeader::LEN];
    fill(session, link, &mut raw, false)?;
    let bad =
        |detail: String| SessionError::Unit { stream: header.stream, seq: header.seq, detail };
    let unit = UnitHeader::from_bytes(&raw).map_err(|error| bad(error.to_string()))?;
    let length = unit.payload_len as usize + header.table_len as usize;
    if length + UnitHeader::LEN != header.payload_len as usize
        || length > session.grants().chunk_bytes
    {
        return Err(bad(format!(
            "its unit states {} bytes, the frame {} and a table of {}",
            unit.payload_len, header.payload_len, header.table_len
        )));
    }
    let is_chunk = header.flags & FLAG_PACKED == 0;
    if is_chunk && unit.plain_len != header.plain_len {
        return Err(bad(format!(
            "its unit states {} plain bytes, the frame {}",
            unit.plain_len, header.plain_len
        )));
    }
    let mut slot = if is_chunk && unit.codec == Codec::Raw {
        // An honest peer does not exceed its credit, so a buffer is always free (W13).
        session.plain().take().ok_or(SessionError::Credit { stream: header.stream })?
    } else {
        let closed = || session.link_lost("the session has ended");
        session.payload().take_until(None, || session.has_failed()).ok_or_else(closed)?
    };
    fill(session, link, &mut slot[..length], false)?;
    Ok((unit, slot))
}

/// Fills `out`. False when the peer closed before the first byte and `may_end` allows it.
fn fill(
    session: &Session,
    link: &mut LinkReader,
    out: &mut [u8],
    may_end: bool,
) -> Result<bool, SessionError> {
    let before = link.wire();
    let mut done = 0;
    let mut silent = Duration::ZERO;
    while done < out.len() {
        let begun = Instant::now();
        match link.read(&mut out[done..]) {
            Ok(0) if done == 0 && may_end => return Ok(false),
            Ok(0) => return Err(session.link_lost("cut inside a frame")),
            Ok(n) => {
                done += n;
                silent = Duration::ZERO;
                session.links.note_received(Instant::now());
            }
            Err(error) if would_block(&error) => {
                if session.has_failed() {
                    return Err(session.link_lost("the session has ended"));
                }
                silent += begun.elapsed().min(MOST_OF_A_WAIT);
                if error.kind() == ErrorKind::Interrupted {
                    silent = Duration::ZERO;
                }
                if silent >= session.silence() {
                    return Err(SessionError::Silent {
                        peer: session.peer.clone(),
                        seconds: session.silence().as_secs(),
                    });
                }
            }
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                return Err(session.link_lost("cut off without a closing message"));
            }
            Err(error) => return Err(session.link_lost(&error.to_string())),
        }
    }
    session.bytes_in.fetch_add(link.wire() - before, Ordering::Relaxed);
    Ok(true)
}
