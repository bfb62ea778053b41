//! Jobs on all threads, with their outputs in the order of the jobs.

use std::io;
use std::sync::Arc;

use pipeline::{Job, Pool, PoolConfig, Popped, Reorder, Results};

/// A job with its number in the stream.
struct Numbered<J> {
    seq: u64,
    job: J,
}

impl<J: Job> Job for Numbered<J> {
    type Output = (u64, J::Output);
    type Context = J::Context;

    fn run(self, context: &mut J::Context) -> Self::Output {
        (self.seq, self.job.run(context))
    }
}

/// Runs jobs, and returns their outputs in order. A bounded number is in flight.
pub(crate) struct Ordered<J: Job> {
    workers: Arc<Pool<Numbered<J>>>,
    results: Arc<Results<(u64, J::Output)>>,
    order: Reorder<(u64, J::Output)>,
    next: u64,
    returned: u64,
    most: u64,
}

impl<J: Job> Ordered<J> {
    pub(crate) fn new(
        name: &'static str,
        threads: usize,
        context: impl FnMut(usize) -> J::Context,
    ) -> io::Result<Self> {
        // A unit takes milliseconds, so one waiting job is enough.
        let config = PoolConfig { threads, ring_capacity: 2, name };
        let workers = Pool::new(config, context)?;
        let most = 3 * threads;
        Ok(Self {
            workers,
            results: Results::new(most),
            order: Reorder::new(most),
            next: 0,
            returned: 0,
            most: most as u64,
        })
    }

    /// Whether an output has to be taken before the next job can start.
    pub(crate) fn is_full(&self) -> bool {
        self.next - self.returned == self.most
    }

    /// Starts a job.
    pub(crate) fn push(&mut self, job: J) {
        debug_assert!(!self.is_full());
        let numbered = Numbered { seq: self.next, job };
        let accepted = self.workers.submit_wait(numbered, &self.results);
        assert!(accepted.is_ok(), "the threads end when this is dropped");
        self.next += 1;
    }

    /// The output of the oldest job; waits for it if `wait`. `None` if there is none.
    pub(crate) fn pop(&mut self, wait: bool) -> Option<J::Output> {
        while self.returned < self.next {
            if let Some((_, output)) = self.order.pop() {
                self.returned += 1;
                return Some(output);
            }
            let result = match wait {
                false => self.results.pop()?,
                true => match self.results.pop_until(None) {
                    Popped::Item(result) => result,
                    Popped::Timeout | Popped::Closed => return None,
                },
            };
            let seq = result.0;
            self.order.insert(seq, result).expect("numbered here, in a window for all");
        }
        None
    }
}

impl<J: Job> Drop for Ordered<J> {
    fn drop(&mut self) {
        self.results.close();
        self.workers.close();
        self.workers.join();
    }
}
