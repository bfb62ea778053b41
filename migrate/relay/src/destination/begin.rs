//! Whether a session's source begins its migration, or gives up the session's target because
//! another source wants it (W4d).

use std::sync::atomic::{AtomicU8, Ordering};

/// Why a session has ended whose target another source wanted. That source may have been refused,
/// or have gone, since.
pub(crate) const GAVE_WAY: &str =
    "the links of this source were lost before its migration began, and another source wanted \
     its target";

/// Neither was decided yet.
const WAITS: u8 = 0;
/// The source has opened its main stream. QEMU may get bytes, and the session keeps its target.
const BEGUN: u8 = 1;
/// Another source wants the target. QEMU gets no byte of this session.
const NEVER: u8 = 2;

/// A migration either begins or never does: one exchange decides.
#[derive(Debug, Default)]
pub(super) struct Beginning(AtomicU8);

impl Beginning {
    fn decide(&self, to: u8) -> bool {
        let decided = self.0.compare_exchange(WAITS, to, Ordering::AcqRel, Ordering::Acquire);
        decided.is_ok() || decided == Err(to)
    }

    /// The source begins its migration; false when another source wants the target.
    #[must_use]
    pub(super) fn begin(&self) -> bool {
        self.decide(BEGUN)
    }

    /// Gives the target away; false when the migration has begun.
    #[must_use]
    pub(super) fn give_up(&self) -> bool {
        self.decide(NEVER)
    }

    pub(super) fn has_begun(&self) -> bool {
        self.0.load(Ordering::Acquire) == BEGUN
    }

    pub(super) fn is_given_up(&self) -> bool {
        self.0.load(Ordering::Acquire) == NEVER
    }
}

#[cfg(test)]
mod tests {
    use super::Beginning;
    use std::sync::Barrier;

    #[test]
    fn a_migration_begins_or_gives_up_its_target_and_never_both() {
        let beginning = Beginning::default();
        assert!(!beginning.has_begun() && !beginning.is_given_up());
        assert!(beginning.begin() && beginning.begin() && beginning.has_begun());
        assert!(!beginning.give_up() && !beginning.is_given_up());
        let beginning = Beginning::default();
        assert!(beginning.give_up() && beginning.give_up() && beginning.is_given_up());
        assert!(!beginning.begin() && !beginning.has_begun());
    }

    #[test]
    fn of_a_source_that_begins_and_one_that_wants_the_target_one_succeeds() {
        for _ in 0..1000 {
            let (beginning, both) = (Beginning::default(), Barrier::new(2));
            let (begun, given_up) = std::thread::scope(|scope| {
                let source = scope.spawn(|| {
                    both.wait();
                    beginning.begin()
                });
                both.wait();
                let given_up = beginning.give_up();
                (source.join().unwrap(), given_up)
            });
            assert_ne!(begun, given_up);
            assert_eq!((begun, given_up), (beginning.has_begun(), beginning.is_given_up()));
        }
    }
}
