//! W20h: a source QEMU that is killed in postcopy. The destination runs the VM: it gets what its
//! source has written, and neither end waits for the rest without end.

use crate::acknowledged::{end, loading, says, section, until_stuck, until_stuck_by, END, LOADED};
use crate::harness::{
    assert_same, bounded, read_exactly, read_rest, Receiving, A_WHILE, PAGE, SHUT_OK,
};
use crate::postcopy::{announced, rig, rig_with, Rig, PING};
use relay::RelayError;
use rustix::net::sockopt::set_socket_send_buffer_size;
use session::Grants;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::Duration;
use stream::synth::{MainStream, Section};

/// A source of QEMU up to 10.1 in postcopy for good.
fn in_postcopy(rig: Rig) -> (Rig, MainStream, UnixStream) {
    let mut main = announced(3);
    let destination = rig.carry(None, &main.take());
    main.packaged(&[7; 70_000]).raw(&PING);
    let destination = rig.carry(Some(destination), &section(&mut main, 3));
    (rig, main, destination)
}

/// A source of QEMU 10.2 or later with little memory left: the relay has not read for a second when
/// it is killed, and so does not know yet that its source has seen the PONG.
#[test]
fn a_source_that_has_sent_all_right_behind_its_pong_takes_nothing_from_the_destination() {
    bounded(|| {
        let (rig, mut main, destination) = loading();
        says(&destination, &rig.source, &LOADED);
        let destination = rig.carry(Some(destination), &section(&mut main, 4));
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

/// Memory is missing at the destination for good.
fn pauses(rig: Rig, destination: UnixStream) {
    let error = rig.sending.result().unwrap_err();
    assert!(matches!(error, RelayError::Paused { .. }), "{error}");
    drop(destination);
    rig.receiving.result().unwrap_err();
}

#[test]
fn a_source_that_is_killed_within_the_last_section_leaves_nobody_waiting() {
    bounded(|| {
        let (rig, mut main, destination) = in_postcopy(rig());
        main.section(Section::End).page("pc.ram", 0, &[5; PAGE]);
        let destination = rig.carry(Some(destination), &main.take());
        rig.source.shutdown(std::net::Shutdown::Both).unwrap();
        pauses(rig, destination);
    });
}

/// The destination takes nothing, so the relay gives up the bytes that wait in its socket.
#[test]
fn a_source_that_is_killed_before_its_last_section_was_read_leaves_nobody_waiting() {
    bounded(|| {
        // More bytes wait than the buffers have room for.
        let grants = Grants { chunk_bytes: 65536, shared_frames: 0, ..Grants::default() };
        let rig = rig_with(Receiving::with(&[None], grants));
        let (rig, mut main, destination) = in_postcopy(rig);
        main.section(Section::End);
        until_stuck_by(&rig, || main.page("pc.ram", 0, &[5; PAGE]).take());
        set_socket_send_buffer_size(&rig.source, 128 << 10).unwrap();
        for _ in 0..30 {
            main.page("pc.ram", 0, &[5; PAGE]);
        }
        main.end_of_section().raw(&[0]);
        (&rig.source).write_all(&main.take()).unwrap();
        rig.source.shutdown(std::net::Shutdown::Both).unwrap();
        pauses(rig, destination);
    });
}

/// A source of QEMU up to 10.1 with little memory left: the relay has read nothing since it turned
/// to postcopy, or only a part of its packaged state, and everything waits in its socket. The
/// section behind the state shows that nobody has cancelled (W20).
#[test]
fn a_source_whose_whole_postcopy_waits_takes_nothing_from_the_destination() {
    for state in [400, 90_000] {
        bounded(move || {
            let grants = Grants { chunk_bytes: 65536, shared_frames: 0, ..Grants::default() };
            let rig = rig_with(Receiving::with(&[None], grants));
            let mut main = announced(3);
            let destination = rig.carry(None, &main.take());
            let mut sent = until_stuck(&rig, &mut main);
            set_socket_send_buffer_size(&rig.source, 200 << 10).unwrap();
            main.packaged(&vec![7; state]).raw(&PING);
            let last = [main.take(), section(&mut main, 3), end(&mut main)].concat();
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
}

/// The same, and the relay reads meanwhile: how far it has come when the source is killed makes no
/// difference.
#[test]
fn a_source_that_is_killed_right_behind_its_postcopy_takes_nothing_whatever_was_read() {
    for pause in 0..20 {
        bounded(move || {
            let rig = rig();
            let mut main = announced(3);
            let destination = rig.carry(None, &main.take());
            main.packaged(&[7; 400]).raw(&PING);
            let state = main.take();
            let last = [section(&mut main, 3), end(&mut main)].concat();
            (&rig.source).write_all(&state).unwrap();
            std::thread::sleep(Duration::from_micros(100 * pause));
            (&rig.source).write_all(&last).unwrap();
            drop(rig.source);
            let all = [state, last].concat();
            assert_same(&read_exactly(&destination, all.len()), &all, "main");
            (&destination).write_all(&SHUT_OK).unwrap();
            let error = rig.sending.result().unwrap_err();
            assert!(matches!(error, RelayError::SourceGone), "{error}");
            drop(destination);
            rig.receiving.result().unwrap_err();
        });
    }
}

/// Without that section the source may have cancelled or failed: the destination does not get what
/// starts the VM. From QEMU 10.2 on the section shows nothing (W20c).
#[test]
fn a_source_whose_packaged_state_waits_may_have_cancelled() {
    for is_acknowledged in [false, true] {
        bounded(move || {
            let grants = Grants { chunk_bytes: 65536, shared_frames: 0, ..Grants::default() };
            let rig = rig_with(Receiving::with(&[None], grants));
            let mut main = announced(3);
            let destination = rig.carry(None, &main.take());
            let before = until_stuck(&rig, &mut main);
            set_socket_send_buffer_size(&rig.source, 200 << 10).unwrap();
            let state = vec![7; 90_000];
            match is_acknowledged {
                true => main.packaged(&[&state[..], &END].concat()).raw(&PING),
                false => main.packaged(&state).raw(&PING),
            };
            let mut last = main.take();
            let starts = before.len() + last.len() - PING.len();
            if is_acknowledged {
                last.extend([section(&mut main, 3), end(&mut main)].concat());
            }
            (&rig.source).write_all(&last).unwrap();
            drop(rig.source);
            std::thread::sleep(4 * A_WHILE);
            let got = read_rest(&destination);
            assert!(got.len() < starts, "what starts the VM was delivered");
            let error = rig.sending.result().unwrap_err();
            assert!(matches!(error, RelayError::SourceEnded), "{error}");
            drop(destination);
            rig.receiving.result().unwrap_err();
        });
    }
}
