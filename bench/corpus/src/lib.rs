//! Memory pages for tests and measurements: a corpus of real ones, or synthetic ones.
//!
//! A corpus is a number of named *sets*, each a run of 4096-byte pages. If the real corpus is
//! available (guest memory, a process's heap, the Silesia and Calgary files), [`Corpus::load`]
//! unpacks it once into `target/corpora` and reads from there. Otherwise the sets are generated
//! from a seed, so that every test and benchmark runs anywhere, and reports which it used
//! ([`Corpus::origin`]).
//!
//! ```text
//!  $PLATEN_CORPORA, or ../shared/corpora ── unpack, once ──► target/corpora ─┐
//!                                                   none of these: made ─────┴─► Set (name, pages)
//!                                                      every distinct page once: mixed_unique
//!                                     any number of bytes, no page twice: Rounds (XOR per round)
//! ```
//!
//! # What fails
//!
//! An unusable directory in `PLATEN_CORPORA` causes a panic, since the user asked for it. Any other
//! failure falls back to synthetic data and prints the reason. Two processes may load at once: one
//! unpacks while the other waits.
//!
//! # Limits
//!
//! For tests and measurements only. The synthetic data has the overall ratio of the real data (zstd
//! level 1 in batches of 512 KiB: 2.6; guest memory 2.7), not its texture.

mod files;
mod made;
mod rounds;

pub use rounds::Rounds;

use std::collections::HashSet;
use std::fmt;
use std::path::PathBuf;

use twox_hash::XxHash3_128;

/// Bytes of a page.
pub const PAGE: usize = 4096;

/// Pages under one name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Set {
    name: String,
    pages: Vec<u8>,
}

impl Set {
    /// A set of `bytes` as pages, the last one padded with zeros.
    pub fn new(name: &str, mut bytes: Vec<u8>) -> Self {
        bytes.resize(bytes.len().next_multiple_of(PAGE), 0);
        Self { name: name.to_owned(), pages: bytes }
    }

    /// The name of the set.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The concatenated pages: a multiple of [`PAGE`] bytes.
    pub fn pages(&self) -> &[u8] {
        &self.pages
    }

    /// The pages, owned.
    pub fn into_pages(self) -> Vec<u8> {
        self.pages
    }
}

/// The origin of the pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Files in this directory.
    Files(PathBuf),
    /// Generated, for this reason.
    Made(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Files(_) => f.write_str("corpus files"),
            Self::Made(why) => write!(f, "made data ({why})"),
        }
    }
}

/// All available sets. Cheap to hold: pages are read or generated on request.
#[derive(Clone, Debug)]
pub struct Corpus {
    origin: Origin,
    /// Name and file, in the order of [`Corpus::mixed_unique`]; empty for synthetic data.
    files: Vec<(String, PathBuf)>,
}

impl Corpus {
    /// Finds the corpus, unpacks it if necessary, and prints its origin to stderr.
    ///
    /// # Panics
    ///
    /// If `PLATEN_CORPORA` names an unusable directory.
    pub fn load() -> Self {
        let corpus = match files::locate() {
            Ok(directory) => {
                let files = files::sets_in(&directory);
                Self { origin: Origin::Files(directory), files }
            }
            Err(why) => Self::made(&why),
        };
        eprintln!("corpus: {}", corpus.origin);
        corpus
    }

    /// Synthetic data in any case, for tests that need the same bytes everywhere.
    pub fn made(why: &str) -> Self {
        Self { origin: Origin::Made(why.to_owned()), files: Vec::new() }
    }

    /// The origin of the pages.
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// The names that [`Corpus::set`] accepts. guest, redis, text, code and random always exist.
    pub fn names(&self) -> Vec<&str> {
        let files = self.files.iter().map(|(name, _)| name.as_str());
        let made = made::NAMES.iter().copied();
        if self.files.is_empty() {
            made.collect()
        } else {
            files.chain(["random"]).collect()
        }
    }

    /// The pages under `name`; `None` for a name that is not one of [`Corpus::names`].
    ///
    /// guest: a Linux guest's memory, including its zero and repeated pages; redis: a process's
    /// heap; text: English prose; code: a program library; random: incompressible bytes (always
    /// generated).
    ///
    /// # Panics
    ///
    /// If a file that existed when the corpus was loaded cannot be read.
    pub fn set(&self, name: &str) -> Option<Set> {
        match self.files.iter().find(|(known, _)| known == name) {
            Some((_, path)) => Some(Set::new(name, files::read(path))),
            None if self.files.is_empty() || name == "random" => {
                made::pages(name).map(|pages| Set::new(name, pages))
            }
            None => None,
        }
    }

    /// Guest memory.
    ///
    /// # Panics
    ///
    /// As for [`Corpus::set`].
    pub fn guest(&self) -> Set {
        self.set("guest").expect("every corpus has it")
    }

    /// A process's heap.
    ///
    /// # Panics
    ///
    /// As for [`Corpus::set`].
    pub fn redis(&self) -> Set {
        self.set("redis").expect("every corpus has it")
    }

    /// Prose.
    ///
    /// # Panics
    ///
    /// As for [`Corpus::set`].
    pub fn text(&self) -> Set {
        self.set("text").expect("every corpus has it")
    }

    /// Every distinct page of all sets once, in the order of the sets and of the pages in them,
    /// without those that repeat one 8-byte word. About 267 MiB from files, or 62 MiB generated.
    ///
    /// # Panics
    ///
    /// As for [`Corpus::set`].
    pub fn mixed_unique(&self) -> Vec<u8> {
        let mut seen = HashSet::new();
        let mut unique = Vec::new();
        for name in self.names() {
            // The files are complete by themselves; "random" is an extra set for its own tests.
            if name == "random" && !self.files.is_empty() {
                continue;
            }
            let set = self.set(name).expect("a name from the list");
            for page in set.pages().chunks_exact(PAGE) {
                if !is_same_filled(page) && seen.insert(XxHash3_128::oneshot(page)) {
                    unique.extend_from_slice(page);
                }
            }
        }
        unique
    }

    /// Any number of bytes without a repeated page: [`Corpus::mixed_unique`] in rounds.
    ///
    /// # Panics
    ///
    /// As for [`Corpus::set`].
    pub fn rounds(&self) -> Rounds {
        Rounds::new(self.mixed_unique())
    }
}

/// Whether `page` repeats one 8-byte word, as a zero page does.
pub fn is_same_filled(page: &[u8]) -> bool {
    page.len() > 8 && page[8..] == page[..page.len() - 8]
}
