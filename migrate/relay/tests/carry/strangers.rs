//! Connections to the source relay's own socket that are not streams of its migration.

use crate::harness::{
    assert_same, bounded, destination_qemu, read_exactly, read_rest, source_qemu, Options, Reader,
    Receiving, Sending, SHUT_OK, WATCHDOG,
};
use crate::identity::single;
use crate::postcopy::announced;
use relay::RelayError;
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Duration;

fn noticed(sending: &Sending, words: &str) {
    loop {
        let notice = sending.notices.recv_timeout(WATCHDOG).expect("it is said");
        if notice.contains(words) {
            return;
        }
    }
}

#[test]
fn a_second_migration_is_refused_and_the_first_one_goes_on() {
    bounded(|| {
        let first = single(300).main;
        let second = single(30).main;
        let receiving = Receiving::new();
        let listener = receiving.qemu(None);
        let sending = Sending::new(&receiving, receiving.address, Options::default());
        let mut source = sending.connect();
        source.write_all(&first[..5000]).unwrap();
        let (destination, _) = listener.accept().unwrap();
        assert_same(&read_exactly(&destination, 5000), &first[..5000], "its beginning");
        for _ in 0..3 {
            let other = sending.connect();
            // The relay may close it before all is written.
            let _ = (&other).write_all(&second);
            assert_eq!(read_rest(&other), b"");
            noticed(&sending, "refused a second migration");
        }
        let rest = first[5000..].to_vec();
        let to = source.try_clone().unwrap();
        let writer = std::thread::spawn(move || (&to).write_all(&rest).unwrap());
        assert_same(&read_exactly(&destination, first.len() - 5000), &first[5000..], "its rest");
        writer.join().unwrap();
        (&destination).write_all(&SHUT_OK).unwrap();
        assert_eq!(read_exactly(&source, 8), SHUT_OK);
        drop((source, destination));
        sending.result().unwrap();
        receiving.result().unwrap();
    });
}

/// A migration by running relays succeeds.
fn still_carries(receiving: &Receiving, sending: Sending) {
    let streams = single(200);
    let destination = destination_qemu(receiving.qemu(None), &streams, Reader::Prompt);
    let source = source_qemu(sending.path.clone(), streams.clone(), 0);
    assert_same(&destination.join().unwrap().main, &streams.main, "main");
    source.join().unwrap();
    sending.result().unwrap();
    receiving.result().unwrap();
}

#[test]
fn a_stream_that_is_no_migration_is_refused_and_the_relay_still_waits_for_one() {
    bounded(|| {
        let receiving = Receiving::new();
        let sending = Sending::new(&receiving, receiving.address, Options::default());
        let tls: &[u8] = &[0x16, 0x03, 0x01, 0x02, 0x00, 0x01];
        for (bytes, words) in
            [(&b"hello\n"[..], "no migration"), (&[0; 1 << 20], "no migration"), (tls, "tls-creds")]
        {
            let stranger = sending.connect();
            let _ = (&stranger).write_all(bytes);
            assert_eq!(read_rest(&stranger), b"");
            noticed(&sending, words);
        }
        still_carries(&receiving, sending);
    });
}

/// Those with part of a header once kept a thread each that looked for more a thousand times a
/// second.
#[test]
fn a_connection_without_a_header_differs_from_a_migration() {
    bounded(|| {
        let receiving = Receiving::new();
        // A migration that follows may be as slow.
        let options = Options { setup_timeout: Duration::from_secs(10), ..Options::default() };
        let sending = Sending::new(&receiving, receiving.address, options);
        for _ in 0..20 {
            let closed = sending.connect();
            (&closed).write_all(b"QEV").unwrap();
            closed.shutdown(Shutdown::Write).unwrap();
            assert_eq!(read_rest(&closed), b"");
        }
        let part = sending.connect();
        (&part).write_all(b"QEV").unwrap();
        assert_eq!(read_rest(&part), b"");
        noticed(&sending, "fewer than four bytes");
        // Like an NBD client, which waits for its server.
        let silent = sending.connect();
        assert_eq!(read_rest(&silent), b"");
        noticed(&sending, "NBD");
        still_carries(&receiving, sending);
    });
}

#[test]
fn idle_connections_of_any_number_do_not_block_a_migration() {
    bounded(|| {
        let receiving = Receiving::new();
        let sending = Sending::new(&receiving, receiving.address, Options::default());
        let idle: Vec<UnixStream> = (0..400).map(|_| sending.connect()).collect();
        noticed(&sending, "closed the oldest");
        still_carries(&receiving, sending);
        drop(idle);
    });
}

/// Regression: any number was admitted, and the destination QEMU got a connection of each.
#[test]
fn a_second_preempt_channel_is_refused_and_the_first_one_goes_on() {
    bounded(|| {
        let receiving = Receiving::new();
        let listener = receiving.qemu(None);
        let sending = Sending::new(&receiving, receiving.address, Options::default());
        let (source, preempt) = (sending.connect(), sending.connect());
        let head = announced(1).take();
        (&source).write_all(&head).unwrap();
        let (destination, _) = listener.accept().unwrap();
        assert_same(&read_exactly(&destination, head.len()), &head, "main");
        // It carries no byte, and still it is connected.
        let (asked, _) = listener.accept().unwrap();
        // One is silent, and one writes what could be pages.
        for bytes in [&[][..], &[0, 0, 0, 0, 0, 0, 0, 8, 1, 1, 1, 1]] {
            let other = sending.connect();
            let _ = (&other).write_all(bytes);
            assert_eq!(read_rest(&other), b"");
            noticed(&sending, "refused a second preempt channel");
        }
        let page = [&[0, 0, 0, 0, 0, 0, 0, 8][..], &[7; 4096]].concat();
        (&preempt).write_all(&page).unwrap();
        assert_same(&read_exactly(&asked, page.len()), &page, "a page");
        listener.set_nonblocking(true).unwrap();
        assert!(listener.accept().is_err(), "the destination QEMU gets no third connection");
        drop((source, preempt, destination, asked));
        sending.result().unwrap_err();
        receiving.result().unwrap_err();
    });
}

#[test]
fn a_relay_whose_socket_is_gone_reports_it_and_ends() {
    bounded(|| {
        let receiving = Receiving::new();
        let sending = Sending::new(&receiving, receiving.address, Options::default());
        std::fs::remove_file(&sending.path).unwrap();
        let _other = std::os::unix::net::UnixListener::bind(&sending.path).unwrap();
        let error = sending.result().unwrap_err();
        assert!(matches!(error, RelayError::Displaced { .. }), "{error}");
        receiving.result().unwrap_err();
    });
}
