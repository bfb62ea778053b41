//! W18: the destination's main channel gets its k-th barrier marker only after every multifd
//! channel got its k-th SYNC. Otherwise the destination QEMU waits in its barrier with its monitor
//! blocked, for ever if a channel is lost.

use ring::EventCount;
use std::sync::{Mutex, PoisonError};

/// A multifd channel's progress.
struct Channel {
    stream: u16,
    /// SYNC packets written to QEMU; `u64::MAX` once the channel is opaque, since its SYNCs can
    /// then no longer be counted.
    syncs: u64,
    /// The channel has ended.
    ended: bool,
}

/// SYNC packets written to QEMU, per multifd channel.
#[derive(Default)]
pub(super) struct Barriers {
    channels: Mutex<Vec<Channel>>,
    moved: EventCount,
}

/// The result of a wait for SYNCs.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Wait {
    Passed,
    /// The session has ended.
    Stopped,
    /// This stream ended after `syncs` SYNCs: the other channels are too few.
    Never {
        stream: u16,
        syncs: u64,
    },
}

impl Barriers {
    /// Records that a channel has got `syncs` SYNC packets so far.
    pub(super) fn handed(&self, stream: u16, syncs: u64) {
        self.change(stream, |channel| channel.syncs = syncs);
    }

    /// Records that a channel has ended.
    pub(super) fn ended(&self, stream: u16) {
        self.change(stream, |channel| channel.ended = true);
    }

    fn change(&self, stream: u16, change: impl FnOnce(&mut Channel)) {
        let mut channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        match channels.iter_mut().find(|channel| channel.stream == stream) {
            Some(channel) => change(channel),
            None => {
                let mut channel = Channel { stream, syncs: 0, ended: false };
                change(&mut channel);
                channels.push(channel);
            }
        }
        drop(channels);
        self.moved.notify_all();
    }

    /// Waits until `count` channels have got SYNC number `marker`.
    pub(super) fn wait(&self, count: u32, marker: u64, stop: impl Fn() -> bool) -> Wait {
        let count = count as usize;
        if count == 0 {
            return Wait::Passed;
        }
        let passed = self.moved.wait_until(None, || {
            if stop() {
                return Some(Wait::Stopped);
            }
            let channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
            let there = channels.iter().filter(|channel| channel.syncs >= marker).count();
            if there >= count {
                return Some(Wait::Passed);
            }
            // Channels that can still reach the marker, and those of `count` that have not appeared
            // yet.
            let short = |channel: &&Channel| channel.ended && channel.syncs < marker;
            let alive = channels.len() - there - channels.iter().filter(short).count();
            let unseen = count.saturating_sub(channels.len());
            let lost = channels.iter().find(short).filter(|_| there + alive + unseen < count)?;
            Some(Wait::Never { stream: lost.stream, syncs: lost.syncs })
        });
        passed.unwrap_or(Wait::Stopped)
    }

    /// Makes every waiting thread call its `stop` again.
    pub(super) fn wake(&self) {
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
                assert_eq!(barriers.wait(2, 5, || false), Wait::Passed);
                assert!(passed.load(Ordering::SeqCst), "passed before the last SYNC");
            })
        };
        passed.store(true, Ordering::SeqCst);
        barriers.handed(2, 5);
        main.join().unwrap();
        assert_eq!(barriers.wait(0, 99, || false), Wait::Passed);
    }

    #[test]
    fn a_channel_that_ends_before_its_sync_ends_the_wait() {
        let barriers = Arc::new(Barriers::default());
        barriers.handed(1, 5);
        barriers.handed(2, 4);
        let main = {
            let barriers = barriers.clone();
            std::thread::spawn(move || barriers.wait(2, 5, || false))
        };
        barriers.ended(1);
        barriers.ended(2);
        assert_eq!(main.join().unwrap(), Wait::Never { stream: 2, syncs: 4 });
        // A channel that has not appeared yet may still come.
        barriers.handed(3, 5);
        assert_eq!(barriers.wait(2, 5, || false), Wait::Passed);
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
        assert_eq!(main.join().unwrap(), Wait::Stopped);
    }
}
