//! Arbitrary answers, and arbitrary dictionaries.

use super::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Arbitrary bytes, in arbitrary pieces, are accepted only if they are an answer.
    #[test]
    fn answers_of_no_trainer_are_refused(
        pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..80), 0..8),
        head in prop::option::of((0_u64..4, 0_u64..200, 0_u64..11_000, any::<bool>())),
        cut in 0_usize..400, round in 0_u64..4, ends in any::<bool>(),
    ) {
        let mut channel = Channel::new();
        let mut theirs = UnixStream::from(channel.open(&Question { round, level: 1 }, b"").unwrap());
        let mut all: Vec<u8> = pieces.concat();
        let mut whole = None;
        if let Some((of, len, gain, right)) = head {
            // With its sum right, so that what follows is looked at.
            let body: Vec<u8> = (0..len).map(|byte| byte.to_le_bytes()[0]).collect();
            let sum = codec::checksum(&body) ^ u64::from(!right);
            let head: [u8; ANSWER_LEN] = words([ANSWER, of, len, gain, sum]);
            all.splice(..0, head.into_iter().chain(body));
            let sound = of == round && gain <= 10_000 && right;
            whole = sound.then_some((ANSWER_LEN + usize::try_from(len).unwrap(), len, gain));
        }
        all.truncate(cut);
        let mut out = [0; MAX_DICTIONARY];
        let mut heard = Ok(None);
        for piece in all.chunks(37) {
            theirs.write_all(piece).unwrap();
            heard = channel.receive(&mut out);
            if heard != Ok(None) {
                break;
            }
        }
        if heard == Ok(None) && ends {
            drop(theirs);
            heard = channel.receive(&mut out);
        }
        match (heard, whole) {
            (Ok(Some(answer)), Some((need, len, gain))) => {
                prop_assert!(all.len() >= need);
                prop_assert_eq!((answer.len as u64, answer.gain), (len, gain));
                prop_assert!(out.iter().zip(0..len).all(|(got, byte)| *got == byte.to_le_bytes()[0]));
            }
            (Ok(Some(_)), None) => prop_assert!(false, "the sum of nothing is not found by chance"),
            (Ok(None), Some((need, ..))) => prop_assert!(all.len() < need && !ends),
            (Ok(None), None) => prop_assert!(all.len() < ANSWER_LEN + 200 && !ends),
            (Err(Over::Gone), whole) => {
                prop_assert!(ends && whole.is_none_or(|(need, ..)| all.len() < need));
            }
            (Err(Over::Lied), whole) => prop_assert!(whole.is_none()),
        }
    }

    /// Bytes with the magic number of a dictionary are refused or used within bounds.
    #[test]
    fn untrained_dictionaries_are_refused_or_bounded(
        at in 8_usize..4000, bytes in prop::collection::vec(any::<u8>(), 1..64), keep in 256_usize..8000,
    ) {
        thread_local! {
            static GOOD: Vec<u8> = {
                let samples: Vec<u8> = (0..200).flat_map(|number| record(1, number)).collect();
                codec::train(&samples, PAGE, 8000).unwrap()
            };
        }
        let mut bent = GOOD.with(Clone::clone);
        bent.truncate(keep);
        let end = (at + bytes.len()).min(bent.len());
        if at < end {
            bent[at..end].copy_from_slice(&bytes[..end - at]);
        }
        let mut room = codec::Dictionary::room(Some(1));
        if room.digest(&bent).is_ok() {
            let room = Arc::new(room);
            let mut encoder = Encoder::with_dictionaries(codec::Settings::default(), PAGE).unwrap();
            let mut coded = vec![0; PAGE];
            let plain = record(1, 5);
            let (encoded, used) = encoder.encode_with(Some(&room), &plain, &mut coded);
            if used {
                let mut back = [0; PAGE];
                codec::Decoder::new().decode_with(&room, &coded[..encoded.len], &mut back).unwrap();
                prop_assert!(back == plain);
            }
        }
    }
}
