//! Messages to a service manager (`sd_notify`): ready, status, watchdog.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// The manager's socket, if there is a manager.
#[derive(Debug)]
pub struct Notify {
    socket: Option<(UnixDatagram, SocketAddr)>,
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
        Self { socket }
    }

    /// Sends a message. Does not wait for a manager that does not read.
    pub fn say(&self, state: &str) {
        if let Some((socket, address)) = &self.socket {
            let _ = socket.send_to_addr(state.as_bytes(), address);
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
}
