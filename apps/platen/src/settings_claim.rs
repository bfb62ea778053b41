//! A claim on the migration settings of a QEMU, so that no command takes the settings of another
//! platen for the user's own.
//!
//! The command and its helper process ([`crate::settings_keeper`]) hold the claim together. The
//! helper of a command that was killed holds it until the settings are restored.

use anyhow::{ensure, Context};
use relay::UnixAddress;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::process::Stdio;
use std::time::{Duration, Instant, SystemTime};

/// How long a claim waits for the one before: a helper asks its QEMU at least once a second.
const PATIENCE: Duration = Duration::from_secs(10);
const ASK: Duration = Duration::from_millis(50);

/// Identity of a monitor's socket: its device, its inode and its birth, if the file system has one.
pub(crate) type SocketId = (u64, u64, Option<SystemTime>);

/// The identity of the socket at this address. That of another QEMU at the same path differs.
pub(crate) fn socket_of(monitor: &UnixAddress) -> Option<SocketId> {
    let found = std::fs::metadata(monitor.path()).ok()?;
    Some((found.dev(), found.ino(), found.created().ok()))
}

/// An abstract socket: the kernel frees it with the last process that has it, and no file is left
/// behind.
#[derive(Debug)]
pub(crate) struct SettingsClaim(UnixListener);

impl SettingsClaim {
    /// Claims the settings of the QEMU behind this monitor; `None` if there is no monitor.
    ///
    /// # Errors
    /// Another platen has them for longer than 10 s.
    pub(crate) fn new(monitor: &UnixAddress) -> anyhow::Result<Option<Self>> {
        Self::within(monitor, PATIENCE)
    }

    fn within(monitor: &UnixAddress, patience: Duration) -> anyhow::Result<Option<Self>> {
        let Some((device, inode, _)) = socket_of(monitor) else { return Ok(None) };
        let name = format!("platen-settings-{device:x}-{inode:x}");
        let address = SocketAddr::from_abstract_name(name).context("cannot claim the settings")?;
        let until = Instant::now() + patience;
        loop {
            match UnixListener::bind_addr(&address) {
                Ok(claim) => return Ok(Some(Self(claim))),
                Err(error) if error.kind() == ErrorKind::AddrInUse => ensure!(
                    Instant::now() < until,
                    "monitor {monitor}: another platen migrates, rehearses or saves this VM, or has \
                     died in that and still restores QEMU's settings: wait for its end"
                ),
                Err(error) => return Err(error).context("cannot claim the settings"),
            }
            std::thread::sleep(ASK);
        }
    }

    /// The claim as the standard output of a process that writes nothing to it: that descriptor is
    /// inherited.
    pub(crate) fn as_output(&self) -> std::io::Result<Stdio> {
        Ok(OwnedFd::from(self.0.try_clone()?).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_claim_lasts_as_long_as_the_helper_that_inherited_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let monitor: UnixAddress = format!("unix:{}", path.display()).parse().unwrap();
        let claim = || SettingsClaim::within(&monitor, Duration::ZERO);
        assert!(claim().unwrap().is_none());
        let _listener = UnixListener::bind(&path).unwrap();
        let first = claim().unwrap().unwrap();
        let output = first.as_output().unwrap();
        let mut helper = Command::new("sleep").arg("600").stdout(output).spawn().unwrap();
        drop(first);
        let refused = claim().unwrap_err().to_string();
        assert!(refused.contains("still restores QEMU's settings"), "{refused}");
        helper.kill().unwrap();
        helper.wait().unwrap();
        assert!(claim().unwrap().is_some());
    }
}
