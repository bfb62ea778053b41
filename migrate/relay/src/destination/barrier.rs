//! W18: the destination's main channel gets its k-th barrier marker only after every multifd
//! channel was handed its k-th SYNC. Otherwise the destination QEMU sits in its barrier with its
//! monitor dead, for ever if a channel is lost.

use ring::EventCount;
use std::sync::{Mutex, PoisonError};

/// SYNCs handed over per multifd channel.
#[derive(Default)]
pub(crate) struct Barriers {
    /// (stream, SYNC packets written to QEMU); `u64::MAX` once a channel is opaque and can no
    /// longer be counted.
    channels: Mutex<Vec<(u16, u64)>>,
    moved: EventCount,
}

impl Barriers {
    /// A channel was handed `syncs` SYNC packets so far.
    pub(crate) fn handed(&self, stream: u16, syncs: u64) {
        let mut channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        match channels.iter_mut().find(|(id, _)| *id == stream) {
            Some(channel) => channel.1 = syncs,
            None => channels.push((stream, syncs)),
        }
        drop(channels);
        self.moved.notify_all();
    }

    /// Waits until `count` channels were handed SYNC number `marker`. False when `stop` says so.
    pub(crate) fn wait(&self, count: u32, marker: u64, stop: impl Fn() -> bool) -> bool {
        if count == 0 {
            return true;
        }
        let passed = self.moved.wait_until(None, || {
            if stop() {
                return Some(false);
            }
            let channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
            let there = channels.iter().filter(|(_, syncs)| *syncs >= marker).count();
            (there >= count as usize).then_some(true)
        });
        passed.unwrap_or(false)
    }

    /// Lets everybody look at their `stop` again.
    pub(crate) fn wake(&self) {
        self.moved.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::Arc;

    #[test]
    fn main_waits_for_the_last_channel() {
        let barriers = Arc::new(Barriers::default());
        barriers.handed(1, 5);
        barriers.handed(2, 4);
        let passed = Arc::new(AtomicBool::new(false));
        let main = {
            let (barriers, passed) = (barriers.clone(), passed.clone());
            std::thread::spawn(move || {
                assert!(barriers.wait(2, 5, || false));
                assert!(passed.load(Ordering::SeqCst), "passed before the last SYNC");
            })
        };
        passed.store(true, Ordering::SeqCst);
        barriers.handed(2, 5);
        main.join().unwrap();
        assert!(barriers.wait(0, 99, || false));
    }

    #[test]
    fn the_end_of_the_session_ends_the_wait() {
        let barriers = Arc::new(Barriers::default());
        let stop = Arc::new(AtomicBool::new(false));
        let main = {
            let (barriers, stop) = (barriers.clone(), stop.clone());
            std::thread::spawn(move || barriers.wait(1, 1, || stop.load(Ordering::SeqCst)))
        };
        stop.store(true, Ordering::SeqCst);
        barriers.wake();
        assert!(!main.join().unwrap());
    }
}
