//! A library with faults: every unit is right, whatever it does.

mod fake;

use codec::{Codec, Decoder, Encoded, Encoder, Settings, UnitHeader};
use corpus::Corpus;
use fake::{fake, Fake, Fault, State, INTERNAL};
use qpl::{OpenError, Options, Path, Qpl, Snapshot, Status};
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Duration;

const SURE: Options = Options { deadline: Duration::from_secs(300), verify_every: 1 };

/// Units of the corpus through an encoder, each decoded again. Returns how many libqpl made, as the
/// counters say, and all counters.
fn units(qpl: &Qpl, count: usize) -> Snapshot {
    let compressor = qpl.compressor(codec::MAX_PLAIN).unwrap();
    let counters = Arc::clone(compressor.counters());
    let encoder = Encoder::new(Settings::qpl()).unwrap();
    let mut encoder = encoder.with_deflate(Box::new(compressor));
    let corpus = Corpus::load();
    // All of it compresses. Guest memory, also made, has pages that do not.
    let pages = corpus.text();
    let mut plain = pages.pages().iter().copied().cycle();
    let (mut out, mut back) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    for number in 0..count {
        let plain: Vec<u8> = plain.by_ref().take(30_000 + number * 1000).collect();
        let encoded = encoder.encode(&plain, &mut out);
        assert_eq!(encoded.codec, Codec::Zlib, "unit {number}");
        decode(&plain, encoded, &out, &mut back).unwrap();
    }
    counters.snapshot()
}

fn decode(
    plain: &[u8],
    encoded: Encoded,
    out: &[u8],
    back: &mut [u8],
) -> Result<(), codec::DecodeError> {
    let header = UnitHeader::of(plain, encoded);
    let back = &mut back[..plain.len()];
    Decoder::new().decode(&header, &out[..encoded.len], back)?;
    assert!(back == plain);
    Ok(())
}

/// Opens a library whose jobs have these faults; job 0 is the known unit.
fn with(faults: &[(u32, Fault)], options: Options) -> (Qpl, Arc<State>) {
    let fake = fake();
    let state = Arc::clone(&fake.state);
    state.faults.lock().unwrap().extend(faults.iter().copied());
    (Qpl::open(Arc::new(fake), options).unwrap(), state)
}

#[test]
fn another_version_is_refused_with_its_name() {
    for version in ["2.0.0", "0.9.1", "10.1", "", "one"] {
        let other = Fake { version, ..fake() };
        let error = Qpl::open(Arc::new(other), SURE).unwrap_err();
        assert_eq!(error, OpenError::Version(version.into()));
        assert!(error.to_string().contains(&format!("'{version}'")), "{error}");
    }
}

#[test]
fn without_a_device_the_software_path_is_used_and_the_status_told() {
    let qpl = Qpl::open(Arc::new(fake()), SURE).unwrap();
    assert_eq!((qpl.path(), qpl.version()), (Path::Software, "1.9.0"));
    let why = qpl.no_hardware().unwrap().to_string();
    assert!(why.contains("hardware path") && why.contains("501"), "{why}");
    let neither = Fake { software: Err(Status(54)), ..fake() };
    let error = Qpl::open(Arc::new(neither), SURE).unwrap_err().to_string();
    assert!(error.contains("software path") && error.contains("QPL_STS_PATH_ERR (54)"), "{error}");
}

#[test]
fn a_device_is_used_where_the_library_has_one_that_works() {
    let qpl = Qpl::open(Arc::new(Fake { hardware: Ok(8192), ..fake() }), SURE).unwrap();
    assert_eq!((qpl.path(), qpl.no_hardware()), (Path::Hardware, None));
    assert_eq!(units(&qpl, 3).units, 3);
    // One whose first job fails is none.
    let broken = Fake { hardware: Ok(8192), ..fake() };
    broken.state.faults.lock().unwrap().insert(0, Fault::EndsWith(INTERNAL));
    let qpl = Qpl::open(Arc::new(broken), SURE).unwrap();
    assert_eq!(qpl.path(), Path::Software);
    let why = qpl.no_hardware().unwrap().to_string();
    assert!(why.contains("QPL_STS_LIBRARY_INTERNAL_ERR (6)"), "{why}");
}

/// A queue may limit its transfers (`max_transfer_size`). The units of a migration are long.
#[test]
fn a_device_that_refuses_long_units_is_none() {
    let short = Fake { hardware: Ok(8192), longest: 64 << 10, ..fake() };
    let qpl = Qpl::open(Arc::new(short), SURE).unwrap();
    assert_eq!(qpl.path(), Path::Software);
    let why = qpl.no_hardware().unwrap().to_string();
    assert!(why.contains("1048576 bytes") && why.contains("TRANSFER_SIZE_INVALID"), "{why}");
}

#[test]
fn a_thread_without_a_job_is_an_error_where_the_device_is_required() {
    let library = Fake { hardware: Ok(8192), ..fake() };
    let state = Arc::clone(&library.state);
    let qpl = Qpl::open(Arc::new(library), SURE).unwrap();
    state.no_more_jobs.store(true, Ordering::SeqCst);
    assert_eq!(units(&qpl, 2).without, 2);
    let error = qpl.require().compressor(codec::MAX_PLAIN).unwrap_err();
    assert_eq!(error, OpenError::Job { path: Path::Hardware, status: Status(101) });
}

#[test]
fn a_job_of_an_absurd_size_is_refused_before_memory_is_taken() {
    for size in [0, 1, 100, (32 << 20) + 1, u32::MAX] {
        let odd = Fake { software: Ok(size), no_jobs: true, ..fake() };
        let error = Qpl::open(Arc::new(odd), SURE).unwrap_err();
        assert_eq!(error, OpenError::JobSize { path: Path::Software, size });
        assert!(error.to_string().contains(&size.to_string()), "{error}");
        let odd = Qpl::open(Arc::new(Fake { hardware: Ok(size), ..fake() }), SURE).unwrap();
        assert_eq!(odd.path(), Path::Software);
    }
}

#[test]
fn a_library_that_gets_the_known_unit_wrong_is_refused() {
    for fault in [Fault::Flips, Fault::Says(7), Fault::Says(u32::MAX), Fault::EndsWith(INTERNAL)] {
        // Also where units of a migration would not be verified.
        let wrong = fake();
        wrong.state.faults.lock().unwrap().insert(0, fault);
        let options = Options { verify_every: 0, ..SURE };
        let error = Qpl::open(Arc::new(wrong), options).unwrap_err();
        assert!(matches!(error, OpenError::Known { path: Path::Software, .. }), "{error}");
    }
    let none = Qpl::open(Arc::new(Fake { no_jobs: true, ..fake() }), SURE).unwrap_err();
    assert!(none.to_string().contains("QPL_STS_NO_MEM_ERR (101)"), "{none}");
}

#[test]
fn a_status_in_mid_course_costs_a_unit_of_libdeflate() {
    let faults = [
        (3, Fault::EndsWith(INTERNAL)),
        (5, Fault::Refuses(Status(8))),
        (6, Fault::EndsWith(Status(229))),
    ];
    let (qpl, _) = with(&faults, SURE);
    let seen = units(&qpl, 12);
    assert_eq!((seen.units, seen.failures, seen.without), (9, 3, 0), "{seen:?}");
    assert_eq!(seen.last_failure.unwrap(), "the job ended with status 229 of qpl/c_api/status.h");
}

#[test]
fn a_library_that_keeps_failing_is_left() {
    let (qpl, state) = with(&[], SURE);
    *state.from.lock().unwrap() = Some((4, Fault::EndsWith(INTERNAL)));
    let seen = units(&qpl, 12);
    assert_eq!((seen.units, seen.failures, seen.without), (3, 3, 6), "{seen:?}");
    assert_eq!(state.started.load(Ordering::SeqCst), 7);
}

#[test]
fn a_device_that_does_not_answer_keeps_its_memory() {
    let options = Options { deadline: Duration::from_millis(30), ..SURE };
    let (qpl, state) = with(&[(2, Fault::Silent)], options);
    let freed = state.freed.load(Ordering::SeqCst);
    let seen = units(&qpl, 4);
    assert_eq!((seen.units, seen.failures, seen.without), (1, 1, 2), "{seen:?}");
    assert_eq!(seen.last_failure.unwrap(), "no answer for 30 ms");
    assert_eq!(state.abandoned.load(Ordering::SeqCst), 1);
    assert_eq!(state.freed.load(Ordering::SeqCst), freed);
}

#[test]
fn a_device_that_takes_its_time_is_waited_for() {
    let (qpl, _) = with(&[(1, Fault::Slow(500)), (2, Fault::Busy(300))], SURE);
    let seen = units(&qpl, 3);
    assert_eq!((seen.units, seen.retries, seen.failures), (3, 300, 0), "{seen:?}");
}

/// The deadline passes while the thread has no CPU.
#[test]
fn an_answer_after_a_thread_s_pause_is_taken() {
    let options = Options { deadline: Duration::ZERO, ..SURE };
    let (qpl, state) = with(&[(1, Fault::Slow(1)), (2, Fault::Busy(1))], options);
    let seen = units(&qpl, 3);
    assert_eq!((seen.units, seen.retries, seen.failures), (3, 1, 0), "{seen:?}");
    assert_eq!(state.abandoned.load(Ordering::SeqCst), 0);
}

/// The device gets the job with the last attempt, and has the whole deadline for it.
#[test]
fn a_device_whose_queues_were_full_for_long_has_time_for_the_job() {
    let options = Options { deadline: Duration::from_secs(1), ..SURE };
    let (qpl, state) = with(&[(1, Fault::Full(Duration::from_millis(1100), 5))], options);
    let seen = units(&qpl, 2);
    assert_eq!((seen.units, seen.retries, seen.failures), (2, 1, 0), "{seen:?}");
    assert_eq!(state.abandoned.load(Ordering::SeqCst), 0);
}

#[test]
fn queues_that_stay_full_cost_a_unit_of_libdeflate() {
    let options = Options { deadline: Duration::from_millis(20), ..SURE };
    let (qpl, _) = with(&[(1, Fault::Busy(u32::MAX))], options);
    let seen = units(&qpl, 1);
    assert_eq!((seen.units, seen.failures), (0, 1), "{seen:?}");
    assert!(seen.last_failure.unwrap().contains("every queue was full for 20 ms"));
}

#[test]
fn a_length_that_cannot_be_ends_its_use() {
    for len in [u32::MAX, (1 << 20) + 1, 40_000, 0] {
        let (qpl, _) = with(&[(2, Fault::Says(len))], SURE);
        let seen = units(&qpl, 4);
        assert_eq!((seen.units, seen.failures, seen.without), (1, 1, 2), "{seen:?}");
        assert!(seen.last_failure.unwrap().contains(&format!("wrote {len} bytes")));
    }
}

#[test]
fn a_wrong_stream_is_seen_where_it_is_verified_and_else_by_the_receiver() {
    let (qpl, _) = with(&[(2, Fault::Flips)], SURE);
    let seen = units(&qpl, 4);
    assert_eq!((seen.units, seen.failures, seen.without), (1, 1, 2), "{seen:?}");
    assert!(seen.last_failure.unwrap().contains("inflates to other bytes"));

    let (qpl, _) = with(&[(1, Fault::Flips)], Options { verify_every: 0, ..SURE });
    let compressor = qpl.compressor(1 << 20).unwrap();
    let encoder = Encoder::new(Settings::qpl()).unwrap();
    let mut encoder = encoder.with_deflate(Box::new(compressor));
    let plain = b"not for long the same bytes, and then again ".repeat(90);
    let (mut out, mut back) = (vec![0; plain.len()], vec![0; plain.len()]);
    let encoded = encoder.encode(&plain, &mut out);
    decode(&plain, encoded, &out, &mut back).unwrap_err();
}

#[test]
fn what_does_not_shrink_is_sent_as_it_is() {
    let (qpl, _) = with(&[], SURE);
    let compressor = qpl.compressor(1 << 20).unwrap();
    let counters = Arc::clone(compressor.counters());
    let encoder = Encoder::new(Settings::qpl()).unwrap();
    let mut encoder = encoder.with_deflate(Box::new(compressor));
    let mut state = 1_u64;
    let random = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        state.to_be_bytes()[0]
    };
    let plain: Vec<u8> = (0..50_000).map(random).collect();
    let mut out = vec![0; plain.len()];
    let encoded = encoder.encode(&plain, &mut out);
    assert_eq!(encoded, Encoded { codec: Codec::Raw, len: plain.len() });
    assert_eq!((counters.snapshot().too_long, counters.snapshot().failures), (1, 0));
}

#[test]
fn a_unit_beyond_the_job_s_buffers_is_made_by_libdeflate() {
    let (qpl, state) = with(&[], SURE);
    let compressor = qpl.compressor(1000).unwrap();
    let counters = Arc::clone(compressor.counters());
    let encoder = Encoder::new(Settings::qpl()).unwrap();
    let mut encoder = encoder.with_deflate(Box::new(compressor));
    let plain = b"a unit that is too long for its job ".repeat(50);
    let (mut out, mut back) = (vec![0; plain.len()], vec![0; plain.len()]);
    let encoded = encoder.encode(&plain, &mut out);
    decode(&plain, encoded, &out, &mut back).unwrap();
    let seen = counters.snapshot();
    assert_eq!((seen.units, seen.failures), (0, 1), "{seen:?}");
    assert_eq!(state.started.load(Ordering::SeqCst), 1);
}

/// Only `qpl` uses the maker: codec zlib stays libdeflate's.
#[test]
fn codec_zlib_does_not_use_the_library() {
    let (qpl, _) = with(&[], SURE);
    let compressor = qpl.compressor(1 << 20).unwrap();
    let counters = Arc::clone(compressor.counters());
    let zlib = Settings::new(Codec::Zlib, None).unwrap();
    let mut encoder = Encoder::new(zlib).unwrap().with_deflate(Box::new(compressor));
    let plain = b"some bytes, and then some bytes again ".repeat(50);
    let mut out = vec![0; plain.len()];
    assert_eq!(encoder.encode(&plain, &mut out).codec, Codec::Zlib);
    assert_eq!(counters.snapshot(), Snapshot::default());
    encoder.set(Settings::qpl()).unwrap();
    encoder.encode(&plain, &mut out);
    assert_eq!(counters.snapshot().units, 1);
}
