//! A rule is one fault: when it acts, on which requests, and what it does.

use std::time::Duration;

/// When a rule starts to act.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trigger {
    /// At the N-th submission that matches the rule's filter, from 1.
    At(u64),
    /// At every N-th matching submission.
    Every(u64),
    /// This many milliseconds after the first submission.
    After(u64),
    /// When the script is set.
    Now,
}

/// For how many submissions (or polls) an action applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Count {
    /// This many.
    Times(u64),
    /// All later ones.
    Forever,
}

/// A function of the library, which a rule may keep from returning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// The functions that compress and decompress.
    Submit,
    /// `icp_sal_DcPollInstance`.
    Poll,
    /// `icp_sal_userStartMultiProcess`.
    Process,
    /// `cpaDcStartInstance`.
    Start,
    /// `cpaDcStopInstance`.
    Stop,
}

/// The state of a thread whose call never returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stuck {
    /// Its thread sleeps.
    Sleeps,
    /// Its thread runs.
    Spins,
}

impl Stuck {
    /// Keeps the calling thread.
    pub(crate) fn for_ever(self) -> ! {
        loop {
            match self {
                // One wake-up an hour: nothing wakes the thread while a test watches it.
                Self::Sleeps => std::thread::sleep(Duration::from_secs(3600)),
                Self::Spins => std::hint::spin_loop(),
            }
        }
    }
}

/// A rule's action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Submissions return RETRY.
    Retry(Count),
    /// Submissions return FAIL.
    Fail(Count),
    /// The callback has SUCCESS; the results have this status.
    Status(i32, Count),
    /// The callback has FAIL; the results have this status.
    Error(i32, Count),
    /// Polls return FAIL and deliver nothing.
    PollFail(Count),
    /// Requests are executed and answered this many milliseconds late.
    Late(u64, Count),
    /// One bit of the output is flipped.
    Flip(Count),
    /// The checksum is wrong.
    Crc(Count),
    /// The results report this many produced bytes.
    Produced(u32, Count),
    /// Calls of the function never return.
    Hang(Entry, Stuck, Count),
    /// Nothing is answered.
    Silence,
    /// Ends silence: the delayed requests are executed.
    Revive,
    /// The device dies: silence, then the event, then dummy answers.
    Fatal,
    /// The event at the start of a reset.
    Restarting,
    /// The event at the end of a reset.
    Restarted,
    /// `Fatal`, `Restarting`, and `Restarted` after this many milliseconds.
    Reset(u64),
}

/// A rule's direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Compression.
    Compress,
    /// Decompression.
    Decompress,
}

/// One fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rule {
    /// When the rule acts.
    pub trigger: Trigger,
    /// The rule applies only to this instance.
    pub instance: Option<usize>,
    /// The rule applies only to this direction.
    pub direction: Option<Direction>,
    /// The action.
    pub action: Action,
}
