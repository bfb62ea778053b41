//! The policy's counters.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::time::{clock_gettime, ClockId};
use serde::{Deserialize, Serialize};

/// One counter: name, value, description, and whether it only grows.
pub type Field = (&'static str, u64, &'static str, bool);

macro_rules! counters {
    ($($name:ident $help:literal,)*) => {
        /// The policy's counters since its start, read while it works.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[non_exhaustive]
        pub struct PolicyStats {
            $(#[doc = $help] pub $name: u64,)*
        }

        /// Written by the policy's thread only.
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
            /// All counters.
            pub fn fields(&self) -> Vec<Field> {
                vec![$((stringify!($name), self.$name, $help, true),)*]
            }
        }
    };
}

counters! {
    passes "Passes over all pages",
    pressed_passes "Passes under memory pressure",
    groups_made "Groups of neighbouring pages compressed together",
    pages_grouped "Idle pages compressed in groups",
    pages_recompressed "Idle pages recompressed alone",
    pages_no_gain "Idle pages that recompression made no smaller, and does not try again",
    pages_changed "Pages not replaced because they were written or read during recompression",
    pages_warm "Pages taken out of their group because they were read",
    pages_spread "Pages taken out of their group because most of its pages were gone",
    bytes_saved "Bytes saved by recompression",
    no_room "Recompressions postponed because no memory could be spared",
    damaged "Pages skipped because they could not be read",
    writeback_passes "Passes that looked for pages to write back",
    writeback_asked "Writeback passes on request",
    pages_written_back "Pages written back to the backing device",
    writeback_changed "Pages still in memory because they were written or read during writeback",
    writeback_limited "Writeback passes ended by today's writeback_limit",
    writeback_no_space "Writeback passes ended because the file system had no more than backing_free bytes free",
    writeback_full "Writeback passes ended because the backing device was full",
    writeback_failed "Writeback passes ended by a failed write, then or earlier",
    dictionary_rounds "Trainings of a dictionary begun",
    dictionary_installed "Dictionaries installed: they saved 3 % or more on held-out pages",
    dictionary_no_gain "Dictionaries dropped: they saved less, or cost too much CPU",
    dictionary_late "Trainers that exited without an answer, or did not answer in time",
    dictionary_refused "Trainers whose answer was invalid",
    dictionary_pressed "Trainings postponed or abandoned because memory was short",
    dictionary_put_off "Trainings abandoned for want of memory, samples or a place",
    cpu_us "Microseconds of CPU used",
}

/// Adds to a counter that only this thread writes.
pub(crate) fn add(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
}

/// CPU time of this thread.
pub(crate) fn thread_cpu() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap_or_default()
}
