//! libvirt's daemon: where it listens, and how a new one is found after the old one has ended.

use anyhow::{bail, Context};
use libvirt::{Connection, Domain, LibvirtError, State};
use relay::UnixAddress;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Possible sockets of the daemon. A daemon for QEMU alone comes first.
const SOCKETS: [&str; 2] = ["/run/libvirt/virtqemud-sock", "/run/libvirt/libvirt-sock"];
/// The URI of libvirt's driver for QEMU.
const URI: &str = "qemu:///system";
/// Time limit for a daemon that is restarted.
const RETURNS: Duration = Duration::from_secs(120);
/// Time between two attempts.
const AGAIN: Duration = Duration::from_millis(200);

/// A daemon at its socket.
#[derive(Debug)]
pub(super) struct Daemon {
    socket: PathBuf,
}

impl Daemon {
    /// The daemon that `named` gives, or the first one that has a socket.
    pub(super) fn find(named: Option<&UnixAddress>) -> anyhow::Result<Self> {
        if let Some(named) = named {
            return Ok(Self { socket: named.path().to_owned() });
        }
        match SOCKETS.iter().map(PathBuf::from).find(|socket| socket.exists()) {
            Some(socket) => Ok(Self { socket }),
            None => bail!(
                "no daemon of libvirt listens at {}: start virtqemud or libvirtd, or name its socket with --connect",
                SOCKETS.join(" or ")
            ),
        }
    }

    /// Connects to the daemon.
    pub(super) fn open(&self) -> Result<Connection, LibvirtError> {
        Connection::open(&self.socket, URI)
    }

    /// Whether a domain exists, by the daemon's present answer.
    pub(super) fn has(&self, domain: &Domain) -> bool {
        let state = self.open().and_then(|mut connection| connection.state(domain));
        !matches!(state, Ok(state) if state.and_then(State::why).is_none())
    }

    /// The state of a domain; waits for a daemon that is being restarted.
    pub(super) fn state(&self, domain: &Domain) -> anyhow::Result<Option<State>> {
        let until = Instant::now() + RETURNS;
        loop {
            let state = self.open().and_then(|mut connection| connection.state(domain));
            match state {
                Ok(state) => return Ok(state),
                Err(error) if error.is_lost() && Instant::now() < until => {
                    std::thread::sleep(AGAIN);
                }
                Err(error) => return Err(error).context("libvirt does not tell the VM's state"),
            }
        }
    }
}
