//! W35 to W37: the connections of NBD clients, between a made client and a made server.

use crate::bad_peers::Liar;
use crate::cutter::{Cutter, Plan, Way};
use crate::harness::{
    assert_same, bounded, bounded_by, config, pages, read_exactly, read_rest, readable, Noise,
    Options, Receiving, Sending, A_WHILE, WATCHDOG,
};
use crate::identity::single;
use crate::resume::{MANY, RESUME};
use relay::{DiskError, QemuSocket, Source, SourceEnd};
use session::{FrameType, Grants, Session};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Small chunks, so that there are many messages.
const GRANTS: Grants = Grants { chunk_bytes: 65536, stream_frames: 4, shared_frames: 8 };
/// The kind of stream of an NBD connection.
const NBD: u8 = 5;
const GREETING: &[u8] = b"NBDMAGICIHAVEOPT\0\x03";

/// An NBD connection: the client's end, and the relay that carries it.
struct Disk {
    client: UnixStream,
    session: Arc<Session>,
    thread: JoinHandle<Result<SourceEnd, DiskError>>,
}

impl Disk {
    fn begin(peer: SocketAddr, options: Options) -> Self {
        let source = Source::connect(&config(peer, options)).unwrap();
        let (client, theirs) = UnixStream::pair().unwrap();
        client.set_read_timeout(Some(WATCHDOG)).unwrap();
        let session = source.session().clone();
        let carry =
            move || source.carry_disk(theirs.into(), |_| (), || b"{\"end\":\"source\"}".to_vec());
        Self { client, session, thread: std::thread::spawn(carry) }
    }

    fn ends(self) -> Result<SourceEnd, DiskError> {
        self.thread.join().unwrap()
    }

    /// The error of a connection that nobody has touched, and the connection.
    fn refused(self) -> (String, QemuSocket, UnixStream) {
        let Self { client, thread, .. } = self;
        let DiskError { error, untouched } = thread.join().unwrap().unwrap_err();
        (error.to_string(), untouched.expect("it may go another way"), client)
    }
}

fn options(links: u16, resume: Duration) -> Options {
    Options { links, resume, ..Options::default() }
}

/// A server that greets, then sends `answers` while it reads everything.
fn server(listener: UnixListener, answers: Vec<u8>) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        socket.write_all(GREETING).unwrap();
        let mut answering = socket.try_clone().unwrap();
        let answer = std::thread::spawn(move || answering.write_all(&answers).unwrap());
        let got = read_rest(&socket);
        answer.join().unwrap();
        got
    })
}

/// Both directions of a connection over a network that is cut; returns how often.
fn survives(requests: &[u8], answers: &[u8], links: u16, plan: Plan) -> usize {
    let receiving = Receiving::of_disks(GRANTS, RESUME);
    let cutter = Cutter::new(receiving.address, Some(plan));
    let server = server(receiving.qemu(None), answers.into());
    let disk = Disk::begin(cutter.address, options(links, RESUME));
    assert_eq!(read_exactly(&disk.client, GREETING.len()), GREETING);
    let (mut writing, requests) = (disk.client.try_clone().unwrap(), requests.to_vec());
    let writer = std::thread::spawn(move || {
        writing.write_all(&requests).unwrap();
        writing.shutdown(Shutdown::Write).unwrap();
        requests
    });
    assert_same(&read_rest(&disk.client), answers, &format!("answers, {plan:?}"));
    let requests = writer.join().unwrap();
    assert_same(&server.join().unwrap(), &requests, &format!("requests, {plan:?}"));
    disk.ends().unwrap_or_else(|error| panic!("source, {plan:?}: {error:?}"));
    let end = receiving.result().unwrap_or_else(|error| panic!("destination, {plan:?}: {error}"));
    assert_eq!(end.peer_report, b"{\"end\":\"source\"}", "{plan:?}");
    cutter.cuts()
}

#[test]
fn both_directions_survive_a_cut_at_every_message() {
    bounded_by(MANY, || {
        let (requests, answers) = (pages(120, 1).concat(), Noise(3).bytes(200_000));
        for (way, inside, links, all) in [
            (Way::Forth, 0, 1, true),
            (Way::Back, 0, 1, true),
            (Way::Forth, 100, 3, false),
            (Way::Back, 30, 3, true),
        ] {
            let mut after = 0;
            let plan = |after| Plan { way, after, inside, all, times: 1 };
            while survives(&requests, &answers, links, plan(after)) > 0 {
                after += 1;
            }
            assert!(after > 5, "only {after} messages went {way:?}");
        }
    });
}

#[test]
fn an_answer_does_not_wait_for_more_bytes_and_comes_through_an_outage() {
    bounded(|| {
        let receiving = Receiving::of_disks(GRANTS, RESUME);
        let cutter = Cutter::new(receiving.address, None);
        let listener = receiving.qemu(None);
        let disk = Disk::begin(cutter.address, options(2, RESUME));
        let (mut there, _) = listener.accept().unwrap();
        there.write_all(GREETING).unwrap();
        assert_eq!(read_exactly(&disk.client, GREETING.len()), GREETING);
        for round in 0..20_u8 {
            if round == 10 {
                cutter.hold();
            }
            { &disk.client }.write_all(&[round; 28]).unwrap();
            if round == 10 {
                assert!(!readable(&there, A_WHILE), "the link is cut");
                cutter.release();
            }
            assert_eq!(read_exactly(&there, 28), [round; 28]);
            there.write_all(&[round; 16]).unwrap();
            assert_eq!(read_exactly(&disk.client, 16), [round; 16]);
        }
        drop(there);
        assert_eq!(read_rest(&disk.client), b"");
        drop(disk.client.shutdown(Shutdown::Both));
        disk.ends().unwrap();
        receiving.result().unwrap();
    });
}

#[test]
fn blocks_of_zeros_cost_next_to_nothing_and_pages_what_they_compress_to() {
    bounded(|| {
        let sent = |bytes: Vec<u8>| {
            let receiving = Receiving::of_disks(Grants::default(), Duration::ZERO);
            let server = server(receiving.qemu(None), Vec::new());
            let disk = Disk::begin(receiving.address, options(2, Duration::ZERO));
            // A client that writes before the server has spoken is no NBD client.
            assert_eq!(read_exactly(&disk.client, GREETING.len()), GREETING);
            { &disk.client }.write_all(&bytes).unwrap();
            disk.client.shutdown(Shutdown::Write).unwrap();
            assert_same(&server.join().unwrap(), &bytes, "requests");
            assert_eq!(read_rest(&disk.client), b"");
            let session = disk.session.clone();
            disk.ends().unwrap();
            session.bytes_out.load(Ordering::Relaxed)
        };
        let zeros = 32 << 20;
        let cost = sent(vec![0; zeros]);
        assert!(cost * 500 < zeros as u64, "{cost} bytes for {zeros} zeros");
        let mixed = pages(2000, 5).concat();
        let cost = sent(mixed.clone());
        assert!(cost * 10 < mixed.len() as u64 * 7, "{cost} bytes for {}", mixed.len());
    });
}

#[test]
fn a_connection_to_anything_but_an_nbd_server_is_given_back_untouched() {
    bounded(|| {
        for (says, words) in [
            (&b"SSH-2.0-OpenSSH"[..], "listens no NBD server: it begins with [53, 53, 48"),
            (b"NBD", "has closed the connection"),
            (b"", "has closed the connection"),
        ] {
            let receiving = Receiving::of_disks(GRANTS, RESUME);
            let listener = receiving.qemu(None);
            let disk = Disk::begin(receiving.address, options(1, RESUME));
            let (mut there, _) = listener.accept().unwrap();
            there.write_all(says).unwrap();
            there.shutdown(Shutdown::Write).unwrap();
            let (error, ours, client) = disk.refused();
            assert!(error.contains(words), "{error}");
            assert_eq!(read_rest(&there), b"", "nothing has reached the server");
            still_open(&ours, &client);
        }
        // Nobody listens.
        let receiving = Receiving::of_disks(GRANTS, RESUME);
        let (error, ours, client) = Disk::begin(receiving.address, options(1, RESUME)).refused();
        assert!(error.contains("cannot connect"), "{error}");
        still_open(&ours, &client);
    });
}

/// Bytes go both ways.
fn still_open(mut ours: &QemuSocket, mut client: &UnixStream) {
    client.write_all(b"forth").unwrap();
    let mut got = [0; 5];
    ours.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"forth");
    ours.write_all(b"back").unwrap();
    assert_eq!(read_exactly(client, 4), b"back");
}

#[test]
fn a_client_that_speaks_first_is_no_nbd_client() {
    bounded(|| {
        let receiving = Receiving::of_disks(GRANTS, RESUME);
        let listener = receiving.qemu(None);
        let disk = Disk::begin(receiving.address, options(1, RESUME));
        let (there, _) = listener.accept().unwrap();
        { &disk.client }.write_all(b"QEVM\0\0\0\x03").unwrap();
        let (error, ours, _client) = disk.refused();
        assert!(error.contains("no NBD client"), "{error}");
        let mut first = [0; 8];
        { &ours }.read_exact(&mut first).unwrap();
        assert_eq!((&first, read_rest(&there)), (b"QEVM\0\0\0\x03", Vec::new()));
    });
}

#[test]
fn the_end_of_either_process_ends_the_other_s_connection() {
    bounded(|| {
        for client_goes in [true, false] {
            let receiving = Receiving::of_disks(GRANTS, RESUME);
            let listener = receiving.qemu(None);
            let disk = Disk::begin(receiving.address, options(2, RESUME));
            let (mut there, _) = listener.accept().unwrap();
            there.write_all(GREETING).unwrap();
            assert_eq!(read_exactly(&disk.client, GREETING.len()), GREETING);
            let Disk { client, thread, .. } = disk;
            if client_goes {
                drop(client);
                assert_eq!(read_rest(&there), b"");
                drop(there);
            } else {
                drop(there);
                assert_eq!(read_rest(&client), b"");
                drop(client);
            }
            thread.join().unwrap().unwrap();
            receiving.result().unwrap();
        }
    });
}

#[test]
fn a_server_that_takes_no_more_bytes_ends_the_client_s_write() {
    bounded(|| {
        let receiving = Receiving::of_disks(GRANTS, RESUME);
        let listener = receiving.qemu(None);
        let disk = Disk::begin(receiving.address, options(2, RESUME));
        let (mut there, _) = listener.accept().unwrap();
        there.write_all(GREETING).unwrap();
        assert_eq!(read_exactly(&disk.client, GREETING.len()), GREETING);
        drop(there);
        let until = Instant::now() + WATCHDOG;
        while { &disk.client }.write_all(&[7; 65536]).is_ok() {
            assert!(Instant::now() < until, "it writes on and on");
        }
        let Disk { client, thread, .. } = disk;
        drop(client);
        let error = thread.join().unwrap().unwrap_err();
        assert!(error.error.to_string().contains("takes no more bytes"), "{error:?}");
        assert!(error.untouched.is_none());
        receiving.result().unwrap_err();
    });
}

#[test]
fn an_outage_that_is_too_long_ends_the_connection_at_both() {
    bounded(|| {
        let resume = Duration::from_millis(500);
        let receiving = Receiving::of_disks(GRANTS, resume);
        let cutter = Cutter::new(receiving.address, None);
        let listener = receiving.qemu(None);
        let disk = Disk::begin(cutter.address, options(2, resume));
        let (mut there, _) = listener.accept().unwrap();
        there.write_all(GREETING).unwrap();
        assert_eq!(read_exactly(&disk.client, GREETING.len()), GREETING);
        cutter.hold();
        assert_eq!(read_rest(&disk.client), b"");
        assert_eq!(read_rest(&there), b"");
        let error = disk.ends().unwrap_err().error.to_string();
        assert!(error.contains("did not come back within"), "{error}");
        receiving.result().unwrap_err();
        // Nobody asks where a VM is.
        assert!(!receiving
            .host
            .notices
            .lock()
            .unwrap()
            .iter()
            .any(|said| said.contains("answering")));
    });
}

#[test]
fn a_migration_is_none_of_a_disk_s_session_nor_the_other_way_round() {
    bounded(|| {
        let receiving = Receiving::of_disks(GRANTS, Duration::ZERO);
        let listener = receiving.qemu(None);
        listener.set_nonblocking(true).unwrap();
        let sending = Sending::new(&receiving, receiving.address, Options::default());
        let source = sending.connect();
        // The relay may close it before it has all.
        let _ = (&source).write_all(&single(50).main);
        let error = sending.result().unwrap_err().to_string();
        // The reason of the destination, or its answer if the source had sent everything by then.
        let reasons = ["no NBD connection has", "never reached the destination QEMU"];
        assert!(reasons.iter().any(|reason| error.contains(reason)), "{error}");
        drop(source);
        receiving.result().unwrap_err();
        assert!(listener.accept().is_err(), "a VM's stream must not reach the server");

        let receiving = Receiving::new();
        let listener = receiving.qemu(None);
        listener.set_nonblocking(true).unwrap();
        let disk = Disk::begin(receiving.address, options(1, Duration::ZERO));
        let (error, ..) = disk.refused();
        assert!(error.contains("none of a QEMU migration"), "{error}");
        receiving.result().unwrap_err();
        assert!(listener.accept().is_err(), "QEMU must not get a client of a disk");
    });
}

#[test]
fn frames_that_no_nbd_connection_has_end_the_session_with_nothing_wrong_written() {
    bounded(|| {
        /// Frames of a peer.
        type Lie = fn(&mut Liar);
        let lies: [(Lie, &str); 6] = [
            (|liar| liar.data_with_wrong_hash(), "running hash"),
            (|liar| liar.bare(FrameType::Open, 0, 1), "no NBD connection has"),
            (|liar| liar.data(0, 1, 5, b"bytes"), "comes at 0"),
            (|liar| liar.bare(FrameType::StillOpen, 0, 1), "no NBD connection has"),
            (|liar| liar.data_with_table(0, 1, 0, b"bytes", &[0; 4]), "no NBD connection has"),
            (|liar| liar.bare(FrameType::Open, 1, 0), "no NBD connection has"),
        ];
        for (nth, (lie, words)) in lies.into_iter().enumerate() {
            let receiving = Receiving::of_disks(GRANTS, Duration::ZERO);
            let listener = receiving.qemu(None);
            let mut liar = Liar::new(receiving.address, None);
            liar.open(NBD);
            let (mut there, _) = listener.accept().unwrap();
            there.write_all(GREETING).unwrap();
            lie(&mut liar);
            let error = receiving.result().unwrap_err().to_string();
            assert!(error.contains(words), "{nth}: {error}");
            assert_eq!(read_rest(&there), b"", "{nth}");
        }
    });
}
