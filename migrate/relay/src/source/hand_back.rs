//! Writes the return path to the source QEMU, success last of all.

use super::shared::{Event, Shared, SourceStream};
use crate::inbox::{Arrived, Inbox};
use crate::return_path::ReturnPath;
use pipeline::Results;
use rustix::io::ioctl_fionread;
use session::{Credits, FrameType, SessionError};
use std::io::Write;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long the last acknowledgements may take before SHUT reaches the source (W22): they are
/// already under way, unless the links are lost at this moment.
const LAST_ACKS: Duration = Duration::from_secs(10);
/// The pause between two looks for unread bytes in QEMU's sockets.
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
    while let Some(Arrived { header, chunk, checksum, .. }) = inbox.next()? {
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
    let unread = || {
        let has_bytes = |socket| ioctl_fionread(socket).is_ok_and(|bytes| bytes > 0);
        // The readers of a session that has ended read no more.
        session.failure().is_none() && shared.streams().iter().any(|one| has_bytes(one.socket()))
    };
    if code == 0 && !all_delivered(session.credits(), unread, Instant::now() + patience) {
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

/// Waits until nothing is `unread` in QEMU's sockets and everything that was read is acknowledged;
/// false if it is not acknowledged at `deadline`. Unread bytes alone delay the success until
/// `deadline` and not longer: the destination has confirmed without them.
fn all_delivered(credits: &Credits, unread: impl Fn() -> bool, deadline: Instant) -> bool {
    loop {
        // Looked for first: a reader that takes bytes meanwhile has a permit, and then a frame.
        let unread = unread();
        if !credits.drained(deadline) {
            return false;
        }
        if !unread || Instant::now() >= deadline {
            return true;
        }
        std::thread::sleep(UNREAD);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use session::Grants;
    use std::cell::Cell;

    #[test]
    fn success_waits_for_bytes_that_were_not_read_yet() {
        let credits = Credits::new(Grants::default());
        let soon = || Instant::now() + Duration::from_secs(300);
        let looks = Cell::new(0);
        let unread = || {
            looks.set(looks.get() + 1);
            looks.get() < 5
        };
        assert!(all_delivered(&credits, unread, soon()));
        assert_eq!(looks.get(), 5);
        // Only until the deadline.
        assert!(all_delivered(&credits, || true, Instant::now()));
        // They are read, and not acknowledged.
        let _ = credits.issue(0, FrameType::Open, 0).unwrap();
        assert!(!all_delivered(&credits, || false, Instant::now()));
        credits.close();
        assert!(!all_delivered(&credits, || false, soon()));
    }
}
