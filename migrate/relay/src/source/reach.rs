//! Opens link 0, with patience for a peer that is not up yet or is busy.

use super::config::SourceConfig;
use crate::error::error_chain;
use session::{dial, Hello, Link, SessionError, Welcome};
use std::time::{Duration, Instant};
use tls::TlsError;

/// Pause between two attempts to reach a peer.
const REDIAL: Duration = Duration::from_millis(250);

/// Whether TLS was not done in time, because the peer is busy or this host is, or the hello came
/// too late for the peer. The peer has read no hello, so the attempt has opened no session.
fn is_late(error: &SessionError) -> bool {
    matches!(error, SessionError::Tls(TlsError::Late { .. }) | SessionError::HelloLate { .. })
}

/// Opens link 0. Tries again only after failures that come before the peer has read the hello. If a
/// peer has read it all the same, it refuses the same session a second time.
///
/// # Errors
/// The last attempt's.
pub(super) fn dial_patiently(
    config: &SourceConfig,
    hello: &Hello,
    notice: &mut dyn FnMut(&str),
) -> Result<(Link, Welcome), SessionError> {
    let begun = Instant::now();
    let mut said = Vec::new();
    loop {
        let error = match dial(&config.peer, config.connector.as_ref(), hello) {
            Ok(opened) => return Ok(opened),
            Err(error) => error,
        };
        let (patience, hope) = match &error {
            SessionError::Connect { .. } => (config.connect_timeout, "to come up"),
            late if is_late(late) => (config.answer_timeout, "to answer"),
            _ => return Err(error),
        };
        if begun.elapsed() + REDIAL >= patience {
            return Err(error);
        }
        if !said.contains(&hope) {
            said.push(hope);
            let (cause, seconds) = (error_chain(&error), patience.as_secs());
            notice(&format!("{cause}; waiting up to {seconds} s for it {hope}"));
        }
        std::thread::sleep(REDIAL);
    }
}
