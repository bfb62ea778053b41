//! W20 to W22: the end-of-stream tag, cancelling, success.

use crate::harness::{
    assert_same, bounded, marker_starts, pages, read_exactly, read_rest, readable,
    source_that_tells, sync_ends, tag_at, Options, Receiving, Sending, Streams, A_WHILE, PAGE,
    SHUT_BAD, SHUT_OK,
};
use crate::identity::{multifd, single};
use relay::RelayError;
use rustix::io::Errno;
use rustix::net::sockopt::set_socket_send_buffer_size;
use rustix::net::{send, SendFlags};
use session::Grants;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::time::{Duration, Instant};
use stream::synth::{Configuration, MainStream, Section, Style};

/// A relay has no credit to read on if the number of bytes in flight is the same for so long.
pub(crate) const STUCK: Duration = Duration::from_secs(5);

/// Fills the path to a destination that does not read until it is full, appends `end` where the
/// relay cannot have read it yet, and closes. Returns all bytes written.
fn write_and_vanish(mut socket: UnixStream, end: impl FnOnce(&mut MainStream)) -> Vec<u8> {
    let mut made = MainStream::new(PAGE);
    made.file_header();
    made.configuration(&Configuration {
        machine: Style::Qemu72.machine(),
        ..Configuration::default()
    });
    made.command(1, &[]);
    made.section(Section::Start).block_table(&[("pc.ram", 1 << 30)]).end_of_section();
    made.section(Section::Part);
    let mut sent = made.take();
    socket.write_all(&sent).unwrap();
    // So small that the last bytes still fit once the buffer is enlarged.
    set_socket_send_buffer_size(&socket, 8 << 10).unwrap();
    let mut stuck = 0;
    for (page, i) in pages(5000, 3).iter().zip(0u64..) {
        made.page("pc.ram", i * 4096, page);
        let record = made.take();
        let mut done = 0;
        while done < record.len() && stuck < 12 {
            match send(&socket, &record[done..], SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(n) => {
                    done += n;
                    stuck = 0;
                }
                Err(Errno::AGAIN) => {
                    stuck += 1;
                    std::thread::sleep(A_WHILE / 3);
                }
                Err(error) => panic!("the relay takes it: {error}"),
            }
        }
        if stuck == 12 {
            set_socket_send_buffer_size(&socket, 200 << 10).unwrap();
            sent.extend_from_slice(&record[..done]);
            socket.write_all(&record[done..]).unwrap();
            sent.extend_from_slice(&record[done..]);
            break;
        }
        sent.extend(record);
    }
    assert_eq!(stuck, 12, "the way to the destination never filled");
    made.end_of_section();
    end(&mut made);
    let rest = made.take();
    socket.write_all(&rest).unwrap();
    drop(socket);
    [sent, rest].concat()
}

/// A session with so little credit that a destination that does not read soon stops the source
/// relay.
fn tight() -> Receiving {
    let grants = Grants { chunk_bytes: 65536, stream_frames: 2, shared_frames: 0 };
    Receiving::with(&[None], grants)
}

/// `limit`: the most of the bytes sent that may be delivered.
fn vanishes(end: impl FnOnce(&mut MainStream) + Send + 'static, limit: fn(&[u8]) -> usize) {
    bounded(move || {
        let receiving = tight();
        let listener = receiving.qemu(None);
        let sending = Sending::new(&receiving, receiving.address, Options::default());
        let socket = sending.connect();
        let source = std::thread::spawn(move || write_and_vanish(socket, end));
        let (main, _) = listener.accept().unwrap();
        let sent = source.join().unwrap();
        let got = read_rest(&main);
        let limit = limit(&sent);
        assert!(
            got.len() <= limit,
            "what starts the VM, at {limit}, was delivered, {} bytes in all",
            got.len()
        );
        assert_same(&got, &sent[..got.len()], "what came before");
        let error = sending.result().unwrap_err();
        assert!(matches!(error, RelayError::SourceEnded), "{error}");
        let error = receiving.result().unwrap_err().to_string();
        assert!(error.contains("source QEMU ended"), "{error}");
    });
}

#[test]
fn a_stop_behind_the_success_ends_no_migration() {
    bounded(|| {
        let receiving = Receiving::new();
        let listener = receiving.qemu(None);
        let sending = Sending::new(&receiving, receiving.address, Options::default());
        let source = sending.connect();
        let main = single(5).main;
        (&source).write_all(&main).unwrap();
        let (destination, _) = listener.accept().unwrap();
        assert_same(&read_exactly(&destination, main.len()), &main, "main");
        (&destination).write_all(&SHUT_OK).unwrap();
        assert_eq!(read_exactly(&source, 8), SHUT_OK);
        // The relay has noticed that its QEMU has it.
        std::thread::sleep(A_WHILE);
        sending.handle.stop();
        sending.result().expect("the source QEMU has its success");
        receiving.result().expect("the source relay has finished");
        drop((source, destination));
    });
}

#[test]
fn a_source_that_closes_just_before_its_tag_never_has_it_delivered() {
    vanishes(
        |made| {
            made.section(Section::End).end_of_section();
        },
        <[u8]>::len,
    );
}

#[test]
fn a_source_that_closes_right_behind_its_tag_never_has_it_delivered() {
    vanishes(
        |made| {
            made.section(Section::End).end_of_section().device_tail(400);
        },
        tag_at,
    );
}

#[test]
fn a_source_that_closes_right_behind_its_packaged_state_never_has_it_delivered() {
    vanishes(
        |made| {
            made.packaged(&[7; 400]);
        },
        // Without its last byte the packaged state starts nothing.
        |sent| sent.len() - 1,
    );
}

#[test]
fn a_cancel_half_way_ends_every_connection_and_delivers_no_tag() {
    bounded(|| {
        let streams = multifd(Style::Qemu92, 2, 6000);
        let receiving = Receiving::new();
        let listener = receiving.qemu(None);
        let sending = Sending::new(&receiving, receiving.address, Options::default());
        let marker = marker_starts(&streams.main)[1];
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
        (&main_source).write_all(&streams.main[..marker - 1]).unwrap();
        let (main, _) = listener.accept().unwrap();
        let ours: Vec<_> = (0..2).map(|_| listener.accept().unwrap().0).collect();
        // The first barrier has passed: the migration is under way.
        read_exactly(&main, marker_starts(&streams.main)[0] + 8);
        drop(main_source);
        for channel in &ours {
            read_rest(channel);
        }
        let rest = read_rest(&main);
        assert!(rest.len() < marker, "nothing behind what was written");
        // The relay closes QEMU's other connections too, or QEMU's cancel would hang.
        for channel in &channels {
            read_rest(channel);
        }
        assert!(matches!(sending.result(), Err(RelayError::SourceEnded)));
        assert!(receiving.result().is_err());
    });
}

#[test]
fn success_is_reported_only_when_every_channel_has_all_bytes() {
    bounded(|| {
        let mut streams = multifd(Style::Qemu72, 2, 600);
        // As QEMU 7.2 may send: a packet behind the last SYNC. Here many, more than any socket
        // holds.
        let header = stream::multifd_header_len(PAGE);
        let ends = sync_ends(&streams.channels[1]);
        let mut empty = streams.channels[1][ends[2] - header..ends[2]].to_vec();
        empty[8..12].fill(0);
        let trailing = empty.repeat(1500);
        streams.channels[1].extend(&trailing);
        let receiving = Receiving::new();
        let listener = receiving.qemu(None);
        let sending = Sending::new(&receiving, receiving.address, Options::default());
        let (tell, all_written) = mpsc::channel();
        let source = source_that_tells(sending.path.clone(), streams.clone(), 0, move || {
            tell.send(()).unwrap();
        });
        let (main, _) = listener.accept().unwrap();
        let mut lazy = None;
        for _ in 0..2 {
            let (socket, _) = listener.accept().unwrap();
            let id = usize::from(read_exactly(&socket, 64)[24]);
            let len = streams.channels[id].len() - if id == 1 { trailing.len() } else { 0 };
            read_exactly(&socket, len - 64);
            if id == 1 {
                lazy = Some(socket);
            }
        }
        read_exactly(&main, streams.main.len());
        // Everything is written, or the relay has no credit to read on: then frames are under way
        // for as long as that channel is not read.
        let (mut under_way, mut since) = (0, Instant::now());
        while all_written.try_recv().is_err() && (under_way == 0 || since.elapsed() < STUCK) {
            let now = sending.in_flight();
            if now != under_way {
                (under_way, since) = (now, Instant::now());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        (&main).write_all(&SHUT_OK).unwrap();
        std::thread::sleep(2 * A_WHILE);
        assert!(!source.is_finished(), "SHUT(0) came before everything was acknowledged");
        assert_same(&read_exactly(&lazy.unwrap(), trailing.len()), &trailing, "the rest");
        assert_eq!(source.join().unwrap(), SHUT_OK);
        drop(main);
        sending.result().unwrap();
        receiving.result().unwrap();
    });
}

#[test]
fn a_channel_that_the_destination_closes_early_does_not_fail_the_migration() {
    bounded(|| {
        let streams = multifd(Style::Qemu72, 1, 600);
        let channel = &streams.channels[0];
        let receiving = Receiving::new();
        let listener = receiving.qemu(None);
        let sending = Sending::new(&receiving, receiving.address, Options::default());
        let main_source = sending.connect();
        let mut channel_source = sending.connect();
        channel_source.write_all(channel).unwrap();
        let written = streams.main.clone();
        let writer = std::thread::spawn(move || {
            (&main_source).write_all(&written).unwrap();
            main_source
        });
        let (main, _) = listener.accept().unwrap();
        let (ours, _) = listener.accept().unwrap();
        read_exactly(&ours, channel.len());
        read_exactly(&main, streams.main.len());
        // QEMU closes its channels, and only then the source's last empty packet arrives.
        drop(ours);
        let header = stream::multifd_header_len(PAGE);
        channel_source.write_all(&channel[channel.len() - header..]).unwrap();
        let main_source = writer.join().unwrap();
        // Longer than the relay waits for a failing QEMU (1 s): starting the VM may take a while.
        std::thread::sleep(Duration::from_millis(1300));
        assert!(!readable(&main_source, Duration::ZERO), "the source was cut off");
        (&main).write_all(&SHUT_OK).unwrap();
        assert_eq!(read_exactly(&main_source, 8), SHUT_OK);
        drop((main, main_source, channel_source));
        sending.result().unwrap();
        receiving.result().unwrap();
    });
}

/// The destination QEMU reads everything, answers with `words` and closes; returns what reaches the
/// source QEMU, and both relays' errors.
fn answered(words: &'static [u8]) -> (Vec<u8>, RelayError, RelayError) {
    let Streams { main: sent, .. } = single(300);
    let receiving = Receiving::new();
    let listener = receiving.qemu(None);
    let sending = Sending::new(&receiving, receiving.address, Options::default());
    let socket = sending.connect();
    (&socket).write_all(&sent[..1000]).unwrap();
    let (main, _) = listener.accept().unwrap();
    // A second connection, as a preempt channel that is never used.
    let also = sending.connect();
    (&socket).write_all(&sent[1000..]).unwrap();
    read_exactly(&main, sent.len());
    (&main).write_all(words).unwrap();
    drop(main);
    let back = read_rest(&socket);
    read_rest(&also);
    drop(socket);
    let errors = (sending.result().unwrap_err(), receiving.result().unwrap_err());
    (back, errors.0, errors.1)
}

#[test]
fn a_refusal_reaches_the_source_and_is_the_result() {
    bounded(|| {
        let (back, source, destination) = answered(&SHUT_BAD);
        assert_eq!(back, SHUT_BAD);
        assert!(matches!(source, RelayError::DestinationRefused { code: 1 }), "{source}");
        assert!(matches!(destination, RelayError::DestinationRefused { code: 1 }), "{destination}");
    });
}

#[test]
fn a_destination_that_ends_silently_ends_every_connection_of_the_source() {
    bounded(|| {
        let (back, source, _) = answered(b"");
        assert_eq!(back, b"");
        assert!(source.to_string().contains("destination QEMU closed"), "{source}");
    });
}

/// Ctrl-C of `platen migrate`: QEMU is told to cancel only if no bytes that start the VM have been
/// sent, and from then on none are.
#[test]
fn after_a_cancel_no_byte_that_starts_the_vm_is_sent() {
    bounded(|| {
        let Streams { main: sent, .. } = single(300);
        let tag = tag_at(&sent);
        let receiving = Receiving::new();
        let listener = receiving.qemu(None);
        let sending = Sending::new(&receiving, receiving.address, Options::default());
        let source = sending.connect();
        (&source).write_all(&sent[..5000]).unwrap();
        let (destination, _) = listener.accept().unwrap();
        read_exactly(&destination, 5000);
        assert!(sending.handle.forbid_commit());
        // QEMU has not received the cancel yet, and ends its stream.
        let (to, rest) = (source.try_clone().unwrap(), sent[5000..].to_vec());
        let writer = std::thread::spawn(move || (&to).write_all(&rest).unwrap());
        let before = read_exactly(&destination, tag - 5000 - 25_000);
        writer.join().unwrap();
        let mut left = [0; 200];
        let until = std::time::Instant::now() + 2 * A_WHILE;
        destination.set_nonblocking(true).unwrap();
        let mut more = 0;
        while std::time::Instant::now() < until {
            more += (&destination).read(&mut left).unwrap_or(0);
        }
        destination.set_nonblocking(false).unwrap();
        assert!(5000 + before.len() + more <= tag, "the tag at {tag} was delivered");
        drop(source);
        read_rest(&destination);
        let error = sending.result().unwrap_err();
        assert!(matches!(error, RelayError::SourceEnded), "{error}");
        receiving.result().unwrap_err();
    });
}

#[test]
fn once_the_vm_may_be_starting_a_cancel_is_refused() {
    bounded(|| {
        let Streams { main: sent, .. } = single(300);
        let receiving = Receiving::new();
        let listener = receiving.qemu(None);
        let sending = Sending::new(&receiving, receiving.address, Options::default());
        let source = sending.connect();
        let (to, bytes) = (source.try_clone().unwrap(), sent.clone());
        let writer = std::thread::spawn(move || (&to).write_all(&bytes).unwrap());
        let (destination, _) = listener.accept().unwrap();
        read_exactly(&destination, sent.len());
        writer.join().unwrap();
        assert!(!sending.handle.forbid_commit());
        (&destination).write_all(&SHUT_OK).unwrap();
        assert_eq!(read_exactly(&source, 8), SHUT_OK);
        drop((source, destination));
        sending.result().unwrap();
        receiving.result().unwrap();
    });
}
