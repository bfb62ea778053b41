//! Clocks, medians, and the job that every scheme runs.

use std::time::{Duration, Instant};

use codec::{Encoder, Settings};
use pages::Slot;
use pipeline::Job;
use rustix::time::{clock_gettime, ClockId};

/// The figures of one run.
#[derive(Clone, Debug, Default)]
pub(super) struct Run {
    pub(super) wall: Duration,
    /// CPU time of the submitting thread.
    pub(super) submitter: Duration,
    /// CPU time of each worker.
    pub(super) workers: Vec<Duration>,
    /// Pages that found no thread free.
    pub(super) busy: u64,
    pub(super) pages: u64,
    /// Futex system calls, as counted by the pool.
    pub(super) futex_calls: u64,
    /// Jobs submitted to workers.
    pub(super) jobs: u64,
    /// Bytes sent over the link.
    pub(super) sent: u64,
}

impl Run {
    pub(super) fn cpu(&self) -> Duration {
        self.submitter + self.workers.iter().sum::<Duration>()
    }
}

/// CPU time of the calling thread so far.
pub(super) fn thread_cpu() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).expect("clocks are not negative")
}

/// Wall and CPU time of the calling thread since the creation of this.
pub(super) struct Watch {
    began: Instant,
    cpu: Duration,
}

impl Watch {
    pub(super) fn start() -> Self {
        Self { began: Instant::now(), cpu: thread_cpu() }
    }

    pub(super) fn stop(&self) -> (Duration, Duration) {
        (self.began.elapsed(), thread_cpu() - self.cpu)
    }
}

pub(super) fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The median: the middle value, or the mean of the two in the middle; 0 without values.
pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let upper = values.len() / 2;
    match values.len() {
        0 => 0.0,
        n if n % 2 == 1 => values[upper],
        _ => (values[upper - 1] + values[upper]) / 2.0,
    }
}

/// A batch to compress.
pub(super) struct Encode {
    pub(super) seq: u64,
    pub(super) plain: &'static [u8],
    pub(super) out: Slot,
}

/// The batch, compressed into the front of `out`.
pub(super) struct Encoded {
    pub(super) seq: u64,
    pub(super) plain: &'static [u8],
    pub(super) out: Slot,
    pub(super) unit: codec::Encoded,
}

impl Encoded {
    /// The bytes for the link: the payload, or the plain bytes if nothing was gained.
    pub(super) fn payload(&self) -> &[u8] {
        payload(self.unit, self.plain, &self.out)
    }
}

pub(super) fn payload<'a>(unit: codec::Encoded, plain: &'a [u8], out: &'a [u8]) -> &'a [u8] {
    match unit.codec {
        codec::Codec::Raw => plain,
        _ => &out[..unit.len],
    }
}

/// The context of a worker that compresses.
pub(super) struct Compressor {
    encoder: Encoder,
    /// QEMU compresses a copy, because the guest may write to the page meanwhile. Empty where the
    /// pages are private, as in a relay.
    copy: Vec<u8>,
}

impl Compressor {
    pub(super) fn new(settings: Settings) -> Self {
        let encoder = Encoder::new(settings).expect("contexts for these settings can be made");
        Self { encoder, copy: Vec::new() }
    }

    /// A compressor that first copies batches of up to `batch` bytes.
    pub(super) fn copying(settings: Settings, batch: usize) -> Self {
        Self { copy: vec![0; batch], ..Self::new(settings) }
    }

    pub(super) fn encode(&mut self, plain: &[u8], out: &mut [u8]) -> codec::Encoded {
        if self.copy.is_empty() {
            return self.encoder.encode(plain, out);
        }
        let copy = &mut self.copy[..plain.len()];
        copy.copy_from_slice(plain);
        self.encoder.encode(copy, out)
    }
}

impl Job for Encode {
    type Output = Encoded;
    type Context = Compressor;

    fn run(mut self, compressor: &mut Compressor) -> Encoded {
        let unit = compressor.encode(self.plain, &mut self.out);
        Encoded { seq: self.seq, plain: self.plain, out: self.out, unit }
    }
}
