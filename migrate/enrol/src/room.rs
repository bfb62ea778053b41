//! The connections to an offer: how many there may be, and which gives way.
//!
//! Anybody can connect. So the room takes every connection and closes another one when it is full:
//! a new host is done long before its turn to be closed comes, and a connection that says nothing
//! is not.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Ipv6Addr, Shutdown, TcpStream};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Connections at a time.
pub const AT_A_TIME: usize = 16;

/// The connections, the oldest first.
#[derive(Debug, Default)]
pub(crate) struct Room {
    seats: Mutex<VecDeque<Seat>>,
    /// A connection was closed.
    closed: Condvar,
}

#[derive(Debug)]
struct Seat {
    number: u64,
    from: IpAddr,
    socket: TcpStream,
    /// It has shown the secret: it is not closed for another.
    proven: bool,
}

impl Room {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Seat>> {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a connection, and closes another one if there are too many.
    pub(crate) fn enter(&self, number: u64, from: IpAddr, socket: &TcpStream) -> io::Result<()> {
        let seat = Seat { number, from: network(from), socket: socket.try_clone()?, proven: false };
        let mut seats = self.lock();
        seats.push_back(seat);
        if seats.len() > AT_A_TIME {
            if let Some(seat) = surplus(&seats).and_then(|at| seats.remove(at)) {
                self.close(&seat);
            }
        }
        Ok(())
    }

    /// The connection has shown the secret. False if it was closed before.
    pub(crate) fn prove(&self, number: u64) -> bool {
        let mut seats = self.lock();
        let seat = seats.iter_mut().find(|seat| seat.number == number);
        seat.is_some_and(|seat| {
            seat.proven = true;
            true
        })
    }

    /// Waits for `time`, or until the connection is closed.
    pub(crate) fn pause(&self, number: u64, time: Duration) {
        let until = Instant::now() + time;
        let mut seats = self.lock();
        while seats.iter().any(|seat| seat.number == number) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let waited = self.closed.wait_timeout(seats, left);
            seats = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The connection has ended.
    pub(crate) fn leave(&self, number: u64) {
        self.lock().retain(|seat| seat.number != number);
    }

    /// Closes every connection that has not shown the secret.
    pub(crate) fn clear(&self) {
        self.lock().retain(|seat| {
            if !seat.proven {
                self.close(seat);
            }
            seat.proven
        });
    }

    /// Its thread sees the end of the connection and ends.
    fn close(&self, seat: &Seat) {
        let _ = seat.socket.shutdown(Shutdown::Both);
        self.closed.notify_all();
    }
}

/// The connection to close when there are too many: the oldest of the network that has the most. So
/// a network that floods the port does not shut out a host on another.
fn surplus(seats: &VecDeque<Seat>) -> Option<usize> {
    let open = || seats.iter().filter(|seat| !seat.proven);
    let of = |network: IpAddr| open().filter(|seat| seat.from == network).count();
    let most = open().map(|seat| of(seat.from)).max()?;
    seats.iter().position(|seat| !seat.proven && of(seat.from) == most)
}

/// The part of an address that belongs to one person: all of an IPv4 address, the first half of an
/// IPv6 address.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
        }
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// A room with connections 0, 1, 2, ... from these addresses.
    fn room(addresses: &[&str]) -> Room {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (room, address) = (Room::default(), listener.local_addr().unwrap());
        for (number, from) in (0..).zip(addresses) {
            let socket = TcpStream::connect(address).unwrap();
            room.enter(number, from.parse().unwrap(), &socket).unwrap();
        }
        room
    }

    fn numbers(room: &Room) -> Vec<u64> {
        room.lock().iter().map(|seat| seat.number).collect()
    }

    #[test]
    fn the_oldest_of_the_network_that_has_the_most_gives_way() {
        let flood = ["10.0.0.9"; AT_A_TIME - 2];
        let room = room(&[&["10.0.0.1", "10.0.0.2"], &flood[..], &["10.0.0.9"]].concat());
        let left = numbers(&room);
        assert_eq!((left.len(), &left[..3]), (AT_A_TIME, &[0, 1, 3][..]));
    }

    #[test]
    fn addresses_of_one_network_are_one_and_a_proven_connection_stays() {
        let flood: Vec<String> = (1..AT_A_TIME).map(|nth| format!("2001:db8:0:1::{nth}")).collect();
        let flood: Vec<&str> = flood.iter().map(String::as_str).collect();
        let room = room(&[&flood[..1], &["2001:db8:0:2::1"], &flood[1..]].concat());
        assert_eq!(numbers(&room).len(), AT_A_TIME);
        assert!(room.prove(0));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        room.enter(99, "10.0.0.1".parse().unwrap(), &socket).unwrap();
        assert_eq!(numbers(&room)[..3], [0, 1, 3]);
        assert!(!room.prove(2), "it was closed");
        // One that was closed is not waited for.
        room.pause(2, Duration::from_secs(3600));
        room.clear();
        assert_eq!(numbers(&room), [0]);
    }
}
