//! Orderings, fences and steps of a lock-free protocol that a loom run can remove, one at a time. A
//! model must then fail: otherwise the ordering is not needed, or not tested.
//!
//! A crate names the places where its proof rests on one with [`sites!`], and writes each through a
//! function of this crate:
//!
//! ```
//! use std::sync::atomic::{AtomicBool, Ordering};
//!
//! weaken::sites! {
//!     "WEAKEN",
//!     /// Where the proof rests on an ordering.
//!     enum Site {
//!         /// The writer has written.
//!         DoneRelease,
//!     }
//! }
//!
//! let done = AtomicBool::new(false);
//! done.store(true, weaken::strong(Site::DoneRelease, Ordering::Release));
//! ```
//!
//! In a normal build a site compiles to nothing. Under `--cfg loom` the environment variable that
//! the crate names (`WEAKEN=DoneRelease`) removes that ordering or step, and
//! `WEAKEN=DoneReleaseAcqRel` weakens a SeqCst fence to AcqRel. Crates whose models run together
//! have variables of their own. `scripts/loom` reads the sites from the source, tries each, and
//! fails if no model misses one.

use std::sync::atomic::Ordering;

#[cfg(loom)]
mod model;
#[cfg(not(loom))]
mod real;

#[cfg(loom)]
pub use model::{fence, fence_seq_cst, remains, step, strong, Remains, Weakened};
#[cfg(not(loom))]
pub use real::{fence, fence_seq_cst, step, strong};

/// A place where a proof rests on an ordering, a fence or a step: a variant of an enum that
/// [`sites!`] defines.
pub trait Site: Copy + Eq + std::fmt::Debug + 'static {
    /// The part that the environment takes away, if any.
    #[cfg(loom)]
    fn weakened() -> &'static Weakened<Self>;
}

/// Defines the sites of a crate: the environment variable that takes one away, then the enum.
#[macro_export]
macro_rules! sites {
    (
        $variable:literal,
        $(#[$meta:meta])*
        $visibility:vis enum $name:ident {
            $($(#[$of_site:meta])* $site:ident,)*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        $visibility enum $name {
            $($(#[$of_site])* $site,)*
        }

        impl $crate::Site for $name {
            #[cfg(loom)]
            fn weakened() -> &'static $crate::Weakened<Self> {
                static WEAKENED: ::std::sync::OnceLock<$crate::Weakened<$name>> =
                    ::std::sync::OnceLock::new();
                WEAKENED.get_or_init(|| {
                    $crate::Weakened::from_environment($variable, &[$($name::$site),*])
                })
            }
        }
    };
}

/// The ordering of a read-modify-write that needs both halves, each with a site of its own.
#[inline(always)]
pub fn both<S: Site>(acquire: S, release: S) -> Ordering {
    let acquires = matches!(strong(acquire, Ordering::Acquire), Ordering::Acquire);
    let releases = matches!(strong(release, Ordering::Release), Ordering::Release);
    match (acquires, releases) {
        (true, true) => Ordering::AcqRel,
        (true, false) => Ordering::Acquire,
        (false, true) => Ordering::Release,
        (false, false) => Ordering::Relaxed,
    }
}
