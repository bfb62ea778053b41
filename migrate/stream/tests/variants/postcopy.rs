//! Streams that turn to postcopy.

use super::*;

#[test]
fn postcopy_packages_are_skipped() {
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
fn the_bytes_that_start_the_vm_in_postcopy_are_the_tail_until_sent() {
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
    // The source QEMU goes on sending RAM: it has switched, and its own VM does not run any more.
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
fn a_postcopy_that_continues_is_parsed() {
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
fn records_of_a_preempt_channel_are_parsed() {
    let mut main = MainStream::new(PAGE);
    main.section(Section::Part);
    let head = main.len();
    main.page("pc.ram", 4096, &page(2)).zero("pc.ram", 0).page("pc.ram", 8192, &page(3));
    let mut bytes = main.take().split_off(head);
    // The end mark of 7.2.
    bytes.extend(0x10u64.to_be_bytes());
    let outcome = sweep(Kind::Preempt, &bytes);
    let facts = &outcome.facts;
    assert_eq!((facts.normal, facts.duplicate), (2, 1));
    assert!(!facts.opaque && !facts.tail && facts.barriers == 0, "{facts:?}");
    // No bytes at all, or any others, are accepted too.
    assert!(check(Kind::Preempt, PAGE, &[0x55; 5000], &[700]).facts.opaque);
}
