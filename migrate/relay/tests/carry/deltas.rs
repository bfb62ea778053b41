//! W29: pages that are sent again go as differences, and come out as they were.

use crate::cutter::{Plan, Way};
use crate::harness::{
    assert_same, bounded, bounded_by, destination_qemu, source_qemu, Noise, Options, Reader,
    Receiving, Sending, Streams, DELTA_CACHE, PAGE,
};
use crate::resume::{survives_with, MANY, RESUME};
use codec::Codec;
use session::Grants;
use stream::synth::{Configuration, MainStream, Section};

/// A single stream that sends the same pages `passes` times, each time with a word changed in most of them, all of it in
/// some, nothing in others.
fn again_and_again(count: usize, passes: usize) -> Streams {
    let mut noise = Noise(41);
    let mut memory: Vec<Vec<u8>> = (0..count).map(|_| noise.bytes(PAGE)).collect();
    let mut main = MainStream::new(PAGE);
    main.file_header();
    main.configuration(&Configuration { machine: "pc-q35-7.2", ..Configuration::default() });
    main.command(1, &[]);
    main.section(Section::Start).block_table(&[("pc.ram", (count * PAGE) as u64)]);
    main.end_of_section();
    for _ in 0..passes {
        main.section(Section::Part);
        for (number, page) in memory.iter_mut().enumerate() {
            match noise.next() % 16 {
                0 => *page = noise.bytes(PAGE),
                1 => page.fill(0),
                2 | 3 => {}
                4 => continue,
                _ => {
                    let word = usize::try_from(noise.next() % 500).unwrap() * 8;
                    page[word..word + 8].copy_from_slice(&noise.next().to_le_bytes());
                }
            }
            main.zero_or_page("pc.ram", (number * PAGE) as u64, page);
        }
        main.end_of_section();
    }
    main.section(Section::End).end_of_section();
    main.device_tail(5000);
    Streams { main: main.take(), channels: Vec::new() }
}

/// Carries it; gives pages kept, pages that went as differences, and bytes sent.
fn carried(
    receiving: &Receiving,
    streams: &Streams,
    options: Options,
    piece: usize,
) -> (u64, u64, u64) {
    let destination = destination_qemu(receiving.qemu(None), streams, Reader::Prompt);
    let sending = Sending::new(receiving, receiving.address, options);
    let source = source_qemu(sending.path.clone(), streams.clone(), piece);
    assert_same(&destination.join().unwrap().main, &streams.main, "main");
    source.join().unwrap();
    let (stored, deltas) = sending.deltas();
    let sent = sending.handle.progress().transferred;
    sending.result().unwrap();
    receiving.result().unwrap();
    (stored, deltas, sent)
}

fn options(codec: Codec, delta_cache: u64) -> Options {
    Options { codec, delta_cache, ..Options::default() }
}

#[test]
fn pages_that_are_sent_again_come_out_as_they_were_with_every_codec() {
    bounded(|| {
        let streams = again_and_again(1500, 6);
        for codec in [Codec::Raw, Codec::Lz4, Codec::Zlib, Codec::Zstd, Codec::DeflateQz] {
            let with =
                |cache, piece| carried(&Receiving::new(), &streams, options(codec, cache), piece);
            let (_, none, all) = with(0, 0);
            assert_eq!(none, 0);
            // Twice what there is, and a good deal less.
            let (stored, deltas, sent) = with(12 << 20, 0);
            assert!(deltas > 4000 && stored > deltas, "{codec}: {stored} {deltas}");
            assert!(codec == Codec::Raw || 2 * sent < all, "{codec}: {sent} of {all} bytes");
            let (stored, deltas, _) = with(1 << 20, 0);
            assert!(deltas < stored / 2, "{codec}: {stored} {deltas}");
            with(3_000_000, 10_007);
        }
    });
}

#[test]
fn a_chunk_that_no_codec_thread_takes_has_its_table_all_the_same() {
    bounded(|| {
        let streams = again_and_again(1500, 6);
        let grants = Grants { chunk_bytes: 65536, stream_frames: 4, shared_frames: 8 };
        let receiving = Receiving::with(&[None], grants);
        let options = Options { wait: false, links: 4, ..options(Codec::Zlib, 12 << 20) };
        let (_, deltas, _) = carried(&receiving, &streams, options, 0);
        assert!(deltas > 4000, "{deltas}");
    });
}

#[test]
fn a_receiver_gives_what_it_has_and_the_sender_does_with_that() {
    bounded(|| {
        let streams = again_and_again(300, 3);
        let (_, deltas, _) =
            carried(&Receiving::new(), &streams, options(Codec::Lz4, 4 * DELTA_CACHE), 0);
        assert!(deltas > 300, "{deltas}");
    });
}

#[test]
fn with_deltas_a_link_is_cut_at_every_message() {
    bounded_by(MANY, || {
        let streams = again_and_again(150, 4);
        for (links, inside) in [(1, 0), (1, 200), (3, 60)] {
            let mut after = 0;
            loop {
                let plan = Plan { way: Way::Forth, after, inside, all: links == 1, times: 1 };
                let options = Options { links, resume: RESUME, ..options(Codec::Zstd, 4 << 20) };
                let (cuts, deltas) = survives_with(&streams, options, plan);
                assert!(deltas > 200, "{deltas} pages, {plan:?}");
                if cuts == 0 {
                    break;
                }
                after += 1;
            }
            assert!(after > 5, "only {after} messages went");
        }
    });
}
