//! The followers of the events of a service.

use host::Event;
use rustix::net::{send, SendFlags};
use std::io::{ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};

/// Largest number of followers at a time.
pub(super) const MAX_FOLLOWERS: usize = 16;
/// The first line that a follower gets.
pub(super) const GREETING: &[u8] = b"{\"platen-events\":1}\n";
/// The followers.
#[derive(Debug, Default)]
pub(super) struct Feed(Mutex<Vec<UnixStream>>);

impl Feed {
    /// Adds a follower.
    pub(super) fn add(&self, stream: UnixStream) {
        let mut followers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Those that have gone are noticed at the next event, which may be long after.
        followers.retain(|follower| !has_gone(follower));
        if followers.len() < MAX_FOLLOWERS && write(&stream, GREETING) {
            followers.push(stream);
        }
    }

    /// Sends an event to all.
    pub(super) fn send(&self, event: &Event) {
        let Ok(mut line) = serde_json::to_vec(event) else { return };
        line.push(b'\n');
        let mut followers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        followers.retain(|follower| write(follower, &line));
    }
}

/// Writes a whole line at once. Returns false if that fails.
fn write(stream: &UnixStream, line: &[u8]) -> bool {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    send(stream, line, flags).is_ok_and(|sent| sent == line.len())
}

fn has_gone(mut stream: &UnixStream) -> bool {
    // A follower sends nothing.
    stream.set_nonblocking(true).is_err()
        || !matches!(stream.read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock)
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::{Phase, Record};
    use std::io::{BufRead, BufReader};

    fn event(id: &str, phase: Phase) -> Event {
        Event::from(&Record { id: id.into(), phase, ..Record::default() })
    }

    fn line_of(reader: &mut impl BufRead) -> Event {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    #[test]
    fn a_follower_that_does_not_read_is_dropped_and_the_others_get_every_line() {
        let feed = Feed::default();
        let (slow, slow_end) = UnixStream::pair().unwrap();
        feed.add(slow);
        let (quick, quick_end) = UnixStream::pair().unwrap();
        feed.add(quick);
        let mut reader = BufReader::new(quick_end);
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        assert_eq!(line.as_bytes(), GREETING);
        let mut sent = 0;
        while feed.0.lock().unwrap().len() == 2 {
            sent += 1;
            assert!(sent < 1 << 20, "it is never dropped");
            feed.send(&event(&sent.to_string(), Phase::Active));
            let got = line_of(&mut reader);
            assert_eq!(got.id, sent.to_string());
        }
        drop(slow_end);
        // Those that have gone make room.
        drop(reader);
        let ends: Vec<_> = (0..2 * MAX_FOLLOWERS)
            .map(|_| {
                let (ours, theirs) = UnixStream::pair().unwrap();
                feed.add(ours);
                theirs
            })
            .collect();
        assert_eq!(feed.0.lock().unwrap().len(), MAX_FOLLOWERS);
        let mut refused = &ends[MAX_FOLLOWERS];
        assert_eq!(refused.read(&mut [0]).unwrap(), 0);
    }
}
