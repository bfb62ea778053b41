//! The end of the process. Nothing here waits for a thread that is in a call of an accelerator's
//! library.

use std::process::ExitCode;

/// Passes the status of the process on to `main`. If a thread may be stuck in the QAT library, ends
/// the process here, without that library's exit handlers: they may wait for the thread.
pub(crate) fn with(code: ExitCode) -> ExitCode {
    if qat::is_stuck() {
        qat::end_process(number(code));
    }
    code
}

/// Ends the process from any of its threads.
pub(crate) fn now(code: u8) -> ! {
    if qat::is_stuck() {
        qat::end_process(code);
    }
    std::process::exit(code.into())
}

/// The status as a number, which `ExitCode` does not give.
fn number(code: ExitCode) -> u8 {
    (0..=u8::MAX).find(|&number| ExitCode::from(number) == code).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_has_its_number() {
        for code in 0..=u8::MAX {
            assert_eq!(number(ExitCode::from(code)), code);
        }
        assert_eq!(number(ExitCode::SUCCESS), 0);
        assert_ne!(number(ExitCode::FAILURE), 0);
    }
}
