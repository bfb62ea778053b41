//! A keeper on a thread, with a QEMU and a relay that end in turn.

use super::super::keeping::*;
use super::*;
use crate::return_path::PONG_LOADED;
use std::io::{Read, Write};
use std::sync::mpsc::{self, Receiver};
use std::thread::JoinHandle;

struct Rig {
    control: Option<UnixStream>,
    qemu: UnixStream,
    relay: Option<UnixStream>,
    notices: Receiver<String>,
    keeper: JoinHandle<()>,
}

/// A keeper on a thread, told how many bytes of a packaged state are to come, if any.
fn rig(packaged: Option<Option<u64>>) -> Rig {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (qemu, relay) = UnixStream::pair().unwrap();
    let (send, notices) = mpsc::channel();
    let keeper = std::thread::spawn(move || {
        keep(&theirs, |text| send.send(text.to_string()).unwrap()).unwrap();
    });
    // Not a process: while one starts it has copies of all sockets, including those of other
    // tests.
    let parent = Keeper { control: Some(ours.try_clone().unwrap()), child: None };
    if let Some(packaged) = packaged {
        parent.hold(&relay, packaged.map(Switchover::after)).unwrap();
    }
    drop(parent);
    Rig { control: Some(ours), qemu, relay: Some(relay), notices, keeper }
}

fn is_open(mut qemu: &UnixStream) -> bool {
    qemu.set_nonblocking(true).unwrap();
    // A socket that is closed with bytes unread gives an error.
    qemu.read(&mut [0; 1]).map_or_else(|error| error.kind() == io::ErrorKind::WouldBlock, |n| n > 0)
}

const SOON: Duration = Duration::from_secs(120);

#[test]
fn a_killed_relay_leaves_the_connection_open_until_qemu_ends_it() {
    let mut rig = rig(Some(None));
    rig.relay = None;
    rig.control = None;
    assert!(rig.notices.recv_timeout(SOON).unwrap().contains("migrate_cancel"));
    (&rig.qemu).write_all(&[7; 1000]).unwrap();
    assert!(is_open(&rig.qemu) && !rig.keeper.is_finished());
    drop(rig.qemu);
    rig.keeper.join().unwrap();
}

#[test]
fn a_relay_that_ends_by_itself_takes_the_connection_with_it() {
    let mut rig = rig(Some(None));
    rig.relay.take().unwrap().shutdown(std::net::Shutdown::Both).unwrap();
    rig.control = None;
    rig.keeper.join().unwrap();
    assert!(!is_open(&rig.qemu) && rig.notices.try_recv().is_err());
}

#[test]
fn sockets_never_handed_over_close() {
    let mut never = rig(None);
    never.relay = None;
    never.control = None;
    never.keeper.join().unwrap();
    assert!(!is_open(&never.qemu));
}

/// The end of a stream in postcopy: RAM's last section and the tag.
const END: [u8; 19] = [3, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0x10, 0x7e, 0, 0, 0, 2, 0];

/// A source in postcopy whose relay was killed pauses. If it has sent all, and the relay has not
/// read that, it would run its VM.
#[test]
fn in_postcopy_the_keeper_closes_unless_the_end_of_the_stream_waits() {
    for (end, is_held) in [(&[7; 19][..], false), (&END[..], true)] {
        for before in [Switchover::Switched, Switchover::Coming(9)] {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let (qemu, relay) = UnixStream::pair().unwrap();
            let (send, notices) = mpsc::channel();
            let keeper = std::thread::spawn(move || {
                keep(&theirs, |text| send.send(text.to_string()).unwrap()).unwrap();
            });
            let ping: &[u8] = if before == Switchover::Switched { &[] } else { &[8; 9] };
            (&qemu).write_all(&[ping, &[2, 0, 0, 0, 2], &[5; 999], end].concat()).unwrap();
            Keeper { control: Some(ours), child: None }.hold(&relay, Some(before)).unwrap();
            drop(relay);
            if is_held {
                assert!(notices.recv_timeout(SOON).unwrap().contains("end of a postcopy"));
                std::thread::sleep(Duration::from_millis(500));
                assert!(is_open(&qemu) && !keeper.is_finished(), "{before:?}");
                drop(qemu);
            } else {
                let mut rest = Vec::new();
                let _ = (&qemu).read_to_end(&mut rest);
                assert!(notices.try_recv().is_err(), "{before:?}");
            }
            keeper.join().unwrap();
        }
    }
}

#[test]
fn in_postcopy_the_keeper_closes_once_the_source_is_in_postcopy() {
    let mut rig = rig(Some(Some(0)));
    rig.relay = None;
    rig.control = None;
    rig.notices.recv_timeout(SOON).unwrap();
    (&rig.qemu).write_all(&[7; 9]).unwrap();
    assert!(is_open(&rig.qemu) && !rig.keeper.is_finished());
    // The first byte of a section.
    (&rig.qemu).write_all(&[2]).unwrap();
    rig.keeper.join().unwrap();
    assert!(!is_open(&rig.qemu));
}

fn state_rig(state: Switchover) -> Rig {
    let rig = rig(None);
    drop(rig.control);
    rig.keeper.join().unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (qemu, relay) = UnixStream::pair().unwrap();
    let (send, notices) = mpsc::channel();
    let keeper = std::thread::spawn(move || {
        keep(&theirs, |text| send.send(text.to_string()).unwrap()).unwrap();
    });
    Keeper { control: Some(ours), child: None }.hold(&relay, Some(state)).unwrap();
    Rig { control: None, qemu, relay: None, notices, keeper }
}

/// QEMU 10.2 and later: whatever it writes, it may still fail and run its VM.
#[test]
fn a_source_that_awaits_its_pong_is_held_whatever_it_writes() {
    for (state, word) in [
        (Switchover::Unanswered, "turned to postcopy"),
        (Switchover::Sent, "end of a postcopy migration"),
    ] {
        let rig = state_rig(state);
        let said = rig.notices.recv_timeout(SOON).unwrap();
        assert!(said.contains(word), "{said}");
        (&rig.qemu).write_all(&[2; 9000]).unwrap();
        std::thread::sleep(Duration::from_millis(500));
        assert!(is_open(&rig.qemu) && !rig.keeper.is_finished());
        drop(rig.qemu);
        rig.keeper.join().unwrap();
    }
}

#[test]
fn a_source_whose_pong_was_under_way_gets_it_and_then_pauses() {
    let rig = state_rig(Switchover::Answered);
    let mut pong = [0; 8];
    (&rig.qemu).read_exact(&mut pong).unwrap();
    assert_eq!(pong, PONG_LOADED);
    std::thread::sleep(Duration::from_millis(500));
    assert!(!rig.keeper.is_finished(), "the source has written nothing since");
    // The socket is full while the keeper does not get to read it: QEMU then writes later.
    rig.qemu.set_nonblocking(true).unwrap();
    let until = Instant::now() + SOON;
    // A page, the end of its section, and the head of the next one.
    let section = [&[7; 900][..], &[0, 0, 0, 0, 0, 0, 0, 0x10, 0x7e, 0, 0, 0, 2, 2, 0, 0, 0, 2]];
    let section = section.concat();
    while !rig.keeper.is_finished() {
        assert!(Instant::now() < until, "the source is not let go");
        let _ = (&rig.qemu).write(&section);
        std::thread::sleep(Duration::from_millis(20));
    }
    rig.keeper.join().unwrap();
}

/// It has sent all meanwhile, and ends its stream.
#[test]
fn a_source_that_ends_its_stream_behind_its_pong_is_held_as_one_that_has_sent_all() {
    let rig = state_rig(Switchover::Answered);
    (&rig.qemu).write_all(&[&[5; 999][..], &END].concat()).unwrap();
    assert!(rig.notices.recv_timeout(SOON).unwrap().contains("end of a postcopy"));
    assert!(is_open(&rig.qemu) && !rig.keeper.is_finished());
    drop(rig.qemu);
    rig.keeper.join().unwrap();
}

/// Its end would make the source fail that is turning to postcopy.
#[test]
fn a_preempt_channel_is_held_as_long_as_the_main_one_and_takes_pages() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let ((qemu, relay), (preempt, there)) =
        (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
    let (send, notices) = mpsc::channel();
    let keeper = std::thread::spawn(move || {
        keep(&theirs, |text| send.send(text.to_string()).unwrap()).unwrap();
    });
    let parent = Keeper { control: Some(ours), child: None };
    parent.hold_too(&there).unwrap();
    // Regression: another one took its place, and ended it.
    parent.hold_too(&UnixStream::pair().unwrap().0).unwrap();
    parent.hold(&relay, Some(Switchover::Unanswered)).unwrap();
    drop((relay, there, parent));
    notices.recv_timeout(SOON).unwrap();
    preempt.set_write_timeout(Some(SOON)).unwrap();
    (&preempt).write_all(&[8; 1 << 20]).unwrap();
    assert!(is_open(&preempt) && !keeper.is_finished());
    drop(qemu);
    keeper.join().unwrap();
    assert!(!is_open(&preempt));
}

#[test]
fn the_keeper_closes_while_the_source_writes_its_packaged_state() {
    let mut rig = rig(Some(Some(1)));
    rig.relay = None;
    rig.control = None;
    rig.keeper.join().unwrap();
    assert!(!is_open(&rig.qemu) && rig.notices.try_recv().is_err());
}
