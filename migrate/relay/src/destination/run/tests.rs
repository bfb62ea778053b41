//! The end of a destination whose links, seed or host still do something.

use super::*;
use crate::destination::decode::DecodeContext;
use crate::stream_kind;
use crate::unix::UnixAddress;
use codec::{Codec, UnitHeader};
use delta::{Known, PageHash, PageReader, Seed, SeedKey, SeedPages, TABLE_ROOM};
use pipeline::PoolConfig;
use session::{FrameType, Header, Incoming, RunningHash};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::mpsc::{channel, Sender};
use stream::Kind;

const PAGE: usize = 4096;
/// Nothing here takes this long unless it hangs.
const LIMIT: Duration = Duration::from_secs(300);

/// How long an event that must not happen is waited for.
const A_WHILE: Duration = Duration::from_millis(150);

/// A destination without links, whose QEMU does not listen.
fn destination(listen: Listen, seed: Option<Offered>) -> Arc<Destination> {
    destination_at(Path::new("/nonexistent/qemu"), listen, (false, seed))
}

fn destination_at(
    target: &Path,
    listen: Listen,
    is_disk_and_seed: (bool, Option<Offered>),
) -> Arc<Destination> {
    let grants = Grants { chunk_bytes: 65536, stream_frames: 2, shared_frames: 4 };
    let pool = PoolConfig { threads: 1, name: "decompress", ..PoolConfig::default() };
    let pool = Pool::new(pool, |_| DecodeContext::new(None)).unwrap();
    let target = UnixAddress::from(target.to_owned());
    let destination = Destination::new(
        "the source".into(),
        (grants, (1, Duration::ZERO)),
        (PAGE, 0, None),
        (target.into(), listen, Box::new(|_| Ok(()))),
        pool,
        Box::new(|_| {}),
        is_disk_and_seed,
    );
    Arc::new(destination.unwrap())
}

fn cancel(destination: &Destination) {
    destination.session().fail(SessionError::Local { reason: "cancelled".into() });
}

/// Waits until no thread of the session is left.
fn until_alone(shared: &Arc<Shared>) {
    let until = Instant::now() + LIMIT;
    while Arc::strong_count(shared) > 1 {
        assert!(Instant::now() < until, "a thread of the session does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Another link may bring frames of new streams after the end.
#[test]
fn a_stream_that_begins_after_the_end_leaves_no_thread() {
    let destination = destination(Box::new(|| Ok(())), None);
    cancel(&destination);
    destination.run(Vec::new).unwrap_err();
    // Its writer would wait for the frame before it.
    let header = Header { stream: 5, seq: 1, ..Header::free(FrameType::StillOpen, 0) };
    destination.sink.frame(Incoming { header, unit: None }).unwrap();
    assert!(destination.shared.streams[5].get().is_some(), "the stream has begun");
    until_alone(&destination.shared);
}

/// One page, on a disk that says when it is asked, and answers once the other end of the second
/// channel is dropped.
#[derive(Debug, Clone)]
struct Disk(Sender<()>, Arc<Mutex<Receiver<()>>>);

impl Seed for Disk {
    fn open(&self, _: usize) -> Result<Arc<dyn SeedPages>, String> {
        let _ = self.clone().read(0);
        Ok(Arc::new(self.clone()))
    }
}

impl SeedPages for Disk {
    fn key(&self) -> &SeedKey {
        &[0; 32]
    }

    fn pages(&self) -> u32 {
        1
    }

    fn offer(&self, _: u32, _: &mut dyn FnMut(u32, &[PageHash]) -> bool) {}

    fn reader(&self) -> Box<dyn PageReader> {
        Box::new(self.clone())
    }
}

impl PageReader for Disk {
    fn read(&mut self, _: u32) -> Result<&[u8], String> {
        let _ = self.0.send(());
        let _ = self.1.lock().unwrap().recv();
        Ok(&[7; PAGE])
    }
}

/// Gives the destination the first two frames of a main stream: OPEN, and a page of the seed.
fn begin(destination: &Destination) {
    let mut known = Known::default();
    let hash = delta::page_hash(&[0; 32], &[7; PAGE]);
    known.learn(&delta::offer(0, &[0; 32], &[hash])).unwrap();
    let mut chunk = destination.session().plain().take().unwrap();
    chunk[..PAGE].fill(7);
    let mut running = RunningHash::default();
    running.add(codec::checksum(&chunk[..PAGE]));
    let mut sender = delta::Sender::without_cache(0, PAGE);
    let mut pass = sender.begin(&mut chunk[..PAGE + TABLE_ROOM], PAGE, Some(&known));
    pass.bodies(0, 1);
    let (table_len, counts) = pass.finish();
    assert_eq!(counts.seeded, 1);
    let plain_len = u32::try_from(PAGE).unwrap();
    let open =
        Header { flags: stream_kind::to_flags(Kind::Main), ..Header::free(FrameType::Open, 0) };
    let data = Header {
        seq: 1,
        plain_len,
        table_len: u32::try_from(table_len).unwrap(),
        hash: running.value(),
        ..Header::free(FrameType::Data, 0)
    };
    let unit = UnitHeader { codec: Codec::Raw, plain_len, payload_len: plain_len, checksum: 0 };
    destination.sink.frame(Incoming { header: open, unit: None }).unwrap();
    destination.sink.frame(Incoming { header: data, unit: Some((unit, chunk)) }).unwrap();
}

/// Runs the destination on a thread, which returns once `run` has failed.
fn fails(destination: &Arc<Destination>) -> Receiver<()> {
    let (failed, ended) = channel();
    let running = destination.clone();
    std::thread::spawn(move || {
        running.run(Vec::new).unwrap_err();
        let _ = failed.send(());
    });
    ended
}

/// The host restores QEMU's settings once `run` has returned.
#[test]
fn a_stream_that_waits_for_the_seed_makes_no_qemu_listen_after_the_end() {
    for ends in [false, true] {
        let ((asked, asks), (release, answers)) = (channel(), channel());
        let (listens, listened) = channel();
        let listen = move || {
            let _ = listens.send(());
            Ok(())
        };
        let destination = destination(Box::new(listen), None);
        destination.shared.seed.open(Arc::new(Disk(asked, Arc::new(Mutex::new(answers)))));
        begin(&destination);
        asks.recv_timeout(LIMIT).expect("the stream waits for the disk");
        if ends {
            cancel(&destination);
        }
        drop(release);
        if !ends {
            listened.recv_timeout(LIMIT).expect("QEMU gets the page");
            cancel(&destination);
        }
        until_alone(&destination.shared);
        destination.run(Vec::new).unwrap_err();
        assert!(listened.try_recv().is_err(), "QEMU was told to listen, after the end: {ends}");
    }
}

#[test]
fn the_end_waits_for_a_call_that_makes_qemu_listen() {
    let ((begins, begun), (release, hook)) = (channel(), channel::<()>());
    let hook = Mutex::new(hook);
    let (listens, listened) = channel();
    let listen = move || {
        let _ = begins.send(());
        let _ = hook.lock().unwrap().recv();
        let _ = listens.send(());
        Ok(())
    };
    let destination = destination(Box::new(listen), None);
    let (asked, answers) = (channel().0, channel().1);
    destination.shared.seed.open(Arc::new(Disk(asked, Arc::new(Mutex::new(answers)))));
    let ended = fails(&destination);
    begin(&destination);
    begun.recv_timeout(LIMIT).expect("QEMU is told to listen");
    cancel(&destination);
    assert!(ended.recv_timeout(A_WHILE).is_err(), "it has ended before that call");
    drop(release);
    ended.recv_timeout(LIMIT).unwrap();
    listened.try_recv().expect("the call has ended");
    until_alone(&destination.shared);
}

/// Waits until nothing keeps the session and its buffers.
fn until_gone(destination: Arc<Destination>) {
    let shared = Arc::downgrade(&destination.shared);
    let session = Arc::downgrade(destination.session());
    let buffers = Arc::downgrade(destination.session().plain());
    drop(destination);
    let until = Instant::now() + LIMIT;
    while shared.strong_count() + session.strong_count() + buffers.strong_count() > 0 {
        assert!(Instant::now() < until, "a disk that hangs keeps the session");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// As on a server of NFS that has gone.
#[test]
fn a_seed_that_never_opens_keeps_no_session() {
    let ((asked, asks), (release, answers)) = (channel(), channel::<()>());
    let seed = Arc::new(Disk(asked, Arc::new(Mutex::new(answers))));
    let destination = destination(Box::new(|| Ok(())), Some((seed, 1)));
    asks.recv_timeout(LIMIT).expect("the seed is opened");
    cancel(&destination);
    destination.run(Vec::new).unwrap_err();
    until_gone(destination);
    drop(release);
}

#[test]
fn a_page_that_is_never_read_keeps_no_session() {
    let ((asked, asks), (release, answers)) = (channel(), channel::<()>());
    let destination = destination(Box::new(|| Ok(())), None);
    destination.shared.seed.open(Arc::new(Disk(asked, Arc::new(Mutex::new(answers)))));
    begin(&destination);
    asks.recv_timeout(LIMIT).expect("the stream waits for the disk");
    cancel(&destination);
    destination.run(Vec::new).unwrap_err();
    until_gone(destination);
    drop(release);
}

/// The port of a copy that was aborted goes to the next VM at once.
#[test]
fn a_socket_that_listens_behind_the_look_gets_no_connection_of_a_disk() {
    let bound_behind_the_look = || {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qemu");
        let (bound, binding) = channel();
        let at = path.clone();
        let listen = move || {
            let (bound, at) = (bound.clone(), at.clone());
            std::thread::spawn(move || {
                std::thread::sleep(A_WHILE);
                let qemu = UnixListener::bind(at).unwrap();
                qemu.set_nonblocking(true).unwrap();
                bound.send(qemu).unwrap();
            });
            Ok(())
        };
        let destination = destination_at(&path, Box::new(listen), (true, None));
        let header = Header { flags: stream_kind::NBD, ..Header::free(FrameType::Open, 0) };
        destination.sink.frame(Incoming { header, unit: None }).unwrap();
        let qemu = binding.recv_timeout(LIMIT).unwrap();
        // One connection that is tried later, or none, ends the session.
        let until = Instant::now() + LIMIT;
        while destination.session().failure().is_none() {
            if let Ok((socket, _)) = qemu.accept() {
                drop(socket);
                cancel(&destination);
                destination.run(Vec::new).unwrap_err();
                return false;
            }
            assert!(Instant::now() < until, "the session does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
        let error = destination.run(Vec::new).unwrap_err();
        assert!(error_chain(&error).contains("cannot connect"), "{error:?}");
        qemu.accept().is_err()
    };
    // On a busy machine the one attempt may come late.
    assert!((0..20).any(|_| bound_behind_the_look()), "it always gets a connection");
}

#[test]
fn a_disk_s_session_that_is_not_opened_ends() {
    let not_opened = destination_at(Path::new("/nonexistent"), Box::new(|| Ok(())), (true, None));
    let shared = &not_opened.shared;
    let events = not_opened.events.lock().unwrap();
    let error = disk::decide_within(shared, &events, Duration::ZERO).unwrap_err();
    assert!(error.to_string().contains("has opened no connection"), "{error}");
    assert!(!shared.beginning.begin(), "it opens behind its end");
    drop(events);
    // One that was opened is waited for.
    let opened = destination_at(Path::new("/nonexistent"), Box::new(|| Ok(())), (true, None));
    assert!(opened.shared.beginning.begin());
    let report = b"{}".to_vec();
    for event in [Event::SourceEof, Event::QemuEof { unread: false }, Event::Finished(report)] {
        opened.shared.events.send(event).unwrap();
    }
    let events = opened.events.lock().unwrap();
    assert_eq!(disk::decide_within(&opened.shared, &events, Duration::ZERO).unwrap(), b"{}");
}
