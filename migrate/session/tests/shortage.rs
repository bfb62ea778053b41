//! A host without descriptors. The limit is that of the whole process: no other test is in this
//! file.

use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};
use session::{
    dial, read_preamble, write_preamble, Grants, Hello, Incoming, Link, Redial, Session,
    SessionError, Sink, Welcome, HELLO_TIMEOUT,
};
use std::fs::File;
use std::io::Read;
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Nothing here takes this long unless it hangs.
const LIMIT: Duration = Duration::from_secs(600);

/// Tells what the session says, and its end.
struct Watcher(Mutex<Sender<Result<String, String>>>);

impl Sink for Watcher {
    fn frame(&self, _: Incoming) -> Result<(), SessionError> {
        Ok(())
    }

    fn finish(&self, _: &[u8]) {}

    fn closed(&self, error: &Arc<SessionError>) {
        let _ = self.0.lock().unwrap().send(Err(error.to_string()));
    }

    fn notice(&self, text: &str) {
        let _ = self.0.lock().unwrap().send(Ok(text.into()));
    }
}

fn session(peer: &str) -> (Arc<Session>, mpsc::Receiver<Result<String, String>>) {
    let (sender, said) = mpsc::channel();
    let sink = Arc::new(Watcher(Mutex::new(sender)));
    let grants = Grants { chunk_bytes: 65536, stream_frames: 2, shared_frames: 4 };
    let session = Session::new(peer.into(), grants, 64, (1, LIMIT), sink).unwrap();
    (session, said)
}

/// Files with the lowest numbers that are free.
fn held() -> Vec<File> {
    (0..64).map(|_| File::open("/dev/null").unwrap()).collect()
}

/// Leaves this process with `free` numbers for descriptors, all of them of `held`.
fn leave(mut held: Vec<File>, free: usize) {
    let highest = held.iter().map(AsRawFd::as_raw_fd).max().unwrap();
    let current = Some(u64::try_from(highest + 1).unwrap());
    setrlimit(Resource::Nofile, Rlimit { current, ..getrlimit(Resource::Nofile) }).unwrap();
    held.truncate(held.len() - free);
    std::mem::forget(held);
}

#[test]
fn a_link_for_which_there_are_no_descriptors_now_is_made_when_there_are() {
    let before = getrlimit(Resource::Nofile);
    let held = held();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap().to_string();
    let (server, _server_said) = session("the client");
    let (cut, first_is_cut) = mpsc::channel();
    let (failed, attempts) = mpsc::channel();
    let serving = server.clone();
    std::thread::spawn(move || {
        // While its last socket is not closed yet, there is no descriptor for the next one.
        for (nth, socket) in listener.incoming().flatten().enumerate() {
            let mut link = Link::from(socket);
            let _: Hello = read_preamble(&mut link, "x", HELLO_TIMEOUT).unwrap();
            let welcome = Welcome {
                token: "0".repeat(32),
                chunk_bytes: 65536,
                stream_frames: 2,
                shared_frames: 4,
                ..Welcome::default()
            };
            write_preamble(&mut link, "x", &welcome).unwrap();
            match nth {
                0 => {
                    let () = first_is_cut.recv().unwrap();
                }
                // The client has no descriptor for its end, and closes it.
                1..=3 => {
                    link.socket().set_read_timeout(Some(LIMIT)).unwrap();
                    assert_eq!(link.read(&mut [0; 1]).unwrap_or(0), 0, "it has a link");
                    failed.send(()).unwrap();
                }
                _ => return serving.add_link(0, link).unwrap(),
            }
        }
    });
    let (client, said) = session("the server");
    let plain = Hello::of_one_link(4096).unwrap();
    let mut hello = Hello { session: "0".repeat(32), links: 1, ..plain };
    let (first, welcome) = dial(&to, None, &hello).unwrap();
    hello.token = Some(welcome.token);
    let redial = Redial::new(to, &first, None, hello);
    client.add_link(0, first).unwrap();
    client.supervise_links(Some(redial)).unwrap();

    // One for the client's socket and one for the server's: none for a second handle.
    leave(held, 2);
    cut.send(()).unwrap();
    let next = || said.recv_timeout(LIMIT).expect("it says more").expect("the session goes on");
    // Of two threads, either may be the first to say so.
    let both = [next(), next()].join("\n");
    for text in ["waiting up to 600 s", "cannot make a link to the server anew ("] {
        assert_eq!(both.matches(text).count(), 1, "{both}");
    }
    // More than one attempt, and not another word.
    for _ in 0..3 {
        attempts.recv_timeout(LIMIT).unwrap();
    }
    setrlimit(Resource::Nofile, before).unwrap();
    let text = next();
    assert!(text.contains("the link to the server is back"), "{text}");
    for session in [client, server] {
        session.fail(SessionError::Local { reason: "the test is over".into() });
        session.join();
    }
}
