//! The targets: each has one session at a time. A session that has lost its source before its
//! migration gives way to another source (W4d).

use super::state::{Server, Taken};
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The most time that the end of a session takes which gives way. Its client's links are lost, so
/// this is the time that its threads need to end.
const ENDS: Duration = Duration::from_secs(10);

impl Server {
    fn lock_taken(&self) -> MutexGuard<'_, Vec<Taken>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes `target` for `session`. A session there that gives way ends first, so the target never
    /// has two. The error is a message for the peer.
    pub(super) fn take_target(&self, target: &Option<String>, session: &str) -> Result<(), String> {
        let until = Instant::now() + ENDS;
        let mut taken = self.lock_taken();
        loop {
            let owner = taken.iter().find(|taken| taken.target == *target);
            let Some(owner) = owner.map(|taken| taken.session.clone()) else {
                taken.push(Taken { target: target.clone(), session: session.into() });
                return Ok(());
            };
            drop(taken);
            self.send_away(&owner)?;
            let left = until.saturating_duration_since(Instant::now());
            let is_there =
                |taken: &mut Vec<Taken>| taken.iter().any(|taken| taken.is(target, &owner));
            let (guard, waited) = self
                .freed
                .wait_timeout_while(self.lock_taken(), left, is_there)
                .unwrap_or_else(PoisonError::into_inner);
            taken = guard;
            if waited.timed_out() {
                return Err(self.in_progress(Duration::ZERO));
            }
        }
    }

    /// Ends the session that has a wanted target, if it gives way. The error is a message for the
    /// peer that wants the target.
    fn send_away(&self, owner: &str) -> Result<(), String> {
        let active = self.lock_sessions().get(owner).cloned();
        // A session that is not there yet is being made.
        let Some(active) = active else { return Err(self.in_progress(Duration::ZERO)) };
        if active.destination.gives_way() {
            return Ok(());
        }
        let has_begun = active.destination.has_begun();
        Err(self.in_progress(if has_begun { self.config.resume } else { Duration::ZERO }))
    }

    /// Another source wants the target of the session that this server carries: ends the session if
    /// it has lost its links before its migration. Its owner frees the target.
    pub fn give_way(&self) {
        let sessions: Vec<_> = self.lock_sessions().values().cloned().collect();
        for active in sessions {
            active.destination.gives_way();
        }
    }

    /// Frees a target that `session` has.
    pub(super) fn free_target(&self, target: &Option<String>, session: &str) {
        self.lock_taken().retain(|taken| !taken.is(target, session));
        self.freed.notify_all();
    }

    /// The refusal of a target in use. `waits`: how long its session waits for a source whose links
    /// are lost.
    fn in_progress(&self, waits: Duration) -> String {
        // The links must first fall silent.
        let silence = self.config.silence;
        let most = (silence + waits + silence).as_secs();
        format!(
            "a migration to this target is in progress; if its source has died, the target is free within {most} s"
        )
    }
}
