//! Units through an engine without a device: order, reuse, refusals. With a device the same code
//! runs (`qat`'s tests have the device's faults).

use codec::{qz, Codec, Decoder, UnitHeader};
use corpus::Corpus;
use offload::{Carry, Done, Offload};
use qat::{Engine, EngineOptions};

const MAX: usize = 557_056;

struct Job {
    number: usize,
    own: Option<Vec<u8>>,
}

impl Carry for Job {
    fn input(&self) -> Option<&[u8]> {
        self.own.as_deref()
    }
}

fn offload(units: u16) -> Offload<Job> {
    Offload::new(
        Engine::new(None, EngineOptions { depth: 16, ..EngineOptions::default() }),
        units,
        MAX,
    )
}

/// Pieces of the corpus of awkward lengths, and one that does not compress.
fn inputs() -> Vec<Vec<u8>> {
    let corpus = Corpus::load();
    let pages = corpus.guest();
    let lengths = [MAX, 1, 65_535, 65_536, 65_537, 300_000, MAX, 4096];
    let mut inputs: Vec<Vec<u8>> = lengths
        .iter()
        .enumerate()
        .map(|(number, &len)| {
            pages.pages().iter().copied().cycle().skip(number * 70_001).take(len).collect()
        })
        .collect();
    let mut state = 1_u64;
    inputs.push(
        (0..MAX)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                state.to_be_bytes()[0]
            })
            .collect(),
    );
    inputs
}

fn decode(payload: &[u8], plain: &[u8]) -> Result<(), String> {
    let unit = UnitHeader {
        codec: Codec::DeflateQz,
        plain_len: u32::try_from(plain.len()).unwrap(),
        payload_len: u32::try_from(payload.len()).unwrap(),
        checksum: codec::checksum(plain),
    };
    let mut out = vec![0xa5; plain.len()];
    Decoder::new().decode(&unit, payload, &mut out).map_err(|error| error.to_string())?;
    assert_eq!(out, plain);
    Ok(())
}

#[test]
fn each_unit_is_returned_once_and_decodes_to_its_input() {
    let inputs = inputs();
    let mut offload = offload(3);
    let mut seen = vec![0; inputs.len() * 2];
    let mut payload = vec![0; MAX + MAX / 4];
    let mut next = 0;
    while next < seen.len() || offload.in_flight() > 0 {
        if next < seen.len() && offload.has_room() {
            let input = &inputs[next / 2];
            // In the caller's own memory, and in the buffer.
            if next % 2 == 0 {
                offload.compress(Job { number: next, own: Some(input.clone()) }, 0);
            } else {
                offload.buffer().expect("there is room")[..input.len()].copy_from_slice(input);
                offload.compress(Job { number: next, own: None }, input.len());
            }
            next += 1;
            assert_eq!(
                offload.in_flight(),
                1,
                "without a device units wait for those that have one"
            );
        }
        offload.poll(true, &mut |job, done| {
            let Done::Streams(streams) = done else { panic!("unit {} is not streams", job.number) };
            let input = &inputs[job.number / 2];
            let len = streams.write(&mut payload).expect("there is room for any unit");
            assert_eq!(len, streams.payload_len());
            if len < input.len() {
                decode(&payload[..len], input).unwrap();
            }
            assert_eq!(
                qz::members(&payload[..len], input.len()).unwrap().count(),
                input.len().div_ceil(65_536)
            );
            assert!(streams.write(&mut payload[..len - 1]).is_none());
            seen[job.number] += 1;
        });
    }
    assert!(seen.iter().all(|&times| times == 1), "{seen:?}");
}

/// The engine returns nothing of such a unit.
#[test]
fn a_unit_without_a_byte_is_returned_at_the_next_poll() {
    let mut offload = offload(2);
    for own in [Some(Vec::new()), None] {
        offload.compress(Job { number: 0, own }, 0);
        assert_eq!(offload.in_flight(), 1);
        let mut returned = 0;
        offload.poll(false, &mut |_, done| {
            let Done::Streams(streams) = done else { panic!("not streams") };
            assert_eq!((streams.payload_len(), streams.write(&mut [])), (0, Some(0)));
            returned += 1;
        });
        assert_eq!((returned, offload.in_flight()), (1, 0));
    }
    // The unit's place serves the next one.
    offload.compress(Job { number: 1, own: Some(vec![7; 100]) }, 0);
    let mut payload = vec![0; 1000];
    while offload.in_flight() > 0 {
        offload.poll(true, &mut |_, done| {
            let Done::Streams(streams) = done else { panic!("not streams") };
            let len = streams.write(&mut payload).unwrap();
            decode(&payload[..len], &[7; 100]).unwrap();
        });
    }
}

#[test]
fn without_a_device_the_caller_decompresses() {
    let mut offload = offload(1);
    let job = Job { number: 0, own: Some(vec![0; 100]) };
    assert!(offload.decompress(job, 4096).is_err());
    assert_eq!((offload.in_flight(), offload.has_room()), (0, true));
}
