//! Server and client over TCP: ranges, losses, locks, and peers that do not keep to the protocol.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use image::ImageFile;
use remote::{Client, Folder, Lock, Patience, RemoteError, Server, Sessions, Status};
use tls::{Acceptor, Authority, Connector, Credentials};

/// Longer than any test takes.
const LONG: Duration = Duration::from_secs(600);

/// A folder with an image of 3 MB.
fn folder() -> (tempfile::TempDir, Vec<u8>) {
    let dir = tempfile::tempdir().unwrap();
    let mut bytes = b"PLATENVM".to_vec();
    bytes.extend((0..3_000_000_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8));
    std::fs::write(dir.path().join("vm"), &bytes).unwrap();
    (dir, bytes)
}

/// Serves `folder`; a file has one exclusive lock at a time.
fn serve(folder: &Path, acceptor: Option<Acceptor>, patience: Patience) -> SocketAddr {
    let take = |path: &Path, shared: bool| {
        let file = File::open(path).map_err(|error| error.to_string())?;
        let operation = match shared {
            true => rustix::fs::FlockOperation::NonBlockingLockShared,
            false => rustix::fs::FlockOperation::NonBlockingLockExclusive,
        };
        rustix::fs::flock(&file, operation).map_err(|_| "locked by a test".to_owned())?;
        Ok(file)
    };
    let folder = Folder::open(folder, Box::new(take)).unwrap();
    let server = Server::new(Sessions::new(folder, patience), acceptor, Box::new(|_| {}));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    // It serves until the tests end.
    thread::spawn(move || server.run(&listener));
    address
}

fn client(to: SocketAddr, session: u8, waits: [Duration; 2]) -> Client {
    Client::new(to.to_string(), None, [session; 16], waits, Box::new(|_| {}))
}

fn read(file: &ImageFile, at: u64, len: usize) -> std::io::Result<Vec<u8>> {
    let ImageFile::Remote(file) = file else { panic!("not remote") };
    let mut out = vec![0; len];
    file.read_exact_at(&mut out, at)?;
    Ok(out)
}

/// Forwards connections to `to`; each ends after as many bytes as `lens` says, in turn.
fn cutting(to: SocketAddr, lens: Vec<usize>) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, cuts) = (listener.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
    let counted = Arc::clone(&cuts);
    thread::spawn(move || {
        for (client, len) in listener.incoming().zip(lens.into_iter().cycle()) {
            let (mut client, mut server) = (client.unwrap(), TcpStream::connect(to).unwrap());
            let (mut from, back) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            let counted = Arc::clone(&counted);
            thread::spawn(move || {
                let _ = std::io::copy(&mut from, &mut server);
                let _ = server.shutdown(Shutdown::Both);
            });
            thread::spawn(move || {
                let copied = std::io::copy(&mut Read::take(&back, len as u64), &mut client);
                if copied.is_ok_and(|copied| copied == len as u64) {
                    counted.fetch_add(1, Ordering::Relaxed);
                }
                let _ = client.shutdown(Shutdown::Both);
                let _ = back.shutdown(Shutdown::Both);
            });
        }
    });
    (address, cuts)
}

#[test]
fn any_range_comes_back_to_any_number_of_threads() {
    let (dir, bytes) = folder();
    let to = serve(dir.path(), None, Patience::default());
    let file = client(to, 1, [LONG; 2]).open("vm", Lock::Exclusive).unwrap();
    let ranges =
        [(0, 8), (1, bytes.len() - 1), (5, (1 << 20) + 1), (bytes.len(), 0), (99, 1 << 20)];
    thread::scope(|scope| {
        for nth in 0..4 {
            let (file, bytes) = (&file, &bytes);
            scope.spawn(move || {
                for (at, len) in ranges.into_iter().cycle().skip(nth).take(20) {
                    assert!(read(file, at as u64, len).unwrap() == bytes[at..at + len]);
                }
            });
        }
    });
    for (at, len) in [(bytes.len() as u64, 1), (u64::MAX, 2), (0, bytes.len() + 1)] {
        assert!(read(&file, at, len).is_err(), "{len} from {at} on");
    }
}

#[test]
fn a_connection_that_is_cut_anywhere_costs_no_byte() {
    let (dir, bytes) = folder();
    let to = serve(dir.path(), None, Patience::default());
    // Within the reply to the hello, that to OPEN, a head, and bytes of the file.
    let (to, cuts) = cutting(to, vec![3, 8, 9, 20, 41, 48, 1000, 1_200_000, 2_500_000]);
    let file = client(to, 1, [LONG; 2]).open("vm", Lock::Exclusive).unwrap();
    for _ in 0..3 {
        assert!(read(&file, 0, bytes.len()).unwrap() == bytes);
    }
    assert!(cuts.load(Ordering::Relaxed) >= 9);
}

#[test]
fn hosts_with_certificates_read_and_others_do_not() {
    let (dir, bytes) = folder();
    let keys = tempfile::tempdir().unwrap();
    let authority = Authority::at(keys.path());
    authority.init(false).unwrap();
    let credentials = |name: &str| {
        let issued = authority.issue(&[name.into()], 9, false).unwrap();
        let path = |file| issued.dir.join(file);
        Credentials::load(&path(tls::CA_FILE), &path(tls::CERT_FILE), &path(tls::KEY_FILE)).unwrap()
    };
    let (here, there) = (credentials("here"), credentials("127.0.0.1"));
    let acceptor = Acceptor::new(&there, &["here".into()]).unwrap();
    let to = serve(dir.path(), Some(acceptor), Patience::default());
    let open = |connector| {
        let waits = [Duration::from_millis(1), LONG];
        let client = Client::new(to.to_string(), connector, [1; 16], waits, Box::new(|_| {}));
        client.open("vm", Lock::Exclusive)
    };
    let file = open(Some(Connector::new(&here, "127.0.0.1").unwrap())).unwrap();
    assert!(read(&file, 0, bytes.len()).unwrap() == bytes);
    let error = open(Some(Connector::new(&here, "elsewhere").unwrap())).unwrap_err();
    assert!(matches!(error, RemoteError::Tls { .. }), "{error}");
    // The server does not allow this name.
    assert!(open(Some(Connector::new(&there, "127.0.0.1").unwrap())).is_err());
    assert!(open(None).is_err());
}

#[test]
fn a_lock_lasts_as_long_as_its_session() {
    let (dir, _) = folder();
    let patience = Patience { closed: Duration::from_millis(50), lost: LONG };
    let to = serve(dir.path(), None, patience);
    let waits = [Duration::from_millis(1), LONG];
    let one = client(to, 1, waits);
    let _file = one.open("vm", Lock::Exclusive).unwrap();
    // Another process of the session.
    client(to, 1, waits).open("vm", Lock::Exclusive).unwrap();
    let open = |session| client(to, session, waits).open("vm", Lock::Exclusive);
    let error = open(2).unwrap_err();
    assert!(matches!(&error, RemoteError::Refused { status: Status::InUse, .. }), "{error}");
    assert!(error.to_string().contains("vm: locked by a test"), "{error}");
    // The server may read the end of one connection later than the beginning of the next.
    let opened = |session| {
        let until = Instant::now() + LONG;
        loop {
            match open(session) {
                Err(RemoteError::Refused { status: Status::InUse, .. })
                    if Instant::now() < until => {}
                opened => return opened.unwrap(),
            }
        }
    };
    one.end();
    let two = opened(3);
    // A process that has ended without a word. The server waits a moment for its next connection.
    drop(two);
    opened(4);
}

/// It would be asked for ever, and the VM would not go on from a copy.
#[test]
fn a_server_that_never_has_a_file_open_is_an_error() {
    const NOT_OPEN: [u8; 8] = [3, 0, 0, 0, 0, 0, 0, 0];
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap();
    thread::spawn(move || {
        let mut peer = listener.accept().unwrap().0;
        let mut request = [0; 32];
        peer.read_exact(&mut request).unwrap();
        peer.write_all(&[0; 8]).unwrap();
        while peer.read_exact(&mut request).is_ok() {
            let is_open = request[0] == 1;
            if is_open {
                peer.read_exact(&mut [0; 2]).unwrap();
                let mut opened = [0; 8 + 24];
                (opened[7], opened[31]) = (24, 9);
                peer.write_all(&opened).unwrap();
            } else {
                peer.write_all(&NOT_OPEN).unwrap();
            }
        }
    });
    let file = client(to, 1, [LONG; 2]).open("vm", Lock::None).unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    thread::spawn(move || tell.send(read(&file, 0, 9).unwrap_err().to_string()));
    let error = told.recv_timeout(LONG).expect("it reads for ever");
    assert!(error.contains("vm"), "{error}");
}

#[test]
fn another_file_of_the_name_is_never_read() {
    let (dir, bytes) = folder();
    let patience = Patience { closed: Duration::ZERO, lost: Duration::ZERO };
    let to = serve(dir.path(), None, patience);
    // Every connection ends after the bytes of the first read, and the session with it.
    let (to, _) = cutting(to, vec![8 + 32 + 8 + 100]);
    let client = client(to, 1, [LONG; 2]);
    let file = client.open("vm", Lock::Exclusive).unwrap();
    assert!(read(&file, 0, 100).unwrap() == bytes[..100]);
    // Until the server has ended the session: it has closed the file then.
    let here = File::open(dir.path().join("vm")).unwrap();
    let until = Instant::now() + LONG;
    while rustix::fs::flock(&here, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_err() {
        assert!(Instant::now() < until, "the session does not end");
        thread::sleep(Duration::from_millis(1));
    }
    drop(here);
    std::fs::write(dir.path().join("new"), &bytes).unwrap();
    std::fs::rename(dir.path().join("new"), dir.path().join("vm")).unwrap();
    let error = read(&file, 0, 100).unwrap_err();
    assert!(error.to_string().contains("vm was replaced by another file"), "{error}");
}

#[test]
fn a_server_that_stays_away_is_an_error_after_the_limit() {
    let (dir, _) = folder();
    let to = serve(dir.path(), None, Patience::default());
    let said = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&said);
    // The first connection carries hello and OPEN; all others end before their first byte.
    let (to, _) = cutting(to, [vec![40], vec![0; 100_000]].concat());
    let tell = Box::new(move |text: &str| told.lock().unwrap().push(text.to_owned()));
    let waits = [LONG, Duration::from_millis(100)];
    let client = Client::new(to.to_string(), None, [1; 16], waits, tell);
    let file = client.open("vm", Lock::None).unwrap();
    let error = read(&file, 0, 1).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::TimedOut);
    assert!(error.to_string().contains(&format!("cannot reach {to}")), "{error}");
    let said = said.lock().unwrap();
    assert!(said.len() == 1 && said[0].contains("does not answer"), "{said:?}");
}

/// A unit that cannot be read is read again by each thread that needs it.
#[test]
fn an_outage_is_waited_for_once() {
    let (dir, _) = folder();
    let to = serve(dir.path(), None, Patience::default());
    // The first connection carries hello and OPEN; all others end before their first byte.
    let (to, _) = cutting(to, [vec![40], vec![0; 100_000]].concat());
    let file = client(to, 1, [LONG, Duration::from_secs(2)]).open("vm", Lock::None).unwrap();
    let begin = Instant::now();
    for _ in 0..20 {
        assert!(read(&file, 0, 1).is_err());
    }
    assert!(begin.elapsed() < Duration::from_secs(15), "{:?}", begin.elapsed());
}

#[test]
fn garbage_ends_its_own_connection() {
    let (dir, bytes) = folder();
    let to = serve(dir.path(), None, Patience::default());
    let file = client(to, 1, [LONG; 2]).open("vm", Lock::Exclusive).unwrap();
    let mut hello = b"PLATENIM\0\x01".to_vec();
    hello.resize(32, 9);
    let answer = |bytes: &[u8]| {
        let mut peer = TcpStream::connect(to).unwrap();
        peer.write_all(bytes).unwrap();
        let mut answer = Vec::new();
        let _ = peer.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    };
    assert!(answer(&[b'G'; 32]).contains("no restore"));
    assert!(answer(&[&hello[..], &[77; 32]].concat()).contains("a name of 19789 bytes"));
    let mut read_of_none = vec![2, 0, 0, 0, 0, 0, 0, 5];
    read_of_none.resize(32, 0);
    let mut unknown = read_of_none.clone();
    unknown[0] = 9;
    let words = answer(&[&hello[..], &read_of_none, &unknown].concat());
    assert!(words.contains("the file is not open") && words.contains("operation 9"), "{words}");
    assert!(read(&file, 0, bytes.len()).unwrap() == bytes);
}
