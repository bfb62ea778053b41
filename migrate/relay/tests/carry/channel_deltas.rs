//! W29c: multifd channels share a delta cache. A page goes as a difference on whichever channel it
//! is sent again.

use crate::bad_peers::Liar;
use crate::cutter::{Plan, Way};
use crate::deltas::{carried, options};
use crate::harness::{
    assert_same, bounded, bounded_by, read_exactly, Noise, Options, Receiving, Streams, PAGE,
};
use crate::resume::{survives_with, MANY, RESUME};
use codec::Codec;
use session::{FrameType, Header, RunningHash};
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

#[test]
fn pages_sent_again_on_any_channel_are_differences() {
    bounded(|| {
        for (style, channels) in [(Style::Qemu72, 2), (Style::Qemu92, 8)] {
            let streams = again_and_again(style, channels, 1500, 5);
            for codec in [Codec::Zstd, Codec::Lz4] {
                let (_, none, all) = carried(&Receiving::new(), &streams, options(codec, 0), 0);
                assert_eq!(none, 0);
                // Pages sent first are stored only as far as the CPU time of this process allows,
                // and pages in a chunk that a SYNC splits belong to the pass before.
                let (stored, deltas, sent) =
                    carried(&Receiving::new(), &streams, options(codec, CACHE), 0);
                assert!(deltas > 2000 && stored > deltas, "{codec}: {stored} {deltas}");
                assert!(4 * sent < 3 * all, "{codec}: {sent} of {all} bytes");
            }
            // Pieces that end anywhere.
            let (_, deltas, _) =
                carried(&Receiving::new(), &streams, options(Codec::Zstd, CACHE), 10_007);
            assert!(deltas > 500, "{deltas}");
            // Slots for half of the pages.
            carried(&Receiving::new(), &streams, options(Codec::Zstd, 750 * PAGE as u64), 0);
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

/// The frame that turns to postcopy overtakes a frame of a channel: it frees the cache only behind
/// its barrier.
#[test]
fn a_turn_to_postcopy_does_not_take_the_cache_from_a_channel_that_is_behind() {
    bounded(|| {
        let receiving = Receiving::new();
        let listener = receiving.qemu(None);
        let mut main = MainStream::new(PAGE);
        main.file_header();
        main.configuration(&Configuration { machine: "pc-q35-10.1", ..Configuration::default() });
        main.command(1, &[]).command(2, &[0, 0, 0, 1]).advise_postcopy(PAGE as u64);
        main.section(Section::Start).block_table(&[("pc.ram", 600 * PAGE as u64)]);
        main.flush_marker().end_of_section();
        let begin = main.take();
        main.section(Section::Part).flush_marker().end_of_section();
        main.packaged(&[7; 500]);
        let turn = main.take();
        let mut channel = ChannelStream::new(Style::Qemu92, PAGE, 0);
        let (first, second) = (vec![3; PAGE], vec![4; PAGE]);
        channel.packet(1, "pc.ram", &[(0, Some(&first))], false);
        let body = channel.len() - PAGE;
        channel.sync(2);
        let stored = channel.take();
        channel.packet(3, "pc.ram", &[(0, Some(&second))], false);
        let body_again = channel.len() - PAGE;
        channel.sync(4);
        let again = channel.take();

        let mut liar = Liar::new(receiving.address, None);
        liar.open(0);
        let mut main_hash = RunningHash::default();
        let mut turn_to = |liar: &mut Liar, seq, offset: usize, bytes: &[u8]| {
            std::mem::swap(&mut liar.hash, &mut main_hash);
            let head = Header::free(FrameType::Data, 0);
            let (channels, offset) = (1, offset as u64);
            liar.frame(Header { seq, offset, channels, ..head }, bytes, &[]);
            std::mem::swap(&mut liar.hash, &mut main_hash);
        };
        // A number of two bytes.
        let gap =
            |at: usize| [u8::try_from(at & 127).unwrap() | 128, u8::try_from(at >> 7).unwrap()];
        liar.open_channel();
        liar.of_channel(1, (1, 0), &stored, &[&gap(body)[..], &[1, 0, 0]].concat());
        turn_to(&mut liar, 1, 0, &begin);
        turn_to(&mut liar, 2, begin.len(), &turn);
        let to_main = listener.accept().unwrap().0;
        let to_channel = listener.accept().unwrap().0;
        assert_same(&read_exactly(&to_main, begin.len()), &begin, "main");
        assert_same(&read_exactly(&to_channel, stored.len()), &stored, "channel");
        // QEMU has the bytes in front of the barrier: the frame behind it was processed.
        let head = read_exactly(&to_main, 5);
        assert_same(&head, &turn[..5], "the section in front of the barrier");
        // The page as its difference from the first one. The hash is that of the page itself.
        let table = [&gap(body_again)[..], &[1, 0, 1]].concat();
        let mut difference = again.clone();
        difference[body_again..body_again + PAGE].fill(3 ^ 4);
        let offset = stored.len() as u64;
        liar.difference(1, (2, offset), (&difference, &again), &table);
        assert_same(&read_exactly(&to_channel, again.len()), &again, "channel");
        drop((liar, to_main, to_channel));
        receiving.result().unwrap_err();
    });
}
