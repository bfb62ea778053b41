//! A made daemon of libvirt, for tests: it answers with one state of the domain.

use super::daemon::Daemon;
use libvirt::Domain;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread;

const XML: &str =
    "<domain><name>g1</name><uuid>592ef32c-27a5-4f79-ba49-16196c787853</uuid></domain>";

/// A daemon at a socket in `folder`, whose domain has this state and reason by libvirt's numbers;
/// `None` for a daemon without the domain.
pub(super) fn made(folder: &Path, state: Option<[u32; 2]>) -> (Daemon, Domain) {
    let path = folder.join("libvirt");
    let listener = UnixListener::bind(&path).unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let stream = stream.unwrap();
            thread::spawn(move || answer(stream, state));
        }
    });
    let address = format!("unix:{}", path.display()).parse().unwrap();
    (Daemon::find(Some(&address)).unwrap(), Domain::parse(XML).unwrap())
}

/// Answers the calls of one connection.
fn answer(mut stream: UnixStream, state: Option<[u32; 2]>) {
    const LOGINS: u32 = 66;
    const STATE: u32 = 212;
    const NO_DOMAIN: u32 = 42;
    let mut len = [0; 4];
    while stream.read_exact(&mut len).is_ok() {
        let mut call = vec![0; usize::try_from(u32::from_be_bytes(len)).unwrap() - 4];
        stream.read_exact(&mut call).unwrap();
        let number = |at: usize| u32::from_be_bytes(call[4 * at..4 * at + 4].try_into().unwrap());
        let (procedure, serial) = (number(2), number(4));
        let (failed, body) = match (procedure, state) {
            (LOGINS, _) => (0, vec![1, 0]),
            (STATE, Some(state)) => (0, state.to_vec()),
            (STATE, None) => (1, vec![NO_DOMAIN, 10, 0, 2, 0, 0]),
            _ => (0, Vec::new()),
        };
        let head = [28 + 4 * u32::try_from(body.len()).unwrap(), number(0), 1, procedure, 1];
        let message: Vec<u32> = [&head[..], &[serial, failed], &body].concat();
        let bytes: Vec<u8> = message.iter().flat_map(|number| number.to_be_bytes()).collect();
        if stream.write_all(&bytes).is_err() {
            return;
        }
    }
}
