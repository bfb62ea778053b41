use super::*;
use std::fs::File;

/// Sessions over a folder with an image `vm`.
fn sessions(patience: Patience) -> (tempfile::TempDir, Sessions) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("vm"), b"PLATENVM").unwrap();
    let take =
        Box::new(|path: &std::path::Path, _| File::open(path).map_err(|error| error.to_string()));
    let folder = Folder::open(dir.path(), take).unwrap();
    (dir, Sessions::new(folder, patience))
}

fn never() -> Patience {
    Patience { closed: Duration::ZERO, lost: Duration::from_secs(1 << 30) }
}

#[test]
fn a_session_lasts_as_long_as_a_connection_and_an_outage() {
    let (_dir, sessions) = sessions(never());
    let mut one = sessions.join([1; 16], 1, &[]).unwrap();
    let two = sessions.join([1; 16], 1, &[]).unwrap();
    let stamp = one.open("vm", Lock::Exclusive).unwrap().stamp;
    one.ends(Ended::Closed);
    drop(one);
    assert_eq!(sessions.count(), 1);
    let mut two = two;
    assert!(two.file(stamp).is_some());
    two.ends(Ended::Lost);
    drop(two);
    // The network is down: the file is still open.
    assert_eq!(sessions.count(), 1);
    let mut again = sessions.join([1; 16], 1, &[]).unwrap();
    assert!(again.file(stamp).is_some());
    drop(again);
    assert_eq!(sessions.count(), 0);
    assert!(sessions.join([1; 16], 1, &[]).unwrap().file(stamp).is_none());
}

#[test]
fn a_process_that_is_done_takes_its_lost_connections_with_it() {
    let (_dir, sessions) = sessions(never());
    let mut stale = sessions.join([1; 16], 1, &[]).unwrap();
    let mut last = sessions.join([1; 16], 1, &[]).unwrap();
    let mut other = sessions.join([1; 16], 2, &[]).unwrap();
    last.ends(Ended::Done);
    drop(last);
    assert_eq!(sessions.count(), 1);
    other.ends(Ended::Done);
    drop(other);
    assert_eq!(sessions.count(), 0);
    stale.ends(Ended::Lost);
    drop(stale);
    assert_eq!(sessions.count(), 0);
}

#[test]
fn a_file_is_open_once_for_each_lock() {
    let (_dir, sessions) = sessions(never());
    let mut one = sessions.join([1; 16], 1, &[]).unwrap();
    let mut two = sessions.join([1; 16], 2, &[]).unwrap();
    let file = one.open("vm", Lock::Exclusive).unwrap();
    assert!(Arc::ptr_eq(&file, &two.open("vm", Lock::Exclusive).unwrap()));
    assert!(Arc::ptr_eq(&file, &two.open("vm", Lock::None).unwrap()));
    assert!(!Arc::ptr_eq(&file, &two.open("vm", Lock::Shared).unwrap()));
    assert_eq!(one.open("none", Lock::None).unwrap_err().0, Status::NotFound);
}

/// Otherwise another restore could have the image before the one that had its lock.
#[test]
fn a_new_server_gives_locks_to_the_sessions_of_the_former_one_first() {
    const TIME: Duration = Duration::from_secs(600);
    let (_dir, sessions) = sessions(never());
    let begin = Instant::now();
    let sessions = sessions.returning_for(TIME);
    let new = sessions.join([1; 16], 1, &[]).unwrap();
    let mut old = sessions.join([2; 16], 1, &[]).unwrap();
    assert!(sessions.waits(&new.session, begin) >= TIME);
    assert!(sessions.waits(&old.session, begin) >= TIME);
    assert!(old.file(7).is_none());
    assert_eq!(sessions.waits(&old.session, begin), Duration::ZERO);
    // This would wait otherwise.
    old.open("vm", Lock::Exclusive).unwrap();
    assert_eq!(sessions.waits(&new.session, Instant::now() + TIME), Duration::ZERO);
}

#[test]
fn sessions_are_bounded_and_of_one_peer() {
    let (_dir, sessions) = sessions(never());
    let peer = ["b".to_owned()];
    let _one = sessions.join([1; 16], 1, &peer).unwrap();
    assert!(sessions.join([1; 16], 2, &[]).unwrap_err().contains("another host"));
    let all: Vec<_> = (2..=MAX_SESSIONS)
        .map(|nth| sessions.join([u8::try_from(nth).unwrap(); 16], 1, &peer).unwrap())
        .collect();
    assert!(sessions.join([0; 16], 1, &peer).unwrap_err().contains("64"));
    drop(all);
    sessions.join([0; 16], 1, &peer).unwrap();
}
