//! Adds a link to a session: sets its socket's options and starts its two threads.

use crate::error::SessionError;
use crate::links::LinkState;
use crate::session::Session;
use crate::transport::Link;
use crate::{reader, writer};
use socket2::SockRef;
use std::net::TcpStream;
use std::sync::mpsc::{self, Sender};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use turns::Cap;

/// How often a thread that waits for its socket checks whether the session has ended.
const WAKE_INTERVAL: Duration = Duration::from_millis(500);
/// Unsent bytes that the kernel may hold per link; a link counts as writable below half of it.
/// Large enough for a whole frame, so that writing one to a writable link does not wait. The
/// credits, not this, limit the bytes in flight.
const NOTSENT_LOWAT: u32 = 1 << 20;

impl Session {
    /// Starts the two threads of link `number`, after the exchange of hellos. Replaces an existing
    /// link of that number (W26).
    ///
    /// # Errors
    /// The system refuses descriptors, socket options or threads; or links come and go faster than
    /// their threads end. The session has its other links then, and that of this number, as before.
    pub fn add_link(self: &Arc<Self>, number: u16, link: Link) -> Result<(), SessionError> {
        let socket = self.prepare(link.socket())?;
        self.check_threads()?;
        let Started { begin, threads } = start(self, link)?;
        let (state, replaced) = self.links.add(number, socket);
        if let Some(old) = replaced {
            self.lose(&old, self.link_lost("replaced by a new one"));
        }
        for begin in begin {
            // Each thread waits for this.
            let _ = begin.send(state.clone());
        }
        self.adopt_threads(threads);
        if self.failure().is_some() {
            self.links.cut();
        }
        Ok(())
    }

    /// Sets a link's socket options and returns a second handle for shutting it down.
    fn prepare(&self, socket: &TcpStream) -> Result<TcpStream, SessionError> {
        let failed = |source| SessionError::Resource {
            what: "cannot set up a link's socket".into(),
            source,
        };
        socket.set_nodelay(true).map_err(failed)?;
        // Both threads wake up regularly: to check whether the session has ended, and to notice
        // silence.
        socket.set_read_timeout(Some(WAKE_INTERVAL)).map_err(failed)?;
        socket.set_write_timeout(Some(WAKE_INTERVAL)).map_err(failed)?;
        let options = SockRef::from(socket);
        options.set_tcp_user_timeout(Some(self.silence())).map_err(failed)?;
        self.caps().for_each(Cap::count_handshake);
        let unsent = self.caps().map(|cap| cap.unsent(self.links.count())).min();
        let unsent = unsent.unwrap_or(NOTSENT_LOWAT);
        options.set_tcp_notsent_lowat(unsent).map_err(failed)?;
        socket.try_clone().map_err(failed)
    }
}

/// The threads of a link, which begin when they get its state, or end when they cannot get it.
struct Started {
    begin: [Sender<Arc<LinkState>>; 2],
    threads: [JoinHandle<()>; 2],
}

/// The work of a link's thread.
type Body = Box<dyn FnOnce(&Session, &Arc<LinkState>) + Send>;

/// Starts the writer and the reader of a link. The session knows nothing of the link before both
/// are there, so that it need not end if the system refuses one.
fn start(session: &Arc<Session>, link: Link) -> Result<Started, SessionError> {
    let failed =
        |source| SessionError::Resource { what: "cannot start a link's threads".into(), source };
    let (reading, writing) = link.split().map_err(failed)?;
    let begins = |name: &str, body: Body| {
        let (begin, state) = mpsc::channel();
        let session = session.clone();
        let body = move || {
            if let Ok(state) = state.recv() {
                body(&session, &state);
            }
        };
        std::thread::Builder::new().name(name.into()).spawn(body).map(|thread| (begin, thread))
    };
    let run = Box::new(move |session: &_, state: &_| reader::run(session, state, reading));
    let (begin_reader, reader) = begins("link-rx", run).map_err(failed)?;
    let run = Box::new(move |session: &_, state: &_| writer::run(session, state, writing));
    let (begin_writer, writer) = begins("link-tx", run).map_err(failed)?;
    Ok(Started { begin: [begin_writer, begin_reader], threads: [writer, reader] })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::credit::Grants;
    use crate::frame::{Header, HEADER_BYTES};
    use crate::frame_type::FrameType;
    use crate::outgoing::Outgoing;
    use crate::sink::{Discard, Incoming, Sink};
    use std::io::{Read, Write};
    use std::net::{Shutdown, TcpListener};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{OnceLock, Weak};
    use std::time::Instant;

    /// A server's sink that counts reports.
    #[derive(Default)]
    struct Reports(AtomicUsize);

    impl Sink for Reports {
        fn frame(&self, _: Incoming) -> Result<(), SessionError> {
            Ok(())
        }

        fn finish(&self, _: &[u8]) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }

        fn answers_finish(&self) -> bool {
            true
        }

        fn closed(&self, _: &Arc<SessionError>) {}
    }

    #[test]
    fn a_peer_that_repeats_its_report_fills_no_memory() {
        let grants = Grants { chunk_bytes: 65536, stream_frames: 2, shared_frames: 4 };
        let links = (1, Duration::from_secs(20));
        let reports = Arc::new(Reports::default());
        let session = Session::new("x".into(), grants, 8, links, reports.clone()).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut theirs, _) = listener.accept().unwrap();
        session.add_link(0, Link::from(ours)).unwrap();
        let finish = [&Header::free(FrameType::Finish, 2).to_bytes()[..], b"{}"].concat();
        theirs.write_all(&finish.repeat(100)).unwrap();
        theirs.shutdown(Shutdown::Write).unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        while session.links.links_up() > 0 {
            assert!(Instant::now() < until, "its end is not read");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(reports.0.load(Ordering::Relaxed), 1);
        session.fail(SessionError::Local { reason: "the test is over".into() });
        session.join();
    }

    /// A sink that ends its session with the first frame.
    #[derive(Default)]
    struct Ends {
        session: OnceLock<Weak<Session>>,
        frames: AtomicUsize,
    }

    impl Sink for Ends {
        fn frame(&self, _: Incoming) -> Result<(), SessionError> {
            self.frames.fetch_add(1, Ordering::Relaxed);
            let session = self.session.get().and_then(Weak::upgrade).expect("a link runs");
            session.fail(SessionError::Local { reason: "the test is over".into() });
            Ok(())
        }

        fn finish(&self, _: &[u8]) {}

        fn closed(&self, _: &Arc<SessionError>) {}
    }

    #[test]
    fn frames_behind_the_end_are_read_and_dropped() {
        let grants = Grants { chunk_bytes: 65536, stream_frames: 2, shared_frames: 4 };
        let sink = Arc::new(Ends::default());
        let session =
            Session::new("x".into(), grants, 8, (1, Duration::ZERO), sink.clone()).unwrap();
        sink.session.set(Arc::downgrade(&session)).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut theirs, _) = listener.accept().unwrap();
        let open = |stream| Header { stream, ..Header::free(FrameType::Open, 0) }.to_bytes();
        // Both are there before the link is: its reader waits for neither.
        theirs.write_all(&[open(0), open(1)].concat()).unwrap();
        session.add_link(0, Link::from(ours)).unwrap();
        session.join();
        assert_eq!(session.bytes_in.load(Ordering::Relaxed), 2 * HEADER_BYTES as u64);
        assert_eq!(sink.frames.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn frames_of_lost_links_are_sent_by_the_next_link() {
        let grants = Grants { chunk_bytes: 65536, stream_frames: 2, shared_frames: 4 };
        let links = (2, Duration::from_secs(20));
        let session = Session::new("x".into(), grants, 8, links, Arc::new(Discard)).unwrap();
        let header = Header { stream: 7, ..Header::free(FrameType::Open, 0) };
        assert!(session.outbound.overflow.push(Outgoing::Bare(header)).is_ok());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut theirs, _) = listener.accept().unwrap();
        session.add_link(1, Link::from(ours)).unwrap();
        let mut frame = [0; HEADER_BYTES];
        loop {
            theirs.read_exact(&mut frame).unwrap();
            let got = Header::from_bytes(&frame, grants.chunk_bytes).unwrap();
            if got.kind == FrameType::Open {
                assert_eq!(got.stream, 7);
                break;
            }
            assert_eq!(got.kind, FrameType::Heartbeat);
        }
        session.fail(SessionError::Local { reason: "the test is over".into() });
        session.join();
    }

    /// As offers of a seed's pages, behind which ACKs would wait.
    #[test]
    fn frames_that_wait_in_the_kernel_show() {
        let grants = Grants { chunk_bytes: 65536, stream_frames: 2, shared_frames: 4 };
        let links = (1, Duration::from_secs(20));
        let session = Session::new("x".into(), grants, 8, links, Arc::new(Discard)).unwrap();
        assert!(!session.has_unsent(), "no link");
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (_unread, _) = listener.accept().unwrap();
        session.add_link(0, Link::from(ours)).unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        while !session.has_unsent() {
            assert!(Instant::now() < until, "the peer reads nothing");
            if session.outbox().len() < 2 {
                session.send(Outgoing::Free(FrameType::Seed, vec![0; 16 << 10]));
            }
        }
        session.fail(SessionError::Local { reason: "the test is over".into() });
        session.join();
    }

    #[test]
    fn of_two_concurrent_hellos_for_one_number_the_last_gets_the_link() {
        let grants = Grants { chunk_bytes: 65536, stream_frames: 2, shared_frames: 4 };
        let links = (1, Duration::from_secs(20));
        let session = Session::new("x".into(), grants, 8, links, Arc::new(Discard)).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ends: Vec<_> = (0..8)
            .map(|_| {
                let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
                (ours, listener.accept().unwrap().0)
            })
            .collect();
        let theirs: Vec<_> = std::thread::scope(|scope| {
            let join = |(ours, theirs)| {
                let session = &session;
                scope.spawn(move || {
                    session.add_link(0, Link::from(ours)).unwrap();
                    theirs
                })
            };
            let threads: Vec<_> = ends.into_iter().map(join).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(session.links.links_up(), 1);
        // All but one are shut down, and the count follows the last one.
        let beat = Header::free(FrameType::Heartbeat, 0).to_bytes();
        let is_shut = |socket: &TcpStream| {
            // A link that is silent for some seconds is lost, which this test may take.
            let _ = (&*socket).write_all(&beat);
            socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
            match (&*socket).read_to_end(&mut Vec::new()) {
                Ok(_) => true,
                Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
            }
        };
        let until = Instant::now() + Duration::from_secs(60);
        while theirs.iter().filter(|socket| is_shut(socket)).count() != 7 {
            assert!(Instant::now() < until, "others than all but one are shut");
        }
        drop(theirs);
        let until = Instant::now() + Duration::from_secs(60);
        while session.links.links_up() > 0 {
            assert!(Instant::now() < until, "a link that is gone counts for ever");
            std::thread::sleep(Duration::from_millis(10));
        }
        session.fail(SessionError::Local { reason: "the test is over".into() });
        session.join();
    }
}
