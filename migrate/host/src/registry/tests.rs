mod held;

use super::found::{is_carrier, is_carrier_at, FIRST_WORD};
use super::*;
use crate::carrier::Carrier;
use crate::listener::DoorAddress;
use crate::record::Status;
use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::{chown, MetadataExt};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// The phase before a change, the phase and the status after it.
type Heard = (Option<Phase>, Phase, Option<Status>);

/// Messages of a registry.
#[derive(Default)]
struct Told(Mutex<Vec<Heard>>);

impl Watcher for Told {
    fn changed(&self, before: Option<&Record>, now: &Record) {
        let told = (before.map(|record| record.phase), now.phase, now.status);
        self.0.lock().unwrap().push(told);
    }
}

fn silent() -> Arc<Told> {
    Arc::default()
}

fn wait(done: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(120);
    while !done() {
        assert!(Instant::now() < until, "it does not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn record() -> Record {
    let session = Some("5".repeat(32));
    let (peer, port) = ("b".to_owned(), 49152);
    Record { id: new_id(), peer, port, session, holds_port: true, ..Record::default() }
}

#[test]
fn a_second_service_finds_the_carrier_its_door_and_its_end() {
    let run = tempfile::tempdir().unwrap();
    let told = Arc::new(Told::default());
    let first = Registry::open(run.path(), told.clone()).unwrap();
    let (ours, theirs) = Channel::pair().unwrap();
    let door = TcpListener::bind("127.0.0.1:0").unwrap();
    let door = DoorListener::Tcp(door);
    let address = door.address().unwrap();
    let (links, taken) = mpsc::channel();
    let begin = record();
    first.add(ours, begin.clone()).unwrap();
    let carrier =
        Carrier::start(run.path(), begin.clone(), theirs.into(), Some(door), links).unwrap();
    carrier.update(|record| record.phase = Phase::Active);
    wait(|| first.running().iter().any(|record| record.phase == Phase::Active));
    let place = Place::Door(49152);
    assert!(first.has(Role::Source, Some("b"), place));
    assert!(!first.has(Role::Source, Some("b"), Place::Socket(49152)));
    assert!(!first.has(Role::Source, Some("c"), place));
    assert!(!first.has(Role::Destination, None, place));

    // A carrier that gets no CPU for seconds is found without its door.
    let (second, found) = loop {
        let second = Registry::open(run.path(), silent()).unwrap();
        let found = second.find_again().unwrap();
        assert_eq!(found.running, 1);
        if !found.doors.is_empty() {
            break (second, found);
        }
    };
    assert_eq!(found.doors[0].0, Door { peer: "b".into(), place });
    assert_eq!(found.doors[0].1.address().unwrap(), address);
    // A link reaches it by its session.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let link = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let from = link.local_addr().unwrap();
    let link = second.hand_on(&"6".repeat(32), link, "10.0.0.1:1").unwrap_err();
    second.hand_on(&"5".repeat(32), link, "10.0.0.1:1").unwrap();
    let (link, peer) = taken.recv().unwrap();
    assert_eq!((link.local_addr().unwrap(), peer.as_str()), (from, "10.0.0.1:1"));

    carrier.end(Status::Failed, Some("a reason".into()));
    drop(carrier);
    wait(|| second.running().is_empty() && first.running().is_empty());
    let history = second.history().unwrap();
    assert_eq!(history.len(), 1);
    assert_eq!(history[0].cause.as_deref(), Some("a reason"));
    assert!(history[0].ended.is_some());
    let (opening, active, ended) = (Phase::Opening, Phase::Active, Phase::Ended);
    wait(|| told.0.lock().unwrap().last().is_some_and(|last| last.1 == ended));
    let told: Vec<_> = told.0.lock().unwrap().drain(..).collect();
    assert_eq!(told[0], (None, opening, None), "{told:?}");
    // The carrier says first how it began.
    assert!(told[1..].contains(&(Some(opening), active, None)), "{told:?}");
    let ends: Vec<_> = told.iter().filter(|one| one.1 == ended).collect();
    assert_eq!(ends.len(), 1, "{told:?}");
    assert_eq!(ends[0].2, Some(Status::Failed));
}

#[test]
fn a_carrier_that_was_killed_is_recorded_by_the_service() {
    let run = tempfile::tempdir().unwrap();
    let registry = Registry::open(run.path(), silent()).unwrap();
    let (ours, theirs) = Channel::pair().unwrap();
    let begin = record();
    write_record(&registry.folder, &begin).unwrap();
    registry.add(ours, begin.clone()).unwrap();
    drop(theirs);
    // The service writes the history after it has taken the carrier from its list.
    wait(|| registry.running().is_empty() && registry.history().is_ok_and(|all| all.len() == 1));
    let history = registry.history().unwrap();
    assert!(history[0].cause.as_ref().unwrap().contains("killed"), "{history:?}");

    // The same when no service was there to see it.
    let unseen = record();
    write_record(&registry.folder, &unseen).unwrap();
    assert_eq!(registry.find_again().unwrap().running, 0);
    let history = registry.history().unwrap();
    assert_eq!(history.len(), 2);
    assert_eq!(history[1].status, Some(Status::Failed));
}

#[test]
fn a_message_that_is_not_understood_does_not_end_a_carrier() {
    let run = tempfile::tempdir().unwrap();
    let registry = Registry::open(run.path(), silent()).unwrap();
    let (ours, theirs) = Channel::pair().unwrap();
    let carrier = Channel::from(theirs);
    let begin = record();
    registry.add(ours, begin.clone()).unwrap();
    carrier.send(&"a record of another version", None).unwrap();
    carrier.send(&Record { plain: 7, ..begin.clone() }, None).unwrap();
    wait(|| registry.running().first().is_none_or(|record| record.plain == 7));
    assert!(registry.has(Role::Source, Some("b"), Place::Door(49152)));
    // One whose record cannot be written has told its end all the same.
    let cause = Some("the disk is full".to_owned());
    let end = Record { phase: Phase::Ended, cause: cause.clone(), ..begin };
    carrier.send(&end, None).unwrap();
    drop(carrier);
    wait(|| registry.running().is_empty() && !registry.history().unwrap().is_empty());
    assert_eq!(registry.history().unwrap()[0].cause, cause);
}

#[test]
fn a_carrier_that_is_stopped_holds_up_no_service() {
    let run = tempfile::tempdir().unwrap();
    let registry = Registry::open(run.path(), silent()).unwrap();
    let begin = record();
    write_record(&registry.folder, &begin).unwrap();
    let post = crate::channel::Post::listen(&socket_of(&registry.folder, &begin.id)).unwrap();
    assert_eq!(registry.find_again().unwrap().running, 1);
    assert_eq!(registry.running()[0], begin);
    // It goes on, and is heard. Its door comes with its first message.
    let carrier = post.accept().unwrap();
    let door = TcpListener::bind("127.0.0.1:0").unwrap();
    carrier.send(&Record { plain: 7, ..begin }, Some(door.as_fd())).unwrap();
    wait(|| registry.running()[0].plain == 7);
    let doors = registry.take_doors();
    let [(named, listener)] = &doors[..] else { panic!("{doors:?}") };
    assert_eq!(*named, Door { peer: "b".into(), place: Place::Door(49152) });
    let address = DoorAddress::Tcp(door.local_addr().unwrap());
    assert_eq!(listener.address().unwrap(), address);
    assert!(registry.take_doors().is_empty());
}

/// A service manager waits for a service for 90 s.
#[test]
fn many_carriers_that_are_stopped_hold_up_no_service() {
    const STOPPED: usize = 30;
    let run = tempfile::tempdir().unwrap();
    let registry = Registry::open(run.path(), silent()).unwrap();
    let posts: Vec<_> = (0..STOPPED)
        .map(|_| {
            let begin = record();
            write_record(&registry.folder, &begin).unwrap();
            crate::channel::Post::listen(&socket_of(&registry.folder, &begin.id)).unwrap()
        })
        .collect();
    let begin = Instant::now();
    assert_eq!(registry.find_again().unwrap().running, STOPPED);
    let took = begin.elapsed();
    assert!(took < FIRST_WORD * 15, "each was waited for: {took:?}");
    // All of them are heard when they go on.
    let carriers: Vec<_> = posts.iter().map(|post| post.accept().unwrap()).collect();
    for (carrier, known) in carriers.iter().zip(registry.running()) {
        carrier.send(&Record { plain: 7, ..known }, None).unwrap();
    }
    wait(|| registry.running().iter().all(|record| record.plain == 7));
}

/// A service reads all records before it looks for their carriers.
#[test]
fn a_carrier_that_ends_while_a_service_looks_for_it_keeps_its_outcome() {
    let run = tempfile::tempdir().unwrap();
    let registry = Registry::open(run.path(), silent()).unwrap();
    let begin = record();
    write_record(&registry.folder, &begin).unwrap();
    let read_before = registry.stored().unwrap();
    let (phase, status) = (Phase::Ended, Some(Status::Completed));
    write_record(&registry.folder, &Record { phase, status, ..begin }).unwrap();
    assert_eq!(registry.find_those(read_before).unwrap().running, 0);
    assert_eq!(registry.history().unwrap()[0].status, Some(Status::Completed));
}

/// It was stopped, and as many services as may wait at it have come and gone.
#[test]
fn a_carrier_that_takes_no_further_service_is_not_taken_for_killed() {
    let run = tempfile::tempdir().unwrap();
    let registry = Registry::open(run.path(), silent()).unwrap();
    let begin = record();
    write_record(&registry.folder, &begin).unwrap();
    let path = socket_of(&registry.folder, &begin.id);
    let post = crate::channel::Post::listen(&path).unwrap();
    let mut gone = 0;
    while Channel::connect(&path).is_ok() {
        gone += 1;
        assert!(gone < 100, "any number may wait");
    }
    assert_eq!(registry.find_again().unwrap().running, 1);
    assert!(registry.has(Role::Source, Some("b"), Place::Door(49152)), "its door is free");
    assert!(registry.history().unwrap().is_empty());
    // It goes on, and is heard.
    (0..gone).for_each(|_| drop(post.accept().unwrap()));
    let carrier = post.accept().unwrap();
    carrier.send(&Record { plain: 7, ..begin }, None).unwrap();
    wait(|| registry.running()[0].plain == 7);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let link = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    registry.hand_on(&"5".repeat(32), link, "10.0.0.1:1").unwrap();
    drop(carrier);
    wait(|| registry.running().is_empty());
}

/// The service that started it was killed, and the next one looks before it listens.
#[test]
fn a_carrier_that_does_not_listen_yet_is_not_taken_for_killed() {
    let run = tempfile::tempdir().unwrap();
    let registry = Registry::open(run.path(), silent()).unwrap();
    // It has a carrier's command line.
    let mut process = std::process::Command::new("sh");
    let process = process.args(["-c", "read word", "carry"]).stdin(std::process::Stdio::piped());
    let mut process = process.spawn().unwrap();
    let begin = Record { pid: process.id(), ..record() };
    wait(|| is_carrier(begin.pid));
    write_record(&registry.folder, &begin).unwrap();
    assert_eq!(registry.find_again().unwrap().running, 1);
    assert!(registry.has(Role::Source, Some("b"), Place::Door(49152)), "its door is free");
    let post = crate::channel::Post::listen(&socket_of(&registry.folder, &begin.id)).unwrap();
    let carrier = post.accept().unwrap();
    carrier.send(&Record { plain: 7, ..begin.clone() }, None).unwrap();
    wait(|| registry.running()[0].plain == 7);
    drop((carrier, post));
    wait(|| registry.running().is_empty());
    // One that ends before it listens is recorded as killed.
    let late = Record { id: new_id(), ..begin };
    write_record(&registry.folder, &late).unwrap();
    assert_eq!(registry.find_again().unwrap().running, 1);
    process.kill().unwrap();
    process.wait().unwrap();
    wait(|| registry.running().is_empty() && registry.history().unwrap().len() == 2);
    let history = registry.history().unwrap();
    assert!(history[1].cause.as_ref().unwrap().contains("killed"), "{history:?}");
}

/// The number of a carrier that has gone may be any process's.
#[test]
fn the_command_line_of_another_user_is_not_waited_for() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: needs root, for a folder of another user");
    }
    let proc = tempfile::tempdir().unwrap();
    // A read waits for a writer.
    let command = proc.path().join("cmdline");
    rustix::fs::mkfifoat(rustix::fs::CWD, command, 0o600.into()).unwrap();
    chown(proc.path(), Some(12345), None).unwrap();
    let (told, answer) = mpsc::channel();
    let process = proc.path().to_owned();
    std::thread::spawn(move || told.send(is_carrier_at(&process)));
    assert!(!answer.recv_timeout(Duration::from_secs(60)).expect("it waits"));
}

/// It ends just as a service starts, and answers with its end.
#[test]
fn an_end_that_is_a_carrier_s_first_word_counts_once() {
    let run = tempfile::tempdir().unwrap();
    let told = silent();
    let registry = Registry::open(run.path(), told.clone()).unwrap();
    let begin = record();
    write_record(&registry.folder, &begin).unwrap();
    let post = crate::channel::Post::listen(&socket_of(&registry.folder, &begin.id)).unwrap();
    let status = Some(Status::Completed);
    let end = Record { phase: Phase::Ended, status, holds_port: false, ..begin };
    std::thread::scope(|scope| {
        scope.spawn(|| post.accept().unwrap().send(&end, None).unwrap());
        registry.find_again().unwrap();
    });
    wait(|| registry.running().is_empty() && !registry.history().unwrap().is_empty());
    let ends = || {
        let told = told.0.lock().unwrap();
        told.iter().filter(|one| one.1 == Phase::Ended).count()
    };
    wait(|| ends() > 0);
    assert_eq!(ends(), 1, "{:?}", told.0.lock().unwrap());
    assert_eq!(registry.history().unwrap()[0].status, status);
}

#[test]
fn the_last_hundred_are_stored() {
    let run = tempfile::tempdir().unwrap();
    let registry = Registry::open(run.path(), silent()).unwrap();
    for number in 0..130 {
        let id = format!("{number:013}-1-000");
        write_record(&registry.folder, &Record { id, phase: Phase::Ended, ..record() }).unwrap();
    }
    let history = registry.history().unwrap();
    assert_eq!((history.len(), history[0].id.as_str()), (100, "0000000000030-1-000"));
    registry.prune();
    assert_eq!(fs::read_dir(&registry.folder).unwrap().count(), 100);
    // A file that is no record is no reason to fail.
    fs::write(registry.folder.join("x.json"), "{").unwrap();
    assert_eq!(registry.history().unwrap().len(), 100);
}

#[test]
fn the_folder_is_the_service_s_and_all_may_pass_through_those_above() {
    let above = tempfile::tempdir().unwrap();
    Registry::open(&above.path().join("run/platen/host"), silent()).unwrap();
    let mode = |name: &str| fs::metadata(above.path().join(name)).unwrap().mode() & 0o777;
    assert_eq!(["run", "run/platen"].map(mode), [0o711; 2]);
    assert_eq!(["run/platen/host", "run/platen/host/migrations"].map(mode), [0o700; 2]);
}

/// Before its migration a source was killed, and another one wants the place.
#[test]
fn only_the_carrier_that_holds_the_place_is_told_to_give_way() {
    let run = tempfile::tempdir().unwrap();
    let registry = Registry::open(run.path(), silent()).unwrap();
    let (told, telling) = (Arc::new(Mutex::new(Vec::new())), AtomicUsize::new(0));
    let carrier = |port: u16, role: Role| {
        let (ours, theirs) = Channel::pair().unwrap();
        let place = Some(Place::Door(port));
        let begin = Record { role, port, place, ..record() };
        registry.add(ours, begin.clone()).unwrap();
        let (links, _) = mpsc::channel();
        let carrier = Carrier::start(run.path(), begin, theirs.into(), None, links).unwrap();
        let (told, number) = (told.clone(), telling.fetch_add(1, Ordering::SeqCst));
        carrier.give_way_by(move || told.lock().unwrap().push(number));
        carrier
    };
    let other = carrier(49153, Role::Destination);
    let leaving = carrier(49152, Role::Source);
    let wanted = carrier(49152, Role::Destination);
    registry.give_way(Place::Door(49152));
    wait(|| !told.lock().unwrap().is_empty());
    registry.give_way(Place::Door(49153));
    wait(|| told.lock().unwrap().len() > 1);
    assert_eq!(*told.lock().unwrap(), [2, 0]);
    // One that has freed its place is asked no more.
    wanted.update(|record| record.holds_port = false);
    wait(|| !registry.has(Role::Destination, None, Place::Door(49152)));
    registry.give_way(Place::Door(49152));
    registry.give_way(Place::Door(49153));
    wait(|| told.lock().unwrap().len() > 2);
    assert_eq!(*told.lock().unwrap(), [2, 0, 0]);
    for carrier in [other, leaving, wanted] {
        carrier.end(Status::Completed, None);
    }
}
