//! The ends of a session: reports, and the reason of an early one.

use super::{join, End, Seen, RESUME};
use session::SessionError;

fn report(from: &End, to: &End, report: Vec<u8>) -> Vec<u8> {
    from.session.send_finish(report);
    match to.next() {
        Seen::Finish(report) => report,
        seen => panic!("{seen:?}"),
    }
}

/// As with an accelerator and a report that lists each of many codec threads.
#[test]
fn a_report_too_long_for_a_frame_is_left_out_and_the_session_ends_well() {
    let (one, other) = (End::new("other", 1, RESUME), End::new("one", 1, RESUME));
    join(&one, &other, 0);
    assert_eq!(report(&one, &other, vec![b' '; 20_000]), b"{}");
    let longest = vec![b' '; session::MAX_FREE_PAYLOAD];
    assert!(report(&other, &one, longest.clone()) == longest);
}

/// As of an error that quotes a file name or a peer's words.
#[test]
fn a_reason_of_any_characters_fits_into_an_abort() {
    for text in ["\u{1}", "\"\n\\", "\u{7f}ü€", "a\u{1b}[31m"] {
        let reason = text.repeat(20_000);
        let (one, other) = (End::new("other", 1, RESUME), End::new("one", 1, RESUME));
        join(&one, &other, 0);
        one.session.fail(SessionError::Local { reason: reason.clone() });
        let closed = other.closed();
        let (_, arrived) = closed.split_once("one ended the migration: ").expect(&closed);
        assert!(reason.starts_with(arrived) && arrived.len() > 600, "{} bytes", arrived.len());
    }
}
