//! Sessions on the simulated device, by the real, unmodified QATzip: right bytes, or an error.

mod lab;

use std::io::Read;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use codec::{qz, Codec, Decoder, Encoded, Encoder, Settings, UnitHeader, MAX_PLAIN};
use lab::{alone, noise, pages};
use qatzip::{LoadError, Paths, QatZip, QatZipError, Session};

/// Room for whatever a session makes of a unit.
const ROOM: usize = MAX_PLAIN / 4 * 5;

fn load(paths: &Paths) -> Arc<QatZip> {
    QatZip::load(paths).expect("the simulated device and QATzip load")
}

/// Decodes as the receiving relay does: `Err` is a unit refused there, `Ok` is these bytes.
fn receive(payload: &[u8], plain: &[u8]) -> Result<(), codec::DecodeError> {
    let encoded = Encoded { codec: Codec::DeflateQz, len: payload.len() };
    let header = UnitHeader::of(plain, encoded);
    let mut out = vec![0xdb; plain.len()];
    Decoder::new().decode(&header, payload, &mut out)?;
    assert!(out == plain, "wrong bytes were accepted");
    Ok(())
}

#[test]
fn every_level_and_size_is_read_by_all_others() {
    alone("every_level_and_size_is_read_by_all_others", "", |paths| {
        let library = load(&paths);
        for level in 1..=9 {
            let mut session = Session::new(&library, level).expect("a session");
            let mut out = vec![0xa5; ROOM];
            for size in [1024, 1025, 4096, 65_536, 65_537, 66_560, 131_072, 524_288, MAX_PLAIN] {
                let plain = pages(size, 7);
                let len = session.compress(&plain, &mut out).expect("a sound device");
                assert!(len < size, "level {level}, {size} bytes became {len}");
                let payload = &out[..len];
                receive(payload, &plain).expect("our decoder reads it");
                let mut judge = Vec::new();
                let mut gunzip = flate2::bufread::MultiGzDecoder::new(payload);
                gunzip.read_to_end(&mut judge).expect("zlib-rs reads it");
                assert!(judge == plain && gunzip.get_ref().is_empty());
                let sizes: Vec<_> =
                    qz::members(payload, size).unwrap().map(|member| member.plain_len).collect();
                let pieces: Vec<_> = plain.chunks(qz::MEMBER_PLAIN).map(<[u8]>::len).collect();
                assert_eq!(sizes, pieces, "level {level}: not made by the device");
                let mut back = vec![0x5a; size];
                match session.decompress(payload, &mut back) {
                    Ok(()) => assert!(back == plain),
                    // The last member is less than QATzip would give to a device.
                    Err(error) => assert_eq!(error, QatZipError::TooShort { len: size - 65_536 }),
                }
            }
        }
        assert_eq!(library.closed(), None);
    });
}

#[test]
fn what_our_software_makes_the_device_reads() {
    alone("what_our_software_makes_the_device_reads", "", |paths| {
        let library = load(&paths);
        let mut session = Session::new(&library, 1).unwrap();
        for level in [1, 6, 9] {
            let settings = Settings::new(Codec::DeflateQz, Some(level)).unwrap();
            let mut encoder = Encoder::new(settings).unwrap();
            for size in [1024, 4096, 65_536, 70_000, 524_288, 557_056, MAX_PLAIN] {
                let plain = pages(size, 11);
                let mut out = vec![0; size];
                let encoded = encoder.encode(&plain, &mut out);
                assert_eq!(encoded.codec, Codec::DeflateQz);
                let mut back = vec![0x5a; size];
                session.decompress(&out[..encoded.len], &mut back).unwrap();
                assert!(back == plain, "level {level}, {size} bytes");
            }
        }
    });
}

#[test]
fn what_no_device_takes_is_refused_without_a_call() {
    alone("what_no_device_takes_is_refused_without_a_call", "", |paths| {
        let library = load(&paths);
        for level in [-1, 0, 10, 256] {
            assert_eq!(Session::new(&library, level).unwrap_err(), QatZipError::Level(level));
        }
        let mut session = Session::new(&library, 1).unwrap();
        let mut out = vec![0; ROOM];
        let error = session.compress(&[0; 1023], &mut out).unwrap_err();
        assert_eq!(error, QatZipError::TooShort { len: 1023 });
        let error = session.compress(&vec![0; MAX_PLAIN + 1], &mut out).unwrap_err();
        assert_eq!(error, QatZipError::TooLong { len: MAX_PLAIN + 1 });
        let plain = noise(65_536, 1);
        let error = session.compress(&plain, &mut out[..65_535]).unwrap_err();
        assert!(matches!(error, QatZipError::NoRoom { room: 65_535, .. }), "{error}");
        let len = session.compress(&plain, &mut out).unwrap();
        receive_longer(&out[..len], &plain);
        // One member for the whole, as QATzip's own software writes it.
        let plain = pages(65_537, 3);
        let mut deflate = Vec::new();
        let level = flate2::Compression::fast();
        flate2::bufread::DeflateEncoder::new(&plain[..], level).read_to_end(&mut deflate).unwrap();
        let mut whole = vec![0; deflate.len() + qz::MEMBER_OVERHEAD];
        qz::write_member(&mut whole, &deflate, qz::crc32(&plain), 65_537).unwrap();
        let error = session.decompress(&whole, &mut vec![0; 65_537]).unwrap_err();
        assert!(matches!(error, QatZipError::Unsuitable(_)), "{error}");
        receive(&whole, &plain).unwrap();
        // None of it has cost us the device.
        assert_eq!(library.closed(), None);
        session.compress(&plain, &mut out).unwrap();
    });
}

/// A payload longer than its plain bytes is no unit, but the members are sound all the same.
fn receive_longer(payload: &[u8], plain: &[u8]) {
    let mut judge = Vec::new();
    flate2::bufread::MultiGzDecoder::new(payload).read_to_end(&mut judge).unwrap();
    assert!(judge == plain);
}

#[test]
fn the_library_is_loaded_once() {
    alone("the_library_is_loaded_once", "", |paths| {
        let missing = Paths { qatzip: Some("/nonexistent/libqatzip.so.3".into()), drivers: None };
        let error = QatZip::load(&missing).unwrap_err();
        assert!(matches!(error, LoadError::Library { .. }), "{error}");
        // Any library without QATzip's functions.
        let other = paths.drivers.as_ref().unwrap().join("libusdm.so.0");
        let other = Paths { qatzip: Some(other), drivers: paths.drivers.clone() };
        let error = QatZip::load(&other).unwrap_err();
        assert!(matches!(error, LoadError::Symbol { .. }), "{error}");
        let first = load(&paths);
        assert!(Arc::ptr_eq(&first, &load(&paths)));
        let error = QatZip::load(&Paths::default()).unwrap_err();
        assert!(matches!(error, LoadError::Loaded { .. }), "{error}");
    });
}

/// Attempts without a device must not use up what the process has few of.
#[test]
fn without_a_device_there_is_one_attempt_and_no_session() {
    alone("without_a_device_there_is_one_attempt_and_no_session", "absent", |paths| {
        let library = load(&paths);
        for _ in 0..1500 {
            let error = Session::new(&library, 1).unwrap_err();
            assert!(matches!(error, QatZipError::Closed(_)), "{error}");
        }
        assert_eq!(library.closed().expect("no device").call, "qzInit");
        keys_are_left();
    });
}

#[test]
fn without_instances_calls_are_refused_and_nothing_leaks() {
    alone("without_instances_calls_are_refused_and_nothing_leaks", "instances 0", |paths| {
        let library = load(&paths);
        let mut out = vec![0; ROOM];
        match Session::new(&library, 1) {
            Ok(mut session) => {
                for _ in 0..1500 {
                    session.compress(&pages(4096, 1), &mut out).unwrap_err();
                }
            }
            Err(error) => assert!(matches!(error, QatZipError::Closed(_)), "{error}"),
        }
        keys_are_left();
    });
}

/// A process has 1024 pthread keys; threads with their own destructors need one.
fn keys_are_left() {
    let mut keys = Vec::new();
    for _ in 0..500 {
        keys.push(lab::PthreadKey::new().expect("pthread keys are left"));
    }
}

#[test]
fn more_sessions_than_instances_find_it_busy_or_right() {
    alone("more_sessions_than_instances_find_it_busy_or_right", "instances 2", |paths| {
        let library = load(&paths);
        let (right, busy) = (AtomicUsize::new(0), AtomicUsize::new(0));
        thread::scope(|scope| {
            for seed in 0..6 {
                let (library, right, busy) = (&library, &right, &busy);
                scope.spawn(move || {
                    let mut session = Session::new(library, 1).unwrap();
                    session.set_deadline(Duration::from_secs(120));
                    let mut out = vec![0; ROOM];
                    for round in 0..12 {
                        let plain = pages(300_000, seed * 100 + round);
                        match session.compress(&plain, &mut out) {
                            Ok(len) => {
                                receive(&out[..len], &plain).expect("what is given is right");
                                right.fetch_add(1, Ordering::Relaxed);
                            }
                            Err(error) => {
                                assert_eq!(error, QatZipError::Busy);
                                busy.fetch_add(1, Ordering::Relaxed);
                            }
                        }
                    }
                });
            }
        });
        let (right, busy) = (right.into_inner(), busy.into_inner());
        assert_eq!(library.closed(), None);
        assert!(right > 0, "nothing was done: {busy} busy");
        println!("{right} done, {busy} found no instance");
    });
}

/// Sessions at work while the device misbehaves: each result is right, and after the first error
/// there is none.
fn work_through_faults(paths: &Paths, sessions: u64, deadline: Duration) -> (usize, Arc<QatZip>) {
    let library = load(paths);
    let done = AtomicUsize::new(0);
    thread::scope(|scope| {
        for seed in 0..sessions {
            let (library, done) = (&library, &done);
            scope.spawn(move || {
                let Ok(mut session) = Session::new(library, 1) else { return };
                session.set_deadline(deadline);
                let mut out = vec![0; ROOM];
                for round in 0..40 {
                    // Sizes that change, so that an answer to an older request cannot fit by luck.
                    let size = 65_536 * 8 - usize::try_from(round * 4096 + seed * 512).unwrap();
                    let plain = pages(size, seed * 1000 + round);
                    let closed_before = library.closed().is_some();
                    match session.compress(&plain, &mut out) {
                        Ok(len) => {
                            assert!(!closed_before, "a result after the first error");
                            receive(&out[..len], &plain).expect("what is given is right");
                            done.fetch_add(1, Ordering::Relaxed);
                            let mut back = vec![0; size];
                            if session.decompress(&out[..len], &mut back).is_ok() {
                                assert!(back == plain, "wrong bytes");
                            }
                        }
                        Err(QatZipError::Busy) => {}
                        Err(error) => {
                            assert!(matches!(error, QatZipError::Closed(_)), "{error}");
                            assert!(library.closed().is_some());
                        }
                    }
                }
            });
        }
    });
    (done.into_inner(), library)
}

macro_rules! faults {
    ($($name:ident: $script:literal, $why:literal;)*) => {$(
        #[test]
        fn $name() {
            alone(stringify!($name), $script, |paths| {
                let sessions = 3;
                let (done, library) =
                    work_through_faults(&paths, sessions, Duration::from_secs(5));
                let closed = library.closed().expect("the device has failed");
                assert!(closed.to_string().contains($why), "{closed}");
                println!("{done} units, then {closed}");
                let error = Session::new(&library, 1).unwrap_err();
                assert_eq!(error, closed.into());
            });
        }
    )*};
}

faults! {
    a_refused_request_ends_it: "at 200 fail 1", "code -2";
    a_device_that_is_always_busy_ends_it: "at 200 retry forever", "";
    an_error_result_ends_it: "at 200 error -9 1", "code -";
    a_few_error_results_end_it: "at 200 error -9 5", "code -";
    a_failed_poll_ends_it: "at 200 pollfail 1", "code -2";
    a_wrong_checksum_ends_it: "at 100 op=compress crc 1", "CRC-32";
    a_dead_device_ends_it: "at 200 fatal", "code -";
}

#[test]
fn a_silent_device_costs_one_deadline_and_the_process_still_ends() {
    let test = "a_silent_device_costs_one_deadline_and_the_process_still_ends";
    alone(test, "at 100 silence", |paths| {
        let (done, library) = work_through_faults(&paths, 3, Duration::from_secs(2));
        let closed = library.closed().expect("the device is silent");
        assert!(closed.reason.contains("no answer within"), "{closed}");
        println!("{done} units, then {closed}; 1 passed");
        // Now and then the exit handlers crash on the call that has not ended. Who runs this looks
        // at the status.
        qatzip::end_process_if_stuck(0);
        panic!("a call was given up, and nobody remembers");
    });
}

#[test]
fn late_answers_within_the_deadline_are_taken() {
    alone("late_answers_within_the_deadline_are_taken", "every 50 late 20 1", |paths| {
        let (done, library) = work_through_faults(&paths, 2, Duration::from_secs(60));
        assert_eq!(library.closed(), None);
        assert_eq!(done, 80);
    });
}

#[test]
fn a_ring_that_is_full_for_a_while_is_waited_for() {
    alone("a_ring_that_is_full_for_a_while_is_waited_for", "at 50 retry 20", |paths| {
        let (done, library) = work_through_faults(&paths, 2, Duration::from_secs(60));
        assert_eq!(library.closed(), None);
        assert_eq!(done, 80);
    });
}

/// The checksum of the plain bytes says nothing of the stream: that is the device's own check, and
/// what it misses the receiver finds.
#[test]
fn a_flipped_bit_is_found_by_the_receiver_at_the_latest() {
    let test = "a_flipped_bit_is_found_by_the_receiver_at_the_latest";
    alone(test, "at 5 op=compress flip 3", |paths| {
        let library = load(&paths);
        let mut session = Session::new(&library, 1).unwrap();
        let mut out = vec![0; ROOM];
        let mut refused = 0;
        for round in 0..20 {
            let plain = pages(65_536, round);
            match session.compress(&plain, &mut out) {
                Ok(len) => refused += usize::from(receive(&out[..len], &plain).is_err()),
                Err(error) => assert!(matches!(error, QatZipError::Closed(_)), "{error}"),
            }
        }
        assert!(refused > 0 || library.closed().is_some(), "no bit was flipped");
    });
}

#[test]
fn units_that_are_not_sound_never_decode_to_wrong_bytes() {
    alone("units_that_are_not_sound_never_decode_to_wrong_bytes", "", |paths| {
        let library = load(&paths);
        let mut session = Session::new(&library, 1).unwrap();
        let plain = pages(200_000, 5);
        let mut out = vec![0; ROOM];
        let len = session.compress(&plain, &mut out).unwrap();
        let mut back = vec![0; plain.len()];
        session.decompress(&out[..len], &mut back).unwrap();
        // In a deflate stream, which is beyond what is checked before the call.
        out[100] ^= 0x10;
        let error = session.decompress(&out[..len], &mut back).unwrap_err();
        assert!(matches!(error, QatZipError::Closed(_)), "{error}");
        out[100] ^= 0x10;
        session.decompress(&out[..len], &mut back).unwrap_err();
        receive(&out[..len], &plain).expect("and our software goes on");
    });
}
