//! A server's heap in the memory that all servers of the device use one after the other.

use crate::device::inherited::{descriptor, Inherited};
use crate::say::say;
use anyhow::Context;
use std::os::fd::OwnedFd;
use swap::heap::{self, Heap};

/// The supervisor's memory file, and addresses reserved for it in this process.
pub(super) struct ServersHeap(Option<(OwnedFd, Heap)>);

impl ServersHeap {
    /// Reserves addresses. Call it before memory is locked and before there are threads.
    ///
    /// A server that cannot use the file has a heap of its own, and prints a message.
    pub(super) fn reserve(inherited: &Inherited, bytes: usize) -> Self {
        let reserve = |number| {
            let file = descriptor(number)?;
            Ok::<_, anyhow::Error>((file, Heap::reserve(bytes)?))
        };
        Self(logged(inherited.heap.map(reserve)))
    }

    /// Maps the file, whose memory the present server uses.
    pub(super) fn map(&mut self) {
        let map = |(file, mut heap): (OwnedFd, Heap)| {
            heap.map(&file)?;
            Ok((file, heap))
        };
        self.0 = logged(self.0.take().map(map));
    }

    /// Whether the server has the supervisor's memory file.
    pub(super) fn is_there(&self) -> bool {
        self.0.is_some()
    }

    /// Discards the memory of the former server, if there was one, and adopts the file. Nothing has
    /// kept that memory present since the server ended.
    pub(super) fn adopt_anew(mut self) {
        if let Some((file, _)) = &self.0 {
            logged(Some(heap::discard(file).map_err(Into::into)));
        }
        self.map();
        self.adopt();
    }

    /// Adopts the mapped memory. Every former server has ended: the supervisor sends "go" only
    /// then, as only one server may have the store open, and a successor waits for it.
    pub(super) fn adopt(self) {
        let Some((_, heap)) = self.0 else { return };
        #[expect(unsafe_code, reason = "the condition is the supervisor's")]
        // SAFETY: see above. A server starts no process: the supervisor does.
        let adopted = unsafe { heap.adopt() };
        logged(Some(adopted.map_err(Into::into)));
    }
}

/// The value, or `None` after the reason was logged.
fn logged<T>(result: Option<anyhow::Result<T>>) -> Option<T> {
    let result = result?.context("the stand-by server needs as much memory as the server");
    result.map_err(|error| say(&format!("{error:#}"))).ok()
}
