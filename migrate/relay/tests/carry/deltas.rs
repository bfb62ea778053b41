//! W29: pages sent again go as differences, and are restored exactly.

use crate::cutter::{Plan, Way};
use crate::harness::{
    assert_same, bounded, bounded_by, by_device, destination_qemu, read_exactly, source_qemu,
    Noise, Options, Reader, Receiving, Sending, Streams, DELTA_CACHE, PAGE,
};
use crate::resume::{survives_with, MANY, RESUME};
use crate::sim::Sim;
use codec::Codec;
use session::Grants;
use std::io::Write;
use stream::synth::{Configuration, MainStream, Section};

/// A single stream that sends the same pages `passes` times: most with one word changed each time,
/// some wholly changed, others unchanged.
fn again_and_again(count: usize, passes: usize) -> Streams {
    let mut noise = Noise(41);
    let mut memory: Vec<Vec<u8>> = (0..count).map(|_| noise.bytes(PAGE)).collect();
    let mut main = begun(&[("pc.ram", count * PAGE)]);
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

/// A stream up to the end of its block table.
fn begun(blocks: &[(&str, usize)]) -> MainStream {
    let mut main = MainStream::new(PAGE);
    main.file_header();
    main.configuration(&Configuration { machine: "pc-q35-7.2", ..Configuration::default() });
    main.command(1, &[]);
    let blocks: Vec<_> = blocks.iter().map(|(name, len)| (*name, *len as u64)).collect();
    main.section(Section::Start).block_table(&blocks);
    main.end_of_section();
    main
}

/// Runs a migration; returns the pages stored, the pages sent as differences, and the bytes sent.
pub(crate) fn carried(
    receiving: &Receiving,
    streams: &Streams,
    options: Options,
    piece: usize,
) -> (u64, u64, u64) {
    let destination = destination_qemu(receiving.qemu(None), streams, Reader::Prompt);
    let sending = Sending::new(receiving, receiving.address, options);
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

pub(crate) fn options(codec: Codec, delta_cache: u64) -> Options {
    Options { codec, delta_cache, ..Options::default() }
}

#[test]
fn resent_pages_arrive_unchanged_with_every_codec() {
    let quick = std::env::var_os("PLATEN_QUICK").is_some();
    bounded(move || {
        let streams = again_and_again(1500, 6);
        for codec in [Codec::Raw, Codec::Lz4, Codec::Zlib, Codec::Zstd, Codec::DeflateQz] {
            let with =
                |cache, piece| carried(&Receiving::new(), &streams, options(codec, cache), piece);
            let (_, none, all) = with(0, 0);
            assert_eq!(none, 0);
            // Twice the cache that is needed, and much less than that.
            let (stored, deltas, sent) = with(12 << 20, 0);
            assert!(deltas > 4000 && stored > deltas, "{codec}: {stored} {deltas}");
            assert!(codec == Codec::Raw || 2 * sent < all, "{codec}: {sent} of {all} bytes");
            if quick && codec != Codec::Zstd {
                continue;
            }
            let (stored, deltas, _) = with(1 << 20, 0);
            assert!(deltas < stored / 2, "{codec}: {stored} {deltas}");
            with(3_000_000, 10_007);
        }
    });
}

/// Two RAM blocks whose pages have the same addresses (NUMA nodes), with slots for the pages of
/// both.
#[test]
fn blocks_do_not_evict_slots_of_each_other() {
    bounded(|| {
        let mut noise = Noise(5);
        let memory: Vec<Vec<u8>> = (0..400).map(|_| noise.bytes(PAGE)).collect();
        let mut main = begun(&[("ram-node0", 200 * PAGE), ("ram-node1", 200 * PAGE)]);
        // Three times: pages sent first are stored only as far as the CPU time of this process
        // allows.
        for _ in 0..3 {
            main.section(Section::Part);
            for (number, page) in memory.iter().enumerate() {
                let block = ["ram-node0", "ram-node1"][number / 200];
                main.page(block, (number % 200 * PAGE) as u64, page);
            }
            main.end_of_section();
        }
        main.section(Section::End).end_of_section();
        main.device_tail(5000);
        let streams = Streams { main: main.take(), channels: Vec::new() };
        let cache = 400 * PAGE as u64;
        let (_, deltas, _) = carried(&Receiving::new(), &streams, options(Codec::Raw, cache), 0);
        // Except for pages that name their block, or that the end of a chunk splits.
        assert!(deltas > 350, "{deltas}");
    });
}

#[test]
fn in_postcopy_no_page_goes_as_a_difference() {
    bounded(|| {
        let receiving = Receiving::new();
        let listener = receiving.qemu(None);
        let sending = Sending::new(&receiving, receiving.address, options(Codec::Zstd, 12 << 20));
        let source = sending.connect();
        let pages = |main: &mut MainStream, changed: u8| {
            main.section(Section::Part);
            for number in 0..600_u16 {
                let mut page = vec![number.to_le_bytes()[0]; PAGE];
                page[1] = changed;
                page[9] = number.to_le_bytes()[1];
                main.page("pc.ram", u64::from(number) * PAGE as u64, &page);
            }
            main.end_of_section();
        };
        let mut main = MainStream::new(PAGE);
        main.file_header();
        main.configuration(&Configuration { machine: "pc-q35-10.0", ..Configuration::default() });
        main.command(1, &[]).command(2, &[0, 0, 0, 1]).advise_postcopy(PAGE as u64);
        main.section(Section::Start).block_table(&[("pc.ram", 600 * PAGE as u64)]);
        main.end_of_section();
        let mut destination = None;
        let mut pass = |main: &mut MainStream| {
            let (to, bytes) = (source.try_clone().unwrap(), main.take());
            let sent = bytes.clone();
            let writer = std::thread::spawn(move || (&to).write_all(&sent).unwrap());
            let got = destination.get_or_insert_with(|| listener.accept().unwrap().0);
            assert_same(&read_exactly(got, bytes.len()), &bytes, "main");
            writer.join().unwrap();
        };
        // Each page has arrived, so its base is stored, before it is sent again: a codec thread may
        // wait for a core while another goes on. Three times: pages sent first are stored only as
        // far as the CPU time of this process allows.
        for changed in 0..3 {
            pages(&mut main, changed);
            pass(&mut main);
        }
        let before = sending.deltas();
        assert!(before.0 > 1000 && before.1 > 500, "{before:?}");
        main.packaged(&[7; 70_000]).command(2, &[0, 0, 0, 4]);
        for changed in 3..6 {
            pages(&mut main, changed);
        }
        pass(&mut main);
        assert_eq!(sending.deltas(), before);
        drop((source, destination));
        sending.result().unwrap_err();
        receiving.result().unwrap_err();
    });
}

/// The codec threads of both ends have a simulated QAT device; delta tables follow its units.
#[test]
fn units_of_a_device_carry_their_tables_both_ways() {
    // Before the watchdog starts: the libraries may have to be built.
    qat_sim::libraries();
    bounded(|| {
        let sim = Sim::turn();
        sim.script("instances 4; latency 30; seed 7");
        let qat = sim.start().unwrap();
        let streams = again_and_again(1500, 6);
        for fault in ["", "every 7 fail 1; every 9 status -11 1"] {
            sim.script(fault);
            let receiving = Receiving::on_device(qat.clone());
            let destination = destination_qemu(receiving.qemu(None), &streams, Reader::Prompt);
            let accelerator = Some(qat.clone());
            let options = Options { accelerator, ..options(Codec::DeflateQz, 12 << 20) };
            let sending = Sending::new(&receiving, receiving.address, options);
            let source = source_qemu(sending.path.clone(), streams.clone(), 0);
            assert_same(&destination.join().unwrap().main, &streams.main, "main");
            source.join().unwrap();
            let ((_, deltas), made) = (sending.deltas(), sending.by_device());
            let read = by_device(&receiving.server.accelerators());
            assert!(deltas > 4000 && made > 0 && read > 0, "{deltas} pages, {made} {read} pieces");
            sending.result().unwrap();
            receiving.result().unwrap();
        }
        assert_eq!(sim.counters().violations, 0);
    });
}

#[test]
fn a_chunk_that_is_sent_raw_carries_its_table() {
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
fn the_sender_uses_the_receivers_table_size() {
    bounded(|| {
        // Two passes, and two with differences: see above.
        let streams = again_and_again(300, 4);
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
