use super::netlink::{attribute, ENOSPC, HEAD};
use super::reconnection::SOON;
use super::*;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixListener;
use std::thread::JoinHandle;

/// A server's side of a conversation, and what the client wrote.
struct Talk {
    says: io::Cursor<Vec<u8>>,
    told: Vec<u8>,
}

impl Read for Talk {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.says.read(out)
    }
}

impl Write for Talk {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.told.write(bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn talk(flags: u16, zeroes: usize) -> Talk {
    let mut says = b"NBDMAGICIHAVEOPT".to_vec();
    says.extend(flags.to_be_bytes());
    says.extend((1_u64 << 30).to_be_bytes());
    says.extend(0x16d_u16.to_be_bytes());
    says.extend(vec![0; zeroes]);
    Talk { says: io::Cursor::new(says), told: Vec::new() }
}

/// `blk_add_timer` rounds up to the next second, which is a little more by powers of two.
#[test]
fn requests_of_a_dead_server_are_sent_again_within_10_s() {
    let rounded = TIMEOUT + Duration::from_millis(1024) + SOON;
    assert!(rounded < Duration::from_secs(10), "{rounded:?}");
}

#[test]
fn the_handshake_takes_the_default_export_with_and_without_zeroes() {
    for (flags, zeroes) in [(3, 0), (1, 124)] {
        let mut server = talk(flags, zeroes);
        let export = handshake(&mut server).unwrap();
        assert_eq!(export, Export { size: 1 << 30, flags: 0x16d });
        let told = [&u32::from(flags).to_be_bytes(), &b"IHAVEOPT"[..], &[0, 0, 0, 1], &[0; 4]];
        assert_eq!(server.told, told.concat());
        assert_eq!(server.says.position(), server.says.get_ref().len() as u64);
    }
}

#[test]
fn a_server_that_disconnects_or_speaks_another_protocol_is_an_error() {
    for cut in 0..28 {
        let mut server = talk(3, 0);
        server.says.get_mut().truncate(cut);
        assert!(handshake(&mut server).is_err(), "{cut}");
    }
    let mut server = talk(3, 0);
    server.says.get_mut()[9] = b'x';
    let error = handshake(&mut server).unwrap_err();
    assert!(error.to_string().contains("newstyle"), "{error}");
}

fn answer(kind: u16, payload: &[u8]) -> Vec<u8> {
    let mut bytes = u32::try_from(16 + payload.len()).unwrap().to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend([0; 10]);
    bytes.extend(payload);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

#[test]
fn answers_are_parsed_and_truncated_answers_are_harmless() {
    let mut message = Message(vec![1, 1, 0, 0]);
    message.u64(ATTR_SIZE, 9);
    message.u32(ATTR_INDEX, 5);
    let whole = [answer(0x1b, &message.0), answer(2, &[0; 20])].concat();
    let mut found = None;
    assert!(parse(&whole, ATTR_INDEX, &mut found).unwrap());
    assert_eq!(found, Some(5_u32.to_ne_bytes().to_vec()));
    for cut in 0..whole.len() {
        let _ = parse(&whole[..cut], ATTR_INDEX, &mut found);
        let mut bent = whole.clone();
        bent[cut] ^= 0xff;
        let _ = parse(&bent, ATTR_INDEX, &mut found);
    }
    let refused = answer(2, &(-28_i32).to_ne_bytes());
    let error = parse(&refused, ATTR_INDEX, &mut found).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(ENOSPC));
}

#[test]
fn the_kernel_is_offered_no_cache_to_flush() {
    let flags = |offered: u16| {
        let message = connect(0x1b, 5, Export { size: 1 << 30, flags: offered }, "");
        let flags = attribute(&message.0[HEAD..], ATTR_SERVER_FLAGS).unwrap();
        u64::from_ne_bytes(flags.try_into().unwrap())
    };
    // The flags of our server: discard, write-zeroes and multi-conn stay.
    assert_eq!(flags(0x16d), 0x161);
    assert_eq!(flags(u16::MAX), 0xfff3);
    assert_eq!(flags(1), 1);
}

/// The number of a disk that was detached may be another device's: the kernel compares names.
#[test]
fn a_disk_takes_connections_only_with_the_name_of_its_device() {
    let name = |message: &Message| {
        attribute(&message.0[HEAD..], ATTR_BACKEND).map(|name| String::from_utf8_lossy(name).into())
    };
    let export = Export { size: 1 << 30, flags: 0x16d };
    let [ours, others] = [1, 2].map(|listener| backend(listener).unwrap());
    assert_ne!(ours, others);
    let attached = connect(0x1b, 5, export, &ours);
    assert_eq!(name(&attached), Some(ours.clone()));
    assert_eq!(name(&reconfigure(0x1b, 5, &ours)), Some(ours));
    assert_eq!(name(&reconfigure(0x1b, 5, &others)), Some(others));
}

/// A server that takes `number` handshakes; returns its ends of the connections.
fn serve(listener: UnixListener, number: usize) -> JoinHandle<Vec<UnixStream>> {
    let greet = move || {
        let mut stream = listener.accept().unwrap().0;
        stream.write_all(&talk(3, 0).says.into_inner()[..18]).unwrap();
        stream.read_exact(&mut [0; 20]).unwrap();
        stream.write_all(&talk(3, 0).says.into_inner()[18..]).unwrap();
        stream
    };
    std::thread::spawn(move || (0..number).map(|_| greet()).collect())
}

/// The listening socket of another device may have taken the path: its disk is not attached.
#[test]
fn the_first_connections_are_to_the_listener_of_this_device() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("nbd");
    let own = std::process::id();
    let listener = UnixListener::bind(&socket).unwrap();
    let other = listener.try_clone().unwrap();
    let error = dial(&socket, own + 1, 2).unwrap_err();
    assert!(error.to_string().contains(&format!("process {own} listens")), "{error}");
    // That server has heard nothing.
    assert_eq!(other.accept().unwrap().0.read(&mut [0]).unwrap(), 0);
    let server = serve(listener, 2);
    let (sockets, export) = dial(&socket, own, 2).unwrap();
    assert_eq!((sockets.len(), export), (2, Export { size: 1 << 30, flags: 0x16d }));
    assert_eq!(server.join().unwrap().len(), 2);
}

/// The kernel answers a request with success, or with no answer at all, whether or not it has
/// taken the connection. One that it has not taken stays open and is offered again; one that
/// it has taken is not.
#[test]
fn a_connection_that_the_kernel_has_not_taken_is_offered_again() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("nbd");
    let server = serve(UnixListener::bind(&socket).unwrap(), 2);
    // In turn: success in vain, a failure in vain, both connections with and without an answer.
    let failed = || io::Error::from(io::ErrorKind::TimedOut);
    let mut turns = [(false, true), (false, false), (true, true), (false, true), (true, false)]
        .into_iter()
        .peekable();
    let (mut offered, mut kernel) = (Vec::new(), Vec::new());
    let connect = || UnixStream::connect(&socket);
    let mut reconnection = Reconnection::new(&connect, 2);
    while turns.peek().is_some() {
        reconnection.dial().unwrap();
        let attempt = reconnection.attempt(&|| false, &mut |connection| {
            let (takes, answers) = turns.next().expect("it has all connections");
            offered.push(connection.as_raw_fd());
            if takes {
                // As `nbd_reconnect_socket` does.
                connection.set_write_timeout(Some(TIMEOUT)).unwrap();
                kernel.push(connection.try_clone().unwrap());
            }
            if answers {
                Ok(())
            } else {
                Err(failed())
            }
        });
        assert_eq!(attempt.is_ok(), turns.peek().is_none());
    }
    assert!(reconnection.some && reconnection.left == 0);
    assert_eq!(offered[..3], [offered[0]; 3]);
    assert_eq!(offered[3], offered[4]);
    // The server has had these two connections, and no end of either.
    for mut stream in server.join().unwrap() {
        stream.set_nonblocking(true).unwrap();
        let read = stream.read(&mut [0]);
        assert_eq!(read.unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }
    assert_eq!(kernel.len(), 2);
}

/// Another client could take the memory of those that come later.
#[test]
fn all_connections_are_made_before_the_kernel_is_offered_one() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("nbd");
    let server = serve(UnixListener::bind(&socket).unwrap(), 3);
    let made = std::cell::Cell::new(0);
    let connect = || {
        made.set(made.get() + 1);
        UnixStream::connect(&socket)
    };
    let mut reconnection = Reconnection::new(&connect, 3);
    reconnection.dial().unwrap();
    let mut given = 0;
    let give = &mut |connection: &UnixStream| {
        assert_eq!(made.get(), 3);
        given += 1;
        connection.set_write_timeout(Some(TIMEOUT))
    };
    reconnection.attempt(&|| false, give).unwrap();
    assert_eq!((given, made.get(), reconnection.left), (3, 3, 0));
    assert_eq!(server.join().unwrap().len(), 3);
}

#[test]
fn requests_are_limited_and_a_lower_limit_stays() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("max_sectors_kb");
    // The defaults of Linux 6.9 and 6.16, of earlier ones, and a limit that was set before.
    for (before, after) in
        [("1280\n", "288"), ("4096\n", "288"), ("128\n", "128"), ("288\n", "288")]
    {
        std::fs::write(&file, before).unwrap();
        limit_in(folder.path(), 288 << 10).unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap().trim(), after);
    }
    std::fs::write(&file, "none\n").unwrap();
    let error = limit_in(folder.path(), 288 << 10).unwrap_err();
    assert!(error.to_string().contains("none"), "{error}");
    let error = limit_requests(Path::new("/dev/nbd-none"), 288 << 10).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NotFound);
}

#[test]
fn a_disk_s_number_is_in_its_name() {
    assert_eq!(index(Path::new("/dev/nbd12")).unwrap(), 12);
    assert!(index(Path::new("/dev/ublkb1")).is_err());
    assert!(index(Path::new("/dev/nbd")).is_err());
}

#[test]
fn a_disk_has_the_name_that_its_backend_file_has() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("backend");
    assert!(!is_named_in(folder.path()).unwrap());
    for (text, is_named) in [("\n", false), ("platen 1 pid:[4026531836]\n", true)] {
        fs::write(&file, text).unwrap();
        assert_eq!(is_named_in(folder.path()).unwrap(), is_named, "{text}");
    }
    fs::remove_file(&file).unwrap();
    fs::create_dir(&file).unwrap();
    let error = is_named_in(folder.path()).unwrap_err();
    assert!(error.to_string().contains(&format!("cannot read {}", file.display())), "{error}");
    assert!(!is_named(Path::new("/dev/nbd_of_nobody")).unwrap());
}

#[test]
fn the_process_that_has_attached_a_disk_is_that_of_its_pid_file() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(attacher(folder.path()), None);
    fs::write(folder.path().join("pid"), "4711\n").unwrap();
    assert_eq!(attacher(folder.path()), Some(4711));
    assert!(!is_attached_by(Path::new("/dev/nbd_of_nobody"), 4711));
}
