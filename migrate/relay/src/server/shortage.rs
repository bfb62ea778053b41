//! A shortage of this host that keeps connections out, for its user.

use std::error::Error;
use std::io::{self, ErrorKind};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often a shortage is reported at most. Connections that are turned away free descriptors, and
/// the next ones take these: a shortage may come back many times a second.
const AGAIN: Duration = Duration::from_secs(10);

/// Reports shortages, at intervals.
#[derive(Debug, Default)]
pub(super) struct Shortage(Mutex<Option<Instant>>);

impl Shortage {
    /// Reports `error`, for which a connection was not accepted or not served, unless a report was
    /// made a short time ago.
    pub(super) fn report(&self, error: &dyn Error, notice: impl FnOnce(&str)) {
        {
            let mut reported = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if reported.is_some_and(|at| at.elapsed() < AGAIN) {
                return;
            }
            *reported = Some(Instant::now());
        }
        let cause = error.source().map_or(String::new(), |cause| format!(": {cause}"));
        notice(&format!("cannot accept a link ({error}{cause}); trying again"));
    }
}

/// Whether an error of `accept` says that this host is short of something, perhaps only for a
/// moment. The others concern one connection, or none.
pub(super) fn is_shortage(error: &io::Error) -> bool {
    !matches!(
        error.kind(),
        ErrorKind::WouldBlock | ErrorKind::ConnectionAborted | ErrorKind::Interrupted
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::RelayError;

    #[test]
    fn a_shortage_that_comes_back_at_once_is_reported_once() {
        let (shortage, mut said) = (Shortage::default(), Vec::new());
        for _ in 0..3 {
            let source = io::Error::other("no memory");
            let error = RelayError::Resource { what: "cannot start a thread".into(), source };
            shortage.report(&error, |text| said.push(text.to_owned()));
        }
        assert_eq!(said, ["cannot accept a link (cannot start a thread: no memory); trying again"]);
    }

    #[test]
    fn a_connection_that_was_reset_is_no_shortage() {
        assert!(!is_shortage(&ErrorKind::ConnectionAborted.into()));
        assert!(is_shortage(&io::Error::from_raw_os_error(
            rustix::io::Errno::MFILE.raw_os_error()
        )));
    }
}
