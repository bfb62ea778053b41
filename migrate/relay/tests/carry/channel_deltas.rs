//! W29c: multifd channels share a delta cache. A page goes as a difference on whichever channel it
//! is sent again.

use crate::cutter::{Plan, Way};
use crate::harness::{
    assert_same, bounded, bounded_by, destination_qemu, source_qemu, Noise, Options, Reader,
    Receiving, Sending, Streams, PAGE,
};
use crate::resume::{survives_with, MANY, RESUME};
use codec::Codec;
use stream::synth::{ChannelStream, Configuration, MainStream, Section, Style};

const CACHE: u64 = 12 << 20;

/// The main stream and `channels` channels that send `count` pages `passes` times, each page on any
/// channel, with one word changed each time. Each pass ends with a barrier.
fn again_and_again(style: Style, channels: u8, count: u64, passes: usize) -> Streams {
    let mut noise = Noise(43);
    let mut memory: Vec<Vec<u8>> = (0..count).map(|_| noise.bytes(PAGE)).collect();
    let mut lanes: Vec<_> = (0..channels).map(|id| ChannelStream::new(style, PAGE, id)).collect();
    let mut main = MainStream::new(PAGE);
    main.file_header();
    main.configuration(&Configuration { machine: "pc-q35-9.2", ..Configuration::default() });
    main.command(1, &[]);
    let mut number = 0;
    let mut barrier = |main: &mut MainStream, lanes: &mut [ChannelStream]| {
        for lane in lanes {
            number += 1;
            lane.sync(number);
        }
        if style != Style::Qemu72 {
            main.flush_marker();
        }
        main.end_of_section();
    };
    main.section(Section::Start).block_table(&[("pc.ram", count * PAGE as u64)]);
    barrier(&mut main, &mut lanes);
    for _ in 0..passes {
        main.section(Section::Part);
        for page in &mut memory {
            let word = usize::try_from(noise.next() % 500).unwrap() * 8;
            page[word..word + 8].copy_from_slice(&noise.next().to_le_bytes());
        }
        for (packet, pages) in memory.chunks(100).enumerate() {
            let first = (packet * 100 * PAGE) as u64;
            let offsets = (first..).step_by(PAGE);
            let pages: Vec<_> = offsets.zip(pages.iter().map(|page| Some(&page[..]))).collect();
            let lane = usize::try_from(noise.next() % u64::from(channels)).unwrap();
            lanes[lane].packet(7, "pc.ram", &pages, false);
        }
        barrier(&mut main, &mut lanes);
    }
    main.section(Section::End);
    barrier(&mut main, &mut lanes);
    main.device_tail(5000);
    Streams { main: main.take(), channels: lanes.iter_mut().map(ChannelStream::take).collect() }
}

fn options(codec: Codec, delta_cache: u64) -> Options {
    Options { codec, delta_cache, ..Options::default() }
}

/// Runs a migration; returns the pages stored, the pages sent as differences, and the bytes sent.
fn carried(streams: &Streams, options: Options, piece: usize) -> (u64, u64, u64) {
    let receiving = Receiving::new();
    let destination = destination_qemu(receiving.qemu(None), streams, Reader::Prompt);
    let sending = Sending::new(&receiving, receiving.address, options);
    let source = source_qemu(sending.path.clone(), streams.clone(), piece);
    let got = destination.join().unwrap();
    assert_same(&got.main, &streams.main, "main");
    for (id, (got, sent)) in got.channels.iter().zip(&streams.channels).enumerate() {
        assert_same(got, sent, &format!("channel {id}"));
    }
    source.join().unwrap();
    let (stored, deltas) = sending.deltas();
    let sent = sending.handle.progress().transferred;
    sending.result().unwrap();
    receiving.result().unwrap();
    (stored, deltas, sent)
}

#[test]
fn pages_sent_again_on_any_channel_are_differences() {
    bounded(|| {
        for (style, channels) in [(Style::Qemu72, 2), (Style::Qemu92, 8)] {
            let streams = again_and_again(style, channels, 1500, 5);
            for codec in [Codec::Zstd, Codec::Lz4] {
                let (_, none, all) = carried(&streams, options(codec, 0), 0);
                assert_eq!(none, 0);
                // Pages sent first are stored only as far as the CPU time of this process allows,
                // and pages in a chunk that a SYNC splits belong to the pass before.
                let (stored, deltas, sent) = carried(&streams, options(codec, CACHE), 0);
                assert!(deltas > 2000 && stored > deltas, "{codec}: {stored} {deltas}");
                assert!(4 * sent < 3 * all, "{codec}: {sent} of {all} bytes");
            }
            // Pieces that end anywhere.
            let (_, deltas, _) = carried(&streams, options(Codec::Zstd, CACHE), 10_007);
            assert!(deltas > 500, "{deltas}");
            // Slots for half of the pages.
            carried(&streams, options(Codec::Zstd, 750 * PAGE as u64), 0);
        }
    });
}

#[test]
fn with_channel_deltas_a_link_is_cut_at_every_message() {
    bounded_by(MANY, || {
        let streams = again_and_again(Style::Qemu92, 2, 300, 4);
        for (links, inside) in [(1, 0), (3, 60)] {
            let mut after = 0;
            loop {
                let plan = Plan { way: Way::Forth, after, inside, all: links == 1, times: 1 };
                let options = Options { links, resume: RESUME, ..options(Codec::Zstd, 4 << 20) };
                let (cuts, deltas) = survives_with(&streams, options, plan);
                assert!(deltas > 100, "{deltas} pages, {plan:?}");
                if cuts == 0 {
                    break;
                }
                after += 1;
            }
            assert!(after > 5, "only {after} messages went");
        }
    });
}
