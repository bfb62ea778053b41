//! Channels that share a cache: whatever they send, and in whatever order their chunks arrive, the
//! receiver restores it.

use delta::{ChannelCache, ChannelSender, Counts, Layout, Receiver, Table, TABLE_ROOM};
use proptest::prelude::*;
use std::collections::VecDeque;
use std::sync::Arc;

const PAGE: usize = 64;

/// The next step of a channel.
#[derive(Debug, Clone)]
enum Step {
    Sync,
    /// Bytes before the pages, the pages' numbers, and how many words of each have the version;
    /// whether new pages are stored; the room for the table.
    Chunk(usize, Vec<(Option<u64>, usize)>, bool, usize),
}

fn step() -> impl Strategy<Value = Step> {
    let number = prop_oneof![9 => (0_u64..60).prop_map(Some), 1 => Just(None)];
    // Runs of pages with consecutive numbers, too.
    let pages = prop_oneof![
        proptest::collection::vec((number, 0_usize..=PAGE / 8), 0..12),
        (0_u64..50, 1_usize..12, 0_usize..=PAGE / 8).prop_map(|(first, n, words)| {
            (first..).take(n).map(|number| (Some(number), words)).collect()
        }),
    ];
    let room = prop_oneof![4 => Just(TABLE_ROOM), 1 => 0_usize..60];
    prop_oneof![
        1 => Just(Step::Sync),
        3 => (0_usize..30, pages, proptest::bool::weighted(0.8), room)
            .prop_map(|(before, pages, new, room)| Step::Chunk(before, pages, new, room)),
    ]
}

/// A frame under way.
enum Frame {
    Sync,
    Chunk { epoch: u64, bytes: Vec<u8>, len: usize, plain: Vec<u8>, counts: Counts },
}

/// Sends the steps of channel `steps[i].0`. Returns each channel's frames, all with the same number
/// of SYNCs.
fn send(steps: &[(usize, Step)], channels: usize, slots: u64) -> Vec<VecDeque<Frame>> {
    let cache = Arc::new(ChannelCache::new(slots * PAGE as u64, PAGE));
    let mut sender = ChannelSender::new(u32::try_from(slots).unwrap(), PAGE);
    sender.set_cache(Some(cache));
    let mut frames: Vec<VecDeque<Frame>> = (0..channels).map(|_| VecDeque::new()).collect();
    let mut epochs = vec![0; channels];
    for (version, (channel, step)) in (0_u8..).zip(steps) {
        let Step::Chunk(before, pages, new, room) = step else {
            epochs[*channel] += 1;
            frames[*channel].push_back(Frame::Sync);
            continue;
        };
        let mut plain = vec![0xee; *before];
        for (number, words) in pages {
            let body = u8::try_from(number.unwrap_or(99)).unwrap();
            for word in 0..PAGE / 8 {
                plain.extend([if word < *words { version } else { body }; 8]);
            }
        }
        let mut bytes = plain.clone();
        bytes.resize(plain.len() + room, 0);
        let epoch = epochs[*channel];
        let mut pass = sender.begin((&mut bytes, plain.len()), None, (epoch, *new));
        let place = |number: &Option<u64>| number.map_or(u64::MAX, |n| n * PAGE as u64);
        let places: Vec<_> = pages.iter().map(|(number, _)| place(number)).collect();
        pass.bodies(*before, pages.len(), &places);
        let (len, counts) = pass.finish();
        frames[*channel].push_back(Frame::Chunk { epoch, bytes, len, plain, counts });
    }
    let most = epochs.iter().copied().max().unwrap_or(0);
    for (frames, epoch) in frames.iter_mut().zip(epochs) {
        frames.extend((epoch..most).map(|_| Frame::Sync));
    }
    frames
}

/// Receives all frames, from channel to channel as `order` says. Returns the differences.
fn receive(mut frames: Vec<VecDeque<Frame>>, slots: u64, order: &[usize]) -> u64 {
    let cache = Arc::new(ChannelCache::new(slots * PAGE as u64, PAGE));
    let mut syncs = vec![0_u64; frames.len()];
    let mut deltas = 0;
    let mut receivers: Vec<_> =
        frames.iter().map(|_| Receiver::of_channel(cache.clone())).collect();
    let mut order = order.iter().cycle();
    while frames.iter().any(|frames| !frames.is_empty()) {
        let everywhere = *syncs.iter().min().unwrap();
        let may = |frame: &Frame| match frame {
            Frame::Sync => true,
            Frame::Chunk { epoch, .. } => *epoch <= everywhere,
        };
        let able: Vec<_> =
            (0..frames.len()).filter(|i| frames[*i].front().is_some_and(may)).collect();
        assert!(!able.is_empty(), "every channel waits for another one");
        let channel = able[order.next().unwrap() % able.len()];
        match frames[channel].pop_front().unwrap() {
            Frame::Sync => syncs[channel] += 1,
            Frame::Chunk { mut bytes, len, plain, counts, .. } => {
                let (travelling, table) = bytes.split_at_mut(plain.len());
                let table = Table { bytes: &table[..len], layout: Layout::Bodies };
                assert_eq!(receivers[channel].apply(travelling, table, 0), Ok(counts));
                assert!(travelling == &plain[..]);
                deltas += counts.deltas;
            }
        }
    }
    deltas
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn chunks_of_all_channels_are_restored_in_any_order(
        steps in proptest::collection::vec((0_usize..3, step()), 1..40),
        order in proptest::collection::vec(0_usize..60, 1..80),
        slots in 0_u64..70,
    ) {
        receive(send(&steps, 3, slots), slots, &order);
    }
}

fn chunk(numbers: std::ops::Range<u64>, words: usize) -> Step {
    Step::Chunk(0, numbers.map(|number| (Some(number), words)).collect(), true, TABLE_ROOM)
}

#[test]
fn a_page_that_another_channel_sent_before_the_last_sync_is_a_difference() {
    let steps = [
        (0, chunk(0..10, 0)),
        (1, chunk(10..20, 0)),
        // Not yet: channel 0 could be behind.
        (1, chunk(0..10, 1)),
        (0, Step::Sync),
        (1, Step::Sync),
        (0, chunk(10..20, 1)),
        (1, chunk(0..10, 1)),
    ];
    assert_eq!(receive(send(&steps, 2, 64), 64, &[0, 1, 1]), 20);
    // Consecutive pages are one run: a gap, a number, a step, and bits for 10 pages.
    let frames = send(&steps, 2, 64);
    let Some(Frame::Chunk { len, .. }) = frames[0].back() else { panic!("no chunk") };
    assert_eq!(*len, 5);
}

#[test]
fn a_page_that_was_not_stored_when_it_was_new_is_stored_when_it_is_sent_again() {
    let new = |words| {
        let Step::Chunk(before, pages, _, room) = chunk(0..10, words) else { panic!("a SYNC") };
        Step::Chunk(before, pages, false, room)
    };
    let stored = |frame: &Frame| match frame {
        Frame::Chunk { counts, .. } => Some((counts.stored, counts.deltas)),
        Frame::Sync => None,
    };
    let steps =
        [(0, new(0)), (0, Step::Sync), (0, new(1)), (0, Step::Sync), (0, new(2)), (0, Step::Sync)];
    let frames = send(&steps, 1, 64);
    let counts: Vec<_> = frames[0].iter().filter_map(stored).collect();
    assert_eq!(counts, [(0, 0), (10, 0), (10, 10)]);
    // New pages behind one that is known.
    let steps = [(0, chunk(0..1, 0)), (0, Step::Sync), (0, new(1))];
    let frames = send(&steps, 1, 64);
    let counts: Vec<_> = frames[0].iter().filter_map(stored).collect();
    assert_eq!(counts, [(1, 0), (1, 1)]);
}
