//! A main connection that is admitted at the moment at which its relay ends, and a host without
//! threads.

use super::*;
use crate::error::RelayError;
use crate::qemu_socket::QemuSocket;
use crate::source::test_session::{receiver, with_session, LIMIT};
use crate::source::Source;
use crate::threads::refusals;
use rustix::fd::BorrowedFd;
use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};

/// Runs `test` with a source relay whose session is open.
fn with_source(test: impl FnOnce(Source)) {
    with_session(receiver(), |_| {}, test);
}

/// Waits until `has_come` is true.
fn wait_until(has_come: impl Fn() -> bool) {
    let until = Instant::now() + LIMIT;
    while !has_come() {
        assert!(Instant::now() < until, "it does not come");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_return_path_that_begins_after_the_end_leaves_no_thread() {
    with_source(|source| {
        source.end(Err(RelayError::SourceEnded)).unwrap_err();
        let shared = source.handle().0;
        drop(source);
        // Its kind is of no interest here.
        let stream = shared.admit_disk(UnixStream::pair().unwrap().0.into());
        assert!(!open(&shared, &stream, Kind::Main), "the session has ended");
        assert!(stream.results.get().is_some(), "the return path has begun");
        // The writer of the return path ends.
        wait_until(|| Arc::strong_count(&shared) == 1);
    });
}

/// The relay's socket, without a thread that accepts.
struct Plain(UnixListener);

impl Entrance for Plain {
    fn prepare(&self) -> io::Result<()> {
        Ok(())
    }

    fn accept(&self) -> io::Result<QemuSocket> {
        Ok(self.0.accept()?.0.into())
    }

    fn readiness(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    fn is_ours(&self) -> bool {
        true
    }

    fn address(&self) -> String {
        "the socket".into()
    }
}

#[test]
fn a_connection_for_which_there_is_no_thread_is_read_when_there_is_one() {
    with_source(|source| {
        let shared = source.handle().0;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        assert!(shared.entrance.set(Arc::new(Plain(listener))).is_ok());
        let mut stranger = UnixStream::connect(&path).unwrap();
        stranger.write_all(b"a stranger's bytes").unwrap();
        for _ in 0..2 {
            refusals::LEFT.set(1);
            let error = shared.accept_waiting().unwrap_err().to_string();
            assert!(error.contains("thread intake") && error.contains("pids.max"), "{error}");
        }
        assert!(shared.session.failure().is_none(), "the session goes on");
        assert_eq!(shared.refused.load(Ordering::Relaxed), 0);
        shared.accept_waiting().unwrap();
        // It has been read.
        wait_until(|| shared.refused.load(Ordering::Relaxed) == 1);
    });
}

#[test]
fn a_session_without_a_thread_for_its_return_path_ends_by_name() {
    with_source(|source| {
        let shared = source.handle().0;
        let stream = shared.admit_disk(UnixStream::pair().unwrap().0.into());
        refusals::LEFT.set(1);
        assert!(!open(&shared, &stream, Kind::Main));
        let why = shared.session.failure().expect("it has ended").to_string();
        assert!(why.contains("thread return-path") && why.contains("pids.max"), "{why}");
        assert_eq!(shared.return_paths.load(Ordering::Relaxed), 0);
    });
}
