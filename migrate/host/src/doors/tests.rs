use super::sort::UNDECIDED;
use super::*;
use crate::listener::{ACCEPTS, BUFFER};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::ops::RangeInclusive;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;

/// An address of this process: the same tests may run in another one at the same time.
fn peer() -> Ipv4Addr {
    let [_, a, b, c] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, 81 + a % 16, b, c)
}

fn tcp(ports: RangeInclusive<u16>) -> Vec<(Door, DoorAddress)> {
    let door = |port| Door { peer: "b".into(), place: Place::Door(port) };
    ports.map(|port| (door(port), DoorAddress::Tcp((peer(), port).into()))).collect()
}

fn stream(socket: &QemuSocket) -> &TcpStream {
    let QemuSocket::Tcp(socket) = socket else { panic!("no TCP: {socket:?}") };
    socket
}

#[derive(Default)]
struct Keeper {
    migrations: Vec<(Door, Vec<QemuSocket>)>,
    strangers: Vec<(QemuSocket, String)>,
    silent: Vec<QemuSocket>,
    refused: Vec<String>,
    shut: Vec<String>,
    lent: HashSet<Door>,
    /// The doors that carriers have, beside those.
    in_doubt: HashSet<Door>,
    /// The answers of the other host, in turn; the last one stays.
    answers: Vec<Option<Awaits>>,
}

impl Doorkeeper for Keeper {
    fn lent(&self) -> HashSet<Door> {
        self.lent.clone()
    }
    fn held(&self) -> HashSet<Door> {
        self.lent.union(&self.in_doubt).cloned().collect()
    }
    fn migration(&mut self, door: &Door, _: &DoorListener, all: Vec<QemuSocket>) {
        self.migrations.push((door.clone(), all));
    }
    fn awaits(&mut self, _: &Door, _: &QemuSocket, _: Instant) -> Option<Awaits> {
        match &mut self.answers[..] {
            [] => Some(Awaits::Unknown),
            [last] => *last,
            _ => self.answers.remove(0),
        }
    }
    fn silent(&mut self, _: &Door, connection: QemuSocket) {
        self.silent.push(connection);
    }
    fn stranger(&mut self, _: &Door, connection: QemuSocket, why: &str) {
        self.strangers.push((connection, why.into()));
    }
    fn refused(&mut self, _: &Door, why: &str) {
        self.refused.push(why.into());
    }
    fn shut(&mut self, _: &Door, why: &str) {
        self.shut.push(why.into());
    }
}

fn doors(port: u16, users: &[u32]) -> (Doors, Keeper) {
    let mut doors = Doors::new(tcp(port..=port), Vec::new(), AllowedUsers(users.into()));
    let mut keeper = Keeper::default();
    doors.turn(Duration::ZERO, &mut keeper).unwrap();
    assert_eq!(doors.open(), 1, "{:?}", keeper.shut);
    (doors, keeper)
}

fn me() -> u32 {
    std::fs::metadata("/proc/self").unwrap().uid()
}

/// Turns until `done`.
fn turn(doors: &mut Doors, keeper: &mut Keeper, done: impl Fn(&Keeper) -> bool) {
    let until = Instant::now() + Duration::from_secs(120);
    while !done(keeper) {
        assert!(Instant::now() < until, "it does not happen");
        doors.turn(Duration::from_millis(50), keeper).unwrap();
    }
}

/// Turns until a connection waits at that door.
fn someone_waits(doors: &mut Doors, keeper: &mut Keeper, nth: usize) {
    let until = Instant::now() + Duration::from_secs(120);
    while doors.doors[nth].waiting.is_empty() {
        assert!(Instant::now() < until, "nobody comes");
        doors.turn(Duration::from_millis(20), keeper).unwrap();
    }
}

#[test]
fn all_connections_of_a_migration_are_handed_over_in_their_order() {
    let (mut doors, mut keeper) = doors(20_001, &[me()]);
    // A VM is awaited for a minute, however late this test writes its first bytes.
    keeper.answers = vec![Some(Awaits::Vm)];
    let connect = || TcpStream::connect((peer(), 20_001)).unwrap();
    let (mut main, mut channel, preempt) = (connect(), connect(), connect());
    // The channel's bytes come first.
    channel.write_all(&0x1122_3344_u32.to_be_bytes()).unwrap();
    doors.turn(Duration::from_millis(100), &mut keeper).unwrap();
    doors.turn(Duration::from_millis(100), &mut keeper).unwrap();
    assert!(keeper.migrations.is_empty());
    main.write_all(b"QEVM\0\0\0\x03").unwrap();
    turn(&mut doors, &mut keeper, |keeper| !keeper.migrations.is_empty());
    let (door, sockets) = &keeper.migrations[0];
    assert_eq!((door.peer.as_str(), door.place), ("b", Place::Door(20_001)));
    for socket in sockets {
        // The kernel doubles it, for its own bookkeeping.
        let size = rustix::net::sockopt::socket_recv_buffer_size(socket).unwrap();
        assert_eq!(size, 2 * BUFFER);
    }
    let there = sockets.iter().map(|socket| stream(socket).peer_addr().unwrap());
    let here = [&main, &channel, &preempt].map(|socket| socket.local_addr().unwrap());
    assert_eq!(there.collect::<Vec<_>>(), here);
    // Nothing was read.
    let mut first = [0; 8];
    { &sockets[0] }.read_exact(&mut first).unwrap();
    assert_eq!(&first, b"QEVM\0\0\0\x03");
    // The carrier has the door now: the next connection is not the service's.
    keeper.lent = HashSet::from([doors.doors[0].door.clone()]);
    let mut late = connect();
    late.write_all(b"QEVM\0\0\0\x03").unwrap();
    for _ in 0..3 {
        doors.turn(Duration::from_millis(20), &mut keeper).unwrap();
    }
    assert_eq!(keeper.migrations.len(), 1);
    keeper.lent.clear();
    turn(&mut doors, &mut keeper, |keeper| keeper.migrations.len() == 2);
}

/// A source opens its channels behind its main connection, so those that it has closed and that
/// came before the main connection are of a migration that was cancelled.
#[test]
fn a_migration_gets_no_channel_that_a_cancelled_one_has_left() {
    let (mut doors, mut keeper) = doors(20_010, &[me()]);
    keeper.answers = vec![Some(Awaits::Vm)];
    let connect = || TcpStream::connect((peer(), 20_010)).unwrap();
    let channel = || {
        let mut channel = connect();
        channel.write_all(&[0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1]).unwrap();
        channel
    };
    let (left, open) = (channel(), channel());
    someone_waits(&mut doors, &mut keeper, 0);
    drop(left);
    // Its end comes after its bytes.
    turn(&mut doors, &mut keeper, |_| true);
    std::thread::sleep(Duration::from_millis(100));
    let (mut main, own) = (connect(), channel());
    // A whole channel can be there at once.
    own.shutdown(std::net::Shutdown::Write).unwrap();
    main.write_all(b"QEVM\0\0\0\x03").unwrap();
    turn(&mut doors, &mut keeper, |keeper| !keeper.migrations.is_empty());
    let there: Vec<_> =
        keeper.migrations[0].1.iter().map(|socket| stream(socket).peer_addr().unwrap()).collect();
    assert_eq!(there, [&open, &main, &own].map(|socket| socket.local_addr().unwrap()));
}

/// It has pages of a VM: it is no stranger, which may go on without encryption and to any QEMU.
#[test]
fn a_channel_without_its_migration_is_reset_and_never_a_stranger() {
    let (mut doors, mut keeper) = doors(20_011, &[me()]);
    let mut channel = TcpStream::connect((peer(), 20_011)).unwrap();
    channel.write_all(&[0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1]).unwrap();
    someone_waits(&mut doors, &mut keeper, 0);
    let waiting = &mut doors.doors[0].waiting[0];
    waiting.since = waiting.since.checked_sub(UNDECIDED).unwrap();
    turn(&mut doors, &mut keeper, |keeper| {
        !keeper.refused.is_empty() || !keeper.strangers.is_empty()
    });
    assert!(keeper.strangers.is_empty(), "{:?}", keeper.strangers);
    assert!(keeper.refused[0].contains("multifd"), "{:?}", keeper.refused);
    assert_eq!(channel.read(&mut [0; 1]).unwrap_err().kind(), ErrorKind::ConnectionReset);
}

#[test]
fn what_is_no_migration_is_told_apart_and_nothing_of_it_read() {
    let (mut doors, mut keeper) = doors(20_002, &[me()]);
    let mut client = TcpStream::connect((peer(), 20_002)).unwrap();
    client.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
    turn(&mut doors, &mut keeper, |keeper| !keeper.strangers.is_empty());
    let (socket, why) = &mut keeper.strangers[0];
    assert!(why.contains("47, 45, 54"), "{why}");
    let mut got = [0; 18];
    { &*socket }.read_exact(&mut got).unwrap();
    assert!(keeper.migrations.is_empty());
}

#[test]
fn a_client_that_waits_for_its_server_is_told_apart_with_nothing_read() {
    let (mut doors, mut keeper) = doors(20_007, &[me()]);
    let mut client = TcpStream::connect((peer(), 20_007)).unwrap();
    turn(&mut doors, &mut keeper, |keeper| !keeper.silent.is_empty());
    client.write_all(b"NBD").unwrap();
    let mut got = [0; 3];
    { &keeper.silent[0] }.read_exact(&mut got).unwrap();
    assert!(&got == b"NBD" && keeper.strangers.is_empty() && keeper.migrations.is_empty());
}

#[test]
fn what_the_other_host_awaits_tells_a_late_migration_from_a_client() {
    let (mut doors, mut keeper) = doors(20_008, &[me()]);
    keeper.answers = vec![None, None, Some(Awaits::Vm)];
    let connect = || TcpStream::connect((peer(), 20_008)).unwrap();
    let (mut source, mut channel) = (connect(), connect());
    channel.write_all(&[0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1]).unwrap();
    let until = Instant::now() + Duration::from_secs(120);
    let is_known = |one: &Waiting| one.awaited == Some(Awaits::Vm);
    while doors.doors[0].waiting.iter().filter(|one| is_known(one)).count() < 2 {
        assert!(Instant::now() < until, "it is not asked for");
        doors.turn(Duration::from_millis(20), &mut keeper).unwrap();
    }
    // It is asked again, and has not answered yet.
    keeper.answers = vec![None];
    // Far longer than a connection of which nothing is known may be silent.
    for one in &mut doors.doors[0].waiting {
        one.since = one.since.checked_sub(Duration::from_secs(30)).unwrap();
    }
    doors.turn(Duration::from_millis(20), &mut keeper).unwrap();
    assert!(keeper.silent.is_empty() && keeper.strangers.is_empty());
    source.write_all(b"QEVM\0\0\0\x03").unwrap();
    turn(&mut doors, &mut keeper, |keeper| !keeper.migrations.is_empty());
    assert_eq!(keeper.migrations[0].1.len(), 2, "the channel still waited");
    // A client's goes on as soon as that is known, and not before.
    keeper.answers = vec![None, Some(Awaits::Clients)];
    let _client = connect();
    turn(&mut doors, &mut keeper, |keeper| !keeper.silent.is_empty());
    assert_eq!(keeper.answers.len(), 1, "it was not asked for");
}

#[test]
fn a_migration_by_another_way_is_refused_while_one_has_the_door() {
    let (mut doors, mut keeper) = doors(20_009, &[me()]);
    // A VM is awaited for a minute, however late this test writes its first bytes.
    keeper.answers = vec![Some(Awaits::Vm)];
    let mut second = TcpStream::connect((peer(), 20_009)).unwrap();
    someone_waits(&mut doors, &mut keeper, 0);
    // The first one began in the same turn, and has the door now.
    keeper.lent = HashSet::from([doors.doors[0].door.clone()]);
    second.write_all(b"QEVM\0\0\0\x03").unwrap();
    turn(&mut doors, &mut keeper, |keeper| !keeper.refused.is_empty());
    assert!(keeper.refused[0].contains("another way"), "{:?}", keeper.refused);
    assert!(keeper.migrations.is_empty());
    assert_eq!(second.read(&mut [0; 1]).unwrap_err().kind(), ErrorKind::ConnectionReset);
}

#[test]
fn a_user_who_may_not_migrate_is_reset_at_once() {
    let (mut doors, mut keeper) = doors(20_003, &[me() + 1]);
    let mut client = TcpStream::connect((peer(), 20_003)).unwrap();
    turn(&mut doors, &mut keeper, |keeper| !keeper.refused.is_empty());
    assert!(keeper.refused[0].contains("allow_users"), "{:?}", keeper.refused);
    let error = client.read(&mut [0; 1]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

#[test]
fn a_door_that_another_has_is_said_once_and_opened_later() {
    let other = TcpListener::bind((peer(), 20_004)).unwrap();
    let mut doors = Doors::new(tcp(20_004..=20_004), Vec::new(), AllowedUsers::default());
    let mut keeper = Keeper::default();
    for _ in 0..3 {
        doors.turn(Duration::ZERO, &mut keeper).unwrap();
        std::thread::sleep(AGAIN);
    }
    assert_eq!(keeper.shut.len(), 1, "{:?}", keeper.shut);
    drop(other);
    let until = Instant::now() + Duration::from_secs(60);
    while doors.open() == 0 {
        assert!(Instant::now() < until);
        doors.turn(Duration::from_millis(50), &mut keeper).unwrap();
    }
}

/// A carrier that did not answer a new service in time has the door.
#[test]
fn a_door_that_a_carrier_sends_late_is_open_again() {
    let mut wanted = tcp(20_012..=20_012);
    let mut doors = Doors::new(wanted.clone(), Vec::new(), AllowedUsers(vec![me()]));
    let (door, address) = wanted.remove(0);
    let carrier = DoorListener::open(&address, &AllowedUsers::default()).unwrap();
    let mut keeper = Keeper::default();
    doors.turn(Duration::ZERO, &mut keeper).unwrap();
    assert_eq!((doors.open(), keeper.shut.len()), (0, 1));
    doors.adopt(vec![(door, carrier.try_clone().unwrap())]);
    assert_eq!(doors.open(), 1);
    let mut main = TcpStream::connect((peer(), 20_012)).unwrap();
    main.write_all(b"QEVM\0\0\0\x03").unwrap();
    turn(&mut doors, &mut keeper, |keeper| !keeper.migrations.is_empty());
}

#[test]
fn a_unix_door_takes_a_migration_with_all_its_connections_and_refuses_other_users() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sockets/b/1");
    let door = Door { peer: "b".into(), place: Place::Socket(1) };
    let wanted = [(door.clone(), DoorAddress::Unix(path.clone()))];
    let mut doors = Doors::new(wanted.clone(), Vec::new(), AllowedUsers(vec![me()]));
    let mut keeper = Keeper::default();
    doors.turn(Duration::ZERO, &mut keeper).unwrap();
    assert_eq!(doors.open(), 1, "{:?}", keeper.shut);
    let connect = || UnixStream::connect(&path).unwrap();
    let (mut main, mut channel) = (connect(), connect());
    channel.write_all(&0x1122_3344_u32.to_be_bytes()).unwrap();
    main.write_all(b"QEVM\0\0\0\x03").unwrap();
    turn(&mut doors, &mut keeper, |keeper| !keeper.migrations.is_empty());
    assert_eq!((&keeper.migrations[0].0, keeper.migrations[0].1.len()), (&door, 2));
    // A user who is not allowed any more; the right to the file is another matter for root.
    doors.change(wanted, AllowedUsers(vec![me() + 1]), &keeper.held());
    let _late = UnixStream::connect(&path);
    turn(&mut doors, &mut keeper, |keeper| !keeper.refused.is_empty());
    assert!(keeper.refused[0].contains("allow_users"), "{:?}", keeper.refused);
}

#[test]
fn a_change_keeps_the_doors_that_stay_and_shuts_the_others() {
    let (mut doors, mut keeper) = doors(20_005, &[me()]);
    keeper.answers = vec![Some(Awaits::Vm)];
    let connect = |port| TcpStream::connect((peer(), port)).unwrap();
    // A channel without its migration waits at the door.
    let mut channel = connect(20_005);
    channel.write_all(&[0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1]).unwrap();
    someone_waits(&mut doors, &mut keeper, 0);
    doors.change(tcp(20_005..=20_006), AllowedUsers(vec![me()]), &keeper.held());
    assert_eq!((doors.count(), doors.open()), (2, 1));
    let mut main = connect(20_005);
    main.write_all(b"QEVM\0\0\0\x03").unwrap();
    turn(&mut doors, &mut keeper, |keeper| !keeper.migrations.is_empty());
    assert_eq!(keeper.migrations[0].1.len(), 2, "the channel still waited");
    assert_eq!(doors.open(), 2);
    let mut waits = connect(20_006);
    someone_waits(&mut doors, &mut keeper, 1);
    doors.change(tcp(20_005..=20_005), AllowedUsers(vec![me() + 1]), &keeper.held());
    assert_eq!(waits.read(&mut [0; 1]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    assert!(TcpStream::connect((peer(), 20_006)).is_err());
    let _other = connect(20_005);
    turn(&mut doors, &mut keeper, |keeper| !keeper.refused.is_empty());
}

/// The second reload that brings a host back, or the reload and the start that rename it, while a
/// migration has its door.
#[test]
fn a_door_that_comes_back_gets_the_socket_that_a_carrier_still_has() {
    let (mut doors, mut keeper) = doors(20_013, &[me()]);
    let wanted = tcp(20_013..=20_013);
    let (old, address) = wanted[0].clone();
    let Some(DoorListener::Tcp(open)) = &doors.doors[0].listener else { panic!("it is shut") };
    let carrier = DoorListener::Tcp(open.try_clone().unwrap());
    keeper.lent = HashSet::from([old.clone()]);
    let change = |doors: &mut Doors, keeper: &mut Keeper, wanted: Vec<(Door, DoorAddress)>| {
        doors.change(wanted, AllowedUsers(vec![me()]), &keeper.held());
        doors.turn(Duration::ZERO, keeper).unwrap();
        doors.open()
    };
    assert_eq!(change(&mut doors, &mut keeper, Vec::new()), 0);
    assert_eq!(change(&mut doors, &mut keeper, wanted), 1, "{:?}", keeper.shut);
    // By another name it is still the carrier's.
    let renamed = vec![(Door { peer: "c".into(), ..old.clone() }, address.clone())];
    assert_eq!(change(&mut doors, &mut keeper, renamed.clone()), 1, "{:?}", keeper.shut);
    assert!(doors.doors[0].is_lent(&keeper.lent));
    let found = vec![(old.clone(), carrier.try_clone().unwrap())];
    let mut next = Doors::new(renamed, found, AllowedUsers(vec![me()]));
    next.turn(Duration::ZERO, &mut keeper).unwrap();
    assert!(next.open() == 1 && next.doors[0].is_lent(&keeper.lent));
    drop(next);
    // The migration is in doubt, and the service accepts again, at a removed door to refuse.
    keeper.in_doubt = std::mem::take(&mut keeper.lent);
    assert_eq!(change(&mut doors, &mut keeper, Vec::new()), 0);
    let mut late = TcpStream::connect((peer(), 20_013)).unwrap();
    turn(&mut doors, &mut keeper, |keeper| !keeper.refused.is_empty());
    assert_eq!(late.read(&mut [0; 1]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    assert!(keeper.refused[0].contains("no such door"), "{:?}", keeper.refused);
    // It has ended.
    keeper.in_doubt.clear();
    drop(carrier);
    doors.turn(Duration::ZERO, &mut keeper).unwrap();
    assert!(TcpStream::connect((peer(), 20_013)).is_err());
    assert!(keeper.shut.is_empty(), "{:?}", keeper.shut);
}

#[test]
fn a_turn_accepts_only_where_a_connection_waits() {
    let mut doors = Doors::new(tcp(20_100..=20_199), Vec::new(), AllowedUsers(vec![me()]));
    let mut keeper = Keeper::default();
    let calls_of_ten_turns = |doors: &mut Doors, keeper: &mut Keeper| {
        let before = ACCEPTS.get();
        (0..10).for_each(|_| doors.turn(Duration::ZERO, keeper).unwrap());
        ACCEPTS.get() - before
    };
    assert_eq!(calls_of_ten_turns(&mut doors, &mut keeper), 0);
    assert_eq!(doors.open(), 100, "{:?}", keeper.shut);
    let _client = TcpStream::connect((peer(), 20_150)).unwrap();
    // The connection, and that there is no other.
    assert_eq!(calls_of_ten_turns(&mut doors, &mut keeper), 2);
    assert_eq!(doors.doors[50].waiting.len(), 1);
}

/// Makes the connections that wait at the only door appear to have come that much earlier, as if
/// this thread had stood still.
fn stand_still(doors: &mut Doors, time: Duration) {
    for one in &mut doors.doors[0].waiting {
        one.since = one.since.checked_sub(time).unwrap();
    }
}

#[test]
fn a_service_that_stood_still_waits_for_the_answer_to_its_question() {
    let (mut doors, mut keeper) = doors(20_014, &[me()]);
    keeper.answers = vec![None, Some(Awaits::Vm)];
    let mut source = TcpStream::connect((peer(), 20_014)).unwrap();
    someone_waits(&mut doors, &mut keeper, 0);
    stand_still(&mut doors, Duration::from_secs(11));
    turn(&mut doors, &mut keeper, |keeper| keeper.answers.len() == 1 || !keeper.silent.is_empty());
    doors.turn(Duration::from_millis(20), &mut keeper).unwrap();
    assert!(keeper.silent.is_empty(), "taken for a disk's without an answer");
    source.write_all(b"QEVM\0\0\0\x03").unwrap();
    turn(&mut doors, &mut keeper, |keeper| !keeper.migrations.is_empty());
}

#[test]
fn a_channel_goes_with_a_main_connection_that_came_while_the_service_stood_still() {
    let (mut doors, mut keeper) = doors(20_015, &[me()]);
    // A host that is down, or has an older service.
    keeper.answers = vec![Some(Awaits::Unknown)];
    let mut channel = TcpStream::connect((peer(), 20_015)).unwrap();
    channel.write_all(&[0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1]).unwrap();
    someone_waits(&mut doors, &mut keeper, 0);
    stand_still(&mut doors, UNDECIDED + Duration::from_secs(1));
    let mut main = TcpStream::connect((peer(), 20_015)).unwrap();
    main.write_all(b"QEVM\0\0\0\x03").unwrap();
    turn(&mut doors, &mut keeper, |keeper| {
        !keeper.migrations.is_empty() || !keeper.refused.is_empty()
    });
    assert!(keeper.refused.is_empty(), "{:?}", keeper.refused);
    assert_eq!(keeper.migrations[0].1.len(), 2);
}
