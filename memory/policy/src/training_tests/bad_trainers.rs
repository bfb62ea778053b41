//! Trainers that lie, die or hang.

use super::*;

/// Receives the samples, and sends `said` of this round with these bytes: length, gain and checksum
/// as given.
fn say(mut stream: UnixStream, said: impl FnOnce(u64) -> [u64; 5], bytes: &[u8]) -> io::Result<()> {
    let (question, _, samples) = channel::receive(&mut stream)?;
    assert_eq!(samples.len(), SAMPLES * PAGE);
    let head: [u8; ANSWER_LEN] = words(said(question.round));
    stream.write_all(&head)?;
    stream.write_all(bytes)
}

/// A dictionary for the pages of a kind.
fn dictionary(kind: u64) -> Vec<u8> {
    let samples: Vec<u8> = (0..500).flat_map(|number| record(kind, number)).collect();
    codec::train(&samples, PAGE, MAX_DICTIONARY).unwrap()
}

#[test]
fn trainers_with_invalid_answers_cost_their_round() {
    let page = |number| record(1, number);
    let mut made = made(page);
    let foreign = dictionary(77);
    let mut refused = 0;
    let mut lies = |made: &mut Made, said: fn(u64, u64) -> [u64; 5], bytes: Vec<u8>| {
        made.round(move |stream| {
            let sum = codec::checksum(&bytes);
            say(stream, |round| said(round, sum), &bytes)
        });
        refused += 1;
        let stats = made.counters.stats();
        assert_eq!((stats.dictionary_refused, stats.dictionary_late), (refused, 0), "{stats:?}");
    };
    // One that is no dictionary, with every sum right.
    lies(&mut made, |round, sum| [ANSWER, round, 5000, 9000, sum], vec![0x37; 5000]);
    // The right magic number, and nothing behind it.
    let mut bent = foreign[..4000].to_vec();
    bent[8..].fill(0xa5);
    lies(&mut made, |round, sum| [ANSWER, round, 4000, 9000, sum], bent);
    // A length that is beyond all there is; a gain that none can have; a sum that is another's.
    let some = foreign[..300].to_vec();
    lies(&mut made, |round, sum| [ANSWER, round, u64::MAX, 400, sum], some.clone());
    let most = |round, sum| [ANSWER, round, MAX_DICTIONARY as u64 + 1, 400, sum];
    lies(&mut made, most, some.clone());
    lies(&mut made, |round, sum| [ANSWER, round, 300, 10_001, sum], some.clone());
    lies(&mut made, |round, sum| [ANSWER, round, 299, 400, sum], some.clone());
    // Something else, and what belongs to another round.
    lies(&mut made, |round, sum| [ANSWER ^ 1, round, 300, 400, sum], some.clone());
    lies(&mut made, |round, sum| [ANSWER, round - 1, 300, 400, sum], some.clone());
    lies(&mut made, |round, sum| [ANSWER, round + 1, 300, 400, sum], some);
    // A head whose own sum is wrong.
    made.round(move |mut stream| {
        channel::receive(&mut stream)?;
        stream.write_all(&[0x5a; ANSWER_LEN])
    });
    assert_eq!(made.counters.stats().dictionary_refused, 10);
    // A dictionary of other pages, praised: it is tried here, and brings nothing.
    made.round(move |mut stream| {
        let (question, ..) = channel::receive(&mut stream)?;
        channel::answer(&mut stream, question.round, &foreign, 9999)
    });
    let stats = made.counters.stats();
    assert_eq!((stats.dictionary_no_gain, stats.dictionary_installed), (1, 0), "{stats:?}");
    assert_eq!(made.store.dictionaries(), 0);
    made.is_unharmed(page);
    // None of it has cost the room: an honest one is believed, when there is something new to train
    // on.
    for index in 0..PAGES {
        made.queue.write_now(index, &page(index)).unwrap();
    }
    made.round(honest);
    assert_eq!(made.counters.stats().dictionary_installed, 1);
    assert_eq!(made.device.dictionaries().rooms(), DICTIONARIES - 1);
    made.is_unharmed(page);
}

#[test]
fn trainers_that_die_cost_their_round_at_once() {
    let page = |number| record(1, number);
    let mut made = made(page);
    let good = dictionary(1);
    let half = good[..good.len() / 2].to_vec();
    // Never started; dead with some of the samples, with all of them, in the middle of the head of
    // its answer, and of the dictionary. No patience is needed for any.
    made.round(|_| Ok(()));
    made.round(|mut stream| stream.read_exact(&mut [0; 100_000]));
    made.round(|mut stream| channel::receive(&mut stream).map(drop));
    made.round(|mut stream| {
        channel::receive(&mut stream)?;
        stream.write_all(&ANSWER.to_le_bytes())
    });
    let sum = codec::checksum(&good);
    let len = good.len() as u64;
    made.round(move |stream| say(stream, |round| [ANSWER, round, len, 900, sum], &half));
    let stats = made.counters.stats();
    assert_eq!((stats.dictionary_late, made.ended(), made.store.dictionaries()), (5, 5, 0));
    assert_eq!(made.stopped.load(Ordering::Relaxed), 5);
    made.round(honest);
    assert_eq!(made.store.dictionaries(), 1);
    made.is_unharmed(page);
}

#[test]
fn trainers_that_hang_are_abandoned_and_their_late_answers_ignored() {
    let page = |number| record(1, number);
    let mut made = made(page);
    let good = dictionary(1);
    // It takes nothing: the server goes on with other things, and has given it what there is room
    // for.
    let mut stream = made.until_asked(1);
    for _ in 0..3000 {
        made.training.step(false);
    }
    assert_eq!(made.ended(), 0);
    made.training.lose_patience();
    made.until("one that takes nothing", |made| made.ended() == 1);
    let (mut taken, mut some) = (0, [0; 4096]);
    while let Ok(got @ 1..) = stream.read(&mut some) {
        taken += got;
    }
    assert!(
        taken > 4096 && taken < SAMPLES * PAGE / 4,
        "{taken} bytes wait for one who takes none"
    );
    // It receives everything and answers nothing; or half of an answer.
    for (nth, said) in [(2, 0), (3, 20), (4, ANSWER_LEN), (5, ANSWER_LEN + 200)] {
        let mut stream = made.until_asked(nth);
        let bytes = good.clone();
        let (hung, good) = (Arc::new(AtomicU32::new(0)), good.clone());
        let flag = Arc::clone(&hung);
        let child = thread::spawn(move || {
            let (question, ..) = channel::receive(&mut stream).unwrap();
            let mut all = Vec::new();
            channel::answer(&mut all, question.round, &bytes, 900).unwrap();
            stream.write_all(&all[..said]).unwrap();
            flag.store(1, Ordering::Release);
            (stream, question.round)
        });
        made.until("half of it", |_| hung.load(Ordering::Acquire) == 1);
        let (mut stream, round) = child.join().unwrap();
        for _ in 0..20 {
            made.training.step(false);
        }
        assert_eq!((made.ended(), made.store.dictionaries()), (u64::from(nth) - 1, 0));
        made.training.lose_patience();
        made.until("late", |made| made.ended() == u64::from(nth));
        // It was not dead: its answer is ignored.
        let answered = channel::answer(&mut stream, round, &good, 9000);
        assert_eq!(answered.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
    let stats = made.counters.stats();
    assert_eq!((stats.dictionary_late, stats.dictionary_refused), (5, 0), "{stats:?}");
    assert_eq!(made.stopped.load(Ordering::Relaxed), 5, "each may be ended");
    made.round(honest);
    assert_eq!(made.store.dictionaries(), 1);
    made.is_unharmed(page);
}
