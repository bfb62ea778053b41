//! What a worker does.

use crate::results::Results;
use std::fmt;
use std::sync::Arc;

/// A piece of work for one worker.
pub trait Job: Sized + Send + 'static {
    /// What it gives back.
    type Output: Send + 'static;
    /// What a worker owns and lends to each job in turn: codec contexts, scratch.
    type Context: Send + 'static;

    /// Does the work. It must not wait for another job of the same lanes, and must not panic.
    fn run(self, context: &mut Self::Context) -> Self::Output;

    /// Begins the work of a job whose context may hand it to a device. Gives the output where it is
    /// there at once, with the ticket; else the context keeps the ticket, and [`poll`](Self::poll)
    /// gives both back.
    ///
    /// Unless a type of job says otherwise, [`run`](Self::run) does the work here.
    fn start(
        self,
        context: &mut Self::Context,
        ticket: Ticket<Self::Output>,
    ) -> Option<(Ticket<Self::Output>, Self::Output)> {
        Some((ticket, self.run(context)))
    }

    /// Jobs that `context` keeps: their tickets have not come back.
    fn kept(_context: &Self::Context) -> usize {
        0
    }

    /// Whether `context` can be given another job. It may say no only while it keeps one.
    fn has_room(_context: &Self::Context) -> bool {
        true
    }

    /// Looks after the jobs that `context` keeps, and gives what is finished to `done`.
    ///
    /// With `idle` the worker has nothing else to do: this may then sleep, but not for longer than
    /// a new job may wait (some 50 us), since nobody wakes it.
    fn poll(
        _context: &mut Self::Context,
        _idle: bool,
        _done: &mut dyn FnMut(Ticket<Self::Output>, Self::Output),
    ) {
    }
}

/// Where the output of a job that a device has is to go.
pub struct Ticket<T>(pub(crate) Arc<Results<T>>);

impl<T> fmt::Debug for Ticket<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ticket")
    }
}
