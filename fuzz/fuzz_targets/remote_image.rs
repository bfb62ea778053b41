//! Images of another host: the server answers any requests, and the client takes any replies.
//!
//! Input: one byte, which chooses the end under test, and what the peer sends.
#![no_main]

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use remote::{answer, ask, Folder, Lock, Patience, Request, Sessions, MAX_READ};

/// A peer that sends the input.
struct Peer<'a> {
    input: &'a [u8],
    output: Vec<u8>,
}

impl Read for Peer<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.input.read(out)
    }
}

impl Write for Peer<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.output.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Sessions over a folder with one file, `vm`.
fn sessions() -> &'static Sessions {
    static SESSIONS: OnceLock<Sessions> = OnceLock::new();
    SESSIONS.get_or_init(|| {
        let folder = std::env::temp_dir().join(format!("remote-image-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        std::fs::write(folder.join("vm"), b"PLATENVM with some bytes").expect("a file");
        let take = |path: &Path, _| File::open(path).map_err(|error| error.to_string());
        let opened = Folder::open(&folder, Box::new(take)).expect("the folder");
        Sessions::new(opened, Patience::default())
    })
}

fuzz_target!(|input: &[u8]| {
    let Some((&end, input)) = input.split_first() else { return };
    let mut peer = Peer { input, output: Vec::new() };
    if end & 1 == 0 {
        let mut joined = sessions().join([0; 16], 0, &[]).expect("the only session");
        let mut reply = Vec::new();
        while let Ok(None) = answer(&mut peer, &mut joined, &mut reply) {
            assert!(reply.len() <= 8 + MAX_READ);
            peer.output.clear();
        }
    } else {
        let mut out = vec![0; usize::from(end >> 1)];
        let request = Request::Open { name: "vm".into(), lock: Lock::None };
        match ask(&mut peer, &request, &mut out) {
            // The reply is its head, and the bytes that were asked for.
            Ok(Ok(())) => assert_eq!(input[8..8 + out.len()], out),
            Ok(Err((_, text))) => assert!(!text.contains(char::is_control)),
            Err(_) => {}
        }
    }
});
