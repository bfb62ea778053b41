//! Reading the return path of the destination QEMU.

use super::shared::{Event, Shared};
use crate::qemu_socket::QemuSocket;
use crate::return_path::ReturnPath;
use crate::units::raw;
use session::FrameType;
use std::io::{ErrorKind, Read};
use std::sync::atomic::Ordering;

/// Sends the return path back, uncompressed and at once.
pub(super) fn run(shared: &Shared, stream: u16, mut socket: &QemuSocket) {
    let session = &shared.session;
    let mut sniffer = ReturnPath::default();
    if !session.send_bare(stream, FrameType::Open, 0) {
        return;
    }
    let mut bytes = [0; 16384];
    let unread = loop {
        let len = match socket.read(&mut bytes) {
            Ok(0) => {
                break !shared.confirmed.load(Ordering::Acquire) && socket.is_reset();
            }
            Ok(len) => len,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => {
                // The error when the other end closed with unread bytes in its queue.
                break error.kind() == ErrorKind::ConnectionReset;
            }
        };
        let bytes = &bytes[..len];
        let found = sniffer.feed(bytes);
        // Before anything that may wait for the source: a client that asks during an outage must
        // learn of it too (W28).
        if matches!(found, Some((0, _))) {
            shared.set_confirmed();
        }
        if sniffer.has_loaded() {
            shared.set_loaded();
        }
        // After the end of the session the bytes are dropped. They still show whether the VM runs
        // here.
        let Some(permit) = session.credits().permit(stream) else { continue };
        let Some(mut chunk) = session.plain().take_until(None, || session.failure().is_some())
        else {
            session.credits().give_back(permit);
            continue;
        };
        chunk[..len].copy_from_slice(bytes);
        let checksum = codec::checksum(bytes);
        let header = session.credits().issue_data(permit, len, checksum, 0);
        session.send(raw(header, chunk, len, checksum));
        if let Some((code, _)) = found {
            let _ = shared.events.send(Event::Shut(code));
        }
    };
    // If QEMU refused the stream, the session ends. An EOF sent before that would let a source
    // without a return path report success.
    shared.set_qemu_gone();
    let refused = unread && !shared.confirmed.load(Ordering::Acquire);
    if !refused {
        session.send_bare(stream, FrameType::Eof, 0);
    }
    let _ = shared.events.send(Event::QemuEof { unread });
}
