//! Messages to a service manager (`sd_notify`): ready, status, watchdog.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::ErrorKind;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// The first part of a message of which only the last one counts.
const STATUS: &str = "STATUS=";
/// The most messages that wait for a manager.
const MOST: usize = 32;

/// The manager's socket, if there is a manager.
#[derive(Debug)]
pub struct Notify {
    socket: Option<(UnixDatagram, SocketAddr)>,
    /// Messages for which the socket has had no room, oldest first.
    unsent: RefCell<VecDeque<String>>,
}

impl Notify {
    /// Takes the socket that `NOTIFY_SOCKET` names in systemd's format: a path, or an abstract name
    /// after `@`. Any other name means that there is no manager.
    pub fn new(name: Option<&str>) -> Self {
        let socket = name.and_then(|name| {
            let address = match name.strip_prefix('@') {
                Some(name) => SocketAddr::from_abstract_name(name),
                None => SocketAddr::from_pathname(name),
            };
            let socket = UnixDatagram::unbound().ok()?;
            socket.set_nonblocking(true).ok()?;
            Some((socket, address.ok()?))
        });
        Self { socket, unsent: RefCell::default() }
    }

    /// Sends a message. Does not wait for a manager that does not read: the next [`Notify::beat`]
    /// or [`Notify::say`] sends the message then. A manager that misses `READY=1` would end the
    /// service.
    pub fn say(&self, state: &str) {
        if self.socket.is_none() {
            return;
        }
        let mut unsent = self.unsent.borrow_mut();
        if state.starts_with(STATUS) {
            unsent.retain(|earlier| !earlier.starts_with(STATUS));
        }
        if unsent.len() == MOST {
            unsent.pop_front();
        }
        unsent.push_back(state.to_owned());
        self.send(&mut unsent);
    }

    /// Sends the messages that still wait, and, if `watched`, the watchdog's heartbeat. A heartbeat
    /// itself does not wait: another one follows.
    pub fn beat(&self, watched: bool) {
        let mut unsent = self.unsent.borrow_mut();
        self.send(&mut unsent);
        if watched && unsent.is_empty() {
            if let Some((socket, address)) = &self.socket {
                let _ = socket.send_to_addr(b"WATCHDOG=1", address);
            }
        }
    }

    /// Whether there is a manager.
    pub fn has_manager(&self) -> bool {
        self.socket.is_some()
    }

    /// Asks the manager not to kill the service before `time` has passed. Like a heartbeat, the
    /// message does not wait: another one follows.
    pub fn extend(&self, time: Duration) {
        if let Some((socket, address)) = &self.socket {
            let message = format!("EXTEND_TIMEOUT_USEC={}", time.as_micros());
            let _ = socket.send_to_addr(message.as_bytes(), address);
        }
    }

    fn send(&self, unsent: &mut VecDeque<String>) {
        let Some((socket, address)) = &self.socket else { return };
        while let Some(state) = unsent.front() {
            match socket.send_to_addr(state.as_bytes(), address) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                // Without a manager there is nobody to wait for.
                Ok(_) | Err(_) => drop(unsent.pop_front()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manager_is_notified_by_a_path_and_by_an_abstract_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let hears = |manager: &UnixDatagram, name: &str| {
            Notify::new(Some(name)).say("READY=1");
            let mut bytes = [0; 64];
            let got = manager.recv(&mut bytes).unwrap();
            assert_eq!(&bytes[..got], b"READY=1");
        };
        hears(&UnixDatagram::bind(&path).unwrap(), path.to_str().unwrap());
        let name = format!("platen-notify-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        hears(&UnixDatagram::bind_addr(&address).unwrap(), &format!("@{name}"));
        // A socket without a listener, and no manager.
        Notify::new(Some("/nowhere/at/all")).say("READY=1");
        Notify::new(None).say("READY=1");
    }

    #[test]
    fn a_manager_that_reads_late_misses_heartbeats_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        manager.set_nonblocking(true).unwrap();
        let heard = || {
            let mut bytes = [0; 64];
            let got = manager.recv(&mut bytes).ok()?;
            Some(String::from_utf8_lossy(&bytes[..got]).into_owned())
        };
        let notify = Notify::new(path.to_str());
        // More than any system lets a socket hold (net.unix.max_dgram_qlen, the send buffer).
        (0..5_000).for_each(|_| notify.beat(true));
        notify.say("READY=1");
        notify.say("STATUS=one");
        notify.say("STATUS=two");
        while heard().is_some_and(|text| text == "WATCHDOG=1") {}
        notify.beat(false);
        assert_eq!(heard().as_deref(), Some("READY=1"));
        assert_eq!(heard().as_deref(), Some("STATUS=two"));
        assert_eq!(heard(), None);
        notify.beat(true);
        assert_eq!(heard().as_deref(), Some("WATCHDOG=1"));
        (0..5_000).for_each(|_| notify.say("RELOADING=1"));
        assert_eq!(notify.unsent.borrow().len(), MOST);
    }
}
