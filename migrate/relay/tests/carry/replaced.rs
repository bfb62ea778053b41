//! A source that loses its links before its migration, and another source that wants its target
//! (W4d).

use crate::bad_peers::send_main;
use crate::cutter::Cutter;
use crate::harness::{
    assert_same, bounded, config, destination_qemu, keep_alive, read_exactly, read_rest, readable,
    source_qemu, Options, Reader, Receiving, Sending, A_WHILE, SILENCE, WATCHDOG,
};
use crate::identity::single;
use crate::resume::hello;
use relay::{RelayError, Source};
use session::{dial, Grants, Hello, Link, SessionError, Verdict};
use std::io::{ErrorKind, Write};
use std::net::{Shutdown, SocketAddr};
use std::os::unix::net::UnixListener;
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// Longer than any test runs.
const RESUME: Duration = Duration::from_secs(3600);
/// In the refusal of a receiver whose target has a session that has begun.
fn begun() -> String {
    format!("the target is free within {} s", (SILENCE + RESUME + SILENCE).as_secs())
}
/// In the answer to a source whose target another one wanted.
const REPLACED: &str = "another source wanted its target";
/// The answer about a migration that never began.
const NOTHING: Verdict =
    Verdict { committed: false, confirmed: false, loaded: false, pending: false };
const MAIN: &[u8] = b"QEVM\0\0\0\x03";

fn receiving() -> Receiving {
    Receiving::resuming(&[None], Grants::default(), None, RESUME)
}

/// A source that does not try twice.
fn connect(to: SocketAddr) -> Result<Source, RelayError> {
    Source::connect(&config(to, Options { resume: RESUME, ..Options::default() }))
}

/// The link of a source, and the hello by which it comes back.
fn old_source(to: &Receiving) -> (Link, Hello) {
    let greeting = Hello { codecs: vec!["zstd".into()], ..hello() };
    let (link, welcome) = dial(&to.address.to_string(), None, &greeting).unwrap();
    (link, Hello { token: Some(welcome.token), ..greeting })
}

/// Ends a link as the kernel does for a process that was killed.
fn cut(link: &Link, at: &Receiving) {
    link.socket().shutdown(Shutdown::Both).unwrap();
    at.says("waiting up to");
}

/// The destination QEMU has got no connection.
fn gets_nothing(listener: &UnixListener) {
    listener.set_nonblocking(true).unwrap();
    assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
    listener.set_nonblocking(false).unwrap();
}

#[test]
fn a_source_killed_before_its_migration_gives_its_target_to_the_next_at_once() {
    bounded(|| {
        let receiving = receiving();
        let (link, back) = old_source(&receiving);
        cut(&link, &receiving);
        let new = connect(receiving.address).unwrap();
        let error = receiving.result().unwrap_err().to_string();
        assert!(error.contains(REPLACED), "{error}");
        // Its client gets the answer, as often as it comes: while the next migration has not begun,
        // and when it is over.
        let to = receiving.address.to_string();
        let is_told = || {
            for ask in [false, true, false] {
                let error = dial(&to, None, &Hello { ask, ..back.clone() }).unwrap_err();
                assert!(error.to_string().contains(REPLACED), "{error}");
                let SessionError::Over { answer, .. } = error else { panic!("{error}") };
                assert_eq!(answer, NOTHING);
            }
        };
        is_told();
        let streams = single(300);
        let destination = destination_qemu(receiving.qemu(None), &streams, Reader::Prompt);
        let sending = Sending::running(new, &receiving, "new");
        let source = source_qemu(sending.path.clone(), streams.clone(), 0);
        assert_same(&destination.join().unwrap().main, &streams.main, "main");
        source.join().unwrap();
        sending.result().unwrap();
        receiving.result().unwrap();
        is_told();
    });
}

/// Its host has lost its power: no end of a connection shows that.
#[test]
fn a_source_that_falls_silent_before_its_migration_leaves_its_target_in_seconds() {
    bounded(|| {
        let receiving = Receiving::that_hears(RESUME);
        let (link, _) = old_source(&receiving);
        let until = Instant::now() + WATCHDOG;
        let new = loop {
            match connect(receiving.address) {
                Ok(new) => break new,
                Err(error) => {
                    assert!(error.to_string().contains("free within 6 s"), "{error}");
                    assert!(Instant::now() < until, "{error}");
                    std::thread::sleep(Duration::from_millis(50));
                }
            }
        };
        let error = receiving.result().unwrap_err().to_string();
        assert!(error.contains(REPLACED), "{error}");
        drop((link, new));
    });
}

#[test]
fn a_source_that_comes_back_after_another_got_its_target_reports_that_and_frees_its_vm() {
    bounded(|| {
        let receiving = receiving();
        let listener = receiving.qemu(None);
        let cutter = Cutter::new(receiving.address, None);
        let options = Options { resume: RESUME, ..Options::default() };
        let old = Sending::new(&receiving, cutter.address, options);
        cutter.hold();
        receiving.says("waiting up to");
        // Its QEMU begins during the outage.
        let streams = single(300);
        let qemu = old.connect();
        (&qemu).write_all(&streams.main[..1000]).unwrap();
        let new = connect(receiving.address).unwrap();
        cutter.release();
        let error = old.result().unwrap_err();
        assert!(matches!(error, RelayError::Ended(_)), "{error}");
        assert!(error.to_string().contains(REPLACED), "{error}");
        assert_eq!(read_rest(&qemu), b"", "the source VM goes on");
        receiving.result().unwrap_err();
        gets_nothing(&listener);
        drop(new);
    });
}

#[test]
fn a_migration_that_has_begun_keeps_its_target_while_its_links_are_lost() {
    bounded(|| {
        let receiving = receiving();
        let listener = receiving.qemu(None);
        let (link, back) = old_source(&receiving);
        let link = send_main(link, MAIN);
        let (destination, _) = listener.accept().unwrap();
        read_exactly(&destination, MAIN.len());
        cut(&link, &receiving);
        for _ in 0..3 {
            let error = connect(receiving.address).unwrap_err().to_string();
            assert!(error.contains(&begun()), "{error}");
        }
        assert!(!readable(&destination, A_WHILE), "its QEMU was given up");
        // It goes on when its source is back.
        let (link, _) = dial(&receiving.address.to_string(), None, &back).unwrap();
        keep_alive(link);
        receiving.says("is back after");
        assert!(!readable(&destination, A_WHILE), "its QEMU was given up");
        gets_nothing(&listener);
    });
}

#[test]
fn a_source_whose_links_are_up_keeps_its_target_before_its_migration() {
    bounded(|| {
        let receiving = receiving();
        let listener = receiving.qemu(None);
        let cutter = Cutter::new(receiving.address, None);
        let options = Options { resume: RESUME, links: 2, ..Options::default() };
        let old = Sending::new(&receiving, cutter.address, options);
        let refused = || {
            let error = connect(receiving.address).unwrap_err().to_string();
            let within = format!("free within {} s", 2 * SILENCE.as_secs());
            assert!(error.contains(&within), "{error}");
        };
        refused();
        // Also when they were lost and are back.
        cutter.hold();
        receiving.says("waiting up to");
        cutter.release();
        receiving.says("is back after");
        refused();
        let qemu = old.connect();
        (&qemu).write_all(MAIN).unwrap();
        let (destination, _) = listener.accept().unwrap();
        read_exactly(&destination, MAIN.len());
        drop(qemu);
        old.result().unwrap_err();
        receiving.result().unwrap_err();
    });
}

/// One of both gets the target, and the destination QEMU gets bytes of that one only.
#[test]
fn of_a_source_that_comes_back_to_begin_and_a_new_one_either_gets_the_target() {
    bounded(|| {
        for _ in 0..40 {
            let receiving = receiving();
            let listener = receiving.qemu(None);
            let (link, back) = old_source(&receiving);
            cut(&link, &receiving);
            let (to, both) = (receiving.address.to_string(), Barrier::new(2));
            let (old, new) = std::thread::scope(|scope| {
                let old = scope.spawn(|| {
                    both.wait();
                    dial(&to, None, &back).map(|(link, _)| send_main(link, MAIN))
                });
                both.wait();
                let new = connect(receiving.address);
                (old.join().unwrap(), new)
            });
            match &new {
                Ok(_) => {
                    let error = receiving.result().unwrap_err().to_string();
                    assert!(error.contains(REPLACED), "{error}");
                    gets_nothing(&listener);
                }
                Err(error) => {
                    assert!(error.to_string().contains("in progress"), "{error}");
                    assert!(old.is_ok(), "neither has the target: {error}");
                    let (destination, _) = listener.accept().unwrap();
                    assert_eq!(read_exactly(&destination, MAIN.len()), MAIN);
                }
            }
            drop((old, new));
        }
    });
}

#[test]
fn of_several_sources_for_the_target_of_a_killed_one_exactly_one_gets_it() {
    bounded(|| {
        for _ in 0..10 {
            let receiving = receiving();
            let (link, _) = old_source(&receiving);
            cut(&link, &receiving);
            let tries: Vec<_> = std::thread::scope(|scope| {
                let to = receiving.address;
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(move || connect(to))).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            assert_eq!(tries.iter().filter(|source| source.is_ok()).count(), 1);
            for error in tries.iter().filter_map(|source| source.as_ref().err()) {
                assert!(error.to_string().contains("in progress"), "{error}");
            }
        }
    });
}
