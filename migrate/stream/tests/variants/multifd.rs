//! Packets of multifd channels, and device state on them.

use super::*;

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
    // Stale tails are encoded by the previous header: only the init packet is literal.
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
    // An order that QEMU never leaves: ascending, though the first page is normal and the others
    // are zero.
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
    // 9.0 leaves the method in packets of zero pages; 7.2 leaves the size in packets without pages.
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
fn the_first_packet_of_a_channel_sets_its_page_size() {
    let mut channel = ChannelStream::new(Style::Qemu72, PAGE, 0);
    channel.sync(1).sync(2);
    let mut bytes = channel.take();
    let second = 64 + 1344;
    bytes[second + 12..second + 16].copy_from_slice(&64u32.to_be_bytes());
    let facts = sweep(Kind::Multifd, &bytes).facts;
    assert_eq!((facts.packets, facts.page_size, facts.opaque), (1, PAGE, true));
}

#[test]
fn device_state_of_no_bytes_is_invalid() {
    let mut channel = ChannelStream::new(Style::Qemu92, PAGE, 0);
    channel.device_state("vfio", 0, &[]);
    assert!(sweep(Kind::Multifd, &channel.take()).facts.opaque);
}

#[test]
fn device_state_packets_are_skipped() {
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
fn packets_determine_the_page_size() {
    for page_size in [1024, 16384, 65536] {
        let a = vec![3; page_size];
        let mut channel = ChannelStream::new(Style::Qemu72, page_size, 0);
        channel.sync(0).packet(1, "ram", &[(0, Some(&a)), (page_size as u64, None)], true);
        let bytes = channel.take();
        // Without a page size it learns one from pages_alloc.
        let outcome = sweep_at(Kind::Multifd, PAGE, &bytes);
        assert!(!outcome.facts.opaque);
        assert_eq!((outcome.facts.page_size, outcome.facts.syncs), (page_size, 2));
    }
}

#[test]
fn invalid_packets_turn_the_channel_opaque() {
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
