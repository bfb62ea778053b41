//! The doors that carriers have.

use super::*;

/// A carrier of a forwarded connection lives as long as that connection.
#[test]
fn only_a_carrier_with_a_listening_socket_holds_its_door() {
    let run = tempfile::tempdir().unwrap();
    let registry = Registry::open(run.path(), silent()).unwrap();
    let (ours, _forwards) = Channel::pair().unwrap();
    registry.add(ours, Record { holds_port: false, ..record() }).unwrap();
    assert!(registry.held().is_empty(), "{:?}", registry.held());

    // A migration in doubt accepts nothing, and has the socket still.
    let (ours, theirs) = Channel::pair().unwrap();
    let begin = record();
    registry.add(ours, begin.clone()).unwrap();
    let door = HashSet::from([Door { peer: "b".into(), place: Place::Door(49152) }]);
    assert_eq!((registry.held(), registry.lent()), (door.clone(), door.clone()));
    let carrier = Channel::from(theirs);
    let now = Record { holds_port: false, ..begin.clone() };
    carrier.send(&now, None).unwrap();
    wait(|| registry.lent().is_empty());
    assert_eq!(registry.held(), door);

    // The next service gets it from the carrier.
    write_record(&registry.folder, &begin).unwrap();
    let post = crate::channel::Post::listen(&socket_of(&registry.folder, &begin.id)).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let tell = now.clone();
    let told = std::thread::spawn(move || {
        let carrier = post.accept().unwrap();
        carrier.send(&tell, Some(listener.as_fd())).unwrap();
        (post, carrier)
    });
    let next = Registry::open(run.path(), silent()).unwrap();
    assert_eq!(next.find_again().unwrap().running, 1);
    wait(|| next.held() == door);
    let _carrier = told.join().unwrap();
}
