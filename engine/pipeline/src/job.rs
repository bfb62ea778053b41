//! The trait of the work that a worker does.

use crate::results::Results;
use std::fmt;
use std::sync::Arc;

/// A piece of work for one worker.
pub trait Job: Sized + Send + 'static {
    /// The result of the work.
    type Output: Send + 'static;
    /// State that a worker owns and lends to each job in turn: codec contexts, scratch buffers.
    type Context: Send + 'static;

    /// Does the work. It must not wait for another job of the same worker threads, and must not
    /// panic.
    fn run(self, context: &mut Self::Context) -> Self::Output;

    /// Begins a job whose context may submit it to a device. If the output is ready at once,
    /// returns it with the ticket. Otherwise the context holds the ticket, and [`poll`](Self::poll)
    /// returns both later.
    ///
    /// The default calls [`run`](Self::run).
    fn start(
        self,
        context: &mut Self::Context,
        ticket: Ticket<Self::Output>,
    ) -> Option<(Ticket<Self::Output>, Self::Output)> {
        Some((ticket, self.run(context)))
    }

    /// Number of jobs in flight in `context`: their tickets have not been returned.
    fn in_flight(_context: &Self::Context) -> usize {
        0
    }

    /// Whether `context` can accept another job. It may return false only while a job is in flight.
    fn has_room(_context: &Self::Context) -> bool {
        true
    }

    /// Advances the jobs in flight in `context`, and passes finished ones to `done`.
    ///
    /// With `idle` the worker has nothing else to do. The call may then sleep, but not longer than
    /// a new job may wait (some 50 us): no notification ends this sleep.
    fn poll(
        _context: &mut Self::Context,
        _idle: bool,
        _done: &mut dyn FnMut(Ticket<Self::Output>, Self::Output),
    ) {
    }
}

/// The destination of the output of a job in flight on a device.
pub struct Ticket<T>(pub(crate) Arc<Results<T>>);

impl<T> fmt::Debug for Ticket<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ticket")
    }
}
