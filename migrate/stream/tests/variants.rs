//! Every variant of stream that QEMU 7.2 to 10.x writes, made byte by byte: understood as far as it
//! can be, identical however it is cut, and the facts the same whatever the cuts.

mod common;

use common::{barriers, check, raw_bytes, Outcome};
use stream::synth::{
    main_stream, multifd_streams, ChannelStream, Configuration, MainStream, Section, Style,
};
use stream::{Kind, Token, Tokeniser};

const PAGE: usize = 4096;

/// Checks `bytes` whole, in many cuts, and cut in two at every place worth it; the facts agree.
fn sweep_at(kind: Kind, page_size: usize, bytes: &[u8]) -> Outcome {
    let whole = check(kind, page_size, bytes, &[1 << 20]);
    let mut cuts: Vec<Vec<usize>> =
        vec![vec![1], vec![7, 2, 9, 1], vec![4097, 13], vec![8, 4096], vec![1345, 64]];
    cuts.extend((1..bytes.len().min(1500)).map(|at| vec![at, 1 << 20]));
    let end = bytes.len();
    cuts.extend((end.saturating_sub(400)..end).filter(|&at| at > 0).map(|at| vec![at, 1 << 20]));
    for sizes in cuts {
        let cut = check(kind, page_size, bytes, &sizes);
        assert_eq!(cut.facts, whole.facts, "facts depend on cuts {sizes:?}");
        assert_eq!(barriers(&cut.tokens), whole.facts.barriers);
    }
    whole
}

fn sweep(kind: Kind, bytes: &[u8]) -> Outcome {
    sweep_at(kind, PAGE, bytes)
}

/// Pages of text-like bytes, some zero, some of one word.
fn pages(n: usize) -> impl Iterator<Item = Vec<u8>> {
    (0..n).map(|i| match i % 7 {
        0 | 3 => vec![0; PAGE],
        1 => 0x1122_3344_5566_7788u64.to_be_bytes().repeat(PAGE / 8),
        _ => page(i),
    })
}

fn page(seed: usize) -> Vec<u8> {
    (0..PAGE).map(|i| (i * (seed + 3) / 5 + seed).to_le_bytes()[0]).collect()
}

/// A main channel up to and including the head of RAM's START.
fn begun(configuration: &Configuration<'_>) -> MainStream {
    let mut main = MainStream::new(PAGE);
    main.file_header();
    main.configuration(configuration);
    main.section(Section::Start);
    main
}

fn plain() -> Configuration<'static> {
    Configuration { machine: "pc-q35-7.2", ..Configuration::default() }
}

fn finish(main: &mut MainStream) -> Vec<u8> {
    main.section(Section::End).end_of_section().device_tail(400);
    main.take()
}

/// Understood from the file header to the end of RAM.
fn understood(outcome: &Outcome) {
    let facts = &outcome.facts;
    assert_eq!(facts.resyncs, 0);
    assert!(facts.tail && facts.vm_stopped_hint, "{facts:?}");
}

#[test]
fn whole_made_migrations_are_understood() {
    for style in [Style::Qemu72, Style::Qemu90, Style::Qemu92] {
        let bytes = main_stream(style, PAGE, pages(700));
        let outcome = check(Kind::Main, PAGE, &bytes, &[1 << 20]);
        understood(&outcome);
        assert_eq!((outcome.facts.normal, outcome.facts.duplicate), (500, 200));
        assert!(outcome.facts.return_path);
        assert_eq!(outcome.facts.machine.as_deref(), Some(style.machine()));

        let (main, channels) = multifd_streams(style, PAGE, 3, pages(9000));
        let main = check(Kind::Main, PAGE, &main, &[1 << 20]);
        understood(&main);
        // START, three parts, END.
        assert_eq!(main.facts.barriers, 5);
        let (mut normal, mut duplicate) = (0, main.facts.duplicate);
        for (id, bytes) in channels.iter().enumerate() {
            let outcome = check(Kind::Multifd, PAGE, bytes, &[1 << 20]);
            let facts = &outcome.facts;
            assert!(!facts.opaque && facts.channel == u8::try_from(id).ok());
            assert_eq!(facts.syncs, main.facts.barriers);
            // Only the init packet is literal, and pages that the chunk's end cuts.
            assert!(raw_bytes(&outcome.tokens) <= 64 + bytes.len() / (1 << 20) * (PAGE + 1344));
            normal += facts.normal;
            duplicate += facts.duplicate;
        }
        assert_eq!((normal, duplicate), (9000 - 2 * 1286, 2 * 1286));
    }
}

#[test]
fn qemu_72_sync_rides_on_pages_and_leaves_stale_sizes() {
    let (a, b) = (page(1), page(2));
    let mut channel = ChannelStream::new(Style::Qemu72, PAGE, 4);
    let two: &[(u64, Option<&[u8]>)] = &[(0x3000, Some(&a)), (0x4000, Some(&b))];
    channel.sync(0).packet(1, "pc.ram", two, false);
    // SYNC on a packet with pages, then an empty packet of the same number and a stale size.
    channel.packet(4, "pc.ram", &two[1..], true).empty(4).sync(7);
    let bytes = channel.take();
    let outcome = sweep(Kind::Multifd, &bytes);
    let facts = &outcome.facts;
    assert_eq!((facts.packets, facts.syncs, facts.normal), (5, 3, 3));
    assert!(!facts.opaque);
    // Stale tails are told from the header before: nothing but the init packet is literal.
    assert_eq!(raw_bytes(&outcome.tokens), 64);
    assert!(outcome.packed < 64 + 3 * PAGE + 150, "{}", outcome.packed);
}

#[test]
fn a_sync_counts_when_its_payload_is_whole() {
    let a = page(1);
    let mut channel = ChannelStream::new(Style::Qemu72, PAGE, 0);
    channel.packet(1, "pc.ram", &[(0, Some(&a))], true);
    let bytes = channel.take();
    let mut tokeniser = stream::Tokeniser::new(Kind::Multifd, PAGE);
    tokeniser.feed(&bytes[..bytes.len() - 1], &mut Vec::new());
    assert_eq!(tokeniser.facts().syncs, 0);
    tokeniser.feed(&bytes[bytes.len() - 1..], &mut Vec::new());
    assert_eq!(tokeniser.facts().syncs, 1);
}

#[test]
fn zero_pages_in_packets_regenerate_from_runs_and_bits() {
    let (a, b) = (page(1), page(2));
    for style in [Style::Qemu90, Style::Qemu92] {
        let mut channel = ChannelStream::new(style, PAGE, 0);
        channel.sync(1);
        let mixed = |i: u64| match i % 5 {
            0 => Some(&a[..]),
            3 => Some(&b[..]),
            _ => None,
        };
        let all: Vec<_> = (0..128).map(|i| ((i + i / 40) << 12, mixed(i))).collect();
        let zeros: Vec<_> = (200..328).map(|i| (i << 12, None)).collect();
        channel.packet(2, "pc.ram", &all, false);
        channel.packet(3, "pc.ram", &zeros, false);
        channel.packet(4, "vga.vram", &all[..37], false);
        channel.sync(5);
        let bytes = channel.take();
        let outcome = sweep(Kind::Multifd, &bytes);
        let facts = &outcome.facts;
        assert!(!facts.opaque);
        let normal = 51 + 15;
        assert_eq!((facts.packets, facts.syncs), (5, 2));
        assert_eq!((facts.normal, facts.duplicate), (normal, 128 - 51 + 128 + 37 - 15));
        assert_eq!(raw_bytes(&outcome.tokens), 64);
        let bodies = usize::try_from(normal).unwrap() * PAGE;
        assert!(outcome.packed < bodies + 64 + 300, "{style:?}: {}", outcome.packed - bodies);
    }
}

#[test]
fn header_with_offsets_out_of_order_comes_back_literally() {
    let mut channel = ChannelStream::new(Style::Qemu90, PAGE, 0);
    channel.compressed(1, 0x04, "pc.ram", &[0x5000, 0x1000, 0x9000], &[1; 700]);
    channel.compressed(2, 0x04, "pc.ram", &[0x5001, 0x7000], &[2; 9000]);
    channel.compressed(3, 0x04, "pc.ram", &[0x5000, 0x5000], &[3; 1]);
    let bytes = channel.take();
    let outcome = sweep(Kind::Multifd, &bytes);
    assert!(!outcome.facts.opaque);
    assert_eq!((outcome.facts.packets, outcome.facts.multifd_method), (3, 4));
    assert_eq!(outcome.tokens.iter().filter(|t| **t == Token::MultifdHeader).count(), 3);
}

#[test]
fn mixed_header_in_another_order_comes_back_literally() {
    // As no QEMU leaves them: ascending, though the first page is normal and the others are zero.
    let mut channel = ChannelStream::new(Style::Qemu90, PAGE, 0);
    let a = page(4);
    let pages: Vec<_> = (0..40).map(|i| (i << 12, (i == 7).then_some(&a[..]))).collect();
    channel.packet(1, "pc.ram", &pages, false);
    let mut bytes = channel.take();
    for i in 0..40 {
        bytes[64 + 320 + 8 * i..][..8].copy_from_slice(&((i as u64) << 12).to_be_bytes());
    }
    let outcome = sweep(Kind::Multifd, &bytes);
    assert_eq!((outcome.facts.normal, outcome.facts.duplicate), (1, 39));
    assert!(!outcome.facts.opaque && outcome.packed > 64 + 1344 + PAGE);
}

#[test]
fn stale_size_with_a_method_has_no_payload() {
    // 9.0 keeps the method in packets of zero pages only; 7.2 keeps the size in pageless ones.
    let mut channel = ChannelStream::new(Style::Qemu72, PAGE, 0);
    channel.compressed(1, 2, "pc.ram", &[0, 4096], &[9; 5000]).sync(2);
    let mut bytes = channel.take();
    let sync = bytes.len() - 1344;
    assert_eq!(bytes[sync + 20..sync + 24], 5000u32.to_be_bytes(), "the size is stale");
    bytes[sync + 11] |= 2;
    let again = bytes[sync..].to_vec();
    bytes.extend(again);
    let facts = sweep(Kind::Multifd, &bytes).facts;
    assert_eq!((facts.packets, facts.syncs, facts.opaque), (3, 2, false));
}

#[test]
fn the_page_size_of_a_channel_is_settled_by_its_first_packet() {
    let mut channel = ChannelStream::new(Style::Qemu72, PAGE, 0);
    channel.sync(1).sync(2);
    let mut bytes = channel.take();
    let second = 64 + 1344;
    bytes[second + 12..second + 16].copy_from_slice(&64u32.to_be_bytes());
    let facts = sweep(Kind::Multifd, &bytes).facts;
    assert_eq!((facts.packets, facts.page_size, facts.opaque), (1, PAGE, true));
}

#[test]
fn device_state_of_no_bytes_is_insane() {
    let mut channel = ChannelStream::new(Style::Qemu92, PAGE, 0);
    channel.device_state("vfio", 0, &[]);
    assert!(sweep(Kind::Multifd, &channel.take()).facts.opaque);
}

#[test]
fn device_state_packets_are_passed_over() {
    let a = page(9);
    let mut channel = ChannelStream::new(Style::Qemu92, PAGE, 0);
    channel.sync(1).device_state("0000:00:04.0/vfio", 0, &[7; 3000]);
    channel.packet(2, "pc.ram", &[(0, Some(&a))], false).device_state("x", 1, &[8]).sync(3);
    let bytes = channel.take();
    let outcome = sweep(Kind::Multifd, &bytes);
    let facts = &outcome.facts;
    assert!(!facts.opaque);
    assert_eq!((facts.packets, facts.device_packets, facts.syncs), (3, 2, 2));
}

#[test]
fn packets_tell_the_page_size() {
    for page_size in [1024, 16384, 65536] {
        let a = vec![3; page_size];
        let mut channel = ChannelStream::new(Style::Qemu72, page_size, 0);
        channel.sync(0).packet(1, "ram", &[(0, Some(&a)), (page_size as u64, None)], true);
        let bytes = channel.take();
        // Told nothing, it learns from pages_alloc.
        let outcome = sweep_at(Kind::Multifd, PAGE, &bytes);
        assert!(!outcome.facts.opaque);
        assert_eq!((outcome.facts.page_size, outcome.facts.syncs), (page_size, 2));
    }
}

#[test]
fn insane_packets_turn_the_channel_opaque() {
    let sane = || {
        let mut channel = ChannelStream::new(Style::Qemu90, PAGE, 0);
        channel.sync(1).packet(2, "pc.ram", &[(0, Some(&page(1)))], false).sync(3);
        channel.take()
    };
    let second = 64 + 1344;
    for (at, value) in [
        (0, 0x1122_3345u32), // magic
        (4, 2),              // version
        (8, 0x80),           // unknown flag
        (8, 0x06),           // two methods
        (8, 0x41),           // device state with SYNC
        (12, 64),            // another page size
        (12, 0),             // pages but no room for any
        (16, 129),           // more pages than a packet holds
        (20, 4095),          // payload that is not the pages
        (32, 128),           // more zero pages than room
    ] {
        let mut bytes = sane();
        bytes[second + at..second + at + 4].copy_from_slice(&value.to_be_bytes());
        let outcome = sweep(Kind::Multifd, &bytes);
        assert!(outcome.facts.opaque, "{at} {value:#x}");
        assert_eq!((outcome.facts.syncs, outcome.facts.packets), (1, 1));
    }
}

#[test]
fn block_tables_with_huge_pages_and_shared_blocks() {
    const HUGE: u64 = 2 << 20;
    let ignore: &[&str] = &["x-ignore-shared"];
    type Entry<'a> = (&'a str, u64, Option<u64>, Option<u64>);
    let tables: [(u64, bool, &[Entry<'_>]); 8] = [
        // Postcopy off: no extra field.
        (0, false, &[("pc.ram", HUGE, None, None), ("pc.rom", 4096, None, None)]),
        // Postcopy on: huge pages in none, some, the last, all.
        (4096, false, &[("pc.ram", HUGE, None, None), ("pc.rom", 4096, None, None)]),
        (HUGE | 4096, false, &[("pc.ram", HUGE, Some(HUGE), None), ("rom", 4096, None, None)]),
        (HUGE | 4096, false, &[("pc.rom", 4096, None, None), ("pc.ram", HUGE, Some(HUGE), None)]),
        (HUGE, false, &[("a", HUGE, Some(HUGE), None), ("b", HUGE, Some(HUGE), None)]),
        // A base that looks like the host's page size is none.
        (4096, true, &[("a", 4096, None, Some(4096)), ("pc.rom", 4096, None, Some(0))]),
        // Shared blocks, without and with postcopy.
        (0, true, &[("pc.ram", HUGE, None, Some(0)), ("pc.rom", 4096, None, Some(0xf_0000))]),
        (
            HUGE | 4096,
            true,
            &[
                ("a", HUGE, Some(HUGE), Some(0)),
                ("b", 4096, None, Some(0xe_0000)),
                ("c", HUGE, Some(HUGE), Some(1 << 32)),
            ],
        ),
    ];
    for (advise, shared, table) in tables {
        for flush in [false, true] {
            let capabilities = if shared { ignore } else { &[] };
            let mut main = MainStream::new(PAGE);
            main.file_header().configuration(&Configuration { capabilities, ..plain() });
            if advise != 0 {
                main.advise_postcopy(advise);
            }
            main.section(Section::Start).block_table_with(table);
            if flush {
                main.flush_marker();
            }
            main.end_of_section();
            main.section(Section::Part).page(table[0].0, 0, &page(1)).end_of_section();
            let bytes = finish(&mut main);
            let outcome = sweep(Kind::Main, &bytes);
            understood(&outcome);
            let facts = &outcome.facts;
            assert_eq!((facts.normal, facts.ignore_shared), (1, shared), "{table:?}");
            assert_eq!(facts.barriers, if flush { 1 } else { 3 });
        }
    }
}

#[test]
fn flush_without_multifd_and_zero_guests_and_names() {
    // 8.1 writes FLUSH with multifd off; a guest that is all zero is one run per block.
    let mut main = begun(&plain());
    main.block_table(&[("pc.ram", 64 << 20), ("vga", 1 << 20)]).flush_marker().end_of_section();
    main.section(Section::Part);
    for i in 0..16384 {
        main.zero("pc.ram", i << 12);
    }
    for i in 0..256 {
        main.zero("vga", i << 12);
    }
    main.flush_marker().end_of_section();
    let bytes = finish(&mut main);
    let outcome = check(Kind::Main, PAGE, &bytes, &[1 << 20]);
    understood(&outcome);
    assert_eq!((outcome.facts.duplicate, outcome.facts.barriers), (16640, 2));
    let runs = outcome.tokens.iter().filter(|t| matches!(t, Token::ZeroRun { .. })).count();
    assert_eq!(runs, 2);
    assert!(outcome.packed < 1200, "{} bytes for 16640 zero pages", outcome.packed);
    assert!(stream::worth_packing_without_codec(&outcome.tokens));
}

#[test]
fn early_virtio_mem_is_not_the_tail() {
    let mut main = begun(&plain());
    main.block_table(&[("pc.ram", 1 << 20)]).flush_marker().end_of_section();
    main.virtio_mem_early(38, 64 << 20, 2 << 20).virtio_mem_early(39, 3 << 30, 2 << 20);
    main.section(Section::Part).zero("pc.ram", 0).page("pc.ram", 4096, &page(3));
    main.flush_marker().end_of_section();
    let outcome = sweep(Kind::Main, &finish(&mut main));
    understood(&outcome);
    assert_eq!((outcome.facts.normal, outcome.facts.duplicate, outcome.facts.barriers), (1, 1, 2));
}

#[test]
fn xbzrle_and_compressed_records() {
    let mut main = begun(&plain());
    main.block_table(&[("pc.ram", 1 << 20)]).end_of_section();
    main.section(Section::Part).compressed("pc.ram", 0, &[0x78, 1, 2, 3]);
    main.xbzrle("pc.ram", 4096, &[9; 77]).xbzrle("pc.ram", 8192, &[]);
    main.compressed("pc.ram", 3 << 12, &[5; 4110]).page("pc.ram", 4 << 12, &page(1));
    main.end_of_section();
    let outcome = sweep(Kind::Main, &finish(&mut main));
    understood(&outcome);
    let facts = &outcome.facts;
    assert_eq!((facts.xbzrle, facts.compressed_records, facts.normal), (2, 2, 1));
}

#[test]
fn postcopy_packages_are_passed_over() {
    let mut main = begun(&plain());
    main.block_table(&[("pc.ram", 1 << 20)]).end_of_section();
    main.section(Section::Part).page("pc.ram", 0, &page(1)).end_of_section();
    let mut discard = b"\0\x06pc.ram\0".to_vec();
    discard.extend([0; 32]);
    main.command(11, &[]).command(6, &discard).command(2, &2u32.to_be_bytes());
    // The blob imitates sections and the end tag.
    main.packaged(b"\x08\0\x04\0\0\x7e\0\0\0\x02\x02\0\0\0\x02\0\0\0\0\0\0\0\x10\x7e\0\0\0\x02\0");
    main.section(Section::Part).page("pc.ram", 4096, &page(2)).zero("pc.ram", 0).end_of_section();
    main.section(Section::End).end_of_section().raw(&[0]);
    let outcome = sweep(Kind::Main, &main.take());
    let facts = &outcome.facts;
    assert!(facts.postcopy_running && facts.vm_stopped_hint && facts.resyncs == 0);
    assert_eq!((facts.normal, facts.duplicate), (2, 1));
    assert_eq!(facts.barriers, 2, "no marker counts once postcopy runs");
}

#[test]
fn what_starts_the_vm_in_postcopy_is_the_tail_until_it_is_behind() {
    let mut main = begun(&plain());
    main.block_table(&[("pc.ram", 1 << 20)]).end_of_section();
    main.section(Section::Part).page("pc.ram", 0, &page(1)).end_of_section();
    let before = main.len();
    main.packaged(&[7; 300]);
    // Command, length field, blob.
    let (begin, end) = (before + 9, before + 9 + 300);
    main.command(2, &4u32.to_be_bytes());
    let pinged = main.len();
    main.section(Section::Part).page("pc.ram", 4096, &page(2)).end_of_section();
    main.section(Section::End).end_of_section().raw(&[0]);
    let bytes = main.take();
    let facts = |upto: usize| check(Kind::Main, PAGE, &bytes[..upto], &[1 << 20]).facts;
    assert!(!facts(begin - 1).tail);
    for upto in [begin, end - 1, end, pinged, pinged + 4] {
        let facts = facts(upto);
        assert!(facts.tail && !facts.switched, "after {upto} of {begin}..{end}..{pinged}");
        assert_eq!((facts.tail_at, facts.switch_end), (begin as u64, end as u64));
    }
    // Source QEMU goes on sending RAM: it has gone over, and its own VM runs no more.
    for upto in [pinged + 5, bytes.len() - 6, bytes.len()] {
        let facts = facts(upto);
        assert!(facts.switched && !facts.tail, "after {upto} of {pinged}");
    }
    sweep(Kind::Main, &bytes);
}

#[test]
fn a_switch_behind_opaque_bytes_stays_the_tail() {
    let mut main = begun(&plain());
    main.block_table(&[("pc.ram", 1 << 20)]).end_of_section();
    main.raw(&[0x55; 40]);
    main.raw(&[0x7e, 0, 0, 0, 2]).section(Section::Part).end_of_section();
    main.packaged(&[7; 30]);
    main.section(Section::Part).end_of_section();
    let facts = sweep(Kind::Main, &main.take()).facts;
    assert!(facts.resyncs == 1 && facts.tail && !facts.switched, "{facts:?}");
}

#[test]
fn a_postcopy_that_goes_on_is_understood() {
    let mut main = MainStream::new(PAGE);
    main.command(10, b"\x06pc.ram").command(10, b"\x07pc.bios").command(9, &[]);
    let commands = main.len();
    main.section(Section::Part).page("pc.ram", 4096, &page(2)).zero("pc.ram", 0).end_of_section();
    main.section(Section::Part).page("pc.ram", 8192, &page(3)).end_of_section();
    main.section(Section::End).end_of_section().raw(&[0]);
    let bytes = main.take();
    assert_eq!(stream::classify(&bytes), Some(Kind::Recovery));
    let outcome = sweep(Kind::Recovery, &bytes);
    let facts = &outcome.facts;
    assert_eq!((facts.normal, facts.duplicate, facts.barriers), (2, 1, 0));
    assert!(facts.switched && facts.return_path && !facts.tail, "{facts:?}");
    assert!(raw_bytes(&outcome.tokens) < commands + 100);
}

#[test]
fn records_of_a_preempt_channel_are_understood() {
    let mut main = MainStream::new(PAGE);
    main.section(Section::Part);
    let head = main.len();
    main.page("pc.ram", 4096, &page(2)).zero("pc.ram", 0).page("pc.ram", 8192, &page(3));
    let mut bytes = main.take().split_off(head);
    // What 7.2 ends it with.
    bytes.extend(0x10u64.to_be_bytes());
    let outcome = sweep(Kind::Preempt, &bytes);
    let facts = &outcome.facts;
    assert_eq!((facts.normal, facts.duplicate), (2, 1));
    assert!(!facts.opaque && !facts.tail && facts.barriers == 0, "{facts:?}");
    // And nothing at all, or anything else, passes.
    assert!(check(Kind::Preempt, PAGE, &[0x55; 5000], &[700]).facts.opaque);
}

#[test]
fn configurations_tell_page_size_uuid_and_machine() {
    for bits in [10, 14, 16] {
        let size = 1 << bits;
        let mut main = MainStream::new(size);
        let uuid = Some([7; 16]);
        let configuration = Configuration { page_bits: Some(bits), uuid, ..plain() };
        main.file_header().configuration(&configuration);
        main.section(Section::Start).block_table(&[("ram", 1 << 20)]).end_of_section();
        main.section(Section::Part);
        for i in 0..5u64 {
            main.page("ram", i << bits, &vec![i.to_le_bytes()[0] | 1; size]);
            main.zero("ram", (9 + i) << bits);
        }
        main.end_of_section();
        let outcome = sweep(Kind::Main, &finish(&mut main));
        understood(&outcome);
        let facts = &outcome.facts;
        assert_eq!((facts.page_size, facts.uuid), (size, uuid));
        assert_eq!((facts.normal, facts.duplicate), (5, 5));
    }
}

#[test]
fn streams_without_configuration_or_footers() {
    let mut main = MainStream::new(PAGE).without_footers();
    main.file_header().section(Section::Start).block_table(&[("ram", 1 << 20)]).end_of_section();
    main.section(Section::Part).page("ram", 0, &page(5)).end_of_section();
    let outcome = sweep(Kind::Main, &finish(&mut main));
    understood(&outcome);
    assert_eq!((outcome.facts.normal, outcome.facts.barriers), (1, 3));
}

#[test]
fn pages_of_other_sizes_in_runs() {
    for bits in [10, 13, 16] {
        let size = 1usize << bits;
        let mut main = MainStream::new(size);
        let configuration = Configuration { page_bits: Some(bits), ..plain() };
        main.file_header().configuration(&configuration);
        main.section(Section::Start).block_table(&[("ram", 1 << 20)]).end_of_section();
        main.section(Section::Part);
        for i in 0..9u64 {
            main.page("ram", i << bits, &page(usize::try_from(i).unwrap()).repeat(16)[..size]);
        }
        for i in 0..9u64 {
            main.page("ram", i << bits, &vec![7; size]).zero("ram", (20 + i) << bits);
        }
        main.end_of_section();
        let bytes = finish(&mut main);
        let whole = check(Kind::Main, PAGE, &bytes, &[1 << 20]);
        understood(&whole);
        let run =
            |count| move |t: &&Token| matches!(t, Token::Pages { count: n, .. } if *n == count);
        assert_eq!(whole.tokens.iter().filter(run(8)).count(), 1);
        check(Kind::Main, PAGE, &bytes, &[size + 3, 17]);
    }
}

#[test]
fn a_second_configuration_is_not_believed() {
    // It would change the page size under tokens already given.
    let mut main = begun(&plain());
    main.block_table(&[("ram", 1 << 20)]).end_of_section();
    main.section(Section::Part).zero("ram", 0).page("ram", 4096, &page(5)).page(
        "ram",
        8192,
        &page(6),
    );
    main.end_of_section();
    main.configuration(&Configuration { page_bits: Some(14), ..plain() });
    let facts = sweep(Kind::Main, &main.take()).facts;
    assert_eq!((facts.page_size, facts.opaque), (PAGE, true));
}

#[test]
fn zero_records_with_a_fill_byte_stay_as_they_are() {
    let mut main = begun(&plain());
    main.block_table(&[("ram", 1 << 20)]).end_of_section();
    main.section(Section::Part);
    for i in 0..9u64 {
        main.zero("ram", i << 12);
    }
    main.raw(&(9u64 << 12 | 0x22).to_be_bytes()).raw(&[5]);
    main.zero("ram", 10 << 12).end_of_section();
    let outcome = sweep(Kind::Main, &finish(&mut main));
    understood(&outcome);
    assert_eq!(outcome.facts.duplicate, 11);
}

#[test]
fn device_state_that_imitates_ram_stays_opaque() {
    let mut main = begun(&plain());
    main.block_table(&[("ram", 1 << 20)]).end_of_section();
    main.section(Section::End).end_of_section();
    main.named_section(0x04, 9, "cpu", 0, 1).raw(&[1; 30]).footer();
    main.section(Section::Part).zero("ram", 0).end_of_section();
    let facts = sweep(Kind::Main, &main.take()).facts;
    assert_eq!((facts.resyncs, facts.duplicate, facts.barriers), (0, 0, 2));
    assert!(facts.opaque);
}

#[test]
fn a_start_inside_opaque_bytes_does_not_move_ram() {
    let mut main = begun(&plain());
    main.block_table(&[("ram", 1 << 20)]).end_of_section();
    main.named_section(0x04, 9, "vendor", 0, 1).named_section(0x01, 5, "ram", 0, 4);
    main.raw(&[1; 30]).named_footer(9, |_| ());
    main.section(Section::Part).page("ram", 0, &page(2)).end_of_section();
    let facts = sweep(Kind::Main, &finish(&mut main)).facts;
    assert_eq!((facts.resyncs, facts.normal), (1, 1));
}

#[test]
fn the_end_of_ram_is_found_behind_opaque_bytes() {
    let mut main = begun(&plain());
    main.block_table(&[("ram", 1 << 20)]).end_of_section();
    main.named_section(0x04, 9, "vendor", 0, 1).raw(&[1; 30]).footer();
    let facts = sweep(Kind::Main, &finish(&mut main)).facts;
    assert!(facts.resyncs == 1 && facts.vm_stopped_hint && facts.opaque, "{facts:?}");
}

#[test]
fn colo_is_told() {
    let mut main = MainStream::new(PAGE);
    main.file_header().configuration(&plain()).command(8, &[]);
    assert!(sweep(Kind::Main, &main.take()).facts.colo);
}

#[test]
fn unknown_sections_cost_the_markers_but_not_the_pages() {
    // A vendor's handler, and device state where none belongs, before the end of RAM.
    let mut main = begun(&plain());
    main.block_table(&[("ram", 1 << 20)]).flush_marker().end_of_section();
    let before = main.len() as u64;
    main.named_section(0x01, 77, "vendor", 0, 1).raw(&[0x7e; 40]).footer();
    main.section(Section::Part).page("ram", 0, &page(5)).zero("ram", 4096);
    main.flush_marker().end_of_section();
    main.named_section(0x04, 78, "vendor-full", 0, 1).raw(&[0x02; 4000]).footer();
    main.section(Section::Part).page("ram", 8192, &page(6)).flush_marker().end_of_section();
    let outcome = sweep(Kind::Main, &finish(&mut main));
    let facts = &outcome.facts;
    assert_eq!((facts.resyncs, facts.normal, facts.duplicate), (2, 2, 1));
    assert_eq!(facts.barriers, 1, "only the marker reached by grammar alone");
    assert!(facts.tail && facts.tail_at > before && facts.tail_at < before + 40, "{facts:?}");
}

#[test]
fn other_handlers_are_passed_over_and_markers_still_count() {
    let be = |v: u64| v.to_be_bytes();
    let (setup, data, sent, end) =
        (be(!0x10ef_fffc), be(!0x10ef_fffb), be(!0x10ef_fffa), be(!0x10ef_fffe));
    let mut main = MainStream::new(PAGE);
    main.file_header().configuration(&plain());
    main.named_section(0x01, 1, "block", 0, 1).raw(&be(0x204)).raw(&be(2)).footer();
    main.section(Section::Start).block_table(&[("ram", 1 << 20)]).flush_marker().end_of_section();
    // A named bitmap with bits and zeroes, then its end.
    main.named_section(0x01, 3, "dirty-bitmap", 0, 1);
    main.raw(b"\x1c\x04disk\x01b\0\x01\0\0\x01\x01").footer();
    main.named_section(0x01, 4, "0000:00:05.0/vfio", 0, 1).raw(&setup).raw(&end).footer();
    main.section(Section::Part).page("ram", 0, &page(5)).flush_marker().end_of_section();
    main.raw(&[0x02, 0, 0, 0, 1]).named_footer(1, |main| {
        main.raw(&be(0x1009)).raw(b"\x04disk").raw(&be(2));
    });
    main.raw(&[0x02, 0, 0, 0, 4]).named_footer(4, |main| {
        main.raw(&data).raw(&be(5000)).raw(&[0x02; 5000]).raw(&sent);
    });
    main.raw(&[0x02, 0, 0, 0, 3]).named_footer(3, |main| {
        main.raw(b"\x44\x01c").raw(&[0; 12]).raw(&be(64)).raw(&[0xff; 64]);
        main.raw(b"\x42").raw(&[0; 12]).raw(b"\x20\x01");
    });
    main.section(Section::End).flush_marker().end_of_section();
    main.raw(&[0x03, 0, 0, 0, 4]).named_footer(4, |main| {
        main.raw(&data).raw(&be(1)).raw(&[0x7e]).raw(&data).raw(&be(0)).raw(&end);
    });
    main.raw(&[0x03, 0, 0, 0, 3]).named_footer(3, |main| {
        main.raw(b"\x01");
    });
    main.device_tail(400);
    let outcome = sweep(Kind::Main, &main.take());
    understood(&outcome);
    assert_eq!((outcome.facts.normal, outcome.facts.barriers), (1, 3));
    let facts = &outcome.facts;
    assert!(facts.fed - facts.tail_at > 500, "the end of RAM, not of the other sections");
}

#[test]
fn a_block_of_block_migration_is_passed_over() {
    let mut main = MainStream::new(PAGE);
    main.file_header().configuration(&plain());
    main.named_section(0x01, 1, "block", 0, 1).raw(&0x1001u64.to_be_bytes()).raw(b"\x04disk");
    main.raw(&vec![0x7e; 1 << 20]).raw(&2u64.to_be_bytes()).footer();
    main.section(Section::Start).block_table(&[("ram", 1 << 20)]).end_of_section();
    let bytes = finish(&mut main);
    for sizes in [&[1 << 20][..], &[65536], &[1000, 3]] {
        understood(&check(Kind::Main, PAGE, &bytes, sizes));
    }
}

#[test]
fn ram_is_found_behind_an_unknown_start() {
    let mut main = MainStream::new(PAGE);
    main.file_header().configuration(&plain());
    main.named_section(0x01, 1, "htab", 0, 1).raw(&[9; 100]).footer();
    main.section(Section::Start).block_table(&[("ram", 1 << 20)]).end_of_section();
    main.section(Section::Part).page("ram", 0, &page(5)).end_of_section();
    let outcome = sweep(Kind::Main, &finish(&mut main));
    assert_eq!((outcome.facts.resyncs, outcome.facts.normal, outcome.facts.barriers), (1, 1, 0));
}

#[test]
fn unknown_records_and_commands_turn_opaque() {
    let tails: [&[u8]; 8] = [
        &0x80u64.to_be_bytes(),              // RDMA hook
        &0x400u64.to_be_bytes(),             // flag of the future
        &0x0au64.to_be_bytes(),              // zero and page at once
        &0x1010u64.to_be_bytes(),            // EOS with an address
        &0x1200u64.to_be_bytes(),            // FLUSH with an address
        b"\0\0\0\0\0\0\0\x60\x02\0\x01",     // XBZRLE of another encoding
        b"\0\0\0\0\0\0\0\x60\x01\x10\x01",   // XBZRLE longer than a page
        b"\0\0\0\0\0\0\x01\x20\0\0\x10\x0f", // COMPRESS_PAGE longer than zlib's bound
    ];
    for tail in tails {
        let mut main = begun(&plain());
        main.block_table(&[("ram", 1 << 20)]).end_of_section();
        main.section(Section::Part).raw(tail).raw(&[0x55; 50]);
        let facts = sweep(Kind::Main, &main.take()).facts;
        assert!(facts.opaque && facts.tail && facts.barriers == 1, "{tail:02x?}");
    }
    for command in [0, 12, 0xffff] {
        let mut main = MainStream::new(PAGE);
        main.file_header().configuration(&plain()).command(command, &[1; 5]);
        assert!(sweep(Kind::Main, &main.take()).facts.opaque);
    }
}

#[test]
fn a_marker_is_one_token_however_it_is_cut() {
    let mut main = begun(&plain());
    main.block_table(&[("ram", 1 << 20)]);
    let start = main.len();
    main.flush_marker();
    let bytes = main.take();
    for held in 0..=8 {
        let (first, second) = bytes.split_at(start + held);
        let mut tokeniser = stream::Tokeniser::new(Kind::Main, PAGE);
        let mut tokens = Vec::new();
        tokeniser.feed(first, &mut tokens);
        assert_eq!(tokeniser.facts().barriers, u64::from(held == 8));
        tokeniser.feed(second, &mut tokens);
        let len = if held == 8 { 8 } else { u8::try_from(8 - held).unwrap() };
        assert_eq!(tokens.last(), Some(&Token::Barrier { len }));
        assert_eq!((barriers(&tokens), tokeniser.facts().barriers), (1, 1));
    }
}

#[test]
fn same_filled_pages_leave_only_their_word() {
    let word = 0x0102_0304_0506_0708u64.to_be_bytes().repeat(PAGE / 8);
    let mut main = begun(&plain());
    main.block_table(&[("ram", 1 << 20)]).end_of_section();
    main.section(Section::Part);
    for i in 0..100 {
        main.page("ram", i << 12, if i == 50 { &[0xff; PAGE] } else { &word });
    }
    let bytes = main.take();
    let outcome = sweep(Kind::Main, &bytes);
    assert!(outcome.packed < 200, "{}", outcome.packed);
    let whole = check(Kind::Main, PAGE, &bytes, &[1 << 20]);
    assert_eq!(stream::saving(&bytes, &whole.tokens, PAGE), 100 * 4104 - 8);
    assert!(!stream::worth_packing_without_codec(&whole.tokens));
}

/// Two NUMA nodes: the same addresses in two blocks, and a block that nobody listed.
#[test]
fn records_are_of_the_block_that_was_named_last_wherever_the_stream_is_cut() {
    let mut main = begun(&plain());
    main.block_table(&[("ram-node0", 1 << 30), ("ram-node1", 1 << 30), ("vga.vram", 1 << 24)]);
    main.end_of_section().section(Section::Part);
    let mut expected = Vec::new();
    let places = [("ram-node0", 0), ("vga.vram", 2 << 30), ("new", 0), ("ram-node1", 1 << 30)];
    for (block, place) in places {
        for (nth, address) in [0x5000, 0x9000, 0xa000].into_iter().enumerate() {
            main.page(block, address, &[7; PAGE]);
            // The first names its block, and is no run.
            if nth > 0 {
                expected.push(place + address);
            }
        }
    }
    main.end_of_section();
    let bytes = main.take();
    for size in [1, 7, 333, 5000, 20_000, 1 << 20] {
        let mut tokeniser = Tokeniser::new(Kind::Main, PAGE);
        let (mut seen, mut tokens) = (Vec::new(), Vec::new());
        for piece in bytes.chunks(size) {
            tokens.clear();
            tokeniser.feed(piece, &mut tokens);
            let blocks = tokeniser.blocks();
            assert!(
                blocks.is_sorted() && blocks[0].0 == 0 && blocks.iter().all(|(at, _)| *at <= size)
            );
            let mut at = 0;
            for token in &tokens {
                if let Token::Pages { first, count } = token {
                    let place = blocks.iter().rfind(|(from, _)| *from <= at).unwrap().1;
                    let page = |i| (first & !0xfff) + i * PAGE as u64 + place;
                    seen.extend((0..u64::from(*count)).map(page));
                }
                at += token.len(PAGE);
            }
        }
        // Runs are made of pages that a feed has whole.
        assert!(seen.iter().all(|page| expected.contains(page)), "{size}: {seen:x?}");
        assert!(size < 1 << 20 || seen == expected, "{seen:x?}");
    }
}
