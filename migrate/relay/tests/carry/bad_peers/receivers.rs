//! Receivers that lie.

use super::*;
use session::HEADER_BYTES;

/// A server that accepts one link and lies on it.
pub(crate) fn lying_server(
    lie: impl FnOnce(&mut Link) + Send + 'static,
) -> (SocketAddr, JoinHandle<()>) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let server = std::thread::spawn(move || {
        let mut link = Link::from(listener.accept().unwrap().0);
        let _: Hello = read_preamble(&mut link, "x", HELLO_TIMEOUT).unwrap();
        let welcome = Welcome {
            token: "0".repeat(32),
            chunk_bytes: 65536,
            stream_frames: 2,
            shared_frames: 4,
            ..Welcome::default()
        };
        write_preamble(&mut link, "x", &welcome).unwrap();
        link.socket().set_read_timeout(None).unwrap();
        // The source may be slow. A lie fits into the socket, and goes out in one piece.
        keep_alive(Link::from(link.socket().try_clone().unwrap()));
        lie(&mut link);
        let _ = link.read_to_end(&mut Vec::new());
    });
    (address, server)
}

/// The next frame's header, without that of a heartbeat: the source may have been idle.
fn next_header(link: &mut Link) -> Header {
    let mut head = [0; HEADER_BYTES];
    loop {
        link.read_exact(&mut head).unwrap();
        let header = Header::from_bytes(&head, 65536).unwrap();
        if header.kind != FrameType::Heartbeat {
            return header;
        }
    }
}

/// The source relay must notice before it reports success to the source QEMU.
#[test]
fn a_receiver_that_acknowledges_other_bytes_is_detected() {
    bounded(|| {
        let (address, server) = lying_server(|link| {
            // OPEN and the first DATA.
            next_header(link);
            let data = next_header(link);
            let mut ack = Vec::new();
            let offset = u64::from(data.plain_len);
            AckEntry { stream: 0, seq: 2, offset, hash: data.hash ^ 1 }.write(&mut ack);
            let header = Header::free(FrameType::Ack, u32::try_from(ack.len()).unwrap());
            link.write_all(&[&header.to_bytes()[..], &ack].concat()).unwrap();
        });
        let folder = Receiving::new();
        let options = Options { links: 1, ..Options::default() };
        let sending = Sending::new(&folder, address, options);
        let socket = sending.connect();
        (&socket).write_all(&single(20).main[..2000]).unwrap();
        assert_eq!(read_rest(&socket), b"");
        let error = sending.result().unwrap_err().to_string();
        assert!(error.contains("running hash"), "{error}");
        server.join().unwrap();
    });
}

/// The bytes of the return path are neither compressed nor packed, nor part of a history.
#[test]
fn a_return_path_in_another_form_ends_the_session() {
    bounded(|| {
        for (codec, flags, table) in [
            (Codec::Zstd, 0, 0),
            (Codec::Raw, FLAG_PACKED, 0),
            (Codec::Raw, FLAG_HISTORY, 0),
            (Codec::Raw, 0, 4),
        ] {
            let (address, server) = lying_server(move |link| {
                next_header(link);
                let plain = SHUT_OK;
                let checksum = codec::checksum(&plain);
                let mut hash = RunningHash::default();
                hash.add(checksum);
                let payload_len = if codec == Codec::Raw { 8 } else { 7 };
                let unit = UnitHeader { codec, plain_len: 8, payload_len, checksum }.to_bytes();
                let body = [&plain[..payload_len as usize], &[0; 4][..table]].concat();
                let data = Header {
                    flags,
                    seq: 1,
                    plain_len: 8,
                    hash: hash.value(),
                    table_len: u32::try_from(table).unwrap(),
                    ..Header::free(FrameType::Data, u32::try_from(unit.len() + body.len()).unwrap())
                };
                let open = Header::free(FrameType::Open, 0).to_bytes();
                let frames = [&open[..], &data.to_bytes(), &unit, &body].concat();
                link.write_all(&frames).unwrap();
            });
            let folder = Receiving::new();
            let sending =
                Sending::new(&folder, address, Options { links: 1, ..Options::default() });
            let socket = sending.connect();
            (&socket).write_all(&single(20).main[..2000]).unwrap();
            assert_eq!(read_rest(&socket), b"", "{codec} {flags} {table}");
            let error = sending.result().unwrap_err().to_string();
            assert!(error.contains("never compressed"), "{codec} {flags} {table}: {error}");
            server.join().unwrap();
        }
    });
}

#[test]
fn a_receiver_that_repeats_its_last_offer_of_pages_fills_no_memory() {
    bounded(|| {
        let (address, server) = lying_server(|link| {
            let frame = |offer: Vec<u8>| {
                let len = u32::try_from(offer.len()).unwrap();
                [&Header::free(FrameType::Seed, len).to_bytes()[..], &offer].concat()
            };
            let last = frame(delta::offer(0, &[7; 32], &[]));
            let finish = Header::free(FrameType::Finish, 0).to_bytes();
            let first = frame(delta::offer(0, &[7; 32], &[[1; 16]]));
            link.write_all(&[&first[..], &last.repeat(100), &finish].concat()).unwrap();
        });
        let folder = Receiving::new();
        let options = Options { links: 1, seed: 1 << 20, ..Options::default() };
        let sending = Sending::new(&folder, address, options);
        // The session ends behind the last of these frames.
        while !sending.has_failed() {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(sending.seed().0, 1);
        // They end with the relay.
        let told = sending.notices.iter().filter(|notice| notice.contains("has offered"));
        assert_eq!(told.count(), 1);
        server.join().unwrap();
    });
}

#[test]
fn a_receiver_that_finishes_early_ends_the_session() {
    bounded(|| {
        for resume in [Duration::ZERO, Duration::from_secs(20)] {
            let (address, server) = lying_server(|link| {
                next_header(link);
                let finish = Header::free(FrameType::Finish, 2).to_bytes();
                link.write_all(&[&finish[..], b"{}"].concat()).unwrap();
            });
            let folder = Receiving::new();
            let options = Options { links: 1, resume, ..Options::default() };
            let sending = Sending::new(&folder, address, options);
            let socket = sending.connect();
            (&socket).write_all(&single(20).main[..2000]).unwrap();
            assert_eq!(read_rest(&socket), b"", "the source VM goes on");
            let error = sending.result().unwrap_err().to_string();
            assert!(error.contains("is over, which it is not"), "{error}");
            server.join().unwrap();
        }
    });
}
