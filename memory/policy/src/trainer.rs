//! The trainer process: makes a dictionary from two thirds of the samples, and judges it by the
//! others.
//!
//! The trainer may take tens of MiB, wait for memory, be killed, or hang. The server does not wait
//! for it.

use std::io::{self, Read, Write};
use std::sync::Arc;
use std::time::Duration;

use codec::{Codec, Dictionary, Encoder};
use device::PAGE;
use store::{stored_len, MAX_DICTIONARY};

use crate::channel::{self, Question};

/// The least gain of a dictionary on the held-out samples, of 10000.
pub(crate) const WORTH: u64 = 300;

/// The least number of held-out pages for a judgement.
pub(crate) const FEWEST: usize = 128;

/// A page whose compressed form is longer is stored uncompressed (`device`).
const LONGEST: usize = PAGE - PAGE / 32;

/// Whether a sample is held out from training.
pub(crate) fn is_held_out(number: usize) -> bool {
    number % 3 == 2
}

/// Bytes of memory of a page that compresses to `len` bytes.
pub(crate) fn cost(codec: Codec, len: usize) -> u64 {
    let len = if codec == Codec::Raw || len > LONGEST { PAGE } else { len };
    stored_len(len) as u64
}

/// How much smaller `after` is than `before`, of 10000; 0 if it is not smaller.
pub(crate) fn gain(before: u64, after: u64) -> u64 {
    before.saturating_sub(after).saturating_mul(10_000) / before.max(1)
}

/// Whether the memory saved justifies the CPU time of writing with a dictionary: at most four per
/// cent more CPU time for each per cent of memory. A few pages less must not double a client's
/// latency.
pub(crate) fn pays(gain: u64, before: Duration, after: Duration) -> bool {
    let most = before.as_nanos().saturating_mul(10_000 + 4 * u128::from(gain)) / 10_000;
    gain >= WORTH && after.as_nanos() <= most
}

/// Answers the one question that comes through `stream`. Call it in a process of its own, at low
/// priority and with a time limit. The call ends when the server ends or gives up the round, but
/// not in the middle of training.
///
/// # Errors
///
/// The question is invalid, or the server has closed its end of the stream.
pub fn train(stream: &mut (impl Read + Write)) -> io::Result<()> {
    let (question, current, samples) = channel::receive(stream)?;
    let found = best(&samples, &current, &question).filter(|(_, gain)| *gain >= WORTH);
    let (dictionary, gain) = found.unwrap_or_default();
    channel::answer(stream, question.round, &dictionary, gain)
}

/// The best dictionary, and its gain.
fn best(samples: &[u8], current: &[u8], question: &Question) -> Option<(Vec<u8>, u64)> {
    let pages = || samples.chunks_exact(PAGE).enumerate();
    let training: Vec<u8> = pages()
        .filter(|(number, _)| !is_held_out(*number))
        .flat_map(|(_, page)| page.iter().copied())
        .collect();
    let held_out: Vec<&[u8]> =
        pages().filter(|(number, _)| is_held_out(*number)).map(|(_, page)| page).collect();
    if held_out.len() < FEWEST {
        return None;
    }
    let settings = codec::Settings::new(Codec::Zstd, Some(question.level)).ok()?;
    let mut encoder = Encoder::with_dictionaries(settings, PAGE).ok()?;
    let mut out = vec![0; PAGE];
    let mut sum = |dictionary: Option<&Arc<Dictionary>>| -> u64 {
        let page = |page: &&[u8]| {
            let (encoded, _) = encoder.encode_with(dictionary, page, &mut out);
            cost(encoded.codec, encoded.len)
        };
        held_out.iter().map(page).sum()
    };
    let digest = |bytes: &[u8]| {
        let mut room = Dictionary::room(Some(question.level));
        room.digest(bytes).ok().map(|()| Arc::new(room))
    };
    let dictionary = codec::train(&training, PAGE, MAX_DICTIONARY)?;
    let with = sum(Some(&digest(&dictionary)?));
    // A new dictionary has to be better than the current one.
    let without = sum(None).min(digest(current).map_or(u64::MAX, |current| sum(Some(&current))));
    Some((dictionary, gain(without, with)))
}
