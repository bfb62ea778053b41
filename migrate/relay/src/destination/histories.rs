//! The histories of a session (W29a): puts their parts into order ahead of decoding.
//!
//! ```text
//!  codec thread: begin(part) ─► its turn: decode, end ─► the next part, if it has arrived
//!                    └─ not yet: the part waits here, and the thread goes on with other work
//! ```
//!
//! No thread ever waits for a part. At most one thread decodes a history at a time, so several
//! histories are decoded at once.
//!
//! # What fails
//!
//! A part may name no history of the session, repeat a number, or fail to decode. Its chunk then
//! has the error, which ends the session. A history that has failed returns its error for every
//! other part, so no chunk waits for a part that never comes.
//!
//! # Limits
//!
//! Parts that wait hold their buffers, so the session's credit bounds their number. Each history
//! has a decoder with the agreed window once its first part has come.

use codec::{HistoryDecoder, PartHeader};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The histories of one session. `T` is the item that waits with a part.
pub(crate) struct Histories<T> {
    window_log: u8,
    all: Box<[Mutex<History<T>>]>,
}

struct History<T> {
    /// Number of the part that is decoded now, or next.
    next: u32,
    /// `None` before the first part, while a thread has it, and once the session has ended.
    decoder: Option<HistoryDecoder>,
    /// A thread decodes this history.
    taken: bool,
    /// Parts ahead of their turn, in no order: few, and searched once for each part.
    waiting: Vec<(PartHeader, T)>,
    /// Why no part can be decoded any more.
    failure: Option<String>,
}

/// A part to decode now.
pub(crate) struct Turn<T> {
    pub(super) item: T,
    /// The part begins a frame.
    pub(super) begins: bool,
    /// The history that this thread has taken; `None` for a part that is refused at once.
    history: Option<u16>,
    /// The decoder, or why there is none.
    pub(super) decoder: Result<HistoryDecoder, String>,
}

/// A turn without its item.
pub(crate) struct Taken {
    history: Option<u16>,
    pub(super) decoder: Result<HistoryDecoder, String>,
}

impl<T> Turn<T> {
    /// The item, whether its part begins a frame, and the rest for [`Histories::end`].
    pub(super) fn split(self) -> (T, bool, Taken) {
        let Self { item, begins, history, decoder } = self;
        (item, begins, Taken { history, decoder })
    }
}

impl<T> Histories<T> {
    /// Creates the histories agreed in the hello; none for `None`.
    pub(super) fn new(agreed: Option<session::Histories>) -> Self {
        let (count, window_log) = agreed.map_or((0, 0), |agreed| (agreed.count, agreed.window_log));
        let history =
            || History { next: 0, decoder: None, taken: false, waiting: Vec::new(), failure: None };
        Self { window_log, all: (0..count).map(|_| Mutex::new(history())).collect() }
    }

    fn lock(&self, history: u16) -> Option<MutexGuard<'_, History<T>>> {
        let history = self.all.get(usize::from(history))?;
        // Nothing in here panics while a lock is held.
        Some(history.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Takes the history of `part` if it is the part's turn, or if the part is refused. Otherwise
    /// the part waits, and this returns `None`: the thread that decodes the part before it gets it
    /// from [`end`](Self::end).
    pub(super) fn begin(&self, part: PartHeader, item: T) -> Option<Turn<T>> {
        let PartHeader { history, begins, number } = part;
        let refused =
            |item, reason| Some(Turn { item, begins, history: None, decoder: Err(reason) });
        let Some(mut state) = self.lock(history) else {
            let count = self.all.len();
            return refused(item, format!("part of history {history}, agreed were {count}"));
        };
        if let Some(reason) = &state.failure {
            let reason = reason.clone();
            return refused(item, reason);
        }
        let is_there = state.waiting.iter().any(|(waiting, _)| waiting.number == number);
        if number < state.next || is_there || (state.taken && number == state.next) {
            return refused(item, format!("part {number} of history {history} came twice"));
        }
        if number > state.next {
            state.waiting.push((part, item));
            return None;
        }
        state.taken = true;
        let decoder = match state.decoder.take() {
            Some(decoder) => Ok(decoder),
            None if !begins => Err(format!(
                "part {number} of history {history} refers to others, and is the first"
            )),
            None => HistoryDecoder::new(self.window_log).map_err(str::to_owned),
        };
        Some(Turn { item, begins, history: Some(history), decoder })
    }

    /// Records that the part of `taken` was decoded, or the reason why it was not. Returns the next
    /// part if it has arrived. The thread holds the history until this returns `None`.
    pub(super) fn end(&self, taken: Taken) -> Option<Turn<T>> {
        let Taken { history: Some(history), decoder } = taken else { return None };
        let mut state = self.lock(history)?;
        let decoder = match (&state.failure, decoder) {
            // The session has ended meanwhile.
            (Some(reason), Ok(_)) => Err(reason.clone()),
            (_, decoder) => decoder,
        };
        match decoder {
            Ok(decoder) => {
                // Saturates: a peer's last number must not overflow.
                state.next = state.next.saturating_add(1);
                let next = state.next;
                match state.waiting.iter().position(|(part, _)| part.number == next) {
                    Some(at) => {
                        let (part, item) = state.waiting.swap_remove(at);
                        let (begins, history) = (part.begins, Some(history));
                        Some(Turn { item, begins, history, decoder: Ok(decoder) })
                    }
                    None => {
                        state.decoder = Some(decoder);
                        state.taken = false;
                        None
                    }
                }
            }
            Err(reason) => {
                state.failure.get_or_insert_with(|| reason.clone());
                let (part, item) = state.waiting.pop()?;
                let (begins, history) = (part.begins, Some(history));
                Some(Turn { item, begins, history, decoder: Err(reason) })
            }
        }
    }

    /// Ends the session: frees the decoders and the waiting parts.
    pub(super) fn close(&self) {
        for history in &self.all {
            let mut state = history.lock().unwrap_or_else(PoisonError::into_inner);
            state.failure.get_or_insert_with(|| "the session has ended".into());
            state.decoder = None;
            let waiting = std::mem::take(&mut state.waiting);
            drop(state);
            drop(waiting);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use codec::HistoryEncoder;

    const AGREED: session::Histories = session::Histories { count: 2, window_log: 20 };

    /// Parts of one history, each with its chunk.
    fn parts(history: u16, count: u8) -> Vec<(PartHeader, Vec<u8>, Vec<u8>)> {
        let mut encoder = HistoryEncoder::new(history, 6, 20).unwrap();
        (0..count)
            .map(|number| {
                let chunk: Vec<u8> = (0..40_000_u32)
                    .map(|at| (at / 7 * u32::from(number + 1)).to_le_bytes()[0])
                    .collect();
                let mut out = vec![0; chunk.len()];
                let len = encoder.encode(&chunk, &mut out).unwrap();
                let header = PartHeader::from_bytes(&out).unwrap();
                (header, out[PartHeader::LEN..len].to_vec(), chunk)
            })
            .collect()
    }

    type Item = (Vec<u8>, Vec<u8>);

    /// Decodes the turn and those behind it; returns what became of each.
    fn run(histories: &Histories<Item>, turn: Option<Turn<Item>>) -> Vec<Result<(), String>> {
        let (mut turn, mut results) = (turn, Vec::new());
        while let Some(now) = turn {
            let ((bytes, chunk), begins, mut taken) = now.split();
            let mut out = vec![0; chunk.len()];
            let result = match &mut taken.decoder {
                Ok(decoder) => {
                    decoder.decode(begins, &bytes, &mut out).map_err(|error| error.to_string())
                }
                Err(reason) => Err(reason.clone()),
            };
            match &result {
                Ok(()) => assert!(out == chunk),
                Err(reason) => taken.decoder = Err(reason.clone()),
            }
            results.push(result);
            turn = histories.end(taken);
        }
        results
    }

    #[test]
    fn parts_in_any_order_are_decoded_once_in_theirs() {
        let mut state = 7_u64;
        for _ in 0..200 {
            let histories = Histories::new(Some(AGREED));
            let mut all = [parts(0, 9), parts(1, 9)].concat();
            let mut decoded = 0;
            while !all.is_empty() {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let at = usize::try_from(state >> 33).unwrap() % all.len();
                let (header, bytes, chunk) = all.swap_remove(at);
                let results = run(&histories, histories.begin(header, (bytes, chunk)));
                assert!(results.iter().all(Result::is_ok), "{results:?}");
                decoded += results.len();
            }
            assert_eq!(decoded, 18);
        }
    }

    #[test]
    fn a_part_that_arrives_while_another_thread_decodes_waits_for_it() {
        let histories = Histories::new(Some(AGREED));
        let mut parts = parts(0, 3).into_iter();
        let mut next = || {
            let (header, bytes, chunk) = parts.next().unwrap();
            histories.begin(header, (bytes, chunk))
        };
        let first = next();
        assert!(first.is_some());
        assert!(next().is_none() && next().is_none());
        assert_eq!(run(&histories, first), [Ok(()), Ok(()), Ok(())]);
    }

    #[test]
    fn a_part_of_no_history_or_that_came_before_is_refused_alone() {
        let histories = Histories::new(Some(AGREED));
        let parts = parts(1, 4);
        let begin = |at: usize| {
            let (header, bytes, chunk) = parts[at].clone();
            run(&histories, histories.begin(header, (bytes, chunk)))
        };
        let (header, bytes, chunk) = parts[0].clone();
        let stray = PartHeader { history: 2, ..header };
        let results = run(&histories, histories.begin(stray, (bytes.clone(), chunk.clone())));
        assert_eq!(results, [Err("part of history 2, agreed were 2".into())]);
        let none = Histories::new(None);
        let results = run(&none, none.begin(header, (bytes, chunk)));
        assert_eq!(results, [Err("part of history 1, agreed were 0".into())]);
        let (header, bytes, chunk) = parts[0].clone();
        let first = PartHeader { history: 0, begins: false, ..header };
        let results = run(&histories, histories.begin(first, (bytes, chunk)));
        let reason = "part 0 of history 0 refers to others, and is the first";
        assert_eq!(results, [Err(reason.into())]);
        assert_eq!(begin(0), [Ok(())]);
        assert_eq!(begin(0), [Err("part 0 of history 1 came twice".into())]);
        assert_eq!(begin(2), []);
        assert_eq!(begin(2), [Err("part 2 of history 1 came twice".into())]);
        assert_eq!(begin(1), [Ok(()), Ok(())]);
        assert_eq!(begin(3), [Ok(())]);
    }

    #[test]
    fn a_part_that_fails_fails_all_that_wait_and_all_that_come() {
        let histories = Histories::new(Some(AGREED));
        let mut parts = parts(0, 4);
        parts[1].1.truncate(5);
        let begin = |at: usize| {
            let (header, bytes, chunk) = parts[at].clone();
            run(&histories, histories.begin(header, (bytes, chunk)))
        };
        assert_eq!(begin(0), [Ok(())]);
        assert_eq!(begin(2), []);
        let results = begin(1);
        assert_eq!(results.len(), 2);
        assert!(results[0].as_ref().is_err_and(|reason| reason.contains("expected 40000")));
        assert_eq!(results[0], results[1]);
        assert_eq!(begin(3)[0], results[0]);
    }

    #[test]
    fn the_end_of_the_session_frees_what_waits() {
        let histories = Histories::new(Some(AGREED));
        let item = std::sync::Arc::new(());
        let part = |number| PartHeader { history: 0, begins: number == 0, number };
        let turn = histories.begin(part(0), item.clone());
        assert!(histories.begin(part(1), item.clone()).is_none());
        histories.close();
        // Those here and of the turn.
        assert_eq!(std::sync::Arc::strong_count(&item), 2);
        let (_, _, taken) = turn.unwrap().split();
        assert!(histories.end(taken).is_none());
        let late = histories.begin(part(2), item.clone()).unwrap();
        assert_eq!(late.decoder.err().unwrap(), "the session has ended");
        assert!(histories.all[0].lock().unwrap().decoder.is_none());
    }
}
