//! Good calls: data, order, the ring.

use crate::rig::{noise, operation, setup, text, Rig, Slot};
use flate2::read::DeflateDecoder;
use libdeflater::{crc32, CompressionLvl, Compressor, Decompressor};
use proptest::prelude::*;
use qat_abi::*;
use std::io::Read;

/// Inflates with zlib-rs, which did not make the device's dynamic streams.
fn inflate(deflated: &[u8]) -> Vec<u8> {
    let mut plain = Vec::new();
    DeflateDecoder::new(deflated).read_to_end(&mut plain).expect("the stream is good");
    plain
}

fn deflate(plain: &[u8]) -> Vec<u8> {
    let mut out = vec![0; plain.len() + 1000];
    let mut compressor = Compressor::new(CompressionLvl::new(6).expect("a level"));
    let made = compressor.deflate_compress(plain, &mut out).expect("it fits");
    out.truncate(made);
    out
}

#[test]
fn streams_and_checksums_match_zlib() {
    let rig = Rig::new("");
    for input in [text(1), text(4096), noise(4096), vec![0; 65_536], text(65_536), noise(65_536)] {
        let slot = rig.compress_one(&input, 80_000);
        assert_eq!(slot.status(), CPA_STATUS_SUCCESS);
        assert_eq!(slot.results.status, CPA_DC_OK);
        assert_eq!(slot.results.consumed as usize, input.len());
        assert_eq!(slot.results.checksum, crc32(&input));
        assert_eq!(inflate(&slot.output()), input);
        let untouched = &slot.memory()[slot.results.produced as usize..];
        assert!(untouched.iter().all(|byte| *byte == 0xee), "not a byte behind the output");

        let slot = rig.decompress_one(&deflate(&input), input.len());
        assert_eq!((slot.status(), slot.results.status), (CPA_STATUS_SUCCESS, CPA_DC_OK));
        assert_eq!(slot.results.endOfLastBlock, CPA_TRUE);
        assert_eq!(slot.results.checksum, crc32(&input));
        assert_eq!(slot.output(), input);
    }
}

#[test]
fn incompressible_data_is_emitted_as_stored_blocks() {
    let rig = Rig::new("");
    let slot = rig.compress_one(&noise(4096), 4096 + 5);
    assert_eq!((slot.results.produced, slot.results.dataUncompressed), (4101, 1));
    assert_eq!(inflate(&slot.output()), noise(4096));
    let slot = rig.compress_one(&text(4096), 8192);
    assert_eq!(slot.results.dataUncompressed, 0);
}

#[test]
fn static_trees_are_static() {
    let fixed = CpaDcSessionSetupData { huffType: CPA_DC_HT_STATIC, ..setup() };
    let rig = Rig::with("", fixed);
    let slot = rig.compress_one(&text(4096), 8192);
    let output = slot.output();
    assert_eq!(output[0] >> 1 & 3, 1, "block type 1");
    let mut plain = vec![0; 4096];
    let made = Decompressor::new().deflate_decompress(&output, &mut plain);
    assert_eq!(made, Ok(4096));
    assert_eq!(plain, text(4096));
    let rig = Rig::new("");
    assert_eq!(rig.compress_one(&text(4096), 8192).output()[0] >> 1 & 3, 2, "block type 2");
}

#[test]
fn a_full_flush_leaves_the_stream_open() {
    for trees in [CPA_DC_HT_FULL_DYNAMIC, CPA_DC_HT_STATIC] {
        let rig = Rig::with("", CpaDcSessionSetupData { huffType: trees, ..setup() });
        for input in [text(10_000), noise(10_000)] {
            let mut slot = Slot::new();
            slot.fill(&input, 20_000);
            let status = rig.compress_as(0, &mut slot, &mut operation(CPA_DC_FLUSH_FULL));
            assert_eq!(status, CPA_STATUS_SUCCESS);
            rig.wait(std::slice::from_ref(&slot), 1);
            assert_eq!(slot.results.status, CPA_DC_OK);
            let mut stream = slot.output();
            // On Gen4 a stream that ends early is no error; only endOfLastBlock tells.
            let open = rig.decompress_one(&stream, 20_000);
            assert_eq!((open.status(), open.results.endOfLastBlock), (CPA_STATUS_SUCCESS, 0));
            assert_eq!(open.output(), input);
            stream.extend([3, 0]);
            assert_eq!(inflate(&stream), input);
        }
    }
}

#[test]
fn overflows_are_reported_as_gen4_reports_them() {
    let rig = Rig::new("");
    let slot = rig.compress_one(&noise(4096), 4096);
    assert_eq!((slot.status(), slot.results.status), (CPA_STATUS_SUCCESS, CPA_DC_OVERFLOW));
    assert_eq!((slot.results.produced, slot.results.consumed), (0, 0));

    for short in [1, 100, 4095] {
        let slot = rig.decompress_one(&deflate(&text(4096)), 4096 - short);
        assert_eq!((slot.status(), slot.results.status), (CPA_STATUS_FAIL, CPA_DC_OVERFLOW));
        assert_eq!((slot.results.produced, slot.results.consumed), (0, 0));
    }
}

#[test]
fn bad_streams_fail_and_short_ones_stay_open() {
    let rig = Rig::new("");
    let slot = rig.decompress_one(&[7, 1, 2, 3], 100);
    assert_eq!((slot.status(), slot.results.status), (CPA_STATUS_FAIL, CPA_DC_INVALID_BLOCK_TYPE));
    let slot = rig.decompress_one(&[1, 2, 0, 2, 0, 9, 9], 100);
    assert_eq!(
        (slot.status(), slot.results.status),
        (CPA_STATUS_FAIL, CPA_DC_BAD_STORED_BLOCK_LEN)
    );
    let stream = deflate(&text(4096));
    let slot = rig.decompress_one(&stream[..stream.len() - 5], 4096);
    assert_eq!((slot.status(), slot.results.endOfLastBlock), (CPA_STATUS_SUCCESS, CPA_FALSE));
    assert!(slot.results.produced < 4096);
}

#[test]
fn the_checksum_goes_on_from_its_seed_and_adler_starts_at_one() {
    let rig = Rig::new("");
    let mut slot = Slot::new();
    slot.fill(&text(5000), 8192);
    slot.results.checksum = crc32(&text(5000)[..2000]);
    slot.fill(&text(5000)[2000..], 8192);
    slot.results.checksum = crc32(&text(5000)[..2000]);
    assert_eq!(rig.compress(&mut slot), CPA_STATUS_SUCCESS);
    rig.wait(std::slice::from_ref(&slot), 1);
    assert_eq!(slot.results.checksum, crc32(&text(5000)));

    let rig = Rig::with("", CpaDcSessionSetupData { checksum: CPA_DC_ADLER32, ..setup() });
    let slot = rig.compress_one(&text(5000), 8192);
    assert_eq!(slot.results.checksum, libdeflater::adler32(&text(5000)));
}

#[test]
fn stored_engine_is_stored() {
    let rig = Rig::new("engine stored");
    let slot = rig.compress_one(&text(4096), 5000);
    assert_eq!((slot.results.produced, slot.results.dataUncompressed), (4101, 1));
    let back = rig.decompress_one(&slot.output(), 4096);
    assert_eq!(back.output(), text(4096));
}

#[test]
fn lists_of_many_buffers_are_one_run_of_data() {
    let rig = Rig::new("");
    let mut slot = Slot::new();
    let input = [noise(2000), text(8000)].concat();
    slot.fill(&input, 10_000);
    // The same bytes in three pieces, the destination in two: the metadata has room for eleven.
    let piece = |at: usize, length: u32| CpaFlatBuffer {
        dataLenInBytes: length,
        pData: slot.source.wrapping_add(at),
    };
    let mut pieces = [piece(0, 1), piece(1, 7000), piece(7001, 2999)];
    let mut halves = [
        CpaFlatBuffer { dataLenInBytes: 700, pData: slot.target },
        CpaFlatBuffer { dataLenInBytes: 9000, pData: slot.target.wrapping_add(700) },
    ];
    slot.lists[0].numBuffers = 3;
    slot.lists[0].pBuffers = pieces.as_mut_ptr();
    slot.lists[1].numBuffers = 2;
    slot.lists[1].pBuffers = halves.as_mut_ptr();
    assert_eq!(rig.compress(&mut slot), CPA_STATUS_SUCCESS);
    rig.wait(std::slice::from_ref(&slot), 1);
    assert_eq!(slot.results.status, CPA_DC_OK);
    assert!(slot.results.produced > 700, "the output crosses from one piece to the next");
    assert_eq!(inflate(&slot.output()), input);
}

#[test]
fn the_ring_holds_one_less_than_it_has() {
    let rig = Rig::new("now silence");
    let mut slots: Vec<Slot> = (0..512).map(|_| Slot::new()).collect();
    for (index, slot) in slots.iter_mut().enumerate() {
        slot.fill(&text(100), 512);
        let expected = if index < 511 { CPA_STATUS_SUCCESS } else { CPA_STATUS_RETRY };
        assert_eq!(rig.compress(slot), expected, "submission {}", index + 1);
    }
    assert_eq!(rig.poll(), CPA_STATUS_RETRY, "silent");
    let counters = rig.counters();
    assert_eq!((counters.in_flight, counters.accepted, counters.retries), (511, 511, 1));
    rig.device.control("now revive").expect("a good script");
    rig.wait(&slots[..511], 511);
    assert!(slots[..511].iter().all(|slot| slot.times() == 1));
    let counters = rig.counters();
    assert_eq!((counters.in_flight, counters.max_in_flight), (0, 511));
    assert_eq!(rig.compress(&mut slots[511]), CPA_STATUS_SUCCESS);
    rig.wait(&slots, 512);
}

#[test]
fn a_callback_finds_the_ring_as_full_as_before() {
    // The callback submits once more: with 3 of 3 in flight it must see RETRY, for entries return
    // after the poll.
    struct Again {
        rig: *const Rig,
        slot: *mut Slot,
        status: CpaStatus,
        poll: CpaStatus,
    }
    unsafe extern "C" fn again(tag: *mut std::ffi::c_void, _status: CpaStatus) {
        // SAFETY: the test's own, alive until it has seen the answers; callbacks of one poll run
        // one by one.
        let again = unsafe { &mut *tag.cast::<Again>() };
        // SAFETY: as above.
        let rig = unsafe { &*again.rig };
        // SAFETY: as above.
        let slot = unsafe { &mut *again.slot };
        again.status = rig.compress(slot);
        again.poll = rig.poll();
    }
    let rig = Rig::new("ring 4; order fifo");
    let mut bytes = setup();
    let session = crate::rig::pinned(4096).cast();
    // SAFETY: locals and pinned memory.
    let status =
        unsafe { rig.device.init_session(rig.handles[0], session, &raw mut bytes, Some(again)) };
    assert_eq!(status, CPA_STATUS_SUCCESS);
    let mut extra = Slot::new();
    extra.fill(&text(100), 512);
    let mut seen = Again { rig: &raw const rig, slot: &raw mut extra, status: 99, poll: 99 };
    let mut slots: Vec<Slot> = (0..3).map(|_| Slot::new()).collect();
    for (index, slot) in slots.iter_mut().enumerate() {
        slot.fill(&text(100), 512);
        if index < 2 {
            assert_eq!(rig.compress(slot), CPA_STATUS_SUCCESS);
            continue;
        }
        let [source, target] = &mut *slot.lists;
        // SAFETY: the slot and `seen` outlive the request.
        let status = unsafe {
            rig.device.compress(
                rig.handles[0],
                session,
                source,
                target,
                &mut operation(CPA_DC_FLUSH_FINAL),
                &raw mut *slot.results,
                (&raw mut seen).cast(),
            )
        };
        assert_eq!(status, CPA_STATUS_SUCCESS);
    }
    // All three in one poll.
    std::thread::sleep(std::time::Duration::from_millis(20));
    rig.wait(&slots[..2], 2);
    while rig.counters().callbacks < 3 {
        rig.poll();
    }
    let one_poll = rig.counters().callbacks == 3;
    assert!(one_poll);
    if seen.status == CPA_STATUS_SUCCESS {
        // The machine was so slow that the third answer came in a poll of its own.
        rig.wait(std::slice::from_ref(&extra), 1);
    } else {
        assert_eq!(seen.status, CPA_STATUS_RETRY);
    }
    assert_eq!(seen.poll, CPA_STATUS_RETRY, "no poll within a poll");
}

#[test]
fn a_poll_returns_at_most_its_quota() {
    let rig = Rig::new("engine stored");
    let mut slots: Vec<Slot> = (0..10).map(|_| Slot::new()).collect();
    for slot in &mut slots {
        slot.fill(&text(100), 512);
        assert_eq!(rig.compress(slot), CPA_STATUS_SUCCESS);
    }
    let mut before = 0;
    while before < 10 {
        rig.device.poll(rig.handles[0], 3);
        let now = slots.iter().map(Slot::times).sum::<u32>();
        assert!(now - before <= 3);
        before = now;
    }
    assert_eq!(rig.device.poll(rig.handles[0], 3), CPA_STATUS_RETRY);
}

#[test]
fn completions_come_shuffled_or_in_order_as_asked() {
    use std::sync::Mutex;
    static ORDER: Mutex<Vec<usize>> = Mutex::new(Vec::new());
    unsafe extern "C" fn note(tag: *mut std::ffi::c_void, _status: CpaStatus) {
        ORDER.lock().expect("no panic").push(tag as usize);
    }
    for (script, sorted) in [("order fifo", true), ("order shuffled; seed 3", false)] {
        let rig = Rig::new(&format!("{script}; now silence"));
        let session = crate::rig::pinned(4096).cast();
        // SAFETY: locals and pinned memory.
        unsafe {
            rig.device.init_session(rig.handles[0], session, &mut setup(), Some(note));
        }
        ORDER.lock().expect("no panic").clear();
        let mut slots: Vec<Slot> = (0..100).map(|_| Slot::new()).collect();
        for (index, slot) in slots.iter_mut().enumerate() {
            // Sizes differ, so that an order by service time would show.
            slot.fill(&text(20_000 - index * 190), 40_000);
            let [source, target] = &mut *slot.lists;
            // SAFETY: slots outlive the requests; the tag is a number.
            let status = unsafe {
                rig.device.compress(
                    rig.handles[0],
                    session,
                    source,
                    target,
                    &mut operation(CPA_DC_FLUSH_FINAL),
                    &raw mut *slot.results,
                    index as *mut _,
                )
            };
            assert_eq!(status, CPA_STATUS_SUCCESS);
        }
        rig.device.control("now revive").expect("a good script");
        while rig.counters().callbacks < 100 {
            rig.poll();
        }
        let mut order = ORDER.lock().expect("no panic").clone();
        assert_eq!(order.is_sorted(), sorted, "{script}");
        order.sort_unstable();
        assert_eq!(order, (0..100).collect::<Vec<_>>(), "each once");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    /// With any sizes, seeds, rings and faults, each accepted request is answered once, and each
    /// good answer is right.
    #[test]
    fn each_request_is_answered_exactly_once(
        sizes in proptest::collection::vec((1_usize..6000, any::<bool>()), 1..120),
        seed in any::<u64>(),
        ring in 2_usize..40,
        faults in proptest::collection::vec(prop_oneof![
            (1_u64..100).prop_map(|n| format!("at {n} retry 3")),
            (2_u64..40).prop_map(|n| format!("every {n} error -9")),
            (2_u64..40).prop_map(|n| format!("every {n} status -11")),
            (1_u64..60).prop_map(|n| format!("at {n} late 2 4")),
            (1_u64..60).prop_map(|n| format!("at {n} fail 2")),
            (1_u64..60).prop_map(|n| format!("at {n} pollfail 3")),
        ], 0..4),
        fifo in any::<bool>(),
        stored in any::<bool>(),
    ) {
        let order = if fifo { "fifo" } else { "shuffled" };
        let engine = if stored { "stored" } else { "deflate" };
        let faults = faults.join("; ");
        let rig = Rig::new(&format!("seed {seed}; ring {ring}; order {order}; engine {engine}; {faults}"));
        let mut slots: Vec<Slot> = Vec::new();
        let mut accepted = 0;
        for (len, compressible) in &sizes {
            let input = if *compressible { text(*len) } else { noise(*len) };
            let mut slot = Slot::new();
            slot.fill(&input, len + 600);
            // RETRY is polled away, FAIL is tried again.
            while rig.compress(&mut slot) != CPA_STATUS_SUCCESS {
                rig.poll();
            }
            accepted += 1;
            slots.push(slot);
        }
        rig.wait(&slots, accepted);
        for (slot, (len, compressible)) in slots.iter().zip(&sizes) {
            prop_assert_eq!(slot.times(), 1);
            if slot.status() == CPA_STATUS_SUCCESS && slot.results.status == CPA_DC_OK {
                let input = if *compressible { text(*len) } else { noise(*len) };
                prop_assert_eq!(inflate(&slot.output()), input);
            }
        }
        let counters = rig.counters();
        prop_assert_eq!(counters.callbacks, u64::from(accepted));
        prop_assert_eq!(counters.in_flight, 0);
        prop_assert!(counters.max_in_flight < ring as u64);
        for slot in slots {
            for memory in [slot.source, slot.target, slot.lists[0].pPrivateMetaData.cast(), slot.lists[1].pPrivateMetaData.cast()] {
                prop_assert!(crate::rig::USDM.free(memory.cast()));
            }
        }
    }
}
