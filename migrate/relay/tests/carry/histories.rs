//! W29a: chunks refer to chunks before them, and arrive unchanged and in order.

use crate::bad_peers::{caught, Liar};
use crate::cutter::{Plan, Way};
use crate::harness::{
    assert_same, bounded, bounded_by, config, destination_qemu, read_exactly, source_qemu, Noise,
    Options, Reader, Receiving, Sending, Streams, HISTORY, PAGE,
};
use crate::resume::{survives_with, MANY, RESUME};
use codec::{Codec, HistoryEncoder};
use relay::{Source, SourceConfig};
use session::{FrameType, Grants, Histories};
use std::io::Write;
use stream::synth::{main_stream, multifd_streams, Configuration, MainStream, Section, Style};

/// Pages that repeat pieces of each other, with some that do not shrink.
fn alike(count: usize) -> Vec<Vec<u8>> {
    let mut noise = Noise(77);
    let mut stock = noise.bytes(64 << 10);
    // Random bytes would go without a history.
    stock.iter_mut().for_each(|byte| *byte &= 0x1f);
    let page = |noise: &mut Noise| {
        if noise.next().is_multiple_of(40) {
            return noise.bytes(PAGE);
        }
        let mut page = Vec::with_capacity(PAGE + 600);
        while page.len() < PAGE {
            let at = usize::try_from(noise.next() % (60 << 10)).unwrap();
            page.extend_from_slice(&stock[at..at + 500]);
            page.extend_from_slice(&[0; 40]);
        }
        page.truncate(PAGE);
        page
    };
    (0..count).map(|_| page(&mut noise)).collect()
}

fn single(count: usize) -> Streams {
    Streams { main: main_stream(Style::Qemu72, PAGE, alike(count)), channels: Vec::new() }
}

fn multifd(channels: u8, count: usize) -> Streams {
    let (main, channels) = multifd_streams(Style::Qemu92, PAGE, channels, alike(count));
    Streams { main, channels }
}

/// Runs a migration; returns the chunks that were parts, and the bytes sent.
fn carried(streams: &Streams, options: Options, grants: Grants) -> (u64, u64) {
    let receiving = Receiving::with(&[None], grants);
    let destination = destination_qemu(receiving.qemu(None), streams, Reader::Prompt);
    let sending = Sending::new(&receiving, receiving.address, options);
    let source = source_qemu(sending.path.clone(), streams.clone(), 0);
    let got = destination.join().unwrap();
    assert_same(&got.main, &streams.main, "main");
    for (id, (got, sent)) in got.channels.iter().zip(&streams.channels).enumerate() {
        assert_same(got, sent, &format!("channel {id}"));
    }
    source.join().unwrap();
    let (parts, sent) = (sending.parts(), sending.handle.progress().transferred);
    sending.result().unwrap();
    receiving.result().unwrap();
    (parts, sent)
}

fn options(level: i32, threads: usize) -> Options {
    Options { level: Some(level), threads, history: HISTORY, ..Options::default() }
}

/// Small chunks, so that many are under way.
const SMALL: Grants = Grants { chunk_bytes: 65536, stream_frames: 2, shared_frames: 40 };

#[test]
fn chunks_that_refer_to_those_before_arrive_unchanged() {
    bounded(|| {
        for streams in [single(3000), multifd(2, 3000), multifd(8, 3000)] {
            for (level, threads, links) in [(3, 1, 1), (6, 2, 4), (9, 5, 3)] {
                let with = Options { links, ..options(level, threads) };
                let (parts, sent) = carried(&streams, with, SMALL);
                let without = Options { links, history: 0, ..options(level, threads) };
                let (none, all) = carried(&streams, without, SMALL);
                assert_eq!(none, 0);
                assert!(parts > 100, "{parts} parts");
                assert!(10 * sent < 9 * all, "level {level}: {sent} of {all} bytes");
            }
        }
    });
}

#[test]
fn with_histories_differences_raw_chunks_and_the_choices_of_auto_arrive_unchanged() {
    bounded(|| {
        let streams = single(4000);
        let delta_cache = 8 << 20;
        let busy = Options { wait: false, delta_cache, ..options(6, 1) };
        carried(&streams, busy, SMALL);
        let (parts, _) = carried(&streams, Options { delta_cache, ..options(6, 2) }, SMALL);
        assert!(parts > 100, "{parts} parts");
        for streams in [&streams, &multifd(3, 4000)] {
            let auto = Options { auto: true, level: None, ..options(6, 2) };
            carried(streams, auto, SMALL);
        }
    });
}

/// Regression: no test failed where `auto` never used the histories that were granted.
#[test]
fn auto_refers_to_chunks_before_over_a_slow_link() {
    bounded(|| {
        let receiving = Receiving::with(&[None], SMALL);
        let listener = receiving.qemu(None);
        let auto = Options { auto: true, level: None, ..options(6, 2) };
        // 16 Mbit/s: the link takes much longer for a byte than any level does.
        let slow = SourceConfig { max_bandwidth: Some(2 << 20), ..config(receiving.address, auto) };
        let sending = Sending::running(Source::connect(&slow).unwrap(), &receiving, "src");
        let source = sending.connect();
        let pages = alike(200);
        let mut main = MainStream::new(PAGE);
        main.file_header();
        main.configuration(&Configuration { machine: "pc-q35-7.2", ..Configuration::default() });
        main.section(Section::Start).block_table(&[("pc.ram", (200 * PAGE) as u64)]);
        main.end_of_section();
        let mut destination = None;
        // As long as it takes: a busy machine may have no CPU time for it at first.
        while sending.parts() < 10 {
            main.section(Section::Part);
            for (page, number) in pages.iter().zip(0..) {
                main.page("pc.ram", number * PAGE as u64, page);
            }
            main.end_of_section();
            let bytes = main.take();
            let (to, sent) = (source.try_clone().unwrap(), bytes.clone());
            let writer = std::thread::spawn(move || (&to).write_all(&sent).unwrap());
            let got = destination.get_or_insert_with(|| listener.accept().unwrap().0);
            assert_same(&read_exactly(got, bytes.len()), &bytes, "main");
            writer.join().unwrap();
        }
        drop((source, destination));
        sending.result().unwrap_err();
        receiving.result().unwrap_err();
    });
}

#[test]
fn a_receiver_without_memory_for_histories_gets_none() {
    bounded(|| {
        let streams = single(1000);
        // 512 KiB for each: less than the smallest window.
        let many = usize::try_from(HISTORY >> 19).unwrap();
        assert_eq!(carried(&streams, options(6, many), SMALL).0, 0);
        // A level for which a history does not pay.
        assert_eq!(carried(&streams, options(1, 2), SMALL).0, 0);
        let lz4 = Options { codec: Codec::Lz4, level: None, ..options(6, 2) };
        assert_eq!(carried(&streams, lz4, SMALL).0, 0);
        // More than the receiver grants.
        let much = Options { history: 64 * HISTORY, ..options(6, 2) };
        assert!(carried(&streams, much, SMALL).0 > 10);
    });
}

/// Frames that were lost come again, over any link, later than those that refer to them.
#[test]
fn with_histories_a_link_is_cut_at_every_message() {
    bounded_by(MANY, || {
        for (streams, links, inside) in
            [(single(300), 1, 0), (single(300), 1, 200), (multifd(2, 300), 3, 60)]
        {
            let mut after = 0;
            loop {
                let plan = Plan { way: Way::Forth, after, inside, all: links == 1, times: 1 };
                let options = Options { links, resume: RESUME, ..options(6, 2) };
                let (cuts, _) = survives_with(&streams, options, plan);
                if cuts == 0 {
                    break;
                }
                after += 1;
            }
            assert!(after > 5, "only {after} messages went");
        }
    });
}

/// Sends `chunks` of a main stream as parts made by `bend` from those of an encoder.
fn parts(
    liar: &mut Liar,
    chunks: &[&[u8]],
    window_log: u8,
    mut bend: impl FnMut(usize, &mut Vec<u8>),
) {
    let mut encoder = HistoryEncoder::new(0, 6, window_log).unwrap();
    let mut offset = 0;
    liar.bare(FrameType::Open, 0, 0);
    for (at, chunk) in chunks.iter().enumerate() {
        let mut part = vec![0; chunk.len()];
        let len = encoder.encode(chunk, &mut part).unwrap();
        part.truncate(len);
        bend(at, &mut part);
        liar.part(at as u64 + 1, offset, &part, chunk);
        offset += chunk.len() as u64;
    }
}

#[test]
fn invalid_parts_end_their_session_alone() {
    bounded(|| {
        let streams = single(100);
        let chunks: Vec<&[u8]> = streams.main.chunks(60_000).take(4).collect();
        let agreed = Some(Histories { count: 1, window_log: 20 });
        let with = |histories, window_log, bend: fn(usize, &mut Vec<u8>)| {
            caught(histories, |liar| parts(liar, &chunks, window_log, bend))
        };
        let of = |bend| with(agreed, 20, bend);
        let error = with(None, 20, |_, _| {});
        assert!(error.contains("stream 0") && error.contains("agreed were 0"), "{error}");
        let error = of(|_, part| part[1] = 1);
        assert!(error.contains("part of history 1, agreed were 1"), "{error}");
        let error = of(|_, part| part[2] = 9);
        assert!(error.contains("0x9 and 0x0 as flags"), "{error}");
        let error = of(|at, part| part[7] = [0, 1, 1, 9][at]);
        // The second of them, or the third if it was decoded in the place of the second.
        let twice = error.contains("part 1 of history 0 came twice");
        assert!(twice || error.contains("zstd unit of 60000 bytes"), "{error}");
        let error = of(|at, part| {
            if at > 0 {
                part[2] = 2;
            }
        });
        assert!(error.contains("0x2"), "{error}");
        let error = of(|_, part| part[2] = 0);
        assert!(error.contains("refers to others, and is the first"), "{error}");
        let error = of(|at, part| {
            if at == 2 {
                let middle = part.len() / 2;
                part[middle] ^= 4;
            }
        });
        assert!(error.contains("frame 3") || error.contains("seq 3"), "{error}");
        let error = of(|at, part| {
            if at == 1 {
                part.truncate(4);
            }
        });
        assert!(error.contains("less than a header"), "{error}");
        // A window of 16 MiB where one of 1 MiB was agreed.
        let error = with(agreed, 24, |_, _| {});
        assert!(error.contains("zstd unit of"), "{error}");
    });
}
