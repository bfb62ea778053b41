//! W23, W28: the source is in doubt, and asks.

use super::*;
use crate::cutter::Back;
use std::os::unix::net::UnixStream;

#[test]
fn a_source_in_doubt_goes_on_when_the_peer_is_back_and_never_committed() {
    bounded(|| {
        let rig = rig(|sent| sent.len() / 2, [SHORT, RESUME]);
        rig.cutter.swallow();
        let half = rig.sent.len() / 2;
        (&rig.source).write_all(&rig.sent[half..]).unwrap();
        // STILL_OPEN is sent, and does not arrive.
        until_in_doubt(&rig.sending);
        rig.cutter.hold();
        noticed(&rig.sending, "Look at the destination");
        noticed(&rig.sending, "where the VM is (");
        assert!(!readable(&rig.source, A_WHILE), "QEMU's socket was closed in doubt");
        rig.cutter.release();
        // The question ends the other end's session, which was waiting for links.
        let error = rig.sending.result().unwrap_err();
        assert!(matches!(error, RelayError::NeverCommitted), "{error}");
        assert_eq!(read_rest(&rig.source), b"", "the source VM goes on");
        let rest = read_rest(&rig.destination);
        assert!(half + rest.len() < tag_at(&rig.sent), "the tag was delivered");
        let error = rig.receiving.result().unwrap_err().to_string();
        assert!(error.contains("given up"), "{error}");
    });
}

#[test]
fn a_source_in_doubt_learns_that_its_peer_committed_without_confirmation() {
    bounded(|| {
        let rig = rig(<[u8]>::len, [SHORT, AMPLE]);
        rig.cutter.hold();
        noticed(&rig.sending, "Look at the destination");
        let error = rig.receiving.result().unwrap_err();
        assert!(!matches!(error, RelayError::Unheard { .. }), "{error}");
        rig.cutter.release();
        noticed(&rig.sending, "cannot say");
        assert!(!readable(&rig.source, A_WHILE), "QEMU's socket was closed");
        assert!(rig.sending.is_running());
        drop(rig.source);
        let error = rig.sending.result().unwrap_err();
        assert!(matches!(error, RelayError::InDoubt { .. }), "{error}");
    });
}

/// The source in doubt learns that the destination has confirmed, and informs its QEMU.
fn confirmed_by_the_answer(rig: Rig) {
    rig.cutter.release();
    assert_eq!(read_exactly(&rig.source, 8), SHUT_OK);
    drop((rig.source, rig.destination));
    let end = rig.sending.result().unwrap();
    assert!(end.return_path && end.peer_report.is_empty());
    assert!(rig.receiving.result().unwrap().confirmed);
}

#[test]
fn a_source_in_doubt_succeeds_by_the_answer_of_a_peer_that_has_confirmed() {
    bounded(|| {
        // The source gives up first: its question ends the other end's session. Or the destination
        // does, and waits for a question.
        for [source, destination] in [[SHORT, RESUME], [2 * AMPLE, AMPLE]] {
            let rig = rig(<[u8]>::len, [source, destination]);
            rig.cutter.hold();
            (&rig.destination).write_all(&SHUT_OK).unwrap();
            noticed(&rig.sending, "Look at the destination");
            if destination == AMPLE {
                rig.receiving.says("answering for up to");
            }
            confirmed_by_the_answer(rig);
        }
    });
}

#[test]
fn a_link_that_returns_after_a_confirmed_destination_gave_up_is_an_answer() {
    bounded(|| {
        let rig = rig(<[u8]>::len, [RESUME, AMPLE]);
        rig.cutter.hold();
        (&rig.destination).write_all(&SHUT_OK).unwrap();
        rig.receiving.says("answering for up to");
        confirmed_by_the_answer(rig);
    });
}

/// The receiver answers for as long as the source may ask, and not only for the 5 s behind an
/// answer that has arrived.
#[test]
fn an_answer_that_is_lost_on_the_way_is_given_again() {
    bounded(|| {
        let rig = rig_to(Receiving::once(AMPLE), <[u8]>::len, SHORT);
        rig.cutter.hold();
        (&rig.destination).write_all(&SHUT_OK).unwrap();
        noticed(&rig.sending, "Look at the destination");
        rig.receiving.says("answering for up to");
        rig.cutter.mute();
        let until = Instant::now() + WATCHDOG;
        while !rig.cutter.has_muted() {
            assert!(Instant::now() < until, "the source does not ask");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_secs(8));
        assert!(!rig.receiving.has_ended(), "nobody is left to answer");
        confirmed_by_the_answer(rig);
    });
}

#[test]
fn a_source_with_a_part_of_a_message_stays_in_doubt() {
    bounded(|| {
        let rig = rig(<[u8]>::len, [SHORT, RESUME]);
        (&rig.destination).write_all(&SHUT_OK[..3]).unwrap();
        assert_eq!(read_exactly(&rig.source, 3), SHUT_OK[..3]);
        rig.cutter.hold();
        (&rig.destination).write_all(&SHUT_OK[3..]).unwrap();
        noticed(&rig.sending, "Look at the destination");
        rig.cutter.release();
        noticed(&rig.sending, "runs the VM. Quit");
        assert!(!readable(&rig.source, A_WHILE), "it got more of the message");
        drop(rig.source);
        let error = rig.sending.result().unwrap_err();
        assert!(matches!(error, RelayError::InDoubt { .. }), "{error}");
        assert!(rig.receiving.result().unwrap().confirmed);
    });
}

#[test]
fn a_stopped_receiver_does_not_wait_for_a_question() {
    bounded(|| {
        let rig = rig(<[u8]>::len, [RESUME, AMPLE]);
        rig.cutter.hold();
        (&rig.destination).write_all(&SHUT_OK).unwrap();
        rig.receiving.says("answering for up to");
        rig.receiving.server.stop();
        let error = rig.receiving.result().unwrap_err();
        assert!(matches!(error, RelayError::Unheard { .. }), "{error}");
        drop(rig.source);
        rig.sending.result().unwrap_err();
    });
}

#[test]
fn a_destination_that_confirms_in_an_outage_without_credit_is_known_to_have_confirmed() {
    bounded(|| {
        // One message of the return path may be in flight.
        let grants = Grants { chunk_bytes: 65536, stream_frames: 2, shared_frames: 0 };
        let rig = rig_with(grants, <[u8]>::len, [SHORT, AMPLE]);
        rig.cutter.hold();
        (&rig.destination).write_all(&[0, 2, 0, 4, 0, 0, 0, 1]).unwrap();
        // The relay must read the two messages separately; otherwise this test shows nothing.
        std::thread::sleep(A_WHILE);
        (&rig.destination).write_all(&SHUT_OK).unwrap();
        noticed(&rig.sending, "Look at the destination");
        rig.receiving.says("answering for up to");
        confirmed_by_the_answer(rig);
    });
}

/// A source in doubt whose QEMU has not read these words of its destination, of which more are than
/// its socket holds: the relay cannot pass on the last of them.
fn unread(words: &[u8]) -> Rig {
    let rig = rig(<[u8]>::len, [SHORT, RESUME]);
    let (to, all) = (rig.destination.try_clone().unwrap(), words.to_vec());
    let writer = std::thread::spawn(move || (&to).write_all(&all).unwrap());
    let until = Instant::now() + WATCHDOG;
    // The source relay counts its bytes with their headers, so the network counts the words.
    let has_come =
        |back: Back| back.plain == words.len() as u64 && rig.sending.received() >= back.bytes;
    // A source relay passes a success on only when all that it sent is acknowledged.
    while !has_come(rig.cutter.back()) || rig.sending.in_flight() > 0 {
        assert!(Instant::now() < until, "the words do not come");
        std::thread::sleep(Duration::from_millis(1));
    }
    writer.join().unwrap();
    rig.cutter.hold();
    while !rig.sending.has_failed() {
        assert!(Instant::now() < until, "the session goes on");
        std::thread::sleep(Duration::from_millis(1));
    }
    rig
}

/// PONGs, more than a socket holds together with the relay that writes to it. Not many more: each
/// is a message of its own to the relays, and on a busy machine takes milliseconds.
fn pongs() -> Vec<u8> {
    const PONG: [u8; 8] = [0, 2, 0, 4, 0, 0, 0, 1];
    let (socket, _peer) = UnixStream::pair().unwrap();
    let room = rustix::net::sockopt::socket_send_buffer_size(&socket).unwrap();
    PONG.repeat((room + (64 << 10)) / PONG.len())
}

#[test]
fn a_stop_while_the_last_words_wait_for_the_source_is_answered() {
    bounded(|| {
        let rig = unread(&pongs());
        // The relay gives the source QEMU 2 s to read them.
        std::thread::sleep(A_WHILE);
        rig.sending.handle.stop();
        let mut answered = false;
        for text in rig.sending.notices.iter() {
            answered |= text.contains("interrupt again");
            if text.contains("Look at the destination") {
                break;
            }
        }
        if answered {
            assert!(rig.sending.is_running());
            rig.sending.handle.stop();
        }
        // If it was not answered, it came after those 2 s, and ends a relay in doubt at once.
        let until = Instant::now() + Duration::from_secs(60);
        while rig.sending.is_running() {
            assert!(Instant::now() < until, "the stop is lost");
            std::thread::sleep(Duration::from_millis(1));
        }
        let error = rig.sending.result().unwrap_err();
        assert!(matches!(error, RelayError::LeftInDoubt), "{error}");
    });
}

#[test]
fn a_source_that_reads_its_success_late_has_succeeded() {
    bounded(|| {
        let words = [&pongs()[..], &SHUT_OK].concat();
        let rig = unread(&words);
        noticed(&rig.sending, "Look at the destination");
        assert_same(&read_exactly(&rig.source, words.len()), &words, "the return path");
        drop(rig.source);
        let end = rig.sending.result().expect("the source QEMU has its success");
        assert!(end.return_path);
    });
}
