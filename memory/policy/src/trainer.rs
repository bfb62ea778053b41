//! The process that trains: a dictionary from two thirds of the samples, judged by the rest.
//!
//! It may take tens of MiB, wait for memory, be killed, or hang: nobody waits for it.

use std::io::{self, Read, Write};
use std::sync::Arc;
use std::time::Duration;

use codec::{Codec, Dictionary, Encoder};
use device::PAGE;
use store::{stored_len, MAX_DICTIONARY};

use crate::channel::{self, Question};

/// A dictionary has to save so much of the memory for what was held out, of 10000.
pub(crate) const WORTH: u64 = 300;

/// Fewer pages held out say nothing.
pub(crate) const FEWEST: usize = 128;

/// A page whose compressed form is longer is stored as it is (`device`).
const LONGEST: usize = PAGE - PAGE / 32;

/// Whether a sample is held out from training.
pub(crate) fn is_held_out(number: usize) -> bool {
    number % 3 == 2
}

/// Bytes of memory for a page that compresses to so many.
pub(crate) fn cost(codec: Codec, len: usize) -> u64 {
    let len = if codec == Codec::Raw || len > LONGEST { PAGE } else { len };
    stored_len(len) as u64
}

/// By how much `after` is below `before`, of 10000; 0 if it is not.
pub(crate) fn gain(before: u64, after: u64) -> u64 {
    before.saturating_sub(after).saturating_mul(10_000) / before.max(1)
}

/// Whether memory that was saved is worth the CPU that it costs to write with a dictionary: for
/// each per cent of the one four of the other, at most. What a client waits for does not double for
/// a few pages.
pub(crate) fn pays(gain: u64, before: Duration, after: Duration) -> bool {
    let most = before.as_nanos().saturating_mul(10_000 + 4 * u128::from(gain)) / 10_000;
    gain >= WORTH && after.as_nanos() <= most
}

/// Answers the question that comes through `stream`, once; to be called in a process of its own, at
/// low priority, which somebody kills when it takes long. It ends as soon as the server does, or
/// gives the round up, unless it is training just then.
///
/// # Errors
///
/// No question, a server that does not go on with it.
pub fn train(stream: &mut (impl Read + Write)) -> io::Result<()> {
    let (question, current, samples) = channel::hear(stream)?;
    let found = best(&samples, &current, &question).filter(|(_, gain)| *gain >= WORTH);
    let (dictionary, gain) = found.unwrap_or_default();
    channel::answer(stream, question.round, &dictionary, gain)
}

/// A dictionary, and what it brings.
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
    let mut encoder = Encoder::with_dictionaries(settings).ok()?;
    let mut out = vec![0; Encoder::roomy(PAGE)];
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
    // A dictionary that there is already is what a new one has to be better than.
    let without = sum(None).min(digest(current).map_or(u64::MAX, |current| sum(Some(&current))));
    Some((dictionary, gain(without, with)))
}
