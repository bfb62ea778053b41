//! A source QEMU played by a thread, whose socket is looked at.

use super::sections::tests::NEXT;
use super::sections::{ROOM, ROUNDS, SHORT};
use super::*;
use rustix::net::sockopt::set_socket_send_buffer_size;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use stream::synth::{Configuration, MainStream, Section};
use stream::Kind;

const PAGE: usize = 4096;
const END: [u8; 19] = [3, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0x10, 0x7e, 0, 0, 0, 2, 0];

fn settled(settle: &mut Settle, socket: &impl AsFd) -> Settled {
    loop {
        if let Some(settled) = settle.look(socket) {
            return settled;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_source_that_has_sent_all_differs_from_one_that_waits_to_send() {
    let (mut qemu, ours) = UnixStream::pair().unwrap();
    qemu.write_all(&[7; 5000]).unwrap();
    assert_eq!(settled(&mut Settle::new(false, None), &ours), Settled::Pauses);
    qemu.write_all(&END).unwrap();
    assert_eq!(settled(&mut Settle::new(false, None), &ours), Settled::Sent);
    // Nothing more was taken away.
    (&ours).read_exact(&mut [0; 19]).unwrap();
    assert_eq!(waiting(&ours), 0);
    drop(qemu);
    assert_eq!(settled(&mut Settle::new(false, None), &ours), Settled::Closed);
}

/// With TCP the end may be where this end cannot look: the receiver's buffer is full.
#[test]
fn a_source_that_has_sent_all_by_tcp_is_known_when_its_end_waits_at_the_sender() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    for end in [&END[..], &[7; 19]] {
        let mut qemu = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (ours, _) = listener.accept().unwrap();
        set_socket_send_buffer_size(&qemu, 4 << 20).unwrap();
        let bytes = vec![7; 16 << 10];
        qemu.set_nonblocking(true).unwrap();
        // Until the receiver's buffer is full, and the rest waits at the sender.
        let (mut sent, mut last, mut full) = (0, 0, 0);
        while sent < full + (128 << 10) {
            sent += qemu.write(&bytes).unwrap();
            std::thread::sleep(Duration::from_millis(2));
            if waiting(&ours) != last {
                (last, full) = (waiting(&ours), sent);
            }
        }
        qemu.write_all(end).unwrap();
        let expected = if end == END { Settled::Sent } else { Settled::Pauses };
        assert_eq!(settled(&mut Settle::new(false, None), &ours), expected, "after {sent}");
    }
}

/// The thread of QEMU that writes the end gets its CPU some time after the bytes before were read.
#[test]
fn an_end_that_comes_when_all_before_it_was_read_is_waited_for() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut tcp = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let ours = listener.accept().unwrap().0;
    let (mut unix, theirs) = UnixStream::pair().unwrap();
    ends_late(&mut tcp, &ours);
    ends_late(&mut unix, &theirs);
}

fn ends_late(qemu: &mut impl Write, ours: &impl AsFd) {
    qemu.write_all(&[7; 5000]).unwrap();
    while waiting(ours) < 5000 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let (mut settle, mut rest) = (Settle::new(false, None), &END[..]);
    let settled = loop {
        if let Some(settled) = settle.look(ours) {
            break settled;
        }
        if waiting(ours) == 0 {
            qemu.write_all(std::mem::take(&mut rest)).unwrap();
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    assert_eq!(settled, Settled::Sent);
}

/// It is blocked in the write of its end, of which the full socket shows nothing.
#[test]
fn a_source_that_waits_in_the_write_of_its_end_has_sent_all() {
    for (rest, expected) in [(&END[..], Settled::Sent), (&[7; 19][..], Settled::Pauses)] {
        let (qemu, ours) = UnixStream::pair().unwrap();
        qemu.set_nonblocking(true).unwrap();
        while (&qemu).write(&[7; 4096]).is_ok() {}
        qemu.set_nonblocking(false).unwrap();
        let bytes = [&[7; 100_000][..], rest].concat();
        let writer = std::thread::spawn(move || (&qemu).write_all(&bytes).map(|()| qemu));
        let full = waiting(&ours);
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(waiting(&ours), full, "the writer is to wait");
        assert_eq!(settled(&mut Settle::new(false, None), &ours), expected);
        drop(ours);
        let _ = writer.join().unwrap();
    }
}

/// The source is stopped in that write: no silence shows that it has more to send.
#[test]
fn a_source_that_is_stopped_in_the_write_of_its_end_is_waited_for() {
    let (qemu, ours) = UnixStream::pair().unwrap();
    qemu.set_nonblocking(true).unwrap();
    while (&qemu).write(&[7; 4096]).is_ok() {}
    let mut settle = Settle::new(false, None);
    let begin = Instant::now();
    // Well behind all times that count elsewhere.
    while begin.elapsed() < DRAIN + 2 * STABLE {
        assert_eq!(settle.look(&ours), None);
        std::thread::sleep(LOOK);
    }
    (&qemu).write_all(&END).unwrap();
    assert_eq!(settled(&mut settle, &ours), Settled::Sent);
}

/// A source with much memory to send is not read to its end, which would be the end of its pause.
#[test]
fn a_source_that_has_more_to_send_is_read_little() {
    let (qemu, ours) = UnixStream::pair().unwrap();
    let writer = std::thread::spawn(move || {
        let mut written = 0;
        while (&qemu).write_all(&[7; 4096]).is_ok() {
            written += 4096;
        }
        written
    });
    assert_eq!(settled(&mut Settle::new(false, None), &ours), Settled::Pauses);
    drop(ours);
    let written = writer.join().unwrap();
    assert!(written < 256 << 20, "{written}");
}

#[test]
fn the_end_is_known_however_the_bytes_are_cut() {
    let stream = [&[9; 100][..], &END].concat();
    for piece in 1..=stream.len() {
        let mut last = LastBytes::default();
        stream.chunks(piece).for_each(|bytes| last.feed(bytes));
        assert!(last.end_stream(), "in pieces of {piece}");
    }
    let mut last = LastBytes::default();
    last.feed(&stream[..stream.len() - 1]);
    assert!(!last.end_stream());
}

#[test]
fn the_end_is_known_with_and_without_a_footer() {
    assert!(ends_stream(&END) && ends_stream(&END[12..]));
    let bare = [&[9; 100][..], &END[..13], &[0]].concat();
    assert!(ends_stream(&bare));
    for cut in 1..7 {
        assert!(!ends_stream(&END[..END.len() - cut]), "{cut} bytes before");
    }
    assert!(!ends_stream(&[&[9; 100][..], &[0]].concat()) && !ends_stream(&[]));
}

/// A parser in a section of RAM, and the stream behind it.
fn in_section() -> (Tokeniser, MainStream) {
    let mut main = MainStream::new(PAGE);
    let configuration = Configuration { machine: "pc-q35-10.2", ..Configuration::default() };
    main.file_header().configuration(&configuration);
    main.section(Section::Start).block_table(&[("pc.ram", 1 << 30)]).end_of_section();
    main.section(Section::Part).page("pc.ram", 0, &[1; PAGE]);
    let mut parser = Tokeniser::new(Kind::Main, PAGE);
    parser.feed(&main.take(), &mut Vec::new());
    (parser, main)
}

/// A section of huge pages may take any time, in which the source does not look for its PONG. The
/// guest has written heads of sections into these pages.
#[test]
fn a_source_with_its_pong_does_not_settle_within_a_section() {
    let (qemu, ours) = UnixStream::pair().unwrap();
    let (parser, mut main) = in_section();
    let over = Arc::new(AtomicBool::new(false));
    let (writer, stop) = (qemu.try_clone().unwrap(), over.clone());
    let writer = std::thread::spawn(move || {
        let mut forged = NEXT.repeat(PAGE / NEXT.len());
        forged.resize(PAGE, 0);
        for _ in 0..16 {
            main.page("pc.ram", 0, &forged);
        }
        let pages = main.take();
        while !stop.load(Ordering::Acquire) && (&writer).write_all(&pages).is_ok() {}
        main.end_of_section();
        while (&writer).write_all(&main.take()).is_ok() {
            main.section(Section::Part).page("pc.ram", 0, &[7; PAGE]).end_of_section();
        }
    });
    let begin = Instant::now();
    let mut settle = Settle::new(true, Some(parser));
    while begin.elapsed() < 3 * ROUND * ROUNDS
        || settle.reading.as_ref().is_some_and(|reading| reading.read < 4 * SHORT)
    {
        assert_eq!(settle.look(&ours), None);
        assert!(settle.reading.is_some(), "the guest's bytes count as sections");
    }
    over.store(true, Ordering::Release);
    assert_eq!(settled(&mut settle, &ours), Settled::Pauses);
    qemu.shutdown(std::net::Shutdown::Both).unwrap();
    writer.join().unwrap();
}

/// A source that has sent all cannot pause: it is read no more than it takes.
#[test]
fn a_source_with_its_pong_is_read_slowly_while_its_sections_are_short() {
    let (qemu, ours) = UnixStream::pair().unwrap();
    let section = [&[7; 64 * 4104][..], &NEXT].concat();
    let writer = qemu.try_clone().unwrap();
    let writer = std::thread::spawn(move || while (&writer).write_all(&section).is_ok() {});
    let (mut settle, mut read) = (Settle::new(true, None), 0);
    while let Some(reading) = &settle.reading {
        read = reading.read;
        assert_eq!(settle.look(&ours), None);
        std::thread::sleep(LOOK);
    }
    let rounds = u64::from(ROUNDS + 1) * ROOM as u64;
    assert!(read < rounds + SHORT, "{read}");
    qemu.shutdown(std::net::Shutdown::Both).unwrap();
    writer.join().unwrap();
}

/// A source that writes a section now and then, as a rate limit makes it do.
#[test]
fn a_source_with_its_pong_is_read_for_a_second_before_it_may_pause() {
    let (mut qemu, ours) = UnixStream::pair().unwrap();
    let begin = Instant::now();
    let mut settle = Settle::new(true, None);
    // It is stopped: no time shows anything.
    while begin.elapsed() < 2 * STABLE {
        assert_eq!(settle.look(&ours), None);
        std::thread::sleep(LOOK);
    }
    let begin = Instant::now();
    // It writes until it has been seen for so long, however late the looks come.
    let seen = Arc::new(AtomicBool::new(false));
    let over = seen.clone();
    let writer = std::thread::spawn(move || {
        let section = [&[7; 900][..], &NEXT].concat();
        while !over.load(Ordering::Acquire) && qemu.write_all(&section).is_ok() {
            std::thread::sleep(Duration::from_millis(20));
        }
        qemu
    });
    while settle.reading.is_some() {
        assert_eq!(settle.look(&ours), None);
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(begin.elapsed() >= ROUND * ROUNDS, "{:?}", begin.elapsed());
    seen.store(true, Ordering::Release);
    assert_eq!(settled(&mut settle, &ours), Settled::Pauses);
    drop(ours);
    writer.join().unwrap();
}

/// Its end comes with the sections that show that it has seen its PONG, and all of it is read.
#[test]
fn a_source_that_ends_its_stream_as_it_is_seen_to_have_its_pong_has_sent_all() {
    let (mut qemu, ours) = UnixStream::pair().unwrap();
    let section = [&[7; 900][..], &NEXT].concat();
    let mut settle = Settle::new(true, None);
    let is_old =
        |settle: &Settle| settle.reading.as_ref().is_some_and(|reading| reading.sections.is_old());
    while !is_old(&settle) {
        qemu.write_all(&section).unwrap();
        assert_eq!(settle.look(&ours), None);
        std::thread::sleep(LOOK);
    }
    while waiting(&ours) > 0 {
        assert_eq!(settle.look(&ours), None);
        std::thread::sleep(LOOK);
    }
    qemu.write_all(&[&section[..], &[7; 500], &NEXT[..13], &END].concat()).unwrap();
    assert_eq!(settled(&mut settle, &ours), Settled::Sent);
}

#[test]
fn a_source_that_ends_its_stream_when_it_has_its_pong_is_not_read_on() {
    let (mut qemu, ours) = UnixStream::pair().unwrap();
    qemu.write_all(&[&[7; 3000][..], &END].concat()).unwrap();
    assert_eq!(settled(&mut Settle::new(true, None), &ours), Settled::Sent);
}
