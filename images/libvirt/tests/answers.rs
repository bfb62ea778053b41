//! The client against a made daemon: what libvirt answers, and what no libvirt answers.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::thread;

use libvirt::{Connection, Domain, Handover, LibvirtError, Owner, State, Why};

const PROGRAM: u32 = 0x2000_8086;
const XML: &str =
    "<domain><name>g1</name><uuid>592ef32c-27a5-4f79-ba49-16196c787853</uuid></domain>";

/// A packet: its length, head and body.
fn packet(head: [u32; 6], body: &[u8]) -> Vec<u8> {
    let len = u32::try_from(28 + body.len()).unwrap();
    let mut bytes = len.to_be_bytes().to_vec();
    head.iter().for_each(|number| bytes.extend(number.to_be_bytes()));
    bytes.extend(body);
    bytes
}

fn numbers(all: &[u32]) -> Vec<u8> {
    all.iter().flat_map(|number| number.to_be_bytes()).collect()
}

fn text(text: &str) -> Vec<u8> {
    let mut bytes = numbers(&[u32::try_from(text.len()).unwrap()]);
    bytes.extend(text.as_bytes());
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// Reads a call: procedure, number, arguments.
fn call(stream: &mut UnixStream) -> Option<(u32, u32, Vec<u8>)> {
    let mut len = [0; 4];
    stream.read_exact(&mut len).ok()?;
    let mut rest = vec![0; usize::try_from(u32::from_be_bytes(len)).unwrap() - 4];
    stream.read_exact(&mut rest).ok()?;
    let number = |at: usize| u32::from_be_bytes(rest[4 * at..4 * at + 4].try_into().unwrap());
    Some((number(2), number(4), rest[24..].to_vec()))
}

/// A connection to a daemon that lets us in, and then answers each call with these packets.
fn daemon(answers: impl Fn(u32, u32, &[u8]) -> Vec<u8> + Send + 'static) -> Connection {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    thread::spawn(move || {
        while let Some((procedure, serial, arguments)) = call(&mut theirs) {
            let answer = match procedure {
                66 => packet([PROGRAM, 1, 66, 1, serial, 0], &numbers(&[1, 0])),
                1 => packet([PROGRAM, 1, 1, 1, serial, 0], &[]),
                _ => answers(procedure, serial, &arguments),
            };
            if answer.is_empty() || theirs.write_all(&answer).is_err() {
                return;
            }
        }
    });
    Connection::over(ours, "qemu:///system").unwrap()
}

fn error(procedure: u32, serial: u32, code: u32, message: &str) -> Vec<u8> {
    let body = [numbers(&[code, 10, 1]), text(message), numbers(&[2, 0, 0])].concat();
    packet([PROGRAM, 1, procedure, 1, serial, 1], &body)
}

#[test]
fn calls_have_the_arguments_that_libvirt_reads() {
    let domain = Domain::parse(XML).unwrap();
    let mut connection = daemon(|procedure, serial, arguments| {
        let has = |part: &str| arguments.windows(part.len()).any(|bytes| bytes == part.as_bytes());
        let ends = |numbers: &[u8]| arguments.ends_with(numbers);
        let body = match procedure {
            303 => {
                assert!(has("destination_xml") && has(XML) && has("unix:///run/0.sock"));
                assert!(has("<qemu-migration><name>g1</name>") && ends(&[0, 0, 0x80, 1]));
                [text("<cookie/>"), numbers(&[0])].concat()
            }
            306 => {
                assert!(has("destination_name") && ends(&[0, 8, 0x80, 1, 0, 0, 0, 0]));
                Vec::new()
            }
            212 => {
                assert!(has("g1") && ends(&[0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0]));
                numbers(&[1, 10])
            }
            _ => text("<capabilities><host><secmodel><model>dac</model><baselabel>+7:+8</baselabel></secmodel></host></capabilities>"),
        };
        // An event before the answer, and a question of the program that looks whether we live.
        let event = packet([PROGRAM, 1, 318, 2, 0, 0], &[1, 2, 3]);
        let question = packet([0x6b65_6570, 1, 1, 2, 0, 0], &[]);
        [event, question, packet([PROGRAM, 1, procedure, 1, serial, 0], &body)].concat()
    });
    assert_eq!(connection.owner().unwrap(), Some(Owner { user: 7, group: 8 }));
    connection.prepare(&domain, "/run/0.sock", Handover::AtOnce).unwrap();
    connection.finish(&domain, Handover::Resumed).unwrap();
    assert_eq!(connection.state(&domain).unwrap(), Some(State::Running(Why::Postcopy)));
}

#[test]
fn libvirt_s_errors_are_told_apart() {
    let domain = Domain::parse(XML).unwrap();
    let mut connection = daemon(|procedure, serial, _| match procedure {
        306 => error(procedure, serial, 93, "migration successfully aborted"),
        212 => error(procedure, serial, 42, "Domain not found"),
        _ => error(procedure, serial, 55, "Requested\noperation is \u{1b}[31mnot valid"),
    });
    connection.cancel(&domain, Handover::AtOnce).unwrap();
    assert_eq!(connection.state(&domain).unwrap(), None);
    let said = connection.prepare(&domain, "/0.sock", Handover::AtOnce).unwrap_err();
    assert_eq!(said.to_string(), "libvirt says: Requested operation is  [31mnot valid");
    assert!(connection.finish(&domain, Handover::AtOnce).unwrap_err().is(93));
}

#[test]
fn a_daemon_that_wants_a_login_or_closes_is_named() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let polkit = thread::spawn(move || {
        let (procedure, serial, _) = call(&mut theirs).unwrap();
        theirs
            .write_all(&packet([PROGRAM, 1, procedure, 1, serial, 0], &numbers(&[1, 2])))
            .unwrap();
    });
    assert!(matches!(Connection::over(ours, "qemu:///system"), Err(LibvirtError::Login)));
    polkit.join().unwrap();
    let domain = Domain::parse(XML).unwrap();
    let closed = daemon(|_, _, _| Vec::new()).state(&domain).unwrap_err();
    assert!(closed.is_lost() && matches!(closed, LibvirtError::Closed), "{closed}");
}

#[test]
fn answers_that_no_libvirt_sends_are_errors() {
    let domain = Domain::parse(XML).unwrap();
    let sound =
        |procedure, serial| packet([PROGRAM, 1, procedure, 1, serial, 0], &numbers(&[1, 1]));
    type Bent = fn(Vec<u8>) -> Vec<u8>;
    let bent: [(&str, Bent); 6] = [
        ("a length", |_| u32::MAX.to_be_bytes().to_vec()),
        ("a length", |_| numbers(&[27])),
        ("another call", |mut all| {
            all[15] ^= 1;
            all
        }),
        ("another call", |mut all| {
            all[23] ^= 1;
            all
        }),
        ("neither results nor", |mut all| {
            all[27] = 9;
            all
        }),
        ("ends before", |mut all| {
            all.truncate(32);
            all[3] = 32;
            all
        }),
    ];
    for (expected, bend) in bent {
        let mut connection = daemon(move |procedure, serial, _| bend(sound(procedure, serial)));
        let said = connection.state(&domain).unwrap_err().to_string();
        assert!(said.contains(expected), "{expected}: {said}");
    }
    // Each flipped bit and each cut is a state or an error, and never a wait.
    let whole = sound(212, 3);
    let flipped = (0..8 * whole.len()).map(|bit| {
        let mut all = whole.clone();
        all[bit / 8] ^= 1 << (bit % 8);
        all
    });
    let cut = (0..whole.len()).map(|len| whole[..len].to_vec());
    for bytes in flipped.chain(cut) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(&packet([PROGRAM, 1, 66, 1, 1, 0], &numbers(&[1, 0]))).unwrap();
        theirs.write_all(&packet([PROGRAM, 1, 1, 1, 2, 0], &[])).unwrap();
        theirs.write_all(&bytes).unwrap();
        theirs.shutdown(Shutdown::Write).unwrap();
        let state = Connection::over(ours, "qemu:///system").unwrap().state(&domain);
        assert!(matches!(&state, Ok(Some(_))) || state.is_err(), "{bytes:?}: {state:?}");
    }
}
