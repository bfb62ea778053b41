//! Encodes chunks with every candidate, on a thread of its own.

use crate::bench::{thread_cpu_ns, Bench, Chunk};
use crate::sums::{controller_candidates, SampleSums};
use codec::Settings;
use forecast::{Candidate, Sampled};
use std::sync::mpsc::{sync_channel, Receiver, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use stream::Token;

/// The most samples that wait, of a chunk or two each: pages sent again come in bursts.
const WAITING: usize = 8;

/// A chunk as a relay would send it.
pub(crate) struct Sample {
    pub(crate) chunk: Vec<u8>,
    pub(crate) tokens: Vec<Token>,
    pub(crate) page_size: usize,
    /// For pages that were sent before: the chunk without differences.
    pub(crate) whole: Option<Vec<u8>>,
}

/// The handle of the thread.
pub(crate) struct Sampler {
    sender: SyncSender<Sample>,
    sums: Arc<Mutex<Sums>>,
}

/// The sums of all samples.
#[derive(Debug, Default)]
struct Sums {
    first: SampleSums,
    again: SampleSums,
    again_whole: Option<Candidate>,
}

impl Sampler {
    pub(crate) fn start(largest: usize) -> Result<Self, String> {
        let (sender, samples) = sync_channel(WAITING);
        let sums = Arc::new(Mutex::new(Sums::default()));
        let mut measurer = Measurer { bench: Bench::new(largest)?, nth: 0 };
        let filled = sums.clone();
        let body = move || measurer.run(&samples, &filled);
        let thread = std::thread::Builder::new().name("sampler".into()).spawn(body);
        thread.map_err(|error| format!("cannot start a thread: {error}"))?;
        Ok(Self { sender, sums })
    }

    /// Passes the thread a sample, unless the queue is full.
    pub(crate) fn take(&self, sample: Sample) {
        let _ = self.sender.try_send(sample);
    }

    pub(crate) fn results(&self) -> Sampled {
        let sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        Sampled {
            first: sums.first.sizes(),
            again: sums.again.sizes(),
            again_whole: sums.again_whole,
        }
    }
}

/// The thread's part.
struct Measurer {
    bench: Bench,
    /// The number of the sample.
    nth: usize,
}

impl Measurer {
    fn run(&mut self, samples: &Receiver<Sample>, sums: &Mutex<Sums>) {
        while let Ok(sample) = samples.recv() {
            let begun = thread_cpu_ns();
            self.measure(&sample, sums);
            // The thread uses half of a core at most: the guest's own work decides which pages it
            // dirties.
            let spent = Duration::from_nanos(thread_cpu_ns().saturating_sub(begun));
            std::thread::sleep(spent.min(Duration::from_secs(1)));
        }
    }

    /// Encodes the sample with zstd 1, and with the candidate whose turn it is: sizes differ more
    /// from chunk to chunk than the relation between candidates does, so more chunks tell more.
    fn measure(&mut self, sample: &Sample, sums: &Mutex<Sums>) {
        let pages = data_bytes(sample);
        if pages == 0 {
            return;
        }
        let zstd_1 = Settings::default();
        let candidates = controller_candidates();
        let other = candidates[self.nth % candidates.len()];
        self.nth += 1;
        let Some(level) = self.encode(zstd_1, &sample.chunk, sample) else { return };
        let other = self.encode(other, &sample.chunk, sample).map(|it| (other, it));
        let whole = sample.whole.as_deref().and_then(|whole| self.encode(zstd_1, whole, sample));
        let mut sums = sums.lock().unwrap_or_else(PoisonError::into_inner);
        let kind = if sample.whole.is_some() { &mut sums.again } else { &mut sums.first };
        kind.add(pages, level, other);
        if let Some((encoded, cpu)) = whole {
            let sum = sums.again_whole.get_or_insert_with(|| Candidate::new(zstd_1));
            sum.add(pages, encoded, cpu);
        }
    }

    fn encode(&mut self, settings: Settings, chunk: &[u8], sample: &Sample) -> Option<(u64, u64)> {
        let chunk = Chunk { bytes: chunk, tokens: &sample.tokens, page_size: sample.page_size };
        self.bench.encode(settings, chunk).map(|unit| (unit.len, unit.cpu_ns))
    }
}

/// Bytes of the pages in a sample that are not all zeros.
fn data_bytes(sample: &Sample) -> u64 {
    let pages = sample.tokens.iter().map(|token| match token {
        Token::Pages { count, .. } | Token::Bodies { count } => u64::from(*count),
        _ => 0,
    });
    pages.sum::<u64>() * sample.page_size as u64
}
