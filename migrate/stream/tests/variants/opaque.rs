//! Sections, records and commands that the parser does not know.

use super::*;

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
fn unknown_sections_disable_the_markers_but_not_the_pages() {
    // A vendor's handler, and device state at an unexpected place, before the end of RAM.
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
fn other_handlers_are_skipped_and_markers_still_count() {
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
fn a_block_of_block_migration_is_skipped() {
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
