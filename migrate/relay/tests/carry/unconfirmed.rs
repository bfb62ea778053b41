//! Without a return path: an unknown result is never called success.

use crate::harness::{
    assert_same, bounded, pages, read_exactly, read_rest, Options, Receiving, Sending, PAGE,
};
use relay::{DestinationEnd, RelayError, SourceEnd};
use session::Grants;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::time::{Duration, Instant};
use stream::synth::{MainStream, Section};

/// A whole migration of `count` pages of a source with `return-path` off.
pub(crate) fn without_return_path(count: usize) -> Vec<u8> {
    let mut main = MainStream::new(PAGE);
    main.file_header();
    main.section(Section::Start).block_table(&[("pc.ram", 1 << 30)]).end_of_section();
    main.section(Section::Part);
    for (nth, page) in pages(count, 5).iter().enumerate() {
        main.zero_or_page("pc.ram", (nth * PAGE) as u64, page);
    }
    main.end_of_section();
    main.section(Section::End).end_of_section();
    main.device_tail(20_000);
    main.take()
}

type Ends = (Result<SourceEnd, RelayError>, Result<DestinationEnd, RelayError>);

/// Sends `bytes` and closes, as such a source does; `reads` acts as the destination QEMU.
fn carried(bytes: Vec<u8>, reads: impl FnOnce(UnixStream)) -> Ends {
    carried_until(bytes, reads, || ())
}

/// The same; the source closes when `closes` returns.
fn carried_until(
    bytes: Vec<u8>,
    reads: impl FnOnce(UnixStream),
    closes: impl FnOnce() + Send + 'static,
) -> Ends {
    let receiving = Receiving::new();
    let listener = receiving.qemu(None);
    let sending = Sending::new(&receiving, receiving.address, Options::default());
    let source = sending.connect();
    let (first, rest) = (bytes[..4000].to_vec(), bytes[4000..].to_vec());
    (&source).write_all(&first).unwrap();
    // A migration that is cut at once need not have reached the destination.
    let (destination, _) = listener.accept().unwrap();
    let writer = std::thread::spawn(move || {
        // The relay may close it early.
        let _ = (&source).write_all(&rest);
        closes();
    });
    reads(destination);
    writer.join().unwrap();
    (sending.result(), receiving.result())
}

#[test]
fn a_whole_stream_is_delivered_and_reported_unconfirmed() {
    bounded(|| {
        let sent = without_return_path(300);
        let expected = sent.clone();
        let (source, destination) = carried(sent, move |qemu| {
            assert_same(&read_rest(&qemu), &expected, "main");
        });
        assert!(!source.unwrap().return_path);
        assert!(!destination.unwrap().confirmed);
    });
}

/// A destination QEMU that has read everything closes at once, before its writer has reported that
/// it wrote everything.
#[test]
fn a_destination_that_closes_right_after_the_last_byte_has_not_failed() {
    bounded(|| {
        for _ in 0..20 {
            let sent = without_return_path(300);
            let len = sent.len();
            let (source, destination) = carried(sent, move |qemu| {
                read_exactly(&qemu, len);
            });
            source.unwrap();
            destination.unwrap();
        }
    });
}

/// The same, and the source QEMU closes later: longer after its destination than a relay waits for
/// a QEMU or a peer to give its reason.
#[test]
fn a_source_may_close_later_than_its_destination() {
    bounded(|| {
        let sent = without_return_path(300);
        let len = sent.len();
        let (closed, destination_closed) = mpsc::channel();
        let reads = move |qemu: UnixStream| {
            read_exactly(&qemu, len);
            drop(qemu);
            closed.send(()).unwrap();
        };
        let (source, destination) = carried_until(sent, reads, move || {
            destination_closed.recv().unwrap();
            std::thread::sleep(Duration::from_secs(4));
        });
        source.unwrap();
        destination.unwrap();
    });
}

/// A destination QEMU that closes in the tail, and to which more bytes are then to be written, has
/// failed: nobody waits for the end of its source.
#[test]
fn a_destination_that_closes_before_the_last_byte_fails_at_once() {
    bounded(|| {
        let receiving = Receiving::new();
        let listener = receiving.qemu(None);
        let sending = Sending::new(&receiving, receiving.address, Options::default());
        let source = sending.connect();
        let sent = without_return_path(300);
        let (given, rest) = sent.split_at(sent.len() - 100);
        (&source).write_all(given).unwrap();
        let (destination, _) = listener.accept().unwrap();
        read_exactly(&destination, given.len());
        drop(destination);
        // The receiver knows of the end before it has more to write.
        std::thread::sleep(Duration::from_secs(1));
        let begun = Instant::now();
        let _ = (&source).write_all(rest);
        receiving.result().unwrap_err();
        sending.result().unwrap_err();
        // Less than the minute for which a source that has written its last byte is awaited.
        assert!(begun.elapsed() < Duration::from_secs(58), "{:?}", begun.elapsed());
        drop(source);
    });
}

/// The receiver withholds the tail until it has EOF. With a window of one chunk the tail fills the
/// window, and the end of the source's connection is still to be read.
#[test]
fn the_end_of_a_source_that_has_closed_needs_no_window() {
    bounded(|| {
        let grants = Grants { shared_frames: 0, ..Grants::default() };
        let receiving = Receiving::with(&[None], grants);
        let (open, gate) = mpsc::channel();
        *receiving.host.gate.lock().unwrap() = Some(gate);
        let listener = receiving.qemu(None);
        let sending = Sending::new(&receiving, receiving.address, Options::default());
        let source = sending.connect();
        let sent = without_return_path(30);
        (&source).write_all(&sent).unwrap();
        drop(source);
        // Only from here on can the receiver write a byte and acknowledge it: the source relay
        // reads the tail of a source that has closed.
        open.send(()).unwrap();
        let (destination, _) = listener.accept().unwrap();
        assert_same(&read_rest(&destination), &sent, "main");
        drop(destination);
        sending.result().unwrap();
        receiving.result().unwrap();
    });
}

#[test]
fn a_stream_that_breaks_off_is_a_failure() {
    bounded(|| {
        for cut in [1, 100] {
            let sent = without_return_path(300);
            let sent = sent[..sent.len() - cut].to_vec();
            let (source, destination) = carried(sent, |qemu| drop(read_rest(&qemu)));
            assert!(matches!(source, Err(RelayError::Truncated)), "{source:?}");
            destination.unwrap_err();
        }
        let sent = without_return_path(300);
        let half = sent[..sent.len() / 2].to_vec();
        let (source, destination) = carried(half, |qemu| drop(read_rest(&qemu)));
        source.unwrap_err();
        destination.unwrap_err();
    });
}

#[test]
fn a_destination_that_refuses_is_a_failure_at_both_ends() {
    bounded(|| {
        let len = without_return_path(300).len();
        for read in [100, len / 2, len - 300] {
            let (source, destination) = carried(without_return_path(300), move |qemu| {
                read_exactly(&qemu, read);
                // With bytes unread, as a QEMU that gives up closes.
                std::thread::sleep(crate::harness::A_WHILE);
            });
            source.unwrap_err();
            destination.unwrap_err();
        }
    });
}
