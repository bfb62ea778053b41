//! The user behind a TCP connection on this host, from the kernel's tables in /proc/net.
//!
//! TCP has no `SO_PEERCRED`. The tables name, for each socket, the user who made it.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// The state of a listening socket.
const LISTEN: &str = "0A";
/// The kernel writes a table in pieces, and a socket may be missed when others come and go.
const ATTEMPTS: usize = 3;

/// The owner of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// The user who made it.
    pub uid: u32,
    /// The socket's inode, never 0.
    pub inode: u64,
}

/// The users who may connect to a door.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AllowedUsers(pub Vec<u32>);

impl AllowedUsers {
    /// Checks that an allowed user made a connection from this host.
    ///
    /// # Errors
    /// A message that says who did.
    pub fn check(&self, here: SocketAddr, there: SocketAddr) -> Result<(), String> {
        match connection_owner(there, here) {
            Ok(Some(Owner { uid, .. })) if self.0.contains(&uid) => Ok(()),
            Ok(Some(Owner { uid, .. })) => Err(format!(
                "user {uid} may not migrate: allow_users in the configuration names those who may"
            )),
            // A socket that was closed has no owner any more, and the table then says root.
            Ok(None) => {
                Err("its user cannot be told: the connection was closed at once, or comes \
                             from another network namespace"
                    .into())
            }
            Err(error) => Err(format!("its user cannot be told: {error}")),
        }
    }
}

/// The owner of the socket with that own address, connected to `other`; `None` if no process has
/// it.
///
/// # Errors
/// The tables cannot be read.
pub fn connection_owner(own: SocketAddr, other: SocketAddr) -> io::Result<Option<Owner>> {
    find(|entry| entry.local == own && entry.remote == other)
}

/// The owner of the socket that listens at exactly this address, or at this port of all addresses.
///
/// # Errors
/// The tables cannot be read.
pub(crate) fn listener_owner(address: SocketAddr) -> io::Result<Option<Owner>> {
    find(|entry| {
        let fits = entry.local.ip() == address.ip() || entry.local.ip().is_unspecified();
        entry.state == LISTEN && fits && entry.local.port() == address.port()
    })
}

fn find(wanted: impl Fn(&Entry) -> bool) -> io::Result<Option<Owner>> {
    for _ in 0..ATTEMPTS {
        for table in ["/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"] {
            let file = match File::open(table) {
                Ok(file) => file,
                // A kernel without IPv6.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            };
            for line in BufReader::new(file).lines().skip(1) {
                let entry = parse(&line?);
                if let Some(entry) = entry.filter(|entry| entry.owner.inode > 0 && wanted(entry)) {
                    return Ok(Some(entry.owner));
                }
            }
        }
    }
    Ok(None)
}

/// A line of a table.
#[derive(Debug, PartialEq)]
struct Entry {
    local: SocketAddr,
    remote: SocketAddr,
    state: String,
    owner: Owner,
}

fn parse(line: &str) -> Option<Entry> {
    let mut words = line.split_ascii_whitespace().skip(1);
    let (local, remote) = (address(words.next()?)?, address(words.next()?)?);
    let state = words.next()?.to_owned();
    // Queues, timer, retransmits.
    let mut words = words.skip(3);
    let uid = words.next()?.parse().ok()?;
    let inode = words.nth(1)?.parse().ok()?;
    Some(Entry { local, remote, state, owner: Owner { uid, inode } })
}

/// `ADDRESS:PORT` in hexadecimal; the address is written in words of the machine's byte order. An
/// IPv4 address in IPv6 is given as the IPv4 address.
fn address(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let mut bytes = Vec::with_capacity(16);
    for word in address.as_bytes().chunks(8) {
        let word = std::str::from_utf8(word).ok()?;
        bytes.extend(u32::from_str_radix(word, 16).ok()?.to_ne_bytes());
    }
    let address = match bytes.len() {
        4 => IpAddr::from(<[u8; 4]>::try_from(bytes).ok()?),
        16 => IpAddr::from(<[u8; 16]>::try_from(bytes).ok()?).to_canonical(),
        _ => return None,
    };
    // Unspecified is the same in both.
    let address = if address.is_unspecified() { Ipv4Addr::UNSPECIFIED.into() } else { address };
    Some(SocketAddr::new(address, port))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::fs::MetadataExt;

    fn me() -> u32 {
        std::fs::metadata("/proc/self").unwrap().uid()
    }

    #[test]
    fn the_maker_of_a_connection_is_known() {
        let listener = TcpListener::bind("127.80.77.1:0").unwrap();
        let here = listener.local_addr().unwrap();
        let client = TcpStream::connect(here).unwrap();
        let (_server, there) = listener.accept().unwrap();
        let owner = connection_owner(there, here).unwrap().unwrap();
        assert_eq!(owner.uid, me());
        AllowedUsers(vec![me()]).check(here, there).unwrap();
        let error = AllowedUsers(vec![me() + 1]).check(here, there).unwrap_err();
        assert!(error.contains(&format!("user {}", me())), "{error}");
        assert_eq!(listener_owner(here).unwrap().unwrap().uid, me());
        drop(client);
    }

    /// The table says that a socket without a process is root's.
    #[test]
    fn one_who_has_closed_is_not_taken_for_root() {
        let listener = TcpListener::bind("127.80.77.2:0").unwrap();
        let here = listener.local_addr().unwrap();
        let client = TcpStream::connect(here).unwrap();
        let (_server, there) = listener.accept().unwrap();
        drop(client);
        let error = AllowedUsers(vec![0, me()]).check(here, there).unwrap_err();
        assert!(error.contains("cannot be told"), "{error}");
    }

    #[test]
    fn a_connection_by_way_of_ipv6_is_known_by_its_ipv4_address() {
        let line = "   0: 0000000000000000FFFF00000100007F:C001 0000000000000000FFFF0000024D507F:C000 \
                    01 00000000:00000000 00:00000000 00000000   107        0 4242 1 0 20 4 30 10 -1";
        let entry = parse(line).unwrap();
        assert_eq!(entry.local, "127.0.0.1:49153".parse().unwrap());
        assert_eq!(entry.remote, "127.80.77.2:49152".parse().unwrap());
        assert_eq!(entry.owner, Owner { uid: 107, inode: 4242 });
        for bad in ["", "0: x y", "0: 0100007F:C001 0100007F", "sl local_address rem_address st"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
