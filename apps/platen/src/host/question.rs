//! The question of another host's `platen doctor`, and its answer.
//!
//! The question is a hello for a target of this name, which opens nothing; the reason of the
//! refusal is the answer.

use host::now;
use serde::{Deserialize, Serialize};

/// The target that asks.
const TARGET: &str = "doctor:";
/// Bytes that the target's name is filled up with: more than a packet of 1500 takes at once, and
/// with one of 9000 it is one packet that is larger than those of 1500.
const FILL: usize = 6000;

/// A service's answer about itself.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Told {
    pub(super) version: String,
    /// Milliseconds since 1970.
    pub(super) clock: u64,
}

/// The target that asks, as long as packets of full size need.
pub(super) fn target() -> String {
    format!("{TARGET}{}", ".".repeat(FILL))
}

/// The answer to a hello for this target, if it is one that asks.
pub(super) fn answer(target: &str) -> Option<String> {
    let asks = target.strip_prefix(TARGET)?.bytes().all(|byte| byte == b'.');
    let told = Told { version: env!("CARGO_PKG_VERSION").into(), clock: now() };
    asks.then(|| serde_json::to_string(&told).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_question_is_answered() {
        let told: Told = serde_json::from_str(&answer(&target()).unwrap()).unwrap();
        assert_eq!(told.version, env!("CARGO_PKG_VERSION"));
        assert!(told.clock > 1_700_000_000_000);
        for other in ["door:49152", "doctor:x", "doctor", ""] {
            assert_eq!(answer(other), None, "{other}");
        }
    }
}
