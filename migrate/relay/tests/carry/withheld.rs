//! A STILL_OPEN that is withheld takes no later byte from the destination (W20, W20b, W20h): its
//! place in the sequence is filled once the session goes on.

use crate::acknowledged::{end, says, section, END, LOADED};
use crate::harness::{assert_same, bounded, read_exactly, read_rest, Sending, A_WHILE, SHUT_OK};
use crate::postcopy::{announced, outage, rig, Rig, PING};
use crate::resume::AMPLE;
use relay::RelayError;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::time::Instant;
use stream::synth::MainStream;

/// Waits until the relay reads nothing more of what its source has written.
fn settles(sending: &Sending) {
    let (mut in_flight, mut since) = (0, Instant::now());
    while in_flight == 0 || since.elapsed() < 2 * A_WHILE {
        let now = sending.in_flight();
        if now != in_flight {
            (in_flight, since) = (now, Instant::now());
        }
        std::thread::sleep(A_WHILE / 30);
    }
}

/// The source turns to postcopy while it is told to cancel, and refuses. Then all of `state` and
/// `rest` has to come.
fn refuses(rig: &Rig, destination: &UnixStream, state: Vec<u8>, rest: Vec<u8>) {
    assert!(rig.sending.handle.forbid_commit());
    let all = [&state[..], &rest].concat();
    let to = rig.source.try_clone().unwrap();
    let (refused, goes_on) = mpsc::channel();
    let writer = std::thread::spawn(move || {
        (&to).write_all(&state).unwrap();
        goes_on.recv().unwrap();
        (&to).write_all(&rest).unwrap();
    });
    // Each STILL_OPEN was for a link to send, and was withheld.
    settles(&rig.sending);
    rig.sending.handle.allow_commit();
    refused.send(()).unwrap();
    assert_same(&read_exactly(destination, all.len()), &all, "main");
    writer.join().unwrap();
    assert!(rig.sending.handle.in_doubt());
}

/// The source goes through postcopy to its end.
fn completes(rig: Rig, main: &mut MainStream, destination: UnixStream) {
    let destination = rig.carry(Some(destination), &end(main));
    says(&destination, &rig.source, &SHUT_OK);
    drop((rig.source, destination));
    rig.sending.result().expect("the source relay succeeds");
    rig.receiving.result().expect("the destination relay succeeds");
}

/// QEMU 10.0 and 10.1.
#[test]
fn a_source_that_refuses_to_cancel_gets_its_packaged_state_across() {
    bounded(|| {
        let rig = rig();
        let mut main = announced(3);
        let destination = rig.carry(None, &main.take());
        // Without the section behind it, which shows that the source is in postcopy for good.
        main.packaged(&[7; 30_000]).raw(&PING);
        let state = main.take();
        refuses(&rig, &destination, state, section(&mut main, 3));
        completes(rig, &mut main, destination);
    });
}

/// QEMU 10.2 and later: only the last chunk of the packaged state shows that it waits for a PONG.
#[test]
fn a_source_that_refuses_to_cancel_gets_a_long_packaged_state_across() {
    bounded(|| {
        let rig = rig();
        let mut main = announced(3);
        let destination = rig.carry(None, &main.take());
        main.packaged(&[&vec![7; 3 << 20][..], &END].concat()).raw(&PING);
        let state = main.take();
        refuses(&rig, &destination, state, section(&mut main, 3));
        says(&destination, &rig.source, &LOADED);
        completes(rig, &mut main, destination);
    });
}

/// A source that obeys gets nothing across, whatever was withheld before.
#[test]
fn a_source_that_obeys_behind_its_packaged_state_gets_nothing_across() {
    bounded(|| {
        let rig = rig();
        let mut main = announced(3);
        let destination = rig.carry(None, &main.take());
        assert!(rig.sending.handle.forbid_commit());
        main.packaged(&[7; 30_000]).raw(&PING);
        (&rig.source).write_all(&main.take()).unwrap();
        settles(&rig.sending);
        rig.source.shutdown(std::net::Shutdown::Both).unwrap();
        // As a caller that has misread the answer: the socket decides.
        rig.sending.handle.allow_commit();
        let got = read_rest(&destination);
        assert!(got.len() < 30_000, "what starts the VM was delivered");
        rig.sending.result().unwrap_err();
        rig.receiving.result().unwrap_err();
    });
}

/// A source in postcopy for good was killed when it had sent all, in an outage. The destination
/// does not have the packaged state yet.
#[test]
fn a_source_that_has_sent_all_and_ends_in_an_outage_gets_its_vm_across() {
    bounded(|| {
        let rig = outage(1, None, [AMPLE; 2]);
        let source = rig.sending.connect();
        let mut main = announced(3);
        let head = main.take();
        (&source).write_all(&head).unwrap();
        let (destination, _) = rig.listener.accept().unwrap();
        assert_same(&read_exactly(&destination, head.len()), &head, "main");
        rig.cutter.hold();
        main.packaged(&[7; 30_000]).raw(&PING);
        let state = main.take();
        (&source).write_all(&state).unwrap();
        settles(&rig.sending);
        let rest = [section(&mut main, 3), end(&mut main)].concat();
        (&source).write_all(&rest).unwrap();
        let all = [state, rest].concat();
        while rig.sending.in_flight() < all.len() as u64 {
            std::thread::sleep(A_WHILE / 30);
        }
        drop(source);
        std::thread::sleep(A_WHILE);
        rig.cutter.release();
        assert_same(&read_exactly(&destination, all.len()), &all, "main");
        (&destination).write_all(&SHUT_OK).unwrap();
        let error = rig.sending.result().unwrap_err();
        assert!(matches!(error, RelayError::SourceGone), "{error}");
        drop(destination);
        rig.receiving.result().unwrap_err();
    });
}
