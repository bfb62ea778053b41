//! Asks other hosts what their silent connections are for.
//!
//! Each question has a thread of its own, because another host may take seconds and the service's
//! loop must not wait. All silent connections to a place share a question.

use super::question::{about, ask, OfPlace};
use super::settings::Settings;
use crate::say::say;
use host::{Awaits, Place};
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tls::Connector;

/// How long an answer is valid. After that the place may belong to another QEMU.
const FRESH: Duration = Duration::from_secs(2);
/// Largest number of questions at a time.
const AT_ONCE: usize = 16;

/// The open questions, and the last answers.
#[derive(Default)]
pub(super) struct Asking {
    asked: HashMap<(String, Place), Question>,
}

struct Question {
    /// Time of the question.
    at: Instant,
    /// The answer and its time, once it has come.
    answer: Arc<OnceLock<(Awaits, Instant)>>,
}

impl Asking {
    /// Returns the answer of the host `peer` about a place, to a question asked after `since`;
    /// `None` if there is none yet.
    pub(super) fn about(
        &mut self,
        settings: &Arc<Settings>,
        peer: &str,
        place: Place,
        since: Instant,
    ) -> Option<Awaits> {
        let key = (peer.to_owned(), place);
        match self.asked.get(&key).map(|question| (question.at, question.answer.get())) {
            Some((_, None)) => return None,
            Some((at, Some((awaits, told)))) if at >= since && told.elapsed() < FRESH => {
                return Some(*awaits);
            }
            _ => {}
        }
        let holds = |question: &Question| {
            question.answer.get().is_none_or(|(_, told)| told.elapsed() < FRESH)
        };
        self.asked.retain(|_, question| holds(question));
        if self.asked.values().filter(|question| question.answer.get().is_none()).count() < AT_ONCE
        {
            let question = Question { at: Instant::now(), answer: Arc::default() };
            put(settings.clone(), peer.to_owned(), place, question.answer.clone());
            self.asked.insert(key, question);
        }
        None
    }
}

/// Asks on a thread.
fn put(
    settings: Arc<Settings>,
    peer: String,
    place: Place,
    answer: Arc<OnceLock<(Awaits, Instant)>>,
) {
    let told = answer.clone();
    let body = move || {
        // An older service does not answer, and one that is not reached fails the connection later,
        // with its cause.
        let awaits = look(&settings, &peer, place).unwrap_or(Awaits::Unknown);
        let _ = told.set((awaits, Instant::now()));
    };
    if let Err(error) = std::thread::Builder::new().name("question".into()).spawn(body) {
        say(&format!("cannot start a thread for a question: {error}"));
        let _ = answer.set((Awaits::Unknown, Instant::now()));
    }
}

fn look(settings: &Settings, peer: &str, place: Place) -> anyhow::Result<Awaits> {
    let peer = settings.config.find(peer)?;
    let connector = Connector::new(&settings.credentials()?, &peer.name)?;
    let to = peer.address_with(settings.config.port);
    let told: OfPlace = ask(&to, &connector, settings.config.page_size, about(place))?;
    Ok(told.awaits)
}
