//! One thread's compressor: a job, and the reaction to its failures.

use crate::counters::{count, Counters};
use crate::library::{Job, Status};
use codec::{Deflate, Deflated};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// After this many failures in a row the thread goes on without libqpl.
const FAILURES: u32 = 3;
/// How long a thread that waits for the device spins before it sleeps.
const SPIN: Duration = Duration::from_micros(50);
/// How long the thread then sleeps at a time.
const NAP: Duration = Duration::from_micros(20);

/// Options of the compressors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// The longest wait for a device. Default 100 ms.
    pub deadline: Duration,
    /// Inflate and compare the first stream of a compressor and every n-th after it: 1 for all, 0
    /// for none. Default 64.
    pub verify_every: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self { deadline: Duration::from_millis(100), verify_every: 64 }
    }
}

/// A compressor for one thread.
#[derive(Debug)]
pub struct Compressor {
    /// `None` once the thread goes on without libqpl.
    job: Option<Box<dyn Job>>,
    options: Options,
    counters: Arc<Counters>,
    in_a_row: u32,
    made: u32,
}

/// Why there is no stream.
enum Failure {
    /// The unit is not for libqpl.
    Refused(String),
    /// The job ended with an error, and may succeed with another unit.
    Once(String),
    /// The job must not be used again.
    ForGood(String),
    /// The job has not ended: its memory belongs to the device.
    Silent(String),
}

impl Compressor {
    pub(crate) fn new(job: Result<Box<dyn Job>, Status>, options: Options) -> Self {
        let counters = Arc::new(Counters::default());
        if let Err(status) = &job {
            counters.failed(format!("qpl_init_job: {status}"));
        }
        Self { job: job.ok(), options, counters, in_a_row: 0, made: 0 }
    }

    /// The counters.
    pub fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    fn make(&mut self, plain: &[u8], out: &mut [u8]) -> Result<Deflated, Failure> {
        let Some(job) = self.job.as_mut() else { return Ok(Deflated::Failed) };
        let input = job.input();
        let Some(place) = input.get_mut(..plain.len()) else {
            let (len, most) = (plain.len(), input.len());
            return Err(Failure::Refused(format!("a unit of {len} bytes, {most} at most")));
        };
        // A copy: a device that is given up may read and write its buffers later.
        place.copy_from_slice(plain);
        let status = run(job.as_mut(), (plain.len(), out.len()), self.options, &self.counters)?;
        match status {
            Status::OK => {}
            Status::MORE_OUTPUT_NEEDED | Status::DST_IS_SHORT | Status::OUTPUT_OVERFLOW => {
                return Ok(Deflated::TooLong);
            }
            status => return Err(Failure::Once(format!("the job ended with {status}"))),
        }
        let written = usize::try_from(job.written()).unwrap_or(usize::MAX);
        // No stream of deflate is empty, and no peer would take it.
        let made = job.output().get(..written).filter(|made| !made.is_empty());
        let (Some(made), Some(place)) = (made, out.get_mut(..written)) else {
            let room = out.len();
            let why = format!("it says that it wrote {written} bytes to a place of {room}");
            return Err(Failure::ForGood(why));
        };
        place.copy_from_slice(made);
        let every = self.options.verify_every;
        if every > 0 && self.made.is_multiple_of(every) {
            count(&self.counters.verified);
            if !inflates_to(plain, place) {
                let len = plain.len();
                let why = format!("a unit of {len} bytes inflates to other bytes");
                return Err(Failure::ForGood(why));
            }
        }
        self.made = self.made.wrapping_add(1);
        Ok(Deflated::Done(written))
    }
}

impl Deflate for Compressor {
    fn deflate(&mut self, plain: &[u8], out: &mut [u8]) -> Deflated {
        let failure = match self.make(plain, out) {
            Ok(Deflated::Failed) => {
                count(&self.counters.without);
                return Deflated::Failed;
            }
            Ok(made) => {
                self.in_a_row = 0;
                let is_done = matches!(made, Deflated::Done(_));
                count(if is_done { &self.counters.units } else { &self.counters.too_long });
                return made;
            }
            Err(failure) => failure,
        };
        self.in_a_row += 1;
        let why = match failure {
            Failure::Refused(why) => why,
            Failure::Once(why) => {
                if self.in_a_row >= FAILURES {
                    self.job = None;
                }
                why
            }
            Failure::ForGood(why) => {
                self.job = None;
                why
            }
            Failure::Silent(why) => {
                if let Some(job) = self.job.take() {
                    job.abandon();
                }
                why
            }
        };
        self.counters.failed(why);
        Deflated::Failed
    }
}

/// Runs a job to its end.
fn run(
    job: &mut dyn Job,
    (len, room): (usize, usize),
    options: Options,
    counters: &Counters,
) -> Result<Status, Failure> {
    let deadline = options.deadline;
    let ms = deadline.as_millis();
    let wait = |begun: Instant| {
        if begun.elapsed() < SPIN {
            std::hint::spin_loop();
        } else {
            std::thread::sleep(NAP);
        }
        begun.elapsed() < deadline
    };
    // The deadline may pass while this thread gets no CPU, so the last attempt follows it.
    let mut late = false;
    let begun = Instant::now();
    loop {
        match job.start(len, room) {
            Status::OK => break,
            Status::QUEUES_ARE_BUSY if !late => {
                late = !wait(begun);
                count(&counters.retries);
            }
            Status::QUEUES_ARE_BUSY => {
                return Err(Failure::Once(format!("every queue was full for {ms} ms")));
            }
            status => return Err(Failure::Once(format!("the job was refused: {status}"))),
        }
    }
    late = false;
    // The device has the job only now. It would have no time after a long wait for a queue.
    let begun = Instant::now();
    loop {
        match job.check() {
            Status::BEING_PROCESSED if !late => late = !wait(begun),
            Status::BEING_PROCESSED => {
                return Err(Failure::Silent(format!("no answer for {ms} ms")));
            }
            status => return Ok(status),
        }
    }
}

/// Whether `stream` is a raw DEFLATE stream of `plain`.
pub(crate) fn inflates_to(plain: &[u8], stream: &[u8]) -> bool {
    // This is rare, and allocates.
    let mut out = vec![0; plain.len()];
    let len = libdeflater::Decompressor::new().deflate_decompress(stream, &mut out);
    len == Ok(plain.len()) && out == plain
}
