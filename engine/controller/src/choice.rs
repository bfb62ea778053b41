//! The settings chosen for one chunk, and their outcome.

use crate::Class;

/// The settings for one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    pub(crate) candidate: u8,
    pub(crate) class: Class,
    pub(crate) explore: bool,
}

impl Choice {
    /// Number of the candidate: its place in
    /// [`Config::candidates`](crate::Config#structfield.candidates).
    pub fn candidate(&self) -> usize {
        usize::from(self.candidate)
    }

    /// The chunk's class.
    pub fn class(&self) -> Class {
        self.class
    }

    /// Whether the settings were chosen to measure a candidate, not because it is the best.
    pub fn explore(&self) -> bool {
        self.explore
    }
}

/// The outcome for one chunk. Report raw chunks too: the classes' shares are wrong without them.
#[derive(Clone, Copy, Debug)]
pub struct Observation {
    /// The result of [`Controller::choose`](crate::Controller::choose), also where the codec gave
    /// up and the chunk went raw.
    pub choice: Choice,
    /// Bytes of the chunk.
    pub plain: usize,
    /// Bytes sent over the link for it.
    pub encoded: usize,
    /// CPU time of the codec thread (packing included), ns; 0 for a chunk that bypassed the codec
    /// threads.
    pub cpu_ns: u64,
    /// Wall time in the codec thread, ns; 0 for a chunk that bypassed the codec threads.
    pub wall_ns: u64,
}
