//! The reports at the end of a session.

use super::{join, End, Seen, RESUME};

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
