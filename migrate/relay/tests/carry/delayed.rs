//! Without a return path: the last acknowledgements come late, as behind an outage of the links.

use crate::bad_peers::lying_server;
use crate::harness::{bounded, keep_alive, Options, Receiving, Sending};
use crate::unconfirmed::without_return_path;
use session::{AckEntry, FrameType, Header, Link, HEADER_BYTES};
use std::io::{Read, Write};
use std::time::Duration;

/// The next frame of this kind.
fn next(link: &mut Link, kind: FrameType) -> Header {
    let mut head = [0; HEADER_BYTES];
    loop {
        link.read_exact(&mut head).unwrap();
        let header = Header::from_bytes(&head, 65536).unwrap();
        link.read_exact(&mut vec![0; header.payload_len as usize]).unwrap();
        if header.kind == kind {
            return header;
        }
    }
}

/// A free frame.
fn send(link: &mut Link, kind: FrameType, payload: &[u8]) {
    let header = Header::free(kind, u32::try_from(payload.len()).unwrap()).to_bytes();
    link.write_all(&[&header[..], payload].concat()).unwrap();
}

#[test]
fn a_destination_that_closes_before_its_last_ack_has_come_has_not_failed() {
    bounded(|| {
        let (address, server) = lying_server(|link| {
            keep_alive(Link::from(link.socket().try_clone().unwrap()));
            let last = next(link, FrameType::Eof);
            let eof = Header::free(FrameType::Eof, 0);
            link.write_all(&eof.to_bytes()).unwrap();
            // Longer than the source relay waits for ACKs that are under way.
            std::thread::sleep(Duration::from_secs(12));
            let mut ack = Vec::new();
            let (offset, hash) = (last.offset, last.hash);
            AckEntry { stream: last.stream, seq: last.seq + 1, offset, hash }.write(&mut ack);
            send(link, FrameType::Ack, &ack);
            next(link, FrameType::Finish);
            send(link, FrameType::Finish, b"{}");
        });
        let folder = Receiving::new();
        let options = Options { links: 1, codec: codec::Codec::Raw, ..Options::default() };
        let sending = Sending::new(&folder, address, options);
        let source = sending.connect();
        (&source).write_all(&without_return_path(5)).unwrap();
        drop(source);
        assert!(!sending.result().expect("the destination has all bytes").return_path);
        server.join().unwrap();
    });
}
