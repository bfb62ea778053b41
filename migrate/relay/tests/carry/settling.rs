//! A relay in doubt, or one whose source may not have seen the PONG of its packaged state (W20c):
//! the sockets of the source QEMU stay open, and nothing makes it wait for ever.

use crate::acknowledged::{goes_on, loading, says, section, LOADED};
use crate::harness::{bounded, read_rest, readable, A_WHILE, WATCHDOG};
use crate::postcopy::Rig;
use relay::RelayError;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Waits for a message with `words`.
fn until_said(rig: &Rig, words: &str) {
    while !rig.sending.notices.recv_timeout(WATCHDOG / 20).expect("it is said").contains(words) {}
}

/// A source that has its PONG, whose session ends. It writes nothing.
fn cut_behind_its_pong() -> (Rig, UnixStream) {
    let (rig, _, destination) = loading();
    says(&destination, &rig.source, &LOADED);
    rig.proxy.cut();
    while !rig.sending.has_failed() {
        std::thread::sleep(Duration::from_millis(5));
    }
    (rig, destination)
}

/// Closed then, the source would run its VM.
#[test]
fn an_interrupt_closes_no_source_that_may_not_have_seen_its_pong() {
    bounded(|| {
        let (rig, destination) = cut_behind_its_pong();
        rig.sending.handle.stop();
        until_said(&rig, "interrupt again");
        assert!(!readable(&rig.source, 4 * A_WHILE), "QEMU's socket was closed");
        let going = goes_on(&rig.source);
        assert_eq!(read_rest(&rig.source), b"");
        going.join().unwrap();
        let error = rig.sending.result().unwrap_err();
        assert!(matches!(error, RelayError::Paused { .. }), "{error}");
        drop(destination);
        rig.receiving.result().unwrap_err();
    });
}

/// A source that is stopped shows nothing. The user hears of it, and can end the relay.
#[test]
fn a_source_that_shows_nothing_is_reported_and_can_be_left() {
    bounded(|| {
        let (rig, destination) = cut_behind_its_pong();
        until_said(&rig, "has not shown");
        rig.sending.handle.stop();
        until_said(&rig, "interrupt again");
        // One that comes within a second counts as one that was made before the answer.
        std::thread::sleep(Duration::from_millis(1200));
        rig.sending.handle.stop();
        assert_eq!(read_rest(&rig.source), b"");
        let error = rig.sending.result().unwrap_err();
        assert!(matches!(error, RelayError::LeftInDoubt), "{error}");
        drop(destination);
        rig.receiving.result().unwrap_err();
    });
}

/// QEMU's return path writes pages that a vCPU waits for to the preempt channel, with a lock that
/// the thread of the main channel needs.
fn stuck_in_its_preempt_channel(has_pong: bool) {
    let (rig, mut main, destination) = loading();
    let preempt = rig.sending.connect();
    let (asked, _) = rig.listener.accept().unwrap();
    if has_pong {
        says(&destination, &rig.source, &LOADED);
    }
    rig.proxy.cut();
    let writer = std::thread::spawn(move || (&preempt).write_all(&[8; 1 << 20]).map(|()| preempt));
    let begin = Instant::now();
    while !writer.is_finished() {
        assert!(begin.elapsed() < WATCHDOG / 20, "nobody reads the preempt channel");
        std::thread::sleep(Duration::from_millis(5));
    }
    let preempt = writer.join().unwrap().expect("the channel is open");
    let writes = (&rig.source).write_all(&section(&mut main, 5));
    writes.expect("the main channel is open");
    if has_pong {
        goes_on(&rig.source).join().unwrap();
        let error = rig.sending.result().unwrap_err();
        assert!(matches!(error, RelayError::Paused { .. }), "{error}");
    } else {
        until_said(&rig, "turned to postcopy");
        rig.sending.handle.stop();
        let error = rig.sending.result().unwrap_err();
        assert!(matches!(error, RelayError::LeftInDoubt), "{error}");
    }
    drop((preempt, asked, destination));
    rig.receiving.result().unwrap_err();
}

#[test]
fn pages_of_the_preempt_channel_make_no_source_wait_that_is_to_pause() {
    bounded(|| stuck_in_its_preempt_channel(true));
}

#[test]
fn pages_of_the_preempt_channel_make_no_source_wait_that_is_held() {
    bounded(|| stuck_in_its_preempt_channel(false));
}
