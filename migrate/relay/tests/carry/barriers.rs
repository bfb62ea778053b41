//! W18: main gets its k-th marker only after every channel got its k-th SYNC.

use crate::harness::{
    bounded, marker_starts, read_exactly, readable, source_qemu, sync_ends, Options, Receiving,
    Sending, A_WHILE, SHUT_OK, WATCHDOG,
};
use crate::identity::multifd;
use std::io::Write;
use stream::synth::Style;

/// Reads the channels one after the other, so that each is blocked in turn, and checks for the
/// marker all the time.
fn markers_wait(style: Style) {
    let streams = multifd(style, 2, 9000);
    let receiving = Receiving::new();
    let listener = receiving.qemu(None);
    let sending = Sending::new(&receiving, receiving.address, Options::default());
    let source = source_qemu(sending.path.clone(), streams.clone(), 0);
    let (main, _) = listener.accept().unwrap();
    let mut channels: Vec<_> = (0..2)
        .map(|_| {
            let (socket, _) = listener.accept().unwrap();
            let init = read_exactly(&socket, 64);
            (usize::from(init[24]), socket, 64)
        })
        .collect();
    let mut done = 0;
    let mut withheld = 0;
    for (k, start) in marker_starts(&streams.main).into_iter().enumerate() {
        read_exactly(&main, start - done);
        for (id, socket, read) in &mut channels {
            let end = sync_ends(&streams.channels[*id])[k];
            // More unread bytes than the sockets hold: this SYNC cannot have been written yet.
            if end - *read > 4 << 20 {
                assert!(
                    !readable(&main, A_WHILE),
                    "marker {k} came before SYNC {k} of channel {id}"
                );
                withheld += 1;
            }
            read_exactly(socket, end - *read);
            *read = end;
        }
        assert!(readable(&main, WATCHDOG), "marker {k} does not come");
        read_exactly(&main, 8);
        done = start + 8;
    }
    assert!(withheld >= 3, "the test must have had something to see, got {withheld}");
    read_exactly(&main, streams.main.len() - done);
    for (id, socket, read) in &channels {
        read_exactly(socket, streams.channels[*id].len() - read);
    }
    drop(channels);
    (&main).write_all(&SHUT_OK).unwrap();
    source.join().unwrap();
    drop(main);
    sending.result().unwrap();
    receiving.result().unwrap();
}

#[test]
fn a_flush_marker_waits_for_the_sync_of_every_channel() {
    bounded(|| markers_wait(Style::Qemu92));
}

#[test]
fn an_end_of_section_marker_waits_for_the_sync_of_every_channel() {
    bounded(|| markers_wait(Style::Qemu72));
}

#[test]
fn a_channel_that_ends_before_its_sync_ends_the_migration_at_both_ends() {
    bounded(|| {
        let streams = multifd(Style::Qemu92, 2, 6000);
        let receiving = Receiving::new();
        let listener = receiving.qemu(None);
        let sending = Sending::new(&receiving, receiving.address, Options::default());
        let main_source = sending.connect();
        let channels: Vec<_> = streams
            .channels
            .iter()
            .map(|bytes| {
                let mut socket = sending.connect();
                socket.write_all(&bytes[..sync_ends(bytes)[0]]).unwrap();
                socket
            })
            .collect();
        let markers = marker_starts(&streams.main);
        (&main_source).write_all(&streams.main[..markers[0] + 8]).unwrap();
        let (main, _) = listener.accept().unwrap();
        let ours: Vec<_> = (0..2).map(|_| listener.accept().unwrap().0).collect();
        read_exactly(&main, markers[0] + 8);
        let (to, rest) =
            (main_source.try_clone().unwrap(), streams.main[markers[0] + 8..].to_vec());
        let writer = std::thread::spawn(move || drop((&to).write_all(&rest)));
        // QEMU's main channel stays open: nothing else ends the migration.
        drop(channels);
        let error = sending.result().unwrap_err().to_string();
        assert!(error.contains("ended after 1 SYNCs"), "{error}");
        let error = receiving.result().unwrap_err().to_string();
        assert!(error.contains("ended after 1 SYNCs"), "{error}");
        writer.join().unwrap();
        drop((main_source, main, ours));
    });
}
