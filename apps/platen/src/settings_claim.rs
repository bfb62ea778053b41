//! A claim on the migration settings of a QEMU, so that no command takes the settings of another
//! platen for the user's own.
//!
//! The command and its helper process ([`crate::settings_keeper`]) hold the claim together. The
//! helper of a command that was killed holds it until the settings are restored. The claim is one
//! on the monitor's socket: commands at two monitors of one QEMU do not find each other.

use crate::say::say;
use crate::stranger::stranger;
use anyhow::{bail, Context};
use relay::UnixAddress;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::process::Stdio;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How long a claim waits for the one before: a helper asks its QEMU every 5 s or more often.
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

    /// Claims the settings if nobody else has them.
    pub(crate) fn if_free(monitor: &UnixAddress) -> Option<Self> {
        UnixListener::bind_addr(&address_of(monitor)?).ok().map(Self)
    }

    fn within(monitor: &UnixAddress, patience: Duration) -> anyhow::Result<Option<Self>> {
        let Some(address) = address_of(monitor) else { return Ok(None) };
        let until = Instant::now() + patience;
        loop {
            match UnixListener::bind_addr(&address) {
                Ok(claim) => return Ok(Some(Self(claim))),
                Err(error) if error.kind() == ErrorKind::AddrInUse => {
                    if Instant::now() < until {
                        std::thread::sleep(ASK);
                        continue;
                    }
                    if let Some(user) = stranger(&address, Some(monitor)) {
                        say(&format!(
                            "monitor {monitor}: user {user} claims QEMU's settings, and is neither \
                             root nor the owner of this monitor: going on without the claim"
                        ));
                        return Ok(None);
                    }
                    bail!(
                        "monitor {monitor}: another platen migrates, rehearses, saves or receives \
                         this VM, or has died in that and still restores QEMU's settings: wait for \
                         its end"
                    );
                }
                Err(error) => return Err(error).context("cannot claim the settings"),
            }
        }
    }

    /// The claim as the standard output of a process that writes nothing to it: that descriptor is
    /// inherited.
    pub(crate) fn as_output(&self) -> std::io::Result<Stdio> {
        Ok(OwnedFd::from(self.0.try_clone()?).into())
    }
}

/// The address of the claim; `None` if there is no monitor.
fn address_of(monitor: &UnixAddress) -> Option<SocketAddr> {
    let (device, inode, birth) = socket_of(monitor)?;
    let birth = birth.and_then(|birth| birth.duration_since(UNIX_EPOCH).ok());
    let birth = birth.unwrap_or_default().as_nanos();
    let name = format!("platen-settings-{device:x}-{inode:x}-{birth:x}");
    SocketAddr::from_abstract_name(name).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::Errno;
    use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
    use std::os::unix::net::UnixStream;
    use std::process::Command;
    use std::sync::mpsc;

    /// Nothing here takes this long unless it hangs.
    const WATCHDOG: Duration = Duration::from_secs(60);

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
        assert!(SettingsClaim::if_free(&monitor).is_none());
        helper.kill().unwrap();
        helper.wait().unwrap();
        assert!(claim().unwrap().is_some());
    }

    #[test]
    fn a_claim_of_a_user_without_a_right_to_the_monitor_holds_nothing_up() {
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: only root can act as another user");
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let monitor: UnixAddress = format!("unix:{}", path.display()).parse().unwrap();
        let _listener = UnixListener::bind(&path).unwrap();
        let claim = || SettingsClaim::within(&monitor, Duration::ZERO);
        let as_another = || {
            let user = rustix::thread::Uid::from_raw(64055);
            // Of this thread only.
            rustix::thread::set_thread_res_uid(user, user, user).unwrap();
            claim().unwrap().unwrap()
        };
        let theirs = std::thread::scope(|scope| scope.spawn(as_another).join().unwrap());
        assert!(claim().unwrap().is_none(), "it goes on without a claim");
        drop(theirs);
        let ours = claim().unwrap().unwrap();
        assert!(claim().is_err());
        drop(ours);
    }

    /// A socket with as many connections as it takes, none of which its owner accepts, or one at
    /// which nobody listens.
    #[test]
    fn a_claim_that_takes_no_connection_holds_nothing_up() {
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: only root can act as another user");
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let monitor: UnixAddress = format!("unix:{}", path.display()).parse().unwrap();
        let _listener = UnixListener::bind(&path).unwrap();
        let address = address_of(&monitor).unwrap();
        let made = |user: u32, listens: bool| {
            let user = rustix::thread::Uid::from_raw(user);
            // Of this thread only.
            rustix::thread::set_thread_res_uid(user, user, user).unwrap();
            let (kind, flags) = (SocketType::STREAM, SocketFlags::CLOEXEC);
            let socket = net::socket_with(AddressFamily::UNIX, kind, flags, None).unwrap();
            let name = address.as_abstract_name().unwrap();
            let name = SocketAddrUnix::new_abstract_name(name).unwrap();
            // A process that another test starts holds the former socket until its execve.
            while net::bind(&socket, &name) == Err(Errno::ADDRINUSE) {
                std::thread::sleep(Duration::from_millis(1));
            }
            if listens {
                net::listen(&socket, 0).unwrap();
            }
            socket
        };
        for (user, listens) in [(64055, true), (64055, false), (0, true), (0, false)] {
            let made = || made(user, listens);
            let theirs = std::thread::scope(|scope| scope.spawn(made).join().unwrap());
            let waits = UnixStream::connect_addr(&address);
            assert_eq!(waits.is_ok(), listens);
            let (told, claimed) = mpsc::channel();
            let monitor = monitor.clone();
            std::thread::spawn(move || {
                let _ = told.send(SettingsClaim::within(&monitor, Duration::ZERO));
            });
            let claimed = claimed.recv_timeout(WATCHDOG).expect("it has to return");
            match user {
                0 => assert!(claimed.is_err(), "root's: {claimed:?}"),
                _ => assert!(matches!(claimed, Ok(None)), "{claimed:?}"),
            }
            drop((theirs, waits));
        }
        assert!(SettingsClaim::within(&monitor, Duration::ZERO).unwrap().is_some());
    }
}
