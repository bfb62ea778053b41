//! What the policy has done, counted.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::time::{clock_gettime, ClockId};
use serde::{Deserialize, Serialize};

/// One counter: what it is called, its value, what it says, and whether it only grows.
pub type Field = (&'static str, u64, &'static str, bool);

macro_rules! counters {
    ($($name:ident $help:literal,)*) => {
        /// What the policy has done since it was started; taken while it works.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[non_exhaustive]
        pub struct PolicyStats {
            $(#[doc = $help] pub $name: u64,)*
        }

        /// The policy's thread alone writes them.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: AtomicU64,)*
        }

        impl Counters {
            pub(crate) fn stats(&self) -> PolicyStats {
                PolicyStats { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }

        impl PolicyStats {
            /// All of them.
            pub fn fields(&self) -> Vec<Field> {
                vec![$((stringify!($name), self.$name, $help, true),)*]
            }
        }
    };
}

counters! {
    passes "Passes over all pages",
    pressed_passes "Passes that memory pressure brought forward",
    groups_made "Groups of neighbours compressed as one",
    pages_grouped "Idle pages that went into a group",
    pages_recompressed "Idle pages recompressed alone",
    pages_no_gain "Idle pages that would not have got smaller, and are left as they are from now on",
    pages_changed "Pages written or read while they were recompressed, and left as they were",
    pages_warm "Pages that left their group because they were read in it",
    pages_spread "Pages that left their group because most others had",
    bytes_saved "Bytes by which compressed forms got smaller",
    no_room "Times that there was no memory to spare for a new form, so that it was put off",
    damaged "Pages that could not be read, and were left",
    writeback_passes "Passes that looked for pages to write back",
    writeback_asked "Of these, those that somebody asked for",
    pages_written_back "Pages that went to the backing device",
    writeback_changed "Pages written or read while they were written back, and kept in memory",
    writeback_limited "Passes that ended because today's writeback_limit is spent",
    writeback_no_space "Passes that ended because the file system has no more than backing_free bytes left",
    writeback_full "Passes that ended because no block of the backing device is free",
    writeback_failed "Passes that ended because a write to the backing device failed, now or before",
    dictionary_rounds "Times that somebody was asked to train a dictionary",
    dictionary_installed "Dictionaries that saved 3 % or more of pages held out, and are used",
    dictionary_no_gain "Dictionaries that saved less or cost too much CPU, and were dropped",
    dictionary_late "Trainers that were gone before they had answered, or did not in time",
    dictionary_refused "Trainers whose answer was no dictionary",
    dictionary_pressed "Times that none was begun, or a trainer was given up, because memory was short",
    dictionary_put_off "Rounds without memory, samples or room",
    cpu_us "Microseconds of CPU used",
}

/// Adds to a counter of one's own.
pub(crate) fn add(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
}

/// CPU that this thread has used.
pub(crate) fn thread_cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}
