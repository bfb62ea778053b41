//! Peers that do not speak the protocol, and peers that lie (W2 to W15).

mod receivers;

pub(crate) use receivers::lying_server;

use crate::harness::{
    assert_same, bounded, destination_qemu, keep_alive, read_exactly, read_rest, source_qemu,
    Options, Reader, Receiving, Sending, DELTA_CACHE, PAGE, SHUT_OK, SILENCE, WATCHDOG,
};
use crate::identity::single;
use codec::{Codec, UnitHeader};
use session::{
    dial, read_preamble, write_preamble, AckEntry, FrameType, Grants, Header, Hello, Histories,
    Link, RunningHash, SessionError, Welcome, FLAG_BODIES, FLAG_HISTORY, FLAG_PACKED,
    HELLO_TIMEOUT,
};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread::JoinHandle;
use std::time::Duration;
use stream::synth::MainStream;

fn hello() -> Hello {
    Hello { links: 2, codecs: vec!["zstd".into()], ..Hello::of_one_link(4096).unwrap() }
}

fn refused(to: SocketAddr, change: impl FnOnce(&mut Hello)) -> String {
    let mut hello = hello();
    change(&mut hello);
    match dial(&to.to_string(), None, &hello) {
        Err(SessionError::Refused { reason, .. }) => reason,
        other => panic!("expected a refusal, got {:?}", other.map(|(_, welcome)| welcome)),
    }
}

/// A relay's answer to `bytes` before it closes.
fn answer(to: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut socket = TcpStream::connect(to).unwrap();
    socket.set_read_timeout(Some(WATCHDOG)).unwrap();
    socket.write_all(bytes).unwrap();
    let mut out = Vec::new();
    let mut piece = [0; 4096];
    loop {
        match socket.read(&mut piece) {
            Ok(0) => return out,
            Ok(n) => out.extend_from_slice(&piece[..n]),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return out,
            // With a timeout a read ends like this if this process was stopped meanwhile.
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => panic!("it does not close: {error}"),
        }
    }
}

/// A migration still succeeds.
fn still_serves(receiving: &Receiving) {
    let streams = single(200);
    let destination = destination_qemu(receiving.qemu(None), &streams, Reader::Prompt);
    let sending = Sending::new(receiving, receiving.address, Options::default());
    let source = source_qemu(sending.path.clone(), streams.clone(), 0);
    assert_same(&destination.join().unwrap().main, &streams.main, "main");
    source.join().unwrap();
    sending.result().unwrap();
    receiving.result().unwrap();
}

fn recorded_hello() -> Vec<u8> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut client = Link::from(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
    let (mut link, _) = listener.accept().unwrap();
    write_preamble(&mut client, "x", &hello()).unwrap();
    drop(client);
    let mut bytes = Vec::new();
    link.read_to_end(&mut bytes).unwrap();
    bytes
}

#[test]
fn strangers_get_no_answer_and_do_no_harm() {
    bounded(|| {
        let receiving = Receiving::new();
        let to = receiving.address;
        assert_eq!(answer(to, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"), b"");
        assert_eq!(answer(to, &[0; 4096]), b"");
        let good = recorded_hello();
        let mut giant = good.clone();
        giant[12..16].fill(0xff);
        assert_eq!(answer(to, &giant), b"");
        let mut flipped = good.clone();
        flipped[60] ^= 1;
        assert_eq!(answer(to, &flipped), b"");
        // Silence and half a hello: dropped when their time is up, while other peers are served.
        let waiting: Vec<_> = [&b""[..], &good[..30]]
            .into_iter()
            .map(|bytes| {
                let bytes = bytes.to_vec();
                std::thread::spawn(move || answer(to, &bytes))
            })
            .collect();
        still_serves(&receiving);
        for peer in waiting {
            assert_eq!(peer.join().unwrap(), b"");
        }
        // They are counted once their connections have been closed.
        let until = std::time::Instant::now() + WATCHDOG;
        while receiving.server.strangers() < 5 {
            assert!(std::time::Instant::now() < until, "{}", receiving.server.strangers());
            std::thread::sleep(Duration::from_millis(10));
        }
        // The notice of each follows.
        for words in ["does not speak", "limit 8192", "checksum"] {
            receiving.says(words);
        }
    });
}

#[test]
fn a_refused_hello_gets_the_reason() {
    bounded(|| {
        let receiving = Receiving::with(&[Some("a"), Some("b")], Grants::default());
        let to = receiving.address;
        let named = |hello: &mut Hello| hello.name = Some("a".into());
        let mut old = recorded_hello();
        old[9] = 9;
        let words = String::from_utf8_lossy(&answer(to, &old)).into_owned();
        assert!(words.contains("version 9"), "{words}");
        assert!(refused(to, |h| h.page_size = 65536).contains("65536"));
        assert!(refused(to, |h| h.name = Some("c".into())).contains("'c'"));
        assert!(refused(to, |_| {}).contains("a, b"));
        assert!(refused(to, |h| h.codecs = vec!["middle-out".into()]).contains("middle-out"));
        let link = |h: &mut Hello| {
            named(h);
            h.links = 65;
        };
        assert!(refused(to, link).contains("link 0 of 65"));
        let session = |h: &mut Hello| {
            named(h);
            h.session = "x".into();
        };
        assert!(refused(to, session).contains("32 hex digits"));

        let mut first = hello();
        named(&mut first);
        let (link, welcome) = dial(&to.to_string(), None, &first).unwrap();
        keep_alive(link);
        let busy = refused(to, named);
        let within = format!("free within {} s", 2 * SILENCE.as_secs());
        assert!(busy.contains("in progress") && busy.contains(&within), "{busy}");
        let stolen = |token: Option<&str>, link| {
            refused(to, |h| {
                h.session.clone_from(&first.session);
                h.token = token.map(str::to_string);
                h.link = link;
                named(h);
            })
        };
        assert!(stolen(Some(&"0".repeat(32)), 1).contains("not yours"));
        assert!(stolen(Some(""), 1).contains("not yours"));
        assert!(stolen(None, 1).contains("cannot open a session"));
        assert!(stolen(None, 0).contains("exists already"));
        assert!(stolen(Some(&welcome.token), 0).contains("there already"), "resume is off");
        assert!(stolen(Some(&welcome.token), 2).contains("does not exist"));
    });
}

#[test]
fn a_hundred_idle_connections_do_not_block_a_migration() {
    bounded(|| {
        let receiving = Receiving::new();
        let idle: Vec<_> =
            (0..100).map(|_| TcpStream::connect(receiving.address).unwrap()).collect();
        still_serves(&receiving);
        drop(idle);
    });
}

/// A peer that speaks the protocol by hand.
pub(crate) struct Liar {
    pub(crate) link: Link,
    pub(crate) hash: RunningHash,
}

impl Liar {
    pub(crate) fn new(to: SocketAddr, histories: Option<Histories>) -> Self {
        let mut hello = hello();
        (hello.links, hello.histories) = (1, histories);
        // More than the receiver grants.
        hello.delta_cache = 1 << 40;
        let (link, welcome) = dial(&to.to_string(), None, &hello).unwrap();
        assert_eq!((welcome.delta_cache, welcome.histories), (DELTA_CACHE, histories));
        Self { link, hash: RunningHash::default() }
    }

    pub(crate) fn bare(&mut self, kind: FrameType, stream: u16, seq: u64) {
        let header = Header { stream, seq, ..Header::free(kind, 0) };
        // The relay may close the link at any time; the test examines the relay's error.
        let _ = self.link.write_all(&header.to_bytes());
    }

    /// The first frame of stream 0; `flags` is the kind of stream.
    pub(crate) fn open(&mut self, flags: u8) {
        let header = Header { flags, ..Header::free(FrameType::Open, 0) };
        let _ = self.link.write_all(&header.to_bytes());
    }

    pub(crate) fn data(&mut self, stream: u16, seq: u64, offset: u64, plain: &[u8]) {
        self.data_with_table(stream, seq, offset, plain, &[]);
    }

    pub(crate) fn data_with_table(
        &mut self,
        stream: u16,
        seq: u64,
        offset: u64,
        plain: &[u8],
        table: &[u8],
    ) {
        let head = Header { stream, seq, offset, ..Header::free(FrameType::Data, 0) };
        self.frame(head, plain, table);
    }

    /// A DATA frame with these numbers, flags and channels.
    pub(crate) fn frame(&mut self, head: Header, plain: &[u8], table: &[u8]) {
        self.hash.add(codec::checksum(plain));
        self.hashed_frame(head, plain, table);
    }

    /// As [`Self::of_channel`], with differences. The stream is `plain`.
    pub(crate) fn difference(
        &mut self,
        stream: u16,
        (seq, offset): (u64, u64),
        (differences, plain): (&[u8], &[u8]),
        table: &[u8],
    ) {
        self.hash.add(codec::checksum(plain));
        let (flags, channels) = (FLAG_BODIES, 1);
        let free = Header::free(FrameType::Data, 0);
        let head = Header { flags, stream, seq, offset, channels, ..free };
        self.hashed_frame(head, differences, table);
    }

    fn hashed_frame(&mut self, head: Header, plain: &[u8], table: &[u8]) {
        let checksum = codec::checksum(plain);
        let length = |len: usize| u32::try_from(len).unwrap();
        let plain_len = length(plain.len());
        let unit = UnitHeader { codec: Codec::Raw, plain_len, payload_len: plain_len, checksum }
            .to_bytes();
        let header = Header {
            plain_len,
            hash: self.hash.value(),
            table_len: length(table.len()),
            payload_len: length(unit.len() + plain.len() + table.len()),
            ..head
        };
        let _ = self.link.write_all(&[&header.to_bytes()[..], &unit, plain, table].concat());
    }

    /// A frame of multifd stream `stream` whose table refers to the cache of all channels.
    pub(crate) fn of_channel(
        &mut self,
        stream: u16,
        (seq, offset): (u64, u64),
        plain: &[u8],
        table: &[u8],
    ) {
        let (flags, channels) = (FLAG_BODIES, 1);
        let free = Header::free(FrameType::Data, 0);
        self.frame(Header { flags, stream, seq, offset, channels, ..free }, plain, table);
    }

    /// The first frame of multifd stream 1.
    pub(crate) fn open_channel(&mut self) {
        let header = Header { stream: 1, flags: 1, ..Header::free(FrameType::Open, 0) };
        let _ = self.link.write_all(&header.to_bytes());
    }

    /// `plain` of stream 0 as a part of a history.
    pub(crate) fn part(&mut self, seq: u64, offset: u64, part: &[u8], plain: &[u8]) {
        let checksum = codec::checksum(plain);
        self.hash.add(checksum);
        let length = |len: usize| u32::try_from(len).unwrap();
        let (plain_len, payload_len) = (length(plain.len()), length(part.len()));
        let unit = UnitHeader { codec: Codec::Zstd, plain_len, payload_len, checksum }.to_bytes();
        let header = Header {
            seq,
            offset,
            plain_len,
            flags: FLAG_HISTORY,
            hash: self.hash.value(),
            ..Header::free(FrameType::Data, length(unit.len() + part.len()))
        };
        let _ = self.link.write_all(&[&header.to_bytes()[..], &unit, part].concat());
    }

    pub(crate) fn data_with_wrong_hash(&mut self) {
        self.hash.add(7);
        self.data(0, 1, 0, b"bytes");
    }

    fn free(&mut self, kind: FrameType, payload: &[u8]) {
        let header = Header::free(kind, u32::try_from(payload.len()).unwrap());
        let _ = self.link.write_all(&[&header.to_bytes()[..], payload].concat());
    }
}

/// Opens the main stream by hand and sends its first bytes.
pub(crate) fn send_main(link: Link, bytes: &[u8]) -> Link {
    let mut liar = Liar { link, hash: RunningHash::default() };
    liar.bare(FrameType::Open, 0, 0);
    liar.data(0, 1, 0, bytes);
    liar.link
}

/// The receiving relay's error at the end of a session with such a peer.
pub(crate) fn caught(histories: Option<Histories>, lie: impl FnOnce(&mut Liar)) -> String {
    let receiving = Receiving::new();
    let listener = receiving.qemu(None);
    let mut liar = Liar::new(receiving.address, histories);
    lie(&mut liar);
    let error = receiving.result().unwrap_err().to_string();
    // The relay closes its connections to QEMU, and the target is free again.
    drop(listener);
    std::fs::remove_file(receiving.folder.path().join("dst")).unwrap();
    still_serves(&receiving);
    error
}

#[test]
fn invalid_frames_end_their_session_alone() {
    bounded(|| {
        let error = caught(None, |liar| liar.link.write_all(&[0x55; 480]).unwrap());
        assert!(error.contains("checksum"), "{error}");
        let error = caught(None, |liar| liar.bare(FrameType::Open, 264, 0));
        assert!(error.contains("264"), "{error}");
        let error = caught(None, |liar| {
            let header = Header { payload_len: u32::MAX, ..Header::free(FrameType::Finish, 0) };
            liar.link.write_all(&header.to_bytes()).unwrap();
        });
        assert!(error.contains("4294967295"), "{error}");
        let error = caught(None, |liar| liar.data(0, 0, 0, b"QEVM"));
        assert!(error.contains("OPEN"), "{error}");
        let error = caught(None, |liar| {
            liar.bare(FrameType::Open, 0, 0);
            liar.bare(FrameType::Open, 0, 1);
        });
        assert!(error.contains("second OPEN"), "{error}");
        let error = caught(None, |liar| {
            liar.bare(FrameType::Open, 0, 0);
            liar.hash.add(7);
            liar.data(0, 1, 0, b"QEVM");
        });
        assert!(error.contains("running hash"), "{error}");
        let error = caught(None, |liar| liar.free(FrameType::Ack, &[0; 27]));
        assert!(error.contains("27 bytes"), "{error}");
        let error = caught(None, |liar| {
            let mut payload = Vec::new();
            AckEntry { stream: 3, seq: 5, offset: 0, hash: 0 }.write(&mut payload);
            liar.free(FrameType::Ack, &payload);
        });
        assert!(error.contains("acknowledged, but only 0"), "{error}");
    });
}

#[test]
fn invalid_delta_tables_end_their_session_alone() {
    bounded(|| {
        let page = [7; PAGE];
        let record = [&[0; 8][..], &page].concat();
        let caught_with = |tables: &[&[u8]]| {
            caught(None, |liar| {
                liar.bare(FrameType::Open, 0, 0);
                let (mut seq, mut offset) = (1, 0);
                for table in tables {
                    liar.data_with_table(0, seq, offset, &record, table);
                    seq += 1;
                    offset += record.len() as u64;
                }
            })
        };
        let error = caught_with(&[&[8, 1, 0]]);
        assert!(error.contains("breaks off"), "{error}");
        let error = caught_with(&[&[8, 2, 0, 0]]);
        assert!(error.contains("names 2 pages from byte 8"), "{error}");
        let slots = DELTA_CACHE / PAGE as u64;
        let error = caught_with(&[&[8, 1, 0x80, 0x80, 4, 0]]);
        assert!(error.contains(&format!("slots from {} of {slots}", 1 << 15)), "{error}");
        let error = caught_with(&[&[0; 2049]]);
        assert!(error.contains("2049 bytes, limit 2048"), "{error}");
        // A difference from a page that the peer did not send gives other bytes than it states.
        let error = caught_with(&[&[8, 1, 0, 0], &[8, 1, 0, 1]]);
        assert!(error.contains("running hash"), "{error}");
        let error = caught(None, |liar| {
            liar.open(1);
            liar.data_with_table(0, 1, 0, &record, &[8, 1, 0, 0]);
        });
        assert!(error.contains("may have none"), "{error}");
        // In postcopy no page is sent twice, and the cache is freed.
        let error = caught(None, |liar| {
            let mut main = MainStream::new(PAGE);
            main.file_header().packaged(&[7; 100]);
            let bytes = main.take();
            liar.bare(FrameType::Open, 0, 0);
            liar.data(0, 1, 0, &bytes);
            liar.data_with_table(0, 2, bytes.len() as u64, &record, &[8, 1, 0, 0]);
        });
        assert!(error.contains("or in postcopy"), "{error}");
        // Nor in the chunk that turns to postcopy.
        let error = caught(None, |liar| {
            let mut main = MainStream::new(PAGE);
            main.file_header().packaged(&page);
            let bytes = main.take();
            let gap = u8::try_from(bytes.len() - PAGE).unwrap();
            liar.bare(FrameType::Open, 0, 0);
            liar.data_with_table(0, 1, 0, &bytes, &[gap, 1, 0, 0]);
        });
        assert!(error.contains("or in postcopy"), "{error}");
        // Only one stream has the cache, whatever a peer opens.
        let error = caught(None, |liar| {
            for stream in 0..2 {
                liar.bare(FrameType::Open, stream, 0);
            }
            // In any order, as each stream has its own writer; with one cache either stream may be
            // the one refused.
            liar.data_with_table(0, 1, 0, &record, &[8, 1, 0, 0]);
            liar.hash = RunningHash::default();
            liar.data_with_table(1, 1, 0, &record, &[8, 1, 0, 0]);
        });
        assert!(error.contains("slots from 0 of 0"), "{error}");
    });
}

#[test]
fn invalid_delta_tables_of_channels_end_their_session_alone() {
    bounded(|| {
        let page = [7; PAGE];
        let table = [0, 1, 0, 0];
        // Channels share a cache; a main stream has one of its own.
        let error = caught(None, |liar| {
            liar.open(0);
            liar.of_channel(0, (1, 0), &page, &table);
        });
        assert!(error.contains("may have none"), "{error}");
        // One session has one cache. In any order, as each stream has its own writer.
        let error = caught(None, |liar| {
            liar.bare(FrameType::Open, 0, 0);
            liar.open_channel();
            liar.data_with_table(0, 1, 0, &page, &table);
            liar.hash = RunningHash::default();
            liar.of_channel(1, (1, 0), &page, &table);
        });
        let refused = ["may have none", "slots from 0 of 0"];
        assert!(refused.iter().any(|text| error.contains(text)), "{error}");
        // A difference from a page that no channel sent gives other bytes than the peer states.
        // QEMU gets its main connection first.
        let error = caught(None, |liar| {
            liar.open(0);
            liar.data(0, 1, 0, b"QEVM");
            liar.open_channel();
            liar.hash = RunningHash::default();
            let pages = [page, page].concat();
            liar.of_channel(1, (1, 0), &pages, &[0, 2, 0, 0]);
            let second = pages.len() as u64;
            liar.of_channel(1, (2, second), &pages, &[0, 2, 0, 1]);
        });
        assert!(error.contains("running hash"), "{error}");
        let error = caught(None, |liar| {
            liar.open(1);
            liar.of_channel(0, (1, 0), &page, &[0, 2, 0, 0]);
        });
        assert!(error.contains("names 2 pages from byte 0"), "{error}");
    });
}

#[test]
fn a_peer_that_exceeds_a_bound_is_refused() {
    bounded(|| {
        // Stream 0 never gets its first frame, so nothing can be delivered: 1024 frames may wait.
        let error = caught(None, |liar| (1..=1100).for_each(|seq| liar.data(0, seq, 0, b"x")));
        assert!(error.contains("1024 ahead of what was written"), "{error}");
        // Two such streams: the buffers run out first.
        let error = caught(None, |liar| {
            for seq in 1..=1000 {
                liar.data(0, seq, 0, b"x");
                liar.data(1, seq, 0, b"x");
            }
        });
        assert!(error.contains("beyond its credit"), "{error}");
    });
}

#[test]
fn a_peer_that_dies_in_the_middle_frees_its_target() {
    bounded(|| {
        let receiving = Receiving::new();
        let listener = receiving.qemu(None);
        let mut liar = Liar::new(receiving.address, None);
        liar.bare(FrameType::Open, 0, 0);
        liar.data(0, 1, 0, b"QEVM\0\0\0\x03");
        let (main, _) = listener.accept().unwrap();
        assert_eq!(read_exactly(&main, 8), b"QEVM\0\0\0\x03");
        drop(liar);
        assert_eq!(read_rest(&main), b"");
        let error = receiving.result().unwrap_err().to_string();
        assert!(error.contains("was lost"), "{error}");
        drop(listener);
        std::fs::remove_file(receiving.folder.path().join("dst")).unwrap();
        still_serves(&receiving);
    });
}

#[test]
fn a_peer_that_finishes_and_stays_connected_is_disconnected() {
    bounded(|| {
        let receiving = Receiving::new();
        let listener = receiving.qemu(None);
        let mut liar = Liar::new(receiving.address, None);
        liar.bare(FrameType::Open, 0, 0);
        liar.data(0, 1, 0, b"QEVM\0\0\0\x03");
        let (main, _) = listener.accept().unwrap();
        assert_eq!(read_exactly(&main, 8), b"QEVM\0\0\0\x03");
        (&main).write_all(&SHUT_OK).unwrap();
        // OPEN of the return path, some ACKs, and SHUT.
        liar.link.socket().set_read_timeout(None).unwrap();
        let mut head = [0; 48];
        while head[0] != 2 {
            liar.link.read_exact(&mut head).unwrap();
            let length = u32::from_be_bytes(head[4..8].try_into().unwrap());
            liar.link.read_exact(&mut vec![0; length as usize]).unwrap();
        }
        liar.free(FrameType::Finish, b"{}");
        let beating = keep_alive(liar.link);
        receiving.result().unwrap();
        beating.join().unwrap();
        drop(listener);
        std::fs::remove_file(receiving.folder.path().join("dst")).unwrap();
        still_serves(&receiving);
    });
}

#[test]
fn a_source_that_finishes_before_the_destination_has_confirmed_has_failed() {
    bounded(|| {
        let error = caught(None, |liar| liar.free(FrameType::Finish, b"{}"));
        assert!(error.contains("is over, which it is not"), "{error}");
        let error = caught(None, |liar| {
            liar.bare(FrameType::Open, 0, 0);
            liar.data(0, 1, 0, b"QEVM\0\0\0\x03");
            liar.free(FrameType::Finish, b"{}");
        });
        assert!(error.contains("is over, which it is not"), "{error}");
    });
}
