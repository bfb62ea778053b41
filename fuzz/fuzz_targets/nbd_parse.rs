//! A hostile NBD client: options are answered within bounds or refused, and an executed request
//! lies within the export.
//!
//! Input: the client's bytes, from its flags on; after the handshake, requests of 28 bytes, writes
//! followed by as much payload as is left.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nbd::{Command, Export, Handshake, Parsed, Progress, Session, MAX_REQUEST};

fuzz_target!(|input: &[u8]| {
    let export = Export { name: "swap".to_owned(), size: 5000 * 4096 + 17 };
    let mut handshake = Handshake::new(&export);
    let mut rest = input;
    let session = loop {
        let mut out = Vec::new();
        match handshake.advance(rest, &mut out) {
            Ok((taken, progress)) => {
                assert!(taken <= rest.len() && out.len() <= taken + 512);
                rest = &rest[taken..];
                match progress {
                    Progress::Again => assert!(taken > 0),
                    Progress::Serve(session) => break session,
                    Progress::More => {
                        assert!(taken == 0 && rest.len() < 16 + 8192);
                        // The requests of a client that completed the handshake.
                        break Session { size: export.size, structured: true, allocation: true };
                    }
                    Progress::End => return,
                }
            }
            Err(refusal) => {
                assert!(!refusal.to_string().is_empty());
                return;
            }
        }
    };
    assert_eq!(session.size, export.size);
    while let Some((request, after)) = rest.split_first_chunk() {
        rest = after;
        let payload = match session.parse(request) {
            Parsed::Do(request) => {
                let end = request.offset.checked_add(u64::from(request.length));
                assert!(
                    request.command == Command::Flush || end.is_some_and(|end| end <= export.size)
                );
                let moves = matches!(request.command, Command::Read { .. } | Command::Write);
                assert!(!moves || request.length <= MAX_REQUEST);
                if request.command == Command::Write {
                    request.length
                } else {
                    0
                }
            }
            Parsed::Refuse { skip, .. } => {
                assert!(skip <= MAX_REQUEST);
                skip
            }
            Parsed::Disconnect => return,
            Parsed::Broken(why) => {
                assert!(!why.to_string().is_empty());
                return;
            }
        };
        rest = rest.get(payload as usize..).unwrap_or_default();
    }
});
