//! The real libqpl, on its software path. It needs a newer C library than most systems have, so
//! that the tests run this program again, under the loader and the C library that
//! `scripts/fetch-qpl` has unpacked.

use codec::{Codec, Decoder, Encoder, Settings, UnitHeader};
use corpus::{Corpus, PAGE};
use flate2::read::DeflateDecoder;
use qpl::{Loaded, OpenError, Options, Path, Qpl};
use std::io::Read;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

/// Set in the second run.
const INNER: &str = "PLATEN_QPL_INNER";

/// Runs `test` of this program where libqpl can be loaded.
fn with_libqpl(test: &str, check: impl FnOnce(&Qpl)) {
    if let Some(library) = std::env::var_os(INNER) {
        let loaded = Loaded::new(Some(std::path::Path::new(&library))).unwrap();
        let options = Options { deadline: Duration::from_secs(300), verify_every: 0 };
        check(&Qpl::open(Arc::new(loaded), options).unwrap());
        println!("checked {test} with the real library");
        return;
    }
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/qpl/root");
    let folder = PathBuf::from(root).join("usr/lib/x86_64-linux-gnu");
    let library = folder.join(qpl::LIBRARY);
    if !library.is_file() {
        assert!(
            std::env::var_os("PLATEN_SKIP_QPL").is_some(),
            "no {}: run scripts/fetch-qpl, or set PLATEN_SKIP_QPL=1",
            library.display()
        );
        println!("skipped: no libqpl, by PLATEN_SKIP_QPL");
        return;
    }
    let mut inner = Command::new(folder.join("ld-linux-x86-64.so.2"));
    inner.arg("--library-path").arg(&folder).arg(std::env::current_exe().unwrap());
    inner.args(["--exact", test, "--nocapture"]).env(INNER, &library).env_remove("LD_LIBRARY_PATH");
    let output = inner.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let failed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}{failed}");
    assert!(said.contains(&format!("checked {test} with the real library")), "{said}{failed}");
}

fn inflate(stream: &[u8]) -> Vec<u8> {
    let mut plain = Vec::new();
    DeflateDecoder::new(stream).read_to_end(&mut plain).unwrap();
    plain
}

#[test]
fn its_software_path_is_found_and_no_device_claimed() {
    with_libqpl("its_software_path_is_found_and_no_device_claimed", |qpl| {
        assert!(qpl.version().starts_with("1."), "{}", qpl.version());
        // A machine with a device would take its hardware path, and this test would be wrong there.
        if qpl.path() == Path::Software {
            let why = qpl.no_hardware().expect("a reason");
            assert!(matches!(why, OpenError::Unavailable { path: Path::Hardware, .. }), "{why}");
        }
    });
}

#[test]
fn units_of_all_lengths_inflate_by_zlib_and_by_platen() {
    with_libqpl("units_of_all_lengths_inflate_by_zlib_and_by_platen", |qpl| {
        let compressor = qpl.compressor(codec::MAX_PLAIN).unwrap();
        let counters = Arc::clone(compressor.counters());
        let encoder = Encoder::new(Settings::qpl()).unwrap();
        let mut encoder = encoder.with_deflate(Box::new(compressor));
        let corpus = Corpus::load();
        let mut out = vec![0; codec::MAX_PLAIN];
        let mut back = vec![0; codec::MAX_PLAIN];
        let mut made = 0;
        let lengths = [2, 3, 100, 4096, 4097, 65_535, 65_536, 65_537, 524_288, 557_056, 1 << 20];
        for set in corpus.names() {
            let found = corpus.set(set).unwrap();
            let pages = found.pages();
            for (round, len) in lengths.iter().cycle().take(4 * lengths.len()).enumerate() {
                let from = (round * 70_001) % pages.len();
                let plain: Vec<u8> = pages.iter().copied().cycle().skip(from).take(*len).collect();
                let encoded = encoder.encode(&plain, &mut out);
                if encoded.codec != Codec::Zlib {
                    continue;
                }
                made += 1;
                let payload = &out[..encoded.len];
                assert!(inflate(payload) == plain, "{set}: {len} bytes from {from}");
                let header = UnitHeader::of(&plain, encoded);
                let back = &mut back[..plain.len()];
                Decoder::new().decode(&header, payload, back).unwrap();
                assert!(back == plain);
            }
        }
        let seen = counters.snapshot();
        assert!(made > 50, "{made} {seen:?}");
        assert_eq!((seen.units, seen.failures, seen.without), (made, 0, 0), "{seen:?}");
    });
}

/// Page by page, with the lengths first: what QEMU's multifd method `qpl` sends and inflates.
#[test]
fn pages_make_a_packet_of_qemu_s_method_qpl() {
    with_libqpl("pages_make_a_packet_of_qemu_s_method_qpl", |qpl| {
        let compressor = qpl.compressor(PAGE).unwrap();
        let encoder = Encoder::new(Settings::qpl()).unwrap();
        let mut encoder = encoder.with_deflate(Box::new(compressor));
        let corpus = Corpus::load();
        let guest = corpus.guest();
        let pages: Vec<&[u8]> = guest.pages().chunks_exact(PAGE).take(512).collect();
        let (mut lengths, mut bodies) = (Vec::new(), Vec::new());
        let mut out = vec![0; PAGE];
        for page in &pages {
            let encoded = encoder.encode(page, &mut out);
            let body = match encoded.codec {
                Codec::Zlib => out[..encoded.len].to_vec(),
                // A page of one word is no page of such a packet, and one that does not shrink is
                // sent as it is, with the length of a page.
                _ => page.to_vec(),
            };
            lengths.extend_from_slice(&u32::try_from(body.len()).unwrap().to_be_bytes());
            bodies.extend_from_slice(&body);
        }
        let (mut at, mut inflated) = (0, 0);
        for (length, page) in lengths.chunks_exact(4).zip(&pages) {
            let len = u32::from_be_bytes(length.try_into().unwrap()) as usize;
            assert!((1..=PAGE).contains(&len));
            let body = &bodies[at..at + len];
            at += len;
            if len == PAGE {
                assert!(body == *page);
            } else {
                inflated += 1;
                assert!(inflate(body) == *page);
            }
        }
        assert_eq!(at, bodies.len());
        assert!(inflated > 100, "{inflated}");
    });
}

#[test]
fn threads_have_jobs_of_their_own() {
    with_libqpl("threads_have_jobs_of_their_own", |qpl| {
        let corpus = Corpus::load();
        let guest = corpus.guest();
        let plain = &guest.pages()[..300_000];
        std::thread::scope(|scope| {
            for thread in 0..4 {
                scope.spawn(move || {
                    let encoder = Encoder::new(Settings::qpl()).unwrap();
                    let compressor = qpl.compressor(codec::MAX_PLAIN).unwrap();
                    let counters = Arc::clone(compressor.counters());
                    let mut encoder = encoder.with_deflate(Box::new(compressor));
                    let mut out = vec![0; 300_000];
                    for round in 0..40 {
                        let plain = &plain[thread * 10_000 + round * 1000..];
                        let encoded = encoder.encode(plain, &mut out);
                        assert_eq!(encoded.codec, Codec::Zlib);
                        assert!(inflate(&out[..encoded.len]) == plain);
                    }
                    assert_eq!(counters.snapshot().units, 40);
                });
            }
        });
    });
}
