//! Implementation under loom: one part may be taken away.

use std::sync::atomic::Ordering;

use crate::Site;

/// The part that the environment takes away.
#[derive(Debug)]
pub struct Weakened<S>(Option<(S, Remains)>);

/// The rest of a weakened fence, ordering or step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remains {
    /// Everything is as written.
    All,
    /// A SeqCst fence is one with AcqRel. Orderings and steps are as written.
    AcqRel,
    /// The part is taken away.
    Nothing,
}

impl<S: Site> Weakened<S> {
    /// Returns the part, of `all`, that the environment variable `name` names.
    ///
    /// # Panics
    /// There is no such site: a proof in which nothing is taken away would prove nothing.
    pub fn from_environment(name: &str, all: &[S]) -> Self {
        let Ok(value) = std::env::var(name) else { return Self(None) };
        let (site, remains) = match value.strip_suffix("AcqRel") {
            Some(site) => (site, Remains::AcqRel),
            None => (&*value, Remains::Nothing),
        };
        let site = all.iter().find(|known| format!("{known:?}") == site);
        let site = site.unwrap_or_else(|| panic!("{name}={value} is not known"));
        Self(Some((*site, remains)))
    }
}

/// The rest of a weakened site.
pub fn remains<S: Site>(site: S) -> Remains {
    match S::weakened().0 {
        Some((weak, remains)) if weak == site => remains,
        _ => Remains::All,
    }
}

/// The ordering, or `Relaxed`.
pub fn strong<S: Site>(site: S, ordering: Ordering) -> Ordering {
    if step(site) {
        ordering
    } else {
        Ordering::Relaxed
    }
}

/// Whether to take a step.
pub fn step<S: Site>(site: S) -> bool {
    remains(site) != Remains::Nothing
}

/// A SeqCst fence, or the rest of it when weakened.
pub fn fence_seq_cst<S: Site>(site: S) {
    match remains(site) {
        Remains::All => loom::sync::atomic::fence(Ordering::SeqCst),
        Remains::AcqRel => loom::sync::atomic::fence(Ordering::AcqRel),
        Remains::Nothing => {}
    }
}

/// A fence of this ordering, or none.
pub fn fence<S: Site>(site: S, ordering: Ordering) {
    if step(site) {
        loom::sync::atomic::fence(ordering);
    }
}
