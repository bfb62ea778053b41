//! The connections whose hello has not been read: their limit, and the one to close beyond it.
//!
//! Any host can open connections, also from a peer's own address, and faster than an honest peer
//! finishes its handshake. So a further link of a session begins with a pass (W5a). The pass
//! arrives together with the connection, and gives it a place that strangers cannot take.

use rustix::net::{recv, RecvFlags};
use session::{Pass, PASS_BYTES};
use std::collections::VecDeque;
use std::net::{IpAddr, Shutdown, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use tls::network;

/// The number of the newest pass of a session; 0 before the first.
#[derive(Debug, Default)]
pub(super) struct LastPass(AtomicU64);

impl LastPass {
    /// Whether the owner of `token` has made `pass`, and `pass` is newer than those before.
    pub(super) fn accepts(&self, pass: &Pass, token: &str) -> bool {
        pass.is_of(token) && self.0.fetch_max(pass.number, Ordering::AcqRel) < pass.number
    }
}

impl Clone for LastPass {
    fn clone(&self) -> Self {
        Self(AtomicU64::new(self.0.load(Ordering::Acquire)))
    }
}

/// Connections without a pass that may wait. When one more arrives, one is closed ([`surplus`]). A
/// peer finishes its hello long before that, so idle connections lock no peer out.
const MAX_STRANGERS: usize = 64;
/// Connections with a pass of one session that may wait: its client opens one at a time, and may
/// open the next when it has given up the last.
const MAX_OF_SESSION: usize = 4;

/// A connection before its hello.
struct Waiting {
    number: u64,
    /// Its host's network.
    from: Option<IpAddr>,
    socket: Arc<TcpStream>,
    /// The session whose pass it has shown.
    session: Option<String>,
}

impl Waiting {
    fn new(number: u64, host: Option<IpAddr>, socket: Arc<TcpStream>) -> Self {
        Self { number, from: host.map(network), socket, session: None }
    }
}

/// The waiting connections; the oldest is first.
#[derive(Default)]
pub(super) struct WaitingRoom(VecDeque<Waiting>);

impl WaitingRoom {
    /// Adds a connection; closes another one if there are too many. `verify`: whether a pass is
    /// that of its session's client, and newer than those before.
    pub(super) fn add(
        &mut self,
        number: u64,
        socket: Arc<TcpStream>,
        verify: impl Fn(&Pass) -> bool,
    ) {
        let host = socket.peer_addr().ok().map(|address| address.ip());
        self.0.push_back(Waiting::new(number, host, socket));
        while self.strangers().count() > MAX_STRANGERS {
            let Some(at) = surplus(&self.0) else { return };
            // The connection's thread may not have read the pass yet.
            match pass_at_hand(&self.0[at].socket).filter(&verify) {
                Some(pass) => self.let_in(at, pass.session),
                None => self.close(at),
            }
        }
    }

    /// Connection `number` has shown this pass.
    pub(super) fn show(&mut self, number: u64, pass: Pass, verify: impl Fn(&Pass) -> bool) {
        let at = self.0.iter().position(|waiting| waiting.number == number);
        if let Some(at) = at.filter(|at| self.0[*at].session.is_none()) {
            if verify(&pass) {
                self.let_in(at, pass.session);
            }
        }
    }

    /// Removes a connection whose hello was read, or will not be.
    pub(super) fn remove(&mut self, number: u64) {
        self.0.retain(|waiting| waiting.number != number);
    }

    fn strangers(&self) -> impl Iterator<Item = &Waiting> {
        self.0.iter().filter(|waiting| waiting.session.is_none())
    }

    fn let_in(&mut self, at: usize, session: String) {
        self.0[at].session = Some(session);
        let session = &self.0[at].session;
        let mut same = (0..self.0.len()).filter(|at| self.0[*at].session == *session);
        if let (Some(oldest), MAX_OF_SESSION..) = (same.next(), same.count()) {
            self.close(oldest);
        }
    }

    fn close(&mut self, at: usize) {
        if let Some(waiting) = self.0.remove(at) {
            // Its thread sees the end of the connection and ends.
            let _ = waiting.socket.shutdown(Shutdown::Both);
        }
    }
}

/// The connection to close when too many without a pass wait: the oldest connection of the network
/// that has the most. So a host that floods the port does not lock out new peers on other networks,
/// also when it uses the many addresses that an IPv6 host has.
fn surplus(waiting: &VecDeque<Waiting>) -> Option<usize> {
    let strangers = || waiting.iter().filter(|one| one.session.is_none());
    let of = |from: Option<IpAddr>| strangers().filter(|one| one.from == from).count();
    let most = strangers().map(|one| of(one.from)).max()?;
    waiting.iter().position(|one| one.session.is_none() && of(one.from) == most)
}

/// The pass with which a connection begins, if it has arrived.
fn pass_at_hand(socket: &TcpStream) -> Option<Pass> {
    let mut bytes = [0; PASS_BYTES];
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    match recv(socket, &mut bytes[..], flags) {
        Ok((_, PASS_BYTES)) => Pass::from_bytes(&bytes),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn room(connections: &[([u8; 4], Option<&str>)]) -> WaitingRoom {
        let from = connections.iter().map(|(host, session)| (IpAddr::from(*host), *session));
        room_from(from)
    }

    fn room_from<'a>(connections: impl Iterator<Item = (IpAddr, Option<&'a str>)>) -> WaitingRoom {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let waiting = (0..).zip(connections).map(|(number, (host, session))| {
            let socket = Arc::new(TcpStream::connect(address).unwrap());
            let session = session.map(String::from);
            Waiting { session, ..Waiting::new(number, Some(host), socket) }
        });
        WaitingRoom(waiting.collect())
    }

    fn numbers(room: &WaitingRoom) -> Vec<u64> {
        room.0.iter().map(|waiting| waiting.number).collect()
    }

    /// A pass as W5a has it.
    fn pass(number: u64, token: &str) -> Pass {
        let named = [&b"RELINK\r\n"[..], &[0xab; 16], &number.to_be_bytes()].concat();
        let bytes = [&named[..], &tls::mac(token.as_bytes(), &named)].concat();
        Pass::from_bytes(bytes.first_chunk().unwrap()).unwrap()
    }

    #[test]
    fn a_forged_or_used_pass_does_not_count() {
        let last = LastPass::default();
        for (number, token, counts) in [
            (5, "ours", true),
            (5, "ours", false),
            (4, "ours", false),
            (9, "another", false),
            (6, "ours", true),
        ] {
            assert_eq!(last.accepts(&pass(number, token), "ours"), counts, "{number} {token}");
        }
        let mut room = room(&[([10, 0, 0, 1], None); 2]);
        room.show(0, pass(7, "another"), |pass| last.accepts(pass, "ours"));
        room.show(1, pass(7, "ours"), |pass| last.accepts(pass, "ours"));
        // The same once more: its place stays.
        room.show(1, pass(7, "ours"), |pass| last.accepts(pass, "ours"));
        let sessions: Vec<_> = room.0.iter().map(|waiting| waiting.session.clone()).collect();
        assert_eq!(sessions, [None, Some("ab".repeat(16))]);
    }

    /// A host that opens connections faster than peers finish their handshakes loses its own.
    #[test]
    fn the_host_that_floods_the_port_gives_way() {
        let [a, b, c] = [[10, 0, 0, 1], [10, 0, 0, 2], [10, 0, 0, 3]];
        let mut room = room(&[(a, None), (b, None), (a, None), (a, None), (c, None)]);
        for left in [0, 2] {
            let at = surplus(&room.0).unwrap();
            assert_eq!(room.0.remove(at).unwrap().number, left);
        }
        // Each host has one: the oldest is closed.
        assert_eq!(room.0[surplus(&room.0).unwrap()].number, 1);
        assert!(surplus(&VecDeque::new()).is_none());
    }

    #[test]
    fn a_flood_from_the_addresses_of_one_ipv6_network_locks_out_no_other_host() {
        let flood = (0..64).map(|nth| format!("2001:db8:2::{nth:x}"));
        let hosts = std::iter::once("2001:db8:1::1".to_owned()).chain(flood);
        let room = room_from(hosts.map(|host| (host.parse().unwrap(), None)));
        assert_eq!(room.0[surplus(&room.0).unwrap()].number, 1);
    }

    #[test]
    fn a_link_with_a_pass_gives_way_to_no_stranger() {
        let host = [10, 0, 0, 1];
        let room = room(&[(host, Some("s")), (host, None), (host, Some("s"))]);
        assert_eq!(room.0[surplus(&room.0).unwrap()].number, 1);
    }

    #[test]
    fn the_links_of_a_session_that_wait_are_bounded() {
        let host = [10, 0, 0, 1];
        let mut room = room(&[(host, None); 7]);
        room.let_in(1, "other".into());
        for at in 2..6 {
            room.let_in(at, "s".into());
        }
        assert_eq!(numbers(&room), [0, 1, 2, 3, 4, 5, 6]);
        room.let_in(6, "s".into());
        assert_eq!(numbers(&room), [0, 1, 3, 4, 5, 6]);
    }
}
