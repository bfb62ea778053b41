//! The chunks that the reader threads have to fill, and those that they fill now.

use delta::Layout;
use pages::Slot;
use session::SessionError;
use std::collections::VecDeque;
use std::sync::mpsc::Sender;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// A chunk to fill: its bytes, the lengths of these and of the table behind them, the table's
/// layout, and the place for the result.
pub(super) struct Request {
    pub(super) chunk: Slot,
    pub(super) len: usize,
    pub(super) table_len: usize,
    pub(super) layout: Layout,
    pub(super) answer: Sender<Result<Slot, SessionError>>,
}

#[derive(Default)]
struct State {
    /// Chunks that no reader has begun. The credits bound their number.
    waiting: VecDeque<Request>,
    /// The chunk that each reader reads pages for.
    read: Vec<Option<Request>>,
    /// The session has ended.
    is_over: bool,
}

/// The requests of one session. A read may never return, so no reader owns a chunk meanwhile: a
/// chunk keeps the buffers of its session.
#[derive(Default)]
pub(super) struct Requests {
    state: Mutex<State>,
    changed: Condvar,
}

impl Requests {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing in here panics while the lock is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a request for `readers` readers. The first call starts these by `start`, which gets
    /// their numbers. After the end the request is dropped, and its writer stops waiting.
    ///
    /// # Errors
    /// That of `start`. The next call tries again.
    pub(super) fn push<E>(
        &self,
        request: Request,
        readers: usize,
        start: impl Fn(usize) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut state = self.lock();
        if state.is_over {
            return Ok(());
        }
        while state.read.len() < readers {
            start(state.read.len())?;
            state.read.push(None);
        }
        state.waiting.push_back(request);
        self.changed.notify_one();
        Ok(())
    }

    /// Waits for a chunk that reader `number` reads pages for, and copies the chunk's table to
    /// `table`; returns the length of the chunk's bytes and the table's layout, `None` once the
    /// session has ended.
    pub(super) fn begin(&self, number: usize, table: &mut Vec<u8>) -> Option<(usize, Layout)> {
        let mut state = self.lock();
        while !state.is_over {
            if let Some(request) = state.waiting.pop_front() {
                let (len, table_len, layout) = (request.len, request.table_len, request.layout);
                table.clear();
                table.extend_from_slice(&request.chunk[len..len + table_len]);
                state.read[number] = Some(request);
                return Some((len, layout));
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        None
    }

    /// Takes the chunk of reader `number`; `None` once the session has ended.
    pub(super) fn end(&self, number: usize) -> Option<Request> {
        self.lock().read[number].take()
    }

    /// Ends the session: frees all chunks, whose writers stop waiting, and lets the readers end.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.is_over = true;
        let waiting = std::mem::take(&mut state.waiting);
        let read: Vec<_> = state.read.iter_mut().map(Option::take).collect();
        drop(state);
        self.changed.notify_all();
        drop((waiting, read));
    }
}
