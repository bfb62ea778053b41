//! Every byte is delivered unchanged.

use crate::harness::{
    assert_same, bounded, carries, carries_to, destination_qemu, pages, read_rest, source_qemu,
    Noise, Options, Reader, Receiving, Sending, Streams, PAGE,
};
use codec::Codec;
use session::Grants;
use std::io::Write;
use std::net::Shutdown;
use stream::synth::{main_stream, multifd_streams, Style};

pub(crate) fn single(count: usize) -> Streams {
    Streams { main: main_stream(Style::Qemu72, PAGE, pages(count, 5)), channels: Vec::new() }
}

pub(crate) fn multifd(style: Style, channels: u8, count: usize) -> Streams {
    let (main, channels) = multifd_streams(style, PAGE, channels, pages(count, 9));
    Streams { main, channels }
}

#[test]
fn a_single_stream_arrives_identical_with_every_codec_on_one_link_and_four() {
    bounded(|| {
        let streams = single(2500);
        for codec in [Codec::Raw, Codec::Lz4, Codec::Zlib, Codec::Zstd] {
            for links in [1, 4] {
                let options = Options { codec, links, ..Options::default() };
                carries(&streams, options, 0, Reader::Prompt);
            }
        }
    });
}

#[test]
fn multifd_channels_arrive_identical_with_every_codec_on_one_link_and_four() {
    bounded(|| {
        let two = multifd(Style::Qemu92, 2, 5000);
        let eight = multifd(Style::Qemu72, 8, 5000);
        for (codec, links) in
            [(Codec::Raw, 4), (Codec::Lz4, 1), (Codec::Zlib, 4), (Codec::Zstd, 1), (Codec::Zstd, 4)]
        {
            for streams in [&two, &eight] {
                let options = Options { codec, links, ..Options::default() };
                carries(streams, options, 0, Reader::Prompt);
            }
        }
    });
}

#[test]
fn a_codec_and_level_for_each_chunk_change_nothing() {
    bounded(|| {
        let auto = || Options { auto: true, ..Options::default() };
        carries(&single(9000), auto(), 0, Reader::Prompt);
        carries(&single(3000), Options { links: 4, ..auto() }, 30_011, Reader::Prompt);
        carries(&single(3000), Options { wait: false, ..auto() }, 30_011, Reader::Prompt);
        carries(&multifd(Style::Qemu90, 3, 9000), auto(), 0, Reader::Prompt);
        carries(&multifd(Style::Qemu72, 2, 9000), auto(), 0, Reader::LazyMain);
    });
}

#[test]
fn odd_write_sizes_and_busy_codec_threads_change_nothing() {
    bounded(|| {
        let small = single(600);
        carries(&small, Options::default(), 37, Reader::Prompt);
        let options = Options { wait: false, ..Options::default() };
        carries(&single(3000), options, 30_011, Reader::Prompt);
        let options = Options { wait: false, links: 4, ..Options::default() };
        carries(&multifd(Style::Qemu90, 3, 3000), options, 30_011, Reader::Prompt);
    });
}

#[test]
fn pages_that_find_the_only_codec_thread_busy_are_counted_and_arrive_identical() {
    bounded(|| {
        // The stream comes from memory; the thread compresses at the slowest level of zstd.
        let slow = Options { level: Some(19), threads: 1, wait: false, ..Options::default() };
        let busy = carries_to(&Receiving::new(), &single(3000), slow, 0, Reader::Prompt);
        assert!(busy > 0 && busy < 3000, "{busy} of 3000 pages found no room");
    });
}

#[test]
fn a_channel_that_is_not_read_delays_no_other_before_the_barrier() {
    bounded(|| {
        let streams = multifd(Style::Qemu90, 4, 9000);
        for lazy in [0, 3] {
            carries(&streams, Options::default(), 0, Reader::LazyChannel(lazy));
        }
    });
}

#[test]
fn a_main_channel_that_is_not_read_delays_no_channel() {
    bounded(|| {
        // 7.2 has its zero pages on main, so that bytes can be stuck there.
        let streams = multifd(Style::Qemu72, 2, 9000);
        carries(&streams, Options::default(), 0, Reader::LazyMain);
    });
}

#[test]
fn unknown_bytes_arrive_identical() {
    bounded(|| {
        // Without a return path a stream must end properly, here with the end-of-stream tag.
        let sent = [&b"QEVM\0\0\0\x03"[..], &Noise(3).bytes(700_001), &[0]].concat();
        let receiving = Receiving::new();
        let listener = receiving.qemu(None);
        let sending = Sending::new(&receiving, receiving.address, Options::default());
        let mut socket = sending.connect();
        let written = sent.clone();
        let source = std::thread::spawn(move || {
            socket.write_all(&written).unwrap();
            socket.shutdown(Shutdown::Write).unwrap();
            socket
        });
        let (main, _) = listener.accept().unwrap();
        assert_same(&read_rest(&main), &sent, "garbage");
        drop(main);
        // Without a return path no more than this can be known.
        let end = sending.result().expect("it was all taken");
        assert!(!end.return_path);
        assert!(!receiving.result().unwrap().confirmed);
        drop(source.join().unwrap());
    });
}

#[test]
fn two_migrations_at_once_do_not_mix() {
    bounded(|| {
        let receiving = Receiving::with(&[Some("a"), Some("b")], Grants::default());
        let plans = [("a", single(2500)), ("b", multifd(Style::Qemu92, 3, 2500))];
        let running: Vec<_> = plans
            .iter()
            .map(|(name, streams)| {
                let destination =
                    destination_qemu(receiving.qemu(Some(name)), streams, Reader::Prompt);
                let options = Options { name: Some((*name).into()), ..Options::default() };
                let sending = Sending::new(&receiving, receiving.address, options);
                let source = source_qemu(sending.path.clone(), streams.clone(), 50_000);
                (destination, sending, source)
            })
            .collect();
        for ((destination, sending, source), (_, streams)) in running.into_iter().zip(&plans) {
            let received = destination.join().unwrap();
            assert_same(&received.main, &streams.main, "main");
            assert!(received.channels == streams.channels);
            source.join().unwrap();
            sending.result().unwrap();
            receiving.result().unwrap();
        }
    });
}
