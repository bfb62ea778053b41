//! W20h: a source QEMU that is killed in postcopy. The destination runs the VM: it gets what its
//! source has written, and neither end waits for the rest without end.

use crate::acknowledged::{end, loading, says, section, until_stuck, LOADED};
use crate::harness::{assert_same, bounded, read_exactly, A_WHILE, SHUT_OK};
use relay::RelayError;
use rustix::net::sockopt::set_socket_send_buffer_size;
use std::io::Write;

/// A source of QEMU 10.2 or later with little memory left: the relay has not read for a second when
/// it is killed, and so does not know yet that its source has seen the PONG.
#[test]
fn a_source_that_has_sent_all_right_behind_its_pong_takes_nothing_from_the_destination() {
    bounded(|| {
        let (rig, mut main, destination) = loading();
        says(&destination, &rig.source, &LOADED);
        let destination = rig.carry(Some(destination), &section(&mut main, 4));
        let mut sent = until_stuck(&rig.source, &mut main);
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
