//! The connections to an offer: their limit, and the one to close beyond it.
//!
//! Any host can connect. So every connection is accepted, and beyond the limit another one is
//! closed: a new host has finished long before its connection would be closed, and a silent
//! connection has not.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Shutdown, TcpStream};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tls::network;

/// Connections at a time.
pub const AT_A_TIME: usize = 16;

/// The connections, the oldest first.
#[derive(Debug, Default)]
pub(crate) struct Connections {
    all: Mutex<VecDeque<Connection>>,
    /// A connection was closed.
    closed: Condvar,
}

#[derive(Debug)]
struct Connection {
    number: u64,
    from: IpAddr,
    socket: TcpStream,
    /// Whether the host has sent the secret: the connection is then not closed for another one.
    proven: bool,
}

impl Connections {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Connection>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a connection, and closes another one if there are too many.
    pub(crate) fn add(&self, number: u64, from: IpAddr, socket: &TcpStream) -> io::Result<()> {
        let one =
            Connection { number, from: network(from), socket: socket.try_clone()?, proven: false };
        let mut all = self.lock();
        all.push_back(one);
        if all.len() > AT_A_TIME {
            if let Some(one) = surplus(&all).and_then(|at| all.remove(at)) {
                self.close(&one);
            }
        }
        Ok(())
    }

    /// Records that the host has sent the secret. Returns false if the connection was closed
    /// before.
    pub(crate) fn set_proven(&self, number: u64) -> bool {
        let mut all = self.lock();
        let one = all.iter_mut().find(|one| one.number == number);
        one.is_some_and(|one| {
            one.proven = true;
            true
        })
    }

    /// Waits for `time`, or until the connection is closed.
    pub(crate) fn pause(&self, number: u64, time: Duration) {
        let until = Instant::now() + time;
        let mut all = self.lock();
        while all.iter().any(|one| one.number == number) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let waited = self.closed.wait_timeout(all, left);
            all = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Records that the connection has ended.
    pub(crate) fn remove(&self, number: u64) {
        self.lock().retain(|one| one.number != number);
    }

    /// Closes every connection that has not sent the secret.
    pub(crate) fn close_unproven(&self) {
        self.lock().retain(|one| {
            if !one.proven {
                self.close(one);
            }
            one.proven
        });
    }

    /// Closes a connection. Its thread sees the end and ends.
    fn close(&self, one: &Connection) {
        let _ = one.socket.shutdown(Shutdown::Both);
        self.closed.notify_all();
    }
}

/// The connection to close when there are too many: the oldest of the network that has the most. So
/// a network that floods the port does not shut out a host on another.
fn surplus(all: &VecDeque<Connection>) -> Option<usize> {
    let open = || all.iter().filter(|one| !one.proven);
    let of = |network: IpAddr| open().filter(|one| one.from == network).count();
    let most = open().map(|one| of(one.from)).max()?;
    all.iter().position(|one| !one.proven && of(one.from) == most)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// Connections 0, 1, 2, ... from these addresses.
    fn from(addresses: &[&str]) -> Connections {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (connections, address) = (Connections::default(), listener.local_addr().unwrap());
        for (number, from) in (0..).zip(addresses) {
            let socket = TcpStream::connect(address).unwrap();
            connections.add(number, from.parse().unwrap(), &socket).unwrap();
        }
        connections
    }

    fn numbers(connections: &Connections) -> Vec<u64> {
        connections.lock().iter().map(|one| one.number).collect()
    }

    #[test]
    fn the_oldest_of_the_network_that_has_the_most_gives_way() {
        let flood = ["10.0.0.9"; AT_A_TIME - 2];
        let connections = from(&[&["10.0.0.1", "10.0.0.2"], &flood[..], &["10.0.0.9"]].concat());
        let left = numbers(&connections);
        assert_eq!((left.len(), &left[..3]), (AT_A_TIME, &[0, 1, 3][..]));
    }

    #[test]
    fn addresses_of_one_network_are_one_and_a_proven_connection_stays() {
        let flood: Vec<String> = (1..AT_A_TIME).map(|nth| format!("2001:db8:0:1::{nth}")).collect();
        let flood: Vec<&str> = flood.iter().map(String::as_str).collect();
        let connections = from(&[&flood[..1], &["2001:db8:0:2::1"], &flood[1..]].concat());
        assert_eq!(numbers(&connections).len(), AT_A_TIME);
        assert!(connections.set_proven(0));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        connections.add(99, "10.0.0.1".parse().unwrap(), &socket).unwrap();
        assert_eq!(numbers(&connections)[..3], [0, 1, 3]);
        assert!(!connections.set_proven(2), "it was closed");
        // One that was closed is not waited for.
        connections.pause(2, Duration::from_secs(3600));
        connections.close_unproven();
        assert_eq!(numbers(&connections), [0]);
    }
}
