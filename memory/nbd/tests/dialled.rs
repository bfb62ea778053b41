//! A server's connections to itself, for the kernel's client of the disk: they need no path.

mod simple;

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use device::{Device, DeviceOptions, PAGE};
use nbd::{Server, ServerOptions};
use simple::{client, greeted, request};
use store::{Options, Store};

/// Only a hang takes longer.
const LONG: Duration = Duration::from_secs(300);

fn server() -> Arc<Server<Device>> {
    let store = Store::create(256, Options::default()).unwrap();
    let device = Device::new(&store, &DeviceOptions::default()).unwrap();
    Arc::new(
        Server::new(
            Arc::new(device),
            ServerOptions { handshake: LONG, ..ServerOptions::default() },
        )
        .unwrap(),
    )
}

fn run(server: &Arc<Server<Device>>, path: &Path) -> JoinHandle<()> {
    let (server, listener) = (Arc::clone(server), UnixListener::bind(path).unwrap());
    thread::spawn(move || server.run(&listener, |_| ()).unwrap())
}

/// Page 0 of the disk that the connection leads to, after the page was filled with `byte`, if any.
fn page(mut stream: UnixStream, byte: Option<u8>) -> u8 {
    if let Some(byte) = byte {
        stream.write_all(&request(1, 1, 0, PAGE, &[byte; PAGE])).unwrap();
        stream.read_exact(&mut [0; 16]).unwrap();
    }
    stream.write_all(&request(0, 2, 0, PAGE, &[])).unwrap();
    let mut answer = [0; 16 + PAGE];
    stream.read_exact(&mut answer).unwrap();
    assert!(answer[16..].iter().all(|&found| found == answer[16]));
    answer[16]
}

#[test]
fn a_server_connects_to_itself_wherever_the_path_leads() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nbd");
    let [one, other] = [server(), server()];
    // Before it serves: the connection waits.
    let early = one.dial().unwrap();
    let running = run(&one, &path);
    assert_eq!(page(greeted(early, LONG), Some(7)), 7);
    assert_eq!(page(client(&path, LONG), None), 7);
    // A cleaner of /run has removed it.
    std::fs::remove_file(&path).unwrap();
    let several = [(); 3].map(|()| greeted(one.dial().unwrap(), LONG));
    assert_eq!(several.map(|stream| page(stream, None)), [7; 3]);
    // Another device has it now.
    let others = run(&other, &path);
    assert_eq!(page(client(&path, LONG), Some(9)), 9);
    assert_eq!(page(greeted(one.dial().unwrap(), LONG), None), 7);
    for (server, running) in [(one, running), (other, others)] {
        server.stop();
        running.join().unwrap();
        assert_eq!(server.dial().unwrap_err().kind(), ErrorKind::ConnectionRefused);
    }
}
