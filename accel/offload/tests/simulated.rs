//! Units of 512 KiB on the simulated device, with every fault of its script: each comes back once,
//! and right.

#[path = "../../qat/tests/simulated/matrix.rs"]
mod matrix;
#[allow(dead_code, reason = "made for the driver's tests, which use all of it")]
#[path = "../../qat/tests/simulated/sim.rs"]
mod sim;

use codec::{Codec, Decoder, Encoder, Settings, UnitHeader};
use matrix::{sum, Fault, FAULTS};
use offload::{Carry, Done, Offload};
use qat::{Direction, Engine, EngineOptions, Snapshot};
use sim::Sim;
use std::time::{Duration, Instant};

const UNIT: usize = 512 << 10;
/// Each is eight pieces for the device.
const UNITS: usize = 5;
const IN_FLIGHT: u16 = 3;

struct Job {
    number: usize,
    input: Vec<u8>,
}

impl Carry for Job {
    fn input(&self) -> Option<&[u8]> {
        Some(&self.input)
    }
}

#[test]
fn every_unit_is_returned_once_and_correct_whatever_the_device_does() {
    let sim = Sim::turn();
    // `make test` sets this: half of the cases, in which every two values still meet.
    let half = std::env::var_os("PLATEN_QUICK").is_some();
    for (number, fault) in FAULTS.iter().enumerate() {
        for compress in [true, false] {
            for workers in [1, 4] {
                if !half || (number + usize::from(compress) + workers / 4) % 2 == 0 {
                    fault.until_met(|| run_case(&sim, fault, compress, workers));
                }
            }
        }
    }
}

/// Returns whether the fault was met as meant, and how long the slowest piece has waited.
fn run_case(sim: &Sim, fault: &Fault, compress: bool, workers: usize) -> (bool, Duration) {
    let direction = if compress { "compress" } else { "decompress" };
    let case = &format!("{}: {direction}, {workers} workers", fault.name);
    sim.script("reset");
    sim.script("instances 4; latency 30; seed 7");
    let options = EngineOptions {
        depth: 72,
        deadline: fault.deadline(),
        direction: if compress { Direction::Compress } else { Direction::Decompress },
        share: false,
        verify_every: 1,
        ..EngineOptions::default()
    };
    let qat = sim.start().unwrap();
    let offloads: Vec<Offload<Job>> = (0..workers)
        .map(|_| Offload::new(Engine::new(Some(&qat), options.clone()), IN_FLIGHT, UNIT))
        .collect();
    assert!(offloads.iter().all(|offload| offload.engine().on_device()), "{case}");
    sim.script(fault.script);
    let ends: Vec<(Snapshot, u64)> = std::thread::scope(|scope| {
        let threads: Vec<_> = offloads
            .into_iter()
            .zip(1..)
            .map(|(offload, seed)| scope.spawn(move || work(sim, fault, offload, compress, seed)))
            .collect();
        let ends = threads.into_iter().map(|thread| thread.join());
        ends.map(|end| end.unwrap_or_else(|_| panic!("{case}"))).collect()
    });
    drop(qat);
    let declined: u64 = ends.iter().map(|(_, declined)| declined).sum();
    let snapshots: Vec<Snapshot> = ends.into_iter().map(|(snapshot, _)| snapshot).collect();
    for snapshot in &snapshots {
        let made = snapshot.by_device + snapshot.software();
        assert_eq!(snapshot.delivered, made, "{case}\n{snapshot:#?}");
    }
    let sum = sum(&snapshots);
    // Pieces declined for want of a device are counted nowhere else.
    let met = declined > 0 || (fault.met)(&sum);
    if !met {
        println!("{case}: not met as meant\n{sum:#?}\n{:#?}", sim.counters());
    }
    assert_eq!(sim.counters().violations, 0, "{case}");
    (met, Duration::from_micros(sum.longest_wait_us))
}

/// Runs one worker's units; returns what its engine counted, and the units it declined.
fn work(
    sim: &Sim,
    fault: &Fault,
    mut offload: Offload<Job>,
    compress: bool,
    seed: u64,
) -> (Snapshot, u64) {
    let plain: Vec<Vec<u8>> = (0..UNITS as u64)
        .map(|unit| {
            let pieces = sim::pieces(UNIT / 4096, 4096, true, seed * 1000 + unit);
            pieces.into_iter().flat_map(|piece| piece.plain).collect()
        })
        .collect();
    let payloads: Vec<Vec<u8>> = plain.iter().map(|plain| encode(plain)).collect();
    let mut decoder = Decoder::new();
    let mut written = vec![0; UNIT * 2];
    let mut seen = [0; UNITS];
    let (mut next, mut declined, start) = (0, 0, Instant::now());
    while next < UNITS || offload.in_flight() > 0 {
        assert!(start.elapsed() < sim::HANG, "{seen:?}: {:#?}", offload.engine().counters());
        if next == UNITS / 2 {
            // As in the driver's matrix: the device may have done all of it before its event
            // arrives.
            while fault.script.contains("restarting") && sim.counters().events == 0 {
                offload.poll(true, &mut |job: Job, done| {
                    seen[job.number] += 1;
                    check(&mut decoder, &plain[job.number], &done, &mut written);
                });
                assert!(start.elapsed() < sim::HANG, "no event");
            }
        }
        if next < UNITS && offload.has_room() {
            if compress {
                offload.compress(Job { number: next, input: plain[next].clone() }, 0);
            } else {
                let job = Job { number: next, input: payloads[next].clone() };
                if let Err(job) = offload.decompress(job, UNIT) {
                    // The device is not to be had: the caller's own software.
                    declined += 1;
                    let mut out = vec![0xa5; UNIT];
                    decoder
                        .decode(&header(&job.input, &plain[next]), &job.input, &mut out)
                        .unwrap();
                    assert!(out == plain[next]);
                    seen[next] += 1;
                }
            }
            next += 1;
        }
        offload.poll(true, &mut |job, done| {
            seen[job.number] += 1;
            check(&mut decoder, &plain[job.number], &done, &mut written);
        });
    }
    assert_eq!(seen, [1; UNITS]);
    (offload.engine().counters().snapshot(), declined)
}

fn check(decoder: &mut Decoder, plain: &[u8], done: &Done<'_>, written: &mut [u8]) {
    match done {
        Done::Streams(streams) => {
            let len = streams.write(written).expect("room for a unit");
            assert_eq!(len, streams.payload_len());
            let mut out = vec![0xa5; UNIT];
            if len <= UNIT {
                decoder.decode(&header(&written[..len], plain), &written[..len], &mut out).unwrap();
                assert!(out == plain, "a unit of other bytes");
            }
        }
        Done::Plain(bytes) => assert!(*bytes == plain, "other bytes"),
        Done::Bad => panic!("good data were called bad"),
    }
}

fn header(payload: &[u8], plain: &[u8]) -> UnitHeader {
    UnitHeader {
        codec: Codec::DeflateQz,
        plain_len: u32::try_from(plain.len()).unwrap(),
        payload_len: u32::try_from(payload.len()).unwrap(),
        checksum: codec::checksum(plain),
    }
}

fn encode(plain: &[u8]) -> Vec<u8> {
    let mut encoder = Encoder::new(Settings::new(Codec::DeflateQz, Some(1)).unwrap()).unwrap();
    let mut payload = vec![0; plain.len()];
    let encoded = encoder.encode(plain, &mut payload);
    assert_eq!(encoded.codec, Codec::DeflateQz);
    payload.truncate(encoded.len);
    payload
}

#[test]
fn a_receiver_uses_the_device_again_after_a_reset() {
    let sim = Sim::turn();
    sim.script("instances 1; latency 30");
    let qat = sim.start().unwrap();
    let options = EngineOptions { direction: Direction::Decompress, ..EngineOptions::default() };
    let mut offload = Offload::new(Engine::new(Some(&qat), options), IN_FLIGHT, UNIT);
    let plain: Vec<u8> =
        sim::pieces(UNIT / 4096, 4096, true, 5).into_iter().flat_map(|piece| piece.plain).collect();
    let payload = encode(&plain);
    // As a codec thread does it: polling only while something is kept.
    let mut step = || {
        let job = Job { number: 0, input: payload.clone() };
        let taken = offload.decompress(job, UNIT).is_ok();
        while offload.in_flight() > 0 {
            offload.poll(true, &mut |_, done| match done {
                Done::Plain(bytes) => assert!(bytes == plain),
                other => panic!("{other:?}"),
            });
        }
        taken
    };
    assert!(step());
    sim.script("at 4 reset 50");
    let start = Instant::now();
    while step() {
        assert!(start.elapsed() < sim::HANG, "the reset did not act");
    }
    while !step() {
        std::thread::sleep(Duration::from_millis(1));
        assert!(start.elapsed() < sim::HANG, "never used again");
    }
}
