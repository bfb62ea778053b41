//! Measures codecs on pages that were not read from a stream.

use crate::bench::{Bench, Chunk};
use codec::{Deflate, Settings};
use forecast::{Candidate, Sampled, Sizes};
use relay::take_differences;
use std::time::{Duration, Instant};
use stream::Token;

/// Bytes of a page.
const PAGE: usize = 4096;
/// Pages of a chunk: those of a relay's.
const CHUNK: usize = 128;
/// Bytes of a record: its head and a page.
const RECORD: usize = 8 + PAGE;
/// The flags of a record in a block that is known: PAGE and CONTINUE.
const FLAGS: u64 = 0x28;

/// A page.
#[derive(Clone, Copy, Debug)]
pub struct Page<'a> {
    /// The page's address, a multiple of 4096.
    pub address: u64,
    /// The page's 4096 bytes. Pages of other lengths are ignored.
    pub bytes: &'a [u8],
}

/// Measures sizes and costs of `pages` with each of `settings`, packed and encoded as one relay
/// does it, and decoded as the other one does. `again` are later versions of pages at the same
/// addresses: they are measured as differences, and whole with zstd 1. Pages of zeros are ignored.
/// The measurement ends after the chunk at which `time` is over; with `again` the first half is for
/// `pages`. `qpl` makes the streams of
/// [`Settings::qpl`].
///
/// # Errors
/// An encoder cannot be made, or its output decodes to other bytes.
pub fn measure_pages(
    pages: &[Page<'_>],
    again: &[Page<'_>],
    settings: &[Settings],
    qpl: Option<Box<dyn Deflate>>,
    time: Duration,
) -> Result<Sampled, String> {
    let mut bench = Bench::new(CHUNK * RECORD + delta::TABLE_ROOM)?;
    if let Some(qpl) = qpl {
        bench = bench.with_deflate(qpl);
    }
    let (first, mut again) = (chunks(pages), chunks(again));
    let until = ends(Instant::now(), time, !again.is_empty());
    let mut sums: Vec<Candidate> = settings.iter().map(|one| Candidate::new(*one)).collect();
    // The chunks come from all parts of the memory, however soon the time is over.
    for at in spread(first.len()) {
        let chunk = &first[at];
        for sum in &mut sums {
            add(&mut bench, sum, chunk.view(), chunk.pages())?;
        }
        if Instant::now() >= until[0] {
            break;
        }
    }
    let mut sampled = Sampled { first: Sizes(sums), ..Sampled::default() };
    if again.is_empty() {
        return Ok(sampled);
    }
    let cache = (pages.len() as u64 + 1).next_power_of_two() * PAGE as u64;
    let mut deltas = delta::Sender::new(cache, PAGE);
    for mut chunk in first {
        chunk.take_differences(&mut deltas);
    }
    let mut sums: Vec<Candidate> = settings.iter().map(|one| Candidate::new(*one)).collect();
    let mut whole = Candidate::new(Settings::default());
    for at in spread(again.len()) {
        let chunk = &mut again[at];
        add(&mut bench, &mut whole, chunk.view(), chunk.pages())?;
        chunk.take_differences(&mut deltas);
        for sum in &mut sums {
            add(&mut bench, sum, chunk.view(), chunk.pages())?;
        }
        if Instant::now() >= until[1] {
            break;
        }
    }
    (sampled.again, sampled.again_whole) = (Sizes(sums), Some(whole));
    Ok(sampled)
}

fn add(bench: &mut Bench, sum: &mut Candidate, chunk: Chunk<'_>, pages: u64) -> Result<(), String> {
    let wrong = |what: &str| format!("{:?}: {what}", sum.settings);
    let unit = bench.encode(sum.settings, chunk).ok_or_else(|| wrong("no encoder"))?;
    let decoded = bench.decode(unit, chunk).ok_or_else(|| wrong("decodes to other bytes"))?;
    sum.add(pages, unit.len, unit.cpu_ns);
    sum.decode_ns += decoded;
    Ok(())
}

/// Ends of the measurement of the pages, and of their later versions.
fn ends(begun: Instant, time: Duration, has_later: bool) -> [Instant; 2] {
    [begun + if has_later { time / 2 } else { time }, begun + time]
}

/// Chunks in an order in which neighbours are far apart.
fn spread(chunks: usize) -> impl Iterator<Item = usize> {
    const STEP: usize = 8;
    (0..STEP).flat_map(move |from| (from..chunks).step_by(STEP))
}

/// A chunk of records with room for the table of its differences.
struct Records {
    bytes: Vec<u8>,
    len: usize,
    tokens: Vec<Token>,
}

impl Records {
    fn view(&self) -> Chunk<'_> {
        Chunk { bytes: &self.bytes[..self.len], tokens: &self.tokens, page_size: PAGE }
    }

    /// Bytes of the chunk's pages.
    fn pages(&self) -> u64 {
        (self.len / RECORD * PAGE) as u64
    }

    fn take_differences(&mut self, deltas: &mut delta::Sender) {
        take_differences(deltas, &mut self.bytes, self.len, (&self.tokens, &[]), (PAGE, None));
    }

    fn push(&mut self, page: Page<'_>) {
        let head = page.address | FLAGS;
        self.bytes[self.len..self.len + 8].copy_from_slice(&head.to_be_bytes());
        self.bytes[self.len + 8..self.len + RECORD].copy_from_slice(page.bytes);
        self.len += RECORD;
        if let Some(Token::Pages { first, count }) = self.tokens.last_mut() {
            if first.wrapping_add(u64::from(*count) * PAGE as u64) == head {
                *count += 1;
                return;
            }
        }
        self.tokens.push(Token::Pages { first: head, count: 1 });
    }
}

fn chunks(pages: &[Page<'_>]) -> Vec<Records> {
    let is_data =
        |page: &&Page<'_>| page.bytes.len() == PAGE && page.bytes.iter().any(|byte| *byte != 0);
    let mut all: Vec<Records> = Vec::new();
    for page in pages.iter().filter(is_data) {
        if all.last().is_none_or(|chunk| chunk.len == CHUNK * RECORD) {
            let bytes = vec![0; CHUNK * RECORD + delta::TABLE_ROOM];
            all.push(Records { bytes, len: 0, tokens: Vec::new() });
        }
        if let Some(chunk) = all.last_mut() {
            chunk.push(*page);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use codec::Codec;

    /// 300 pages of words, 20 of zeros among them.
    fn memory() -> Vec<u8> {
        let mut bytes: Vec<u8> = (0..300 * PAGE)
            .map(|at| if at % 5 == 0 { (at / 7).to_le_bytes()[0] } else { b'x' })
            .collect();
        bytes[20 * PAGE..40 * PAGE].fill(0);
        bytes
    }

    fn pages(bytes: &[u8]) -> Vec<Page<'_>> {
        let of = |(nth, bytes)| Page { address: nth as u64 * 4096, bytes };
        bytes.chunks(PAGE).enumerate().map(of).collect()
    }

    #[test]
    fn pages_with_data_count_with_each_codec() {
        let memory = memory();
        let settings = [Settings::new(Codec::Raw, None).unwrap(), Settings::default()];
        let sampled =
            measure_pages(&pages(&memory), &[], &settings, None, Duration::from_secs(300)).unwrap();
        let [none, zstd] = sampled.first.0[..] else { panic!("{sampled:?}") };
        assert_eq!((none.pages, zstd.pages), (280 * 4096, 280 * 4096));
        assert!(none.size() > 0.95 && none.size() <= 1.01, "{none:?}");
        assert!(zstd.size() < 0.5 && zstd.cpu_ns > 0 && zstd.decode_ns > 0, "{zstd:?}");
        assert!(sampled.again.is_empty() && sampled.again_whole.is_none());
    }

    #[test]
    fn pages_sent_again_are_differences() {
        let memory = memory();
        let mut later = memory.clone();
        for page in later.chunks_mut(PAGE) {
            page[77] ^= 1;
        }
        let settings = [Settings::default()];
        let long = Duration::from_secs(300);
        let sampled =
            measure_pages(&pages(&memory), &pages(&later), &settings, None, long).unwrap();
        let (again, whole) = (sampled.again.0[0], sampled.again_whole.unwrap());
        assert!(again.size() < whole.size() / 4.0, "{again:?} {whole:?}");
    }

    #[test]
    fn no_pages_and_pieces_of_pages_are_no_error() {
        let odd = [Page { address: 0, bytes: &[1; 100] }];
        let sampled =
            measure_pages(&odd, &odd, &[Settings::default()], None, Duration::ZERO).unwrap();
        assert!(sampled.first.is_empty());
    }

    #[test]
    fn both_measurements_are_over_when_the_time_is() {
        let (begun, time) = (Instant::now(), Duration::from_secs(4));
        let of = |has_later| ends(begun, time, has_later).map(|end| (end - begun).as_secs());
        assert_eq!((of(true), of(false)), ([2, 4], [4, 4]));
    }

    #[test]
    fn chunks_are_spread_and_each_is_taken_once() {
        let mut order: Vec<usize> = spread(19).collect();
        assert_eq!(order[..5], [0, 8, 16, 1, 9]);
        order.sort_unstable();
        assert!(order.into_iter().eq(0..19));
    }
}
