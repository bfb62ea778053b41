//! Questions of another host's service or `platen doctor`, and their answers.
//!
//! A question is a hello for a target that names it, which opens nothing; the reason of the refusal
//! is the answer (W38). A service of an older version refuses it as a target that it does not have.

use host::{now, Awaits, Place};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use session::{dial, Hello, SessionError};
use tls::Connector;

/// Prefix of the target with a doctor's question.
const DOCTOR: &str = "doctor:";
/// Bytes that fill the target up. With an MTU of 1500 it takes several packets, with one of 9000 a
/// single packet that is larger than 1500 bytes.
const FILL: usize = 6000;
/// Prefix of the target that asks what awaits a connection to a place. The place follows.
const AWAITS: &str = "awaits:";

/// A service's answer about itself.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Told {
    pub(super) version: String,
    /// Milliseconds since 1970.
    pub(super) clock: u64,
}

/// A service's answer about a place.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct OfPlace {
    pub(super) awaits: Awaits,
}

/// The target of a doctor, as long as a packet of full size needs.
pub(super) fn of_doctor() -> String {
    format!("{DOCTOR}{}", ".".repeat(FILL))
}

/// The target that asks what awaits a connection to `place`.
pub(super) fn about(place: Place) -> String {
    format!("{AWAITS}{place}")
}

/// Asks another host's service.
///
/// # Errors
/// The service cannot be reached, or has no answer to this question.
pub(super) fn ask<T: DeserializeOwned>(
    to: &str,
    connector: &Connector,
    page_size: u32,
    target: String,
) -> Result<T, SessionError> {
    let hello = Hello { name: Some(target), again: true, ..Hello::of_one_link(page_size)? };
    match dial(to, Some(connector), &hello) {
        Err(SessionError::Refused { peer, reason }) => {
            serde_json::from_str(&reason).map_err(|_| SessionError::Refused { peer, reason })
        }
        Err(error) => Err(error),
        Ok(_) => {
            let detail = "it has opened a session for a question".into();
            Err(SessionError::Hello { peer: to.into(), detail })
        }
    }
}

/// The answer to a hello for `target`, if that is a question. `awaits` finds what awaits a
/// connection to a place, or returns why there is no such place.
pub(super) fn answer(
    target: &str,
    awaits: impl FnOnce(&str) -> Result<Awaits, String>,
) -> Option<String> {
    let json = |told: serde_json::Result<String>| told.unwrap_or_default();
    if let Some(place) = target.strip_prefix(AWAITS) {
        return Some(match awaits(place) {
            Ok(awaits) => json(serde_json::to_string(&OfPlace { awaits })),
            Err(why) => why,
        });
    }
    let asks = target.strip_prefix(DOCTOR)?.bytes().all(|byte| byte == b'.');
    let told = Told { version: env!("CARGO_PKG_VERSION").into(), clock: now() };
    asks.then(|| json(serde_json::to_string(&told)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_question_is_answered() {
        let nowhere = |place: &str| Err(format!("no {place}"));
        let told = answer(&of_doctor(), nowhere).unwrap();
        let told: Told = serde_json::from_str(&told).unwrap();
        assert_eq!(told.version, env!("CARGO_PKG_VERSION"));
        assert!(told.clock > 1_700_000_000_000);
        for other in ["door:49152", "doctor:x", "doctor", "awaits", ""] {
            assert_eq!(answer(other, nowhere), None, "{other}");
        }
        let target = about(Place::Door(49152));
        assert_eq!(answer(&target, nowhere).unwrap(), "no door:49152");
        let told = answer(&target, |_| Ok(Awaits::Vm)).unwrap();
        assert_eq!(told, "{\"awaits\":\"vm\"}");
        assert_eq!(serde_json::from_str::<OfPlace>(&told).unwrap().awaits, Awaits::Vm);
    }
}
