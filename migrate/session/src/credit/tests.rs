use super::*;

fn credits() -> Credits {
    Credits::new(Grants { chunk_bytes: 1 << 19, stream_frames: 2, shared_frames: 3 })
}

fn ack(header: &Header) -> AckEntry {
    let offset = header.offset + u64::from(header.plain_len);
    AckEntry { stream: header.stream, seq: header.seq + 1, offset, hash: header.hash }
}

fn try_room(credits: &Credits, stream: u16) -> Option<usize> {
    credits.lock().room(stream, &credits.grants)
}

#[test]
fn a_blocked_stream_does_not_use_the_credit_of_others() {
    let credits = credits();
    credits.issue(0, FrameType::Open, 0).unwrap();
    credits.issue(1, FrameType::Open, 1).unwrap();
    let mut taken = 0;
    while try_room(&credits, 0).is_some() {
        let permit = credits.permit(0).unwrap();
        let bytes = permit.bytes;
        credits.issue_data(permit, bytes, 1, 0);
        taken += 1;
        assert!(taken < 100);
    }
    assert!(taken >= 2);
    for _ in 0..1 {
        let permit = credits.permit(1).unwrap();
        let bytes = permit.bytes;
        credits.issue_data(permit, bytes, 2, 0);
    }
}

/// The receiver still has the frames of a stream that has ended: they use its buffers as before
/// (W13).
#[test]
fn frames_of_a_stream_that_has_ended_use_the_shared_credit_until_they_are_acknowledged() {
    let credits = credits();
    let full = |stream| {
        let permits = std::iter::from_fn(|| credits.permit_beyond_window(stream));
        permits.map(|permit| credits.issue_data(permit, 1000, 1, 0)).collect::<Vec<_>>()
    };
    credits.issue(0, FrameType::Open, 0).unwrap();
    credits.issue(1, FrameType::Open, 1).unwrap();
    // Its own two, and all that are shared.
    let first = full(0);
    assert_eq!(first.len(), 5);
    credits.issue(0, FrameType::Eof, 0).unwrap();
    assert_eq!(full(1).len(), 2, "more than the receiver has buffers for");
    credits.acknowledge(&ack(&first[2]), Instant::now()).unwrap();
    assert_eq!(full(1).len(), 3);
}

#[test]
fn acknowledgements_return_credit_and_are_compared() {
    let credits = credits();
    credits.issue(0, FrameType::Open, 0).unwrap();
    let first = credits.permit(0).unwrap();
    let header = credits.issue_data(first, 1000, 77, 0);
    let second = credits.permit(0).unwrap();
    let header2 = credits.issue_data(second, 500, 78, 0);
    assert_eq!((header2.seq, header2.offset), (2, 1000));
    credits.acknowledge(&ack(&header), Instant::now()).unwrap();
    assert_eq!(credits.flow().0, 500);
    // Late and out of order: adds nothing.
    credits
        .acknowledge(&AckEntry { stream: 0, seq: 1, offset: 9, hash: 9 }, Instant::now())
        .unwrap();
    let mut wrong = ack(&header2);
    wrong.hash ^= 1;
    assert!(matches!(
        credits.acknowledge(&wrong, Instant::now()),
        Err(SessionError::HashMismatch { stream: 0, seq: 2, .. })
    ));
}

#[test]
fn an_ack_of_another_number_of_bytes_is_refused_by_number() {
    for theirs in [0, 999, 1001, u64::MAX] {
        let credits = credits();
        credits.issue(0, FrameType::Open, 0).unwrap();
        let header = credits.issue_data(credits.permit(0).unwrap(), 1000, 77, 0);
        let entry = AckEntry { offset: theirs, ..ack(&header) };
        let error = credits.acknowledge(&entry, Instant::now()).unwrap_err();
        assert!(matches!(error, SessionError::AckOffset { ours: 1000, .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("1000") && text.contains(&theirs.to_string()), "{text}");
    }
}

/// The success of a destination is not passed on for bytes about which the ends disagree (W15,
/// W22).
#[test]
fn what_a_refused_ack_acknowledges_stays_unacknowledged() {
    let wrong: [fn(&mut AckEntry); 2] = [|entry| entry.hash ^= 1, |entry| entry.offset += 1];
    for change in wrong {
        let credits = credits();
        credits.issue(0, FrameType::Open, 0).unwrap();
        let header = credits.issue_data(credits.permit(0).unwrap(), 1000, 77, 0);
        let mut entry = ack(&header);
        change(&mut entry);
        credits.acknowledge(&entry, Instant::now()).unwrap_err();
        assert!(!credits.drained(Instant::now()));
        credits.close();
        assert!(!credits.drained(Instant::now()));
        assert_eq!(credits.flow().0, 1000);
    }
}

#[test]
fn the_last_delay_is_that_of_the_bytes_delivered_last() {
    let credits = credits();
    credits.issue(0, FrameType::Open, 0).unwrap();
    let sent = |bytes| credits.issue_data(credits.permit(0).unwrap(), bytes, 1, 0);
    let (first, second) = (sent(1000), sent(500));
    assert_eq!(credits.last_delay(), Duration::ZERO);
    let hours = |n: u64| Duration::from_secs(3600 * n);
    credits.acknowledge(&ack(&first), Instant::now() + hours(2)).unwrap();
    assert!((hours(2)..hours(3)).contains(&credits.last_delay()));
    credits.acknowledge(&ack(&second), Instant::now() + hours(5)).unwrap();
    assert!((hours(5)..hours(6)).contains(&credits.last_delay()));
    // A frame without bytes does not change the delay.
    let eof = credits.issue(0, FrameType::Eof, 0).unwrap();
    credits.acknowledge(&ack(&eof), Instant::now() + hours(9)).unwrap();
    assert!((hours(5)..hours(6)).contains(&credits.last_delay()));
}

#[test]
fn an_ack_of_bytes_never_sent_is_refused() {
    let credits = credits();
    let open = credits.issue(0, FrameType::Open, 0).unwrap();
    let mut entry = ack(&open);
    entry.seq = 2;
    assert!(matches!(
        credits.acknowledge(&entry, Instant::now()),
        Err(SessionError::AckBeyond { stream: 0, seq: 2, sent: 1 })
    ));
}

#[test]
fn drained_means_every_frame_of_every_stream() {
    let credits = credits();
    let soon = || Instant::now() + Duration::from_millis(20);
    let open = credits.issue(0, FrameType::Open, 0).unwrap();
    assert!(!credits.drained(soon()));
    credits.acknowledge(&ack(&open), Instant::now()).unwrap();
    assert!(credits.drained(soon()));
    // Bytes that were read, and are no frame yet.
    let permit = credits.permit(0).unwrap();
    assert!(!credits.drained(soon()));
    credits.give_back(permit);
    assert!(credits.drained(soon()));
    let permit = credits.permit(0).unwrap();
    let data = credits.issue_data(permit, 10, 1, 0);
    assert!(!credits.drained(soon()));
    credits.acknowledge(&ack(&data), Instant::now()).unwrap();
    assert!(credits.drained(soon()));
}

#[test]
fn closing_wakes_a_waiting_reader() {
    let credits = std::sync::Arc::new(credits());
    credits.issue(0, FrameType::Open, 0).unwrap();
    while try_room(&credits, 0).is_some() {
        let permit = credits.permit(0).unwrap();
        let bytes = permit.bytes;
        credits.issue_data(permit, bytes, 1, 0);
    }
    let waiting = {
        let credits = credits.clone();
        std::thread::spawn(move || credits.permit(0).is_none())
    };
    credits.close();
    assert!(waiting.join().unwrap());
}
