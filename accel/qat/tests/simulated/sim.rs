//! The simulated device for tests: one per process, so tests take turns.

#![expect(unsafe_code, reason = "calls the simulated device's control functions")]

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use qat::{Engine, Finished, Libraries, Location, Op, Qat, StartError, StartOptions};
use std::ffi::{c_char, c_int, CString};
use std::io::{Read, Write};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// The loaded libraries and the device's control.
pub(crate) struct Sim {
    pub(crate) libraries: Libraries,
    control: unsafe extern "C" fn(*const c_char) -> c_int,
    counters: unsafe extern "C" fn(*mut qat_sim::Counters),
}

impl Sim {
    /// The device, reset, for one test.
    pub(crate) fn turn() -> MutexGuard<'static, Self> {
        static SIM: OnceLock<Mutex<Sim>> = OnceLock::new();
        let sim = SIM.get_or_init(|| Mutex::new(Self::load()));
        // A test that failed leaves the device as it is; the reset is what counts.
        let sim = sim.lock().unwrap_or_else(PoisonError::into_inner);
        sim.script("reset");
        sim
    }

    fn load() -> Self {
        let folder = qat_sim::libraries();
        let libraries = Libraries::load(&Location::Folder(folder.clone())).unwrap();
        // SAFETY: loaded already, so no initialiser runs.
        let library =
            unsafe { Library::open(Some(folder.join(qat::QAT)), RTLD_NOW | RTLD_GLOBAL) }.unwrap();
        // SAFETY: the type that the simulated device documents.
        let control = *unsafe { library.get("platen_qat_sim_control") }.unwrap();
        // SAFETY: as above.
        let counters = *unsafe { library.get("platen_qat_sim_counters") }.unwrap();
        std::mem::forget(library);
        Self { libraries, control, counters }
    }

    /// Replaces the script; set-up directives only while the device is stopped. It stops late on a
    /// busy machine: the driver's drop waits for a few seconds only.
    pub(crate) fn script(&self, script: &str) {
        let text = CString::new(script).unwrap();
        let start = Instant::now();
        // SAFETY: a NUL-terminated string.
        while unsafe { (self.control)(text.as_ptr()) } != 0 {
            assert!(start.elapsed() < HANG, "refused: {script}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub(crate) fn counters(&self) -> qat_sim::Counters {
        let mut counters = qat_sim::Counters::default();
        // SAFETY: room for one.
        unsafe { (self.counters)(&raw mut counters) };
        counters
    }

    /// Starts the driver on it, when a former driver has stopped.
    pub(crate) fn start(&self) -> Result<Arc<Qat>, StartError> {
        let start = Instant::now();
        loop {
            match self.start_at_once() {
                Err(StartError::AlreadyStarted) if start.elapsed() < HANG => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                started => return started,
            }
        }
    }

    /// Starts the driver on it.
    pub(crate) fn start_at_once(&self) -> Result<Arc<Qat>, StartError> {
        let options =
            StartOptions { event_interval: Duration::from_millis(2), ..StartOptions::default() };
        Qat::start(&self.libraries, &options)
    }
}

/// A piece of work with its expected outcome.
pub(crate) struct Piece {
    pub(crate) op: Op,
    pub(crate) source: Vec<u8>,
    pub(crate) plain: Vec<u8>,
}

/// Pieces of `len` plain bytes: text, heap-like, zero and random ones by turns. Never two alike.
pub(crate) fn pieces(count: usize, len: usize, compress: bool, seed: u64) -> Vec<Piece> {
    let mut state = seed | 1;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    (0..count)
        .map(|at| {
            let mut plain: Vec<u8> = match at % 4 {
                0 => (0..len).map(|_| b"abcdefgh ,.\n"[(random() >> 40) as usize % 12]).collect(),
                1 => (0..len)
                    .map(|i| if i % 8 < 3 { random().to_le_bytes()[0] } else { 0 })
                    .collect(),
                2 => vec![0; len],
                _ => (0..len).map(|_| random().to_le_bytes()[4]).collect(),
            };
            plain[..8].copy_from_slice(&random().to_le_bytes());
            if compress {
                Piece { op: Op::Compress, source: plain.clone(), plain }
            } else {
                let source = deflate(&plain);
                Piece { op: Op::Decompress { plain_len: plain.len() }, source, plain }
            }
        })
        .collect()
}

/// A raw deflate stream, by zlib-rs.
pub(crate) fn deflate(plain: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::new(4));
    encoder.write_all(plain).unwrap();
    encoder.finish().unwrap()
}

/// The contents of a raw deflate stream, by zlib-rs.
pub(crate) fn inflate(stream: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut plain = Vec::new();
    flate2::read::DeflateDecoder::new(stream).read_to_end(&mut plain)?;
    Ok(plain)
}

/// Checks one delivered piece with an independent decoder.
pub(crate) fn check(piece: &Piece, finished: &Finished<'_>) {
    match piece.op {
        Op::Compress => {
            let plain = inflate(finished.bytes).expect("a deflate stream");
            assert!(plain == piece.plain, "a stream of other bytes, by {:?}", finished.by);
        }
        Op::Decompress { .. } => {
            assert!(finished.bytes == piece.plain, "other bytes, by {:?}", finished.by);
        }
    }
    let mut crc = flate2::Crc::new();
    crc.update(&piece.plain);
    assert_eq!(finished.crc32, crc.sum(), "CRC, by {:?}", finished.by);
}

/// Longest that a test waits for anything before it calls that a hang.
pub(crate) const HANG: Duration = Duration::from_secs(240);

/// Runs pieces through an engine, `window` in flight at most: each comes back once, right, and
/// nothing comes after.
pub(crate) fn run(engine: &mut Engine, pieces: &[Piece], window: usize) {
    let mut seen = vec![false; pieces.len()];
    let (mut next, mut done) = (0, 0);
    let start = Instant::now();
    while done < pieces.len() {
        while next < pieces.len() && engine.in_flight() < window {
            let piece = &pieces[next];
            let Some(lease) = engine.take(piece.plain.len()) else { break };
            engine.source(&lease)[..piece.source.len()].copy_from_slice(&piece.source);
            engine.submit(lease, piece.source.len(), piece.op, next as u64);
            next += 1;
        }
        let delivered = engine.poll(|tag, result| {
            let at = usize::try_from(tag).unwrap();
            assert!(!std::mem::replace(&mut seen[at], true), "piece {at} came twice");
            check(&pieces[at], &result.expect("good data"));
        });
        done += delivered;
        if delivered == 0 {
            engine.wait();
            assert!(
                start.elapsed() < HANG,
                "{done} of {} after {HANG:?}: {:#?}",
                pieces.len(),
                engine.counters().snapshot()
            );
        }
    }
    assert_eq!(engine.in_flight(), 0);
    for _ in 0..20 {
        engine.poll(|tag, _| panic!("piece {tag} came twice"));
    }
}

/// Polls an idle engine until `reached`, or calls it a hang.
pub(crate) fn poll_until(engine: &mut Engine, mut reached: impl FnMut(&Engine) -> bool) {
    let start = Instant::now();
    while !reached(engine) {
        engine.poll(|tag, _| panic!("piece {tag} came again"));
        std::thread::sleep(Duration::from_millis(1));
        assert!(start.elapsed() < HANG, "not reached: {:#?}", engine.counters().snapshot());
    }
}
