//! Writes the return path to the source QEMU, success last of all.

use super::shared::{Event, Shared, SourceStream};
use crate::inbox::{Arrived, Inbox};
use crate::return_path::ReturnPath;
use pipeline::Results;
use rustix::io::ioctl_fionread;
use session::{FrameType, SessionError};
use std::io::Write;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long the last acknowledgements may take before SHUT reaches the source (W22): they are
/// already under way, unless the links are lost at this moment.
const LAST_ACKS: Duration = Duration::from_secs(10);
/// How long the reader of a socket gets between two looks whether it has read everything.
const UNREAD: Duration = Duration::from_millis(1);

/// Writes the return path to the source QEMU, in order, and SHUT only once all frames are
/// acknowledged (W22).
pub(super) fn run(shared: &Shared, stream: &SourceStream, queue: &Results<Arrived>) {
    if let Err(error) = hand_back(shared, stream, queue) {
        shared.session.fail(error);
    }
}

fn hand_back(
    shared: &Shared,
    stream: &SourceStream,
    queue: &Results<Arrived>,
) -> Result<(), SessionError> {
    let mut inbox = Inbox::new(stream.id, queue);
    let mut sniffer = ReturnPath::default();
    let mut shut_ok = false;
    while let Some(Arrived { header, chunk, checksum }) = inbox.next()? {
        let receipt = match chunk {
            Some(chunk) => {
                let slot = chunk?;
                let bytes = &slot[..header.plain_len as usize];
                let receipt = inbox.check(&header, bytes, checksum)?;
                let is_main = stream.kind.is_main();
                let from_start = sniffer.is_between_messages();
                let found = sniffer.feed(bytes);
                if is_main && sniffer.has_loaded() {
                    // Called before the PONG is written: from then on the source may be in postcopy
                    // for good.
                    shared.answer(stream, from_start && sniffer.is_between_messages());
                }
                match found {
                    Some((code, before)) => {
                        let (bytes, shut) = bytes.split_at(before);
                        shut_ok |= code == 0;
                        hand_shut(shared, stream, code, bytes, shut)?;
                    }
                    None => {
                        // The reader notices when the source has closed.
                        let written = { stream.socket() }.write_all(bytes).is_ok();
                        if is_main {
                            let between = written && sniffer.is_between_messages();
                            shared.between_messages.store(between, Ordering::Release);
                        }
                    }
                }
                receipt
            }
            None => inbox.receipt(&header),
        };
        inbox.acknowledge(&shared.session, receipt);
        if header.kind == FrameType::Eof {
            // Without SHUT(0) the source must see its socket close. Otherwise it waits for ever.
            if !shut_ok {
                let _ = shared.events.send(Event::DestinationEof);
            }
            return Ok(());
        }
    }
    Ok(())
}

/// Writes the bytes before SHUT, and SHUT itself: success only when the destination has
/// acknowledged every byte (W22).
fn hand_shut(
    shared: &Shared,
    stream: &SourceStream,
    code: u32,
    before: &[u8],
    shut: &[u8],
) -> Result<(), SessionError> {
    let session = &shared.session;
    let mut socket = stream.socket();
    let written = socket.write_all(before);
    // `before` is empty if SHUT came in pieces: then a part of it may have been written.
    if !before.is_empty() {
        shared.between_messages.store(written.is_ok(), Ordering::Release);
    }
    let patience = LAST_ACKS + session.resume_timeout();
    if code == 0 && !all_delivered(shared, Instant::now() + patience) {
        let reason = "the destination confirmed, but not every byte sent to it is acknowledged; \
                      the success is not passed on"
            .into();
        return Err(SessionError::Local { reason });
    }
    // The event of the write follows the write, and QEMU may close in between.
    shared.handing_shut.store(true, Ordering::Release);
    let written = written.and_then(|()| socket.write_all(shut));
    let handed = if written.is_ok() { Event::Shut(code) } else { Event::ShutRefused(code) };
    let _ = shared.events.send(handed);
    Ok(())
}

/// Waits until QEMU's sockets hold no unread bytes and everything that was read from them is
/// acknowledged; false when that is not acknowledged at `deadline`. The destination has confirmed,
/// so bytes that QEMU still writes then, for whatever reason, hold nothing up for longer.
fn all_delivered(shared: &Shared, deadline: Instant) -> bool {
    loop {
        // Looked at first: what a reader takes in between has a permit, and then is a frame.
        let unread = shared.streams().iter().any(|stream| {
            let bytes = ioctl_fionread(stream.socket());
            bytes.is_ok_and(|bytes| bytes > 0)
        });
        if !shared.session.credits().drained(deadline) {
            return false;
        }
        if !unread || Instant::now() >= deadline {
            return true;
        }
        std::thread::sleep(UNREAD);
    }
}
