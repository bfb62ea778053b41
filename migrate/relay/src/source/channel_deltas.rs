//! The delta cache that the multifd channels of a VM share (W29c).

use delta::ChannelCache;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use stream::BlockTable;

use crate::threads::run_aside;

/// The cache, once the main stream has shown that there are channels.
pub(super) struct Open {
    cache: Arc<ChannelCache>,
    /// The channels that QEMU has opened.
    pub(super) channels: u32,
    pub(super) blocks: BlockTable,
}

/// The cache of the session's channels, if they have one.
#[derive(Default)]
pub(super) struct ChannelDeltas {
    /// Bytes granted to channels; 0 if the peer grants channels none.
    granted: u64,
    open: RwLock<Option<Arc<Open>>>,
    /// The channels that have begun.
    begun: AtomicU32,
}

impl ChannelDeltas {
    pub(super) fn new(granted: u64) -> Self {
        Self { granted, ..Self::default() }
    }

    /// Whether channels may have the cache.
    pub(super) fn is_granted(&self) -> bool {
        self.granted > 0
    }

    /// The cache, as long as the channels may use it. The lock costs one step for each chunk.
    pub(super) fn open(&self) -> Option<Arc<Open>> {
        self.open.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Counts a channel that begins. QEMU opens all of them before its first barrier: with one more
    /// than the receiver waits for, no table could rely on what the receiver has.
    pub(super) fn count_channel(&self) {
        let begun = self.begun.fetch_add(1, Ordering::AcqRel) + 1;
        if self.open().is_some_and(|open| begun > open.channels) {
            self.end();
        }
    }

    /// Makes the cache, for the channels that QEMU has opened: all of them have been accepted.
    pub(super) fn begin(&self, channels: u32, page_size: usize, blocks: BlockTable) {
        let cache = Arc::new(ChannelCache::new(self.granted, page_size));
        self.set(Some(Arc::new(Open { cache, channels, blocks })));
    }

    /// Frees the cache. No channel uses it any more.
    pub(super) fn end(&self) {
        if let Some(open) = self.set(None) {
            // A channel that gets no bytes holds it until its end.
            run_aside(move || open.cache.close());
        }
    }

    fn set(&self, open: Option<Arc<Open>>) -> Option<Arc<Open>> {
        let mut now = self.open.write().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *now, open)
    }
}

impl Open {
    pub(super) fn cache(&self) -> Arc<ChannelCache> {
        self.cache.clone()
    }
}
