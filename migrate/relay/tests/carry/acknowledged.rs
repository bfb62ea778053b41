//! W20c: postcopy of QEMU 10.2 and later, whose source may fail and run its VM until it has seen
//! the PONG of its packaged state; W20h: the end of postcopy, when a source of QEMU 8.2 and later
//! fails in the same way.

use crate::bad_peers::lying_server;
use crate::commit::STUCK;
use crate::cutter::Cutter;
use crate::harness::{
    assert_same, bounded, read_exactly, read_rest, readable, Options, Receiving, Sending, A_WHILE,
    PAGE, SHUT_OK, WATCHDOG,
};
use crate::postcopy::{announced, outage, rig, Outage, Rig, PING};
use crate::resume::{AMPLE, SHORT};
use relay::RelayError;
use rustix::net::sockopt::set_socket_send_buffer_size;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};
use stream::synth::{MainStream, Section};

/// PING 0x42 and POSTCOPY_RUN, at the end of the packaged state.
pub(crate) const END: [u8; 14] = [8, 0, 2, 0, 4, 0, 0, 0, 0x42, 8, 0, 5, 0, 0];
pub(crate) const LOADED: [u8; 8] = [0, 2, 0, 4, 0, 0, 0, 0x42];

/// The end of a section and the head of the next one.
const HEAD: [u8; 18] = [0, 0, 0, 0, 0, 0, 0, 0x10, 0x7e, 0, 0, 0, 2, 2, 0, 0, 0, 2];

/// The packaged state, and memory behind it, which the source sends before it has its PONG.
pub(crate) fn packaged(main: &mut MainStream) -> Vec<u8> {
    main.packaged(&[&[7; 70_000][..], &END].concat()).raw(&PING);
    section(main, 3)
}

pub(crate) fn section(main: &mut MainStream, content: u8) -> Vec<u8> {
    main.section(Section::Part).page("pc.ram", 0, &[content; PAGE]).end_of_section();
    main.take()
}

/// The end of a source that has sent all.
pub(crate) fn end(main: &mut MainStream) -> Vec<u8> {
    main.section(Section::End).end_of_section().raw(&[0]);
    main.take()
}

/// A source whose packaged state is at the destination, which has not loaded it.
pub(crate) fn loading() -> (Rig, MainStream, UnixStream) {
    let rig = rig();
    let mut main = announced(300);
    let head = main.take();
    let destination = rig.carry(None, &head);
    let state = packaged(&mut main);
    let destination = rig.carry(Some(destination), &state);
    (rig, main, destination)
}

pub(crate) fn says(mut from: &UnixStream, to: &UnixStream, bytes: &[u8]) {
    from.write_all(bytes).unwrap();
    assert_same(&read_exactly(to, bytes.len()), bytes, "the return path");
}

/// A source QEMU that writes a section every few milliseconds, as its migration thread does, until
/// its socket is closed. Returns when that was.
pub(crate) fn goes_on(source: &UnixStream) -> std::thread::JoinHandle<Instant> {
    let to = source.try_clone().unwrap();
    std::thread::spawn(move || {
        let mut main = announced(1);
        let _ = main.take();
        while (&to).write_all(&section(&mut main, 9)).is_ok() {
            std::thread::sleep(Duration::from_millis(10));
        }
        Instant::now()
    })
}

/// Reads everything away until the end; counts what came.
fn drain(destination: UnixStream) -> std::thread::JoinHandle<Vec<u8>> {
    std::thread::spawn(move || read_rest(&destination))
}

#[test]
fn a_source_that_has_its_pong_goes_through_postcopy_to_its_end() {
    bounded(|| {
        let (rig, mut main, destination) = loading();
        assert!(rig.sending.handle.in_doubt(), "a migrate_cancel could start the source VM");
        says(&destination, &rig.source, &LOADED);
        let destination = rig.carry(Some(destination), &section(&mut main, 4));
        let destination = rig.carry(Some(destination), &end(&mut main));
        says(&destination, &rig.source, &SHUT_OK);
        drop((rig.source, destination));
        let ended = rig.sending.result().expect("the source relay succeeds");
        assert_eq!(ended.hidden_downtime, None);
        rig.receiving.result().expect("the destination relay succeeds");
    });
}

/// The packaged state and what follows it go on without a STILL_OPEN only when the source may not
/// run its VM any more: never here.
#[test]
fn a_source_that_closes_behind_its_packaged_state_never_has_it_delivered() {
    bounded(|| {
        let rig = rig();
        let mut main = announced(3);
        let destination = rig.carry(None, &main.take());
        // The relay cannot look at the source's socket before it is closed.
        assert!(rig.sending.handle.forbid_commit());
        (&rig.source).write_all(&packaged(&mut main)).unwrap();
        assert!(!readable(&rig.source, A_WHILE));
        rig.source.shutdown(std::net::Shutdown::Both).unwrap();
        let got = read_rest(&destination);
        assert!(got.len() < 70_000 + END.len(), "what starts the VM was delivered");
        rig.sending.result().unwrap_err();
        rig.receiving.result().unwrap_err();
    });
}

/// The bytes behind the packaged state show nothing: the source is not given up for them.
#[test]
fn a_peer_lost_before_the_pong_leaves_the_source_open_whatever_it_writes() {
    bounded(|| {
        let (rig, mut main, destination) = loading();
        rig.proxy.cut();
        let notice = rig.sending.notices.recv_timeout(WATCHDOG).expect("it is said");
        assert!(
            notice.contains("turned to postcopy") && notice.contains("do not quit"),
            "{notice}"
        );
        (&rig.source).write_all(&section(&mut main, 5)).unwrap();
        assert!(!readable(&rig.source, 4 * A_WHILE), "QEMU's socket was closed");
        // A person ends it: the source fails, and its VM goes on.
        rig.sending.handle.stop();
        assert_eq!(read_rest(&rig.source), b"");
        let error = rig.sending.result().unwrap_err();
        assert!(matches!(error, RelayError::LeftInDoubt), "{error}");
        drop(destination);
        rig.receiving.result().unwrap_err();
    });
}

#[test]
fn a_destination_that_ends_before_its_pong_frees_the_source() {
    bounded(|| {
        let (rig, mut main, destination) = loading();
        (&rig.source).write_all(&section(&mut main, 5)).unwrap();
        drop(destination);
        assert_eq!(read_rest(&rig.source), b"", "the source QEMU fails, and its VM goes on");
        let error = rig.sending.result().unwrap_err();
        let there = matches!(error, RelayError::Paused { .. } | RelayError::TurnInDoubt { .. });
        assert!(!there, "{error}");
        rig.receiving.result().unwrap_err();
    });
}

/// The peers lose each other for good while the destination loads; then the network is back.
fn lost_while_loading() -> (Outage, UnixStream, UnixStream) {
    let rig = outage(1, None, [SHORT; 2]);
    let source = rig.sending.connect();
    let mut main = announced(3);
    let bytes = [main.take(), packaged(&mut main)].concat();
    (&source).write_all(&bytes).unwrap();
    let (destination, _) = rig.listener.accept().unwrap();
    assert_same(&read_exactly(&destination, bytes.len()), &bytes, "main");
    rig.cutter.hold();
    loop {
        let said = rig.sending.notices.recv_timeout(WATCHDOG).expect("it is said");
        if said.contains("turned to postcopy") {
            break;
        }
    }
    (rig, source, destination)
}

#[test]
fn a_source_that_asks_gets_the_pong_that_was_lost_and_pauses() {
    bounded(|| {
        let (rig, source, destination) = lost_while_loading();
        // It may still load for a while: the relay keeps its connection, and hears of it.
        assert!(!readable(&destination, A_WHILE), "QEMU's socket was closed");
        let loaded = Instant::now();
        (&destination).write_all(&[&[0, 2, 0, 4, 0, 0, 0, 3][..], &LOADED].concat()).unwrap();
        rig.cutter.release();
        assert_eq!(read_exactly(&source, 8), LOADED);
        let going = goes_on(&source);
        assert_eq!(read_rest(&source), b"");
        going.join().unwrap();
        let error = rig.sending.result().unwrap_err();
        assert!(matches!(error, RelayError::Paused { .. }), "{error}");
        assert_eq!(read_rest(&destination), b"");
        // Behind its PONG QEMU has to run the VM before its connection may end.
        assert!(loaded.elapsed() >= Duration::from_secs(1), "{:?}", loaded.elapsed());
        rig.receiving.result().unwrap_err();
    });
}

#[test]
fn a_source_that_asks_is_free_once_the_destination_has_ended_without_its_pong() {
    bounded(|| {
        let (rig, source, destination) = lost_while_loading();
        rig.cutter.release();
        // Asked meanwhile, the peer does not know.
        std::thread::sleep(Duration::from_secs(3));
        assert!(rig.sending.is_running() && !readable(&source, A_WHILE));
        (&destination).write_all(&[0, 2, 0, 4, 0, 0, 0, 3]).unwrap();
        drop(destination);
        assert_eq!(read_rest(&source), b"");
        let error = rig.sending.result().unwrap_err();
        assert!(matches!(error, RelayError::NeverCommitted), "{error}");
        rig.receiving.result().unwrap_err();
    });
}

/// The PONG is in the source's socket, and its migration thread need not have seen it.
#[test]
fn a_peer_lost_right_behind_the_pong_closes_the_source_only_when_it_has_seen_it() {
    bounded(|| {
        let (rig, _, destination) = loading();
        says(&destination, &rig.source, &LOADED);
        rig.proxy.cut();
        // A source that is stopped shows nothing.
        assert!(!readable(&rig.source, 5 * A_WHILE), "QEMU's socket was closed");
        let begin = Instant::now();
        let closed = goes_on(&rig.source).join().unwrap();
        assert!(closed - begin >= Duration::from_millis(900), "{:?}", closed - begin);
        assert_eq!(read_rest(&rig.source), b"");
        let error = rig.sending.result().unwrap_err();
        assert!(matches!(error, RelayError::Paused { .. }), "{error}");
        drop(destination);
        rig.receiving.result().unwrap_err();
    });
}

/// Behind that time it is in postcopy for good: a peer that is lost lets both ends pause.
#[test]
fn a_peer_lost_in_postcopy_lets_both_ends_pause() {
    bounded(|| {
        let (rig, _, destination) = loading();
        says(&destination, &rig.source, &LOADED);
        let (going, there) = (goes_on(&rig.source), drain(destination.try_clone().unwrap()));
        std::thread::sleep(Duration::from_millis(1500));
        rig.proxy.cut();
        assert_eq!(read_rest(&rig.source), b"");
        going.join().unwrap();
        let error = rig.sending.result().unwrap_err();
        assert!(matches!(error, RelayError::Paused { .. }), "{error}");
        assert!(!there.join().unwrap().is_empty());
        rig.receiving.result().unwrap_err();
    });
}

/// Within a section of huge pages, which may take any time, the source does not look for its PONG,
/// and the guest may have written what looks like the heads of sections. The peer is lost at once,
/// or when the relay has read that section for more than a second.
#[test]
fn a_source_within_a_long_section_is_not_taken_for_one_that_has_seen_its_pong() {
    bounded(|| {
        for before in [Duration::ZERO, Duration::from_millis(1800)] {
            let (rig, mut main, destination) = loading();
            says(&destination, &rig.source, &LOADED);
            let there = drain(destination.try_clone().unwrap());
            let (to, over) = (rig.source.try_clone().unwrap(), Arc::new(AtomicBool::new(false)));
            let stop = over.clone();
            let writer = std::thread::spawn(move || {
                let mut forged = HEAD.repeat(PAGE / HEAD.len());
                forged.resize(PAGE, 9);
                main.section(Section::Part);
                while !stop.load(Ordering::Acquire) {
                    if (&to).write_all(&main.page("pc.ram", 0, &forged).take()).is_err() {
                        break;
                    }
                    std::thread::sleep(Duration::from_millis(5));
                }
                let _ = (&to).write_all(&main.end_of_section().take());
            });
            std::thread::sleep(before);
            rig.proxy.cut();
            assert!(!readable(&rig.source, Duration::from_secs(3)), "QEMU's socket was closed");
            over.store(true, Ordering::Release);
            writer.join().unwrap();
            let going = goes_on(&rig.source);
            assert_eq!(read_rest(&rig.source), b"");
            going.join().unwrap();
            let error = rig.sending.result().unwrap_err();
            assert!(matches!(error, RelayError::Paused { .. }), "{error}");
            there.join().unwrap();
            drop(destination);
            rig.receiving.result().unwrap_err();
        }
    });
}

/// QEMU 8.2 and later, of any kind of postcopy: closed when it has sent all, it runs its VM.
#[test]
fn a_source_that_has_sent_all_in_postcopy_is_held_when_the_peer_is_lost() {
    bounded(|| {
        let mut cases = vec![(true, true), (false, true), (false, false)];
        while let Some((acknowledged, read)) = cases.pop() {
            let rig = rig();
            let mut main = announced(30);
            let destination = rig.carry(None, &main.take());
            if acknowledged {
                let destination2 =
                    rig.carry(Some(destination.try_clone().unwrap()), &packaged(&mut main));
                says(&destination2, &rig.source, &LOADED);
            } else {
                main.packaged(&[7; 70_000]).raw(&PING);
                let bytes = section(&mut main, 3);
                rig.carry(Some(destination.try_clone().unwrap()), &bytes);
            }
            let last = end(&mut main);
            if read {
                rig.carry(Some(destination.try_clone().unwrap()), &last);
                rig.proxy.cut();
            } else {
                // The relay has not read it when the peer is lost.
                let lost = Instant::now();
                rig.proxy.cut();
                let written = (&rig.source).write_all(&last);
                // The relay takes a source that writes nothing for 300 ms for one that pauses.
                if lost.elapsed() > Duration::from_millis(250) {
                    cases.push((acknowledged, read));
                    continue;
                }
                written.unwrap();
            }
            let notice = rig.sending.notices.recv_timeout(WATCHDOG).expect("it is said");
            assert!(notice.contains("end of a postcopy migration"), "{notice}");
            assert!(!readable(&rig.source, 4 * A_WHILE), "QEMU's socket was closed");
            drop(rig.source);
            let error = rig.sending.result().unwrap_err();
            assert!(matches!(error, RelayError::EndInDoubt { .. }), "{error}");
            drop(destination);
            rig.receiving.result().unwrap_err();
        }
    });
}

/// Writes sections to a relay whose destination reads nothing, until the relay reads nothing.
/// Returns the bytes of these sections.
pub(crate) fn until_stuck(rig: &Rig, main: &mut MainStream) -> Vec<u8> {
    until_stuck_by(rig, || section(main, 5))
}

/// The same with bytes that `more` makes.
pub(crate) fn until_stuck_by(rig: &Rig, mut more: impl FnMut() -> Vec<u8>) -> Vec<u8> {
    let mut source = &rig.source;
    set_socket_send_buffer_size(source, 8 << 10).unwrap();
    source.set_nonblocking(true).unwrap();
    let mut sent = Vec::new();
    let (mut done, mut last) = (0, Instant::now());
    // A relay that only gets no CPU has credit.
    while last.elapsed() < STUCK || rig.sending.has_credit() {
        if done == sent.len() {
            sent.extend(more());
        }
        match source.write(&sent[done..]) {
            Ok(written) => (done, last) = (done + written, Instant::now()),
            Err(error) => {
                assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
    source.set_nonblocking(false).unwrap();
    set_socket_send_buffer_size(source, 64 << 10).unwrap();
    source.write_all(&sent[done..]).unwrap();
    sent
}

/// It was killed. All memory is on its way to a destination that runs the VM.
#[test]
fn a_source_that_ends_when_it_has_sent_all_in_postcopy_takes_nothing_from_the_destination() {
    bounded(|| {
        let rig = rig();
        let mut main = announced(3);
        let destination = rig.carry(None, &main.take());
        main.packaged(&[7; 70_000]).raw(&PING);
        let destination = rig.carry(Some(destination), &section(&mut main, 3));
        let mut sent = until_stuck(&rig, &mut main);
        // The end is in the relay's socket when QEMU ends, and the relay has no credit to read it.
        set_socket_send_buffer_size(&rig.source, 128 << 10).unwrap();
        let last = end(&mut main);
        (&rig.source).write_all(&last).unwrap();
        sent.extend(last);
        drop(rig.source);
        std::thread::sleep(4 * A_WHILE);
        assert_same(&read_exactly(&destination, sent.len()), &sent, "main");
        (&destination).write_all(&SHUT_OK).unwrap();
        let error = rig.sending.result().unwrap_err();
        assert!(matches!(error, RelayError::SourceGone), "{error}");
        drop(destination);
        rig.receiving.result().unwrap_err();
    });
}

/// The peers lose each other for good at the end of postcopy; the destination has it all. The first
/// question tells it, and no second one may get through.
#[test]
fn a_source_that_has_sent_all_gets_the_confirmation_that_was_lost() {
    bounded(|| {
        for release in [Cutter::release, Cutter::release_one] {
            let rig = outage(1, None, [AMPLE; 2]);
            let source = rig.sending.connect();
            source.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            let mut main = announced(3);
            main.packaged(&[7; 70_000]).raw(&PING);
            let bytes = [section(&mut main, 3), end(&mut main)].concat();
            (&source).write_all(&bytes).unwrap();
            let (destination, _) = rig.listener.accept().unwrap();
            assert_same(&read_exactly(&destination, bytes.len()), &bytes, "main");
            rig.cutter.hold();
            (&destination).write_all(&SHUT_OK).unwrap();
            loop {
                let said = rig.sending.notices.recv_timeout(WATCHDOG).expect("it is said");
                if said.contains("end of a postcopy migration") {
                    break;
                }
            }
            release(&rig.cutter);
            assert_eq!(read_exactly(&source, 8), SHUT_OK);
            drop((source, destination));
            rig.sending.result().expect("the source relay succeeds");
            rig.receiving.result().expect("the destination relay succeeds");
        }
    });
}

/// A receiver of a version that does not hold such a state back for STILL_OPEN.
#[test]
fn a_peer_that_does_not_know_the_rule_gets_no_such_state() {
    bounded(|| {
        let seen = Arc::new(AtomicBool::new(false));
        let noted = seen.clone();
        let (address, server) = lying_server(move |link| {
            let mut all = Vec::new();
            let _ = link.read_to_end(&mut all);
            noted.store(all.windows(END.len()).any(|part| part == END), Ordering::Release);
        });
        let folder = Receiving::new();
        let options = Options { links: 1, codec: codec::Codec::Raw, ..Options::default() };
        let sending = Sending::new(&folder, address, options);
        let source = sending.connect();
        let mut main = announced(1);
        (&source).write_all(&[main.take(), packaged(&mut main)].concat()).unwrap();
        assert_eq!(read_rest(&source), b"", "the source QEMU fails, and its VM goes on");
        let error = sending.result().unwrap_err().to_string();
        assert!(error.contains("QEMU 10.2") && error.contains("upgrade"), "{error}");
        server.join().unwrap();
        assert!(!seen.load(Ordering::Acquire), "what starts the VM went out");
    });
}
