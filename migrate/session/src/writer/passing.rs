//! The frames that the first link passes on to the others.

use crate::outgoing::Outgoing;
use crate::session::Session;
use crate::transport::LinkWriter;
use rustix::event::{poll, PollFd, PollFlags, Timespec};

/// Bytes that a link takes in a row without having to wait, while frames wait for it, when it is
/// its thread that lacks time and not its socket that lacks room. More than a socket's buffer
/// holds: a link that its network limits is full in between.
const IN_A_ROW: u64 = 64 << 20;

/// The first link's record of what it took without having to wait.
#[derive(Debug, Default)]
pub(super) struct Passing {
    in_a_row: u64,
}

impl Passing {
    /// Passes a frame with a payload on to the other links if the first would have to wait, or if
    /// its thread has no time for all. Returns the frame if they are fully loaded.
    pub(super) fn pass_on(
        &mut self,
        session: &Session,
        link: &LinkWriter,
        frame: Outgoing,
    ) -> Option<Outgoing> {
        let Outgoing::Unit { unit, .. } = &frame else { return Some(frame) };
        let bytes = u64::from(unit.payload_len);
        let others = session.links.spare_links();
        let outbound = &session.outbound;
        if others == 0 || outbound.overflow.len() >= others {
            return Some(frame);
        }
        let mut fds = [PollFd::new(link, PollFlags::OUT)];
        let is_full = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) == Ok(0);
        // A thread that waits for its turn has time.
        let is_limited = session.cap.get().is_some() || session.turns.get().is_some();
        if is_full || is_limited || outbound.outbox.len() < others {
            self.in_a_row = 0;
        } else {
            self.in_a_row = self.in_a_row.saturating_add(bytes);
        }
        if is_full || self.in_a_row > IN_A_ROW {
            return outbound.overflow.push(frame).err();
        }
        Some(frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::credit::Grants;
    use crate::frame::Header;
    use crate::frame_type::FrameType;
    use crate::sink::Discard;
    use crate::transport::Link;
    use codec::{Codec, UnitHeader};
    use pages::Arena;
    use std::io::{ErrorKind, Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::sync::Arc;
    use std::time::Duration;

    /// A session of two links, and the first one's two ends.
    fn two_links() -> (Arc<Session>, LinkWriter, TcpStream, TcpStream) {
        let grants = Grants { chunk_bytes: 65536, stream_frames: 2, shared_frames: 4 };
        let links = (2, Duration::from_secs(20));
        let session = Session::new("x".into(), grants, 8, links, Arc::new(Discard)).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let theirs = listener.accept().unwrap().0;
        for number in 0..2 {
            session.links.add(number, ours.try_clone().unwrap());
        }
        let (_, writer) = Link::from(ours.try_clone().unwrap()).split().unwrap();
        (session, writer, ours, theirs)
    }

    /// How many frames of 1 MiB the first link keeps in a row, up to 200. Each passed one is taken
    /// by the other link.
    fn kept(passing: &mut Passing, session: &Session, link: &LinkWriter) -> u32 {
        let arena = Arena::new(1, 1 << 20).unwrap();
        let unit =
            UnitHeader { codec: Codec::Raw, plain_len: 1 << 20, payload_len: 1 << 20, checksum: 0 };
        for kept in 0..200 {
            let body = arena.take().expect("the frame before is dropped");
            let header = Header::free(FrameType::Data, 0);
            if passing.pass_on(session, link, Outgoing::Unit { header, unit, body }).is_none() {
                assert!(session.outbound.overflow.pop().is_some());
                return kept;
            }
        }
        200
    }

    /// Fills a socket until it stays full: the peer's kernel acknowledges some bytes late.
    fn fill(mut socket: &TcpStream) {
        socket.set_nonblocking(true).unwrap();
        let wait = Timespec { tv_sec: 0, tv_nsec: 300_000_000 };
        while poll(&mut [PollFd::new(&socket, PollFlags::OUT)], Some(&wait)) != Ok(0) {
            if let Err(error) = socket.write(&[0; 65536]) {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
            }
        }
    }

    #[test]
    fn a_thread_that_does_not_keep_up_passes_frames_on() {
        let (session, link, _ours, _theirs) = two_links();
        let passing = &mut Passing::default();
        // Nothing waits: the thread keeps up, however much it has sent.
        assert_eq!(kept(passing, &session, &link), 200);
        // Frames wait, and the socket has room all the time.
        session.outbound.send(Outgoing::Acks);
        assert_eq!(kept(passing, &session, &link), 64);
        assert_eq!(kept(passing, &session, &link), 0, "until the thread keeps up");
        assert!(session.outbound.outbox.pop().is_some());
        assert_eq!(kept(passing, &session, &link), 200);
    }

    #[test]
    fn a_link_that_its_network_limits_passes_on_only_while_it_is_full() {
        let (session, link, ours, mut theirs) = two_links();
        let passing = &mut Passing::default();
        session.outbound.send(Outgoing::Acks);
        assert_eq!(kept(passing, &session, &link), 64);
        fill(&ours);
        assert_eq!(kept(passing, &session, &link), 0);
        // The network takes what was written.
        let mut room = [PollFd::new(&ours, PollFlags::OUT)];
        while poll(&mut room, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) == Ok(0) {
            assert!(theirs.read(&mut [0; 65536]).unwrap() > 0);
        }
        assert_eq!(kept(passing, &session, &link), 64, "it has begun anew");
    }

    #[test]
    fn a_thread_that_waits_for_its_turn_passes_nothing_on() {
        let (session, link, _ours, _theirs) = two_links();
        session.limit_rate(1 << 30);
        session.outbound.send(Outgoing::Acks);
        assert_eq!(kept(&mut Passing::default(), &session, &link), 200);
    }
}
