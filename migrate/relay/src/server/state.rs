//! The state of a receiver: its sessions, ended sessions, and connections before their hello.

use super::allowance::Strangers;
use super::answer::ANSWERED;
use super::config::{Host, ServerConfig};
use super::shortage::Shortage;
use super::waiting::{LastPass, WaitingRoom};
use crate::destination::{DecodeJob, Destination, GAVE_WAY};
use pipeline::Pool;
use session::{Hello, Histories, Link, Pass, SessionError, Verdict};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use tls::Peer;

/// The answer about a session that ended before the question.
const HAS_ENDED: &str = "its session has ended";

/// Ended sessions that can still be asked about (W28).
const MAX_ENDED: usize = 64;

pub(super) struct Active {
    pub(super) token: String,
    /// The session's owner: its other links show the same certificate.
    pub(super) owner: Option<Peer>,
    pub(super) links: u16,
    pub(super) joined: Mutex<Vec<u16>>,
    /// The source has got an answer that decides (W28).
    pub(super) answered: AtomicBool,
    /// The session has had a link.
    pub(super) linked: AtomicBool,
    pub(super) last_pass: LastPass,
    /// Bytes granted for a delta cache.
    pub(super) delta_cache: u64,
    /// The histories granted.
    pub(super) histories: Option<Histories>,
    pub(super) destination: Arc<Destination>,
}

impl Active {
    /// Records that a link of this number has come; whether it is the first of the number.
    pub(super) fn join(&self, link: u16) -> bool {
        let mut joined = self.joined.lock().unwrap_or_else(PoisonError::into_inner);
        let is_first = !joined.contains(&link);
        if is_first {
            joined.push(link);
        }
        is_first
    }

    /// Adds a link to the session. Only a link that was added counts: the session notices its loss.
    pub(super) fn add_link(&self, number: u16, link: Link) -> Result<(), SessionError> {
        self.destination.session().add_link(number, link)?;
        self.linked.store(true, Ordering::Release);
        Ok(())
    }

    /// Records that the source has got an answer that decides.
    pub(super) fn note_answered(&self) {
        self.answered.store(true, Ordering::Release);
    }

    /// Whether the session has had a link yet.
    pub(super) fn has_joined(&self) -> bool {
        self.linked.load(Ordering::Acquire)
    }

    /// How far the session got. `committed`: bytes that start the VM may have been written.
    fn answer(&self, committed: bool) -> Verdict {
        let destination = &self.destination;
        // Read before the others: if QEMU answers after this read, the source asks again.
        let is_undecided = destination.is_undecided();
        let (loaded, confirmed) = (destination.has_loaded(), destination.is_confirmed());
        // No answer is better than that of a QEMU that has confirmed.
        Verdict { committed, pending: is_undecided && !confirmed, loaded, confirmed }
    }

    /// Why the session has ended, for its source. A link that the source opens meanwhile may get
    /// this answer before another link has brought the ABORT.
    fn why_ended(&self) -> String {
        if self.destination.gave_way() {
            return GAVE_WAY.into();
        }
        self.destination.session().abort_reason().unwrap_or_else(|| HAS_ENDED.into())
    }

    /// Whether a peer with this `token` and certificate owns the session.
    pub(super) fn belongs_to(&self, token: &str, peer: Option<&Peer>) -> bool {
        same(&self.token, token) && self.owner.as_ref() == peer
    }
}

/// A session that a [`Front`](super::Front) has opened, for the process that runs it.
#[derive(Debug, Clone)]
pub struct Promise {
    /// The source's hello.
    pub hello: Hello,
    /// The session's secret, which the source has.
    pub token: String,
    /// The source's certificate, which all links have to show.
    pub owner: Peer,
    /// The source's address, for messages.
    pub peer: String,
}

/// A hello with a token, as the sessions see it that have not been removed (W28).
enum Question {
    /// The source asks about this session, or opens a link of it after its end.
    About { active: Arc<Active>, has_ended: bool },
    /// It is a link of a session that goes on.
    None,
    /// No such session is here.
    NotHere,
}

/// The record of an ended session.
pub(super) struct Ended {
    pub(super) session: String,
    pub(super) token: String,
    pub(super) owner: Option<Peer>,
    pub(super) last_pass: LastPass,
    /// For the source.
    pub(super) reason: String,
    pub(super) answer: Verdict,
    /// Set if the links were lost, or the source has asked: the time until which it may ask.
    pub(super) unasked_until: Option<Instant>,
}

/// A target that a session has (W4d).
#[derive(Debug)]
pub(super) struct Taken {
    pub(super) target: Option<String>,
    pub(super) session: String,
}

impl Taken {
    pub(super) fn is(&self, target: &Option<String>, session: &str) -> bool {
        self.target == *target && self.session == session
    }
}

/// The receiver: accepts links and runs their sessions.
pub struct Server {
    pub(super) config: ServerConfig,
    pub(super) host: Arc<dyn Host>,
    pub(super) pool: Arc<Pool<DecodeJob>>,
    /// The counters of each codec thread's accelerator.
    pub(super) accelerators: Vec<Arc<qat::Counters>>,
    pub(super) sessions: Mutex<HashMap<String, Arc<Active>>>,
    /// Ended sessions; the newest is last.
    pub(super) ended: Mutex<VecDeque<Ended>>,
    pub(super) taken: Mutex<Vec<Taken>>,
    /// Notified when a target is free again.
    pub(super) freed: Condvar,
    /// Connections whose hello was not read yet.
    pub(super) waiting: Mutex<WaitingRoom>,
    pub(super) admitted: AtomicU64,
    /// Connections that did not speak the protocol.
    pub(super) strangers: Strangers,
    pub(super) shortage: Shortage,
    /// Sessions that have ended.
    pub(super) served: AtomicU64,
    /// How often [`Server::stop`] was called.
    pub(super) stops: AtomicU64,
    /// No new sessions; existing ones continue to their end.
    pub(super) closing: AtomicBool,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Server {
    pub(super) fn lock_sessions(&self) -> MutexGuard<'_, HashMap<String, Arc<Active>>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn lock_waiting(&self) -> MutexGuard<'_, WaitingRoom> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn lock_ended(&self) -> MutexGuard<'_, VecDeque<Ended>> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a pass was made by the client of a session here, and is newer than those before.
    pub(super) fn is_valid(&self, pass: &Pass) -> bool {
        if let Some(active) = self.lock_sessions().get(&pass.session) {
            return active.last_pass.accepts(pass, &active.token);
        }
        let ended = self.lock_ended();
        let known = ended.iter().find(|ended| ended.session == pass.session);
        known.is_some_and(|ended| ended.last_pass.accepts(pass, &ended.token))
    }

    /// Takes a hello as a question about a session that is here. The session is noted as asked
    /// while it cannot be removed, and before it is ended: the deciding thread knows why it ends.
    fn take_question(&self, hello: &Hello, token: &str, peer: Option<&Peer>) -> Question {
        let sessions = self.lock_sessions();
        let active = sessions.get(&hello.session).filter(|active| active.belongs_to(token, peer));
        let Some(active) = active.cloned() else { return Question::NotHere };
        let has_ended = active.destination.session().failure().is_some();
        if !hello.ask && !has_ended {
            return Question::None;
        }
        active.destination.note_asked();
        Question::About { active, has_ended }
    }

    /// Records that the source has its answer about `session`: this end need not wait long for
    /// another question.
    pub(super) fn note_answered(&self, session: &str) {
        let sessions = self.lock_sessions();
        if let Some(active) = sessions.get(session) {
            return active.note_answered();
        }
        let mut ended = self.lock_ended();
        let ended = ended.iter_mut().find(|ended| ended.session == session);
        if let Some(until) = ended.and_then(|ended| ended.unasked_until.as_mut()) {
            *until = Instant::now() + ANSWERED;
        }
    }

    /// Returns how far a session got, to the session's own client (W28). Ends the session if it
    /// still runs, since it has ended at the client.
    pub(super) fn verdict(&self, hello: &Hello, peer: Option<&Peer>) -> Option<(String, Verdict)> {
        let token = hello.token.as_deref()?;
        match self.take_question(hello, token, peer) {
            Question::About { active, has_ended } => {
                let session = active.destination.session();
                let committed =
                    session.end_and_close_commit("the source lost its links and has given up");
                let reason = match has_ended {
                    true => active.why_ended(),
                    false => "its session ends with this question".into(),
                };
                return Some((reason, active.answer(committed)));
            }
            Question::None => return None,
            Question::NotHere => {}
        }
        let ended = self.lock_ended();
        let ended = ended.iter().find(|ended| {
            ended.session == hello.session
                && same(&ended.token, token)
                && ended.owner.as_ref() == peer
        })?;
        Some((ended.reason.clone(), ended.answer))
    }

    /// Moves a session to the ended ones, and frees its target.
    pub(super) fn remove_session(&self, target: &Option<String>, session: &str) {
        {
            let mut sessions = self.lock_sessions();
            if let Some(active) = sessions.get(session) {
                let mut ended = self.lock_ended();
                if ended.len() >= MAX_ENDED {
                    let at = dispensable(&ended);
                    ended.remove(at);
                }
                // Final: a writer that still runs must not make it false.
                let committed =
                    active.destination.session().end_and_close_commit("the session has ended");
                let (lost, asked) = (active.destination.was_lost(), active.destination.was_asked());
                // An answer that may be lost is not enough: the source would ask a host that has
                // forgotten the session.
                let answered = active.answered.load(Ordering::Acquire);
                let time = if answered { ANSWERED } else { active.destination.asking_time() };
                let told = asked || active.destination.is_confirmed();
                if lost && !told && self.stops.load(Ordering::Acquire) == 0 {
                    let seconds = time.as_secs();
                    self.host.notice(&format!(
                        "answering for up to {seconds} s should the source ask where the VM is"
                    ));
                }
                ended.push_back(Ended {
                    unasked_until: (lost || asked).then(|| Instant::now() + time),
                    session: session.into(),
                    token: active.token.clone(),
                    owner: active.owner.clone(),
                    last_pass: active.last_pass.clone(),
                    reason: active.why_ended(),
                    answer: Verdict { pending: false, ..active.answer(committed) },
                });
            }
            sessions.remove(session);
        }
        self.free_target(target, session);
    }

    pub(super) fn serve(&self, target: &Option<String>, session: &str, active: &Active) {
        self.host.serve(target, &active.destination);
        self.remove_session(target, session);
        if active.destination.has_begun() {
            self.served.fetch_add(1, Ordering::AcqRel);
        } else {
            self.host.notice("no migration has begun: the target is free again");
        }
    }
}

/// The record to remove when there are too many: the oldest whose source knows how its session
/// ended, or else the oldest of the host that has the most. So no host makes this end forget the
/// session of another host that is in doubt.
fn dispensable(ended: &VecDeque<Ended>) -> usize {
    let of = |owner: &Option<Peer>| ended.iter().filter(|one| one.owner == *owner).count();
    let most = ended.iter().map(|one| of(&one.owner)).max();
    let told = ended.iter().position(|one| one.unasked_until.is_none());
    let surplus = || ended.iter().position(|one| Some(of(&one.owner)) == most);
    told.or_else(surplus).unwrap_or(0)
}

/// Compares secrets in constant time.
fn same(ours: &str, theirs: &str) -> bool {
    ours.len() == theirs.len()
        && ours.bytes().zip(theirs.bytes()).fold(0, |sum, (a, b)| sum | (a ^ b)) == 0
}

#[cfg(test)]
mod tests;
