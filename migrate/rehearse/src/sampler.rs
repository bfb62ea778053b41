//! Encodes chunks with every candidate, on a thread of its own.

use crate::sizes::{controller_candidates, Candidate, SampleSums, Sizes};
use codec::{Codec, Encoder};
use rustix::time::{clock_gettime, ClockId};
use std::sync::mpsc::{sync_channel, Receiver, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use stream::Token;

/// Samples that wait, of a chunk or two each: pages sent again come in bursts.
const WAITING: usize = 8;

/// A chunk as a relay would send it.
pub(crate) struct Sample {
    pub(crate) chunk: Vec<u8>,
    pub(crate) tokens: Vec<Token>,
    pub(crate) page_size: usize,
    /// Of pages that were sent before: the chunk without differences.
    pub(crate) whole: Option<Vec<u8>>,
}

/// The results of all samples.
#[derive(Clone, Debug, Default)]
pub struct Sampled {
    /// Pages that QEMU sends for the first time.
    pub first: Sizes,
    /// Pages that QEMU sends again, with differences.
    pub again: Sizes,
    /// The same pages without differences; zstd 1 only.
    pub again_whole: Option<Candidate>,
}

impl Sampled {
    /// The sizes of pages sent again. A candidate without samples of its own, of which there may be
    /// few, has the size and cost that it has in the first pass.
    pub fn again(&self) -> Sizes {
        let missing = self
            .first
            .0
            .iter()
            .filter(|one| self.again.0.iter().all(|known| known.settings != one.settings));
        Sizes(self.again.0.iter().chain(missing).copied().collect())
    }

    /// zstd 1 on pages sent again, whole.
    pub fn again_zstd_1(&self) -> Option<&Candidate> {
        self.again_whole.as_ref().or_else(|| self.first.zstd_1())
    }
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
        let mut bench = Bench::new(largest)?;
        let filled = sums.clone();
        let body = move || bench.run(&samples, &filled);
        let thread = std::thread::Builder::new().name("sampler".into()).spawn(body);
        thread.map_err(|error| format!("cannot start a thread: {error}"))?;
        Ok(Self { sender, sums })
    }

    /// Gives the thread a sample, unless as many wait as may.
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

/// Encoder and buffers.
struct Bench {
    encoder: Encoder,
    packed: Vec<u8>,
    payload: Vec<u8>,
    /// The number of the sample.
    nth: usize,
}

impl Bench {
    fn new(largest: usize) -> Result<Self, String> {
        let encoder =
            Encoder::new(codec::Settings::default()).map_err(|error| error.to_string())?;
        let payload = vec![0; Encoder::roomy(largest)];
        Ok(Self { encoder, packed: vec![0; largest], payload, nth: 0 })
    }

    fn run(&mut self, samples: &Receiver<Sample>, sums: &Mutex<Sums>) {
        while let Ok(sample) = samples.recv() {
            let begun = thread_cpu_ns();
            self.measure(&sample, sums);
            // Half of a core at most: the guest's own work decides what it dirties.
            let spent = Duration::from_nanos(thread_cpu_ns().saturating_sub(begun));
            std::thread::sleep(spent.min(Duration::from_secs(1)));
        }
    }

    /// Encodes the sample with zstd 1, and with the candidate whose turn it is: sizes differ more from
    /// chunk to chunk than the relation between candidates does, so more chunks tell more.
    fn measure(&mut self, sample: &Sample, sums: &Mutex<Sums>) {
        let pages = data_bytes(sample);
        if pages == 0 {
            return;
        }
        let zstd_1 = codec::Settings::default();
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

    /// Bytes and CPU ns of `chunk` packed and encoded, as a relay's codec thread does it.
    fn encode(
        &mut self,
        settings: codec::Settings,
        chunk: &[u8],
        sample: &Sample,
    ) -> Option<(u64, u64)> {
        self.encoder.set(settings).ok()?;
        let begun = thread_cpu_ns();
        let packed = stream::pack(chunk, &sample.tokens, sample.page_size, &mut self.packed);
        let plain = packed.map_or(chunk, |len| &self.packed[..len]);
        let encoded = self.encoder.encode(plain, &mut self.payload);
        let len = if encoded.codec == Codec::Raw { plain.len() } else { encoded.len };
        Some((len as u64, thread_cpu_ns().saturating_sub(begun)))
    }
}

fn thread_cpu_ns() -> u64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    u64::try_from(now.tv_sec * 1_000_000_000 + now.tv_nsec).unwrap_or(0)
}

/// Bytes of the pages in a sample that are not all zeros.
fn data_bytes(sample: &Sample) -> u64 {
    let pages = sample.tokens.iter().map(|token| match token {
        Token::Pages { count, .. } | Token::Bodies { count } => u64::from(*count),
        _ => 0,
    });
    pages.sum::<u64>() * sample.page_size as u64
}
