//! The VMs as the command line names them.

use crate::say::say;
use crate::stranger::stranger;
use anyhow::{bail, Context};
use relay::UnixAddress;
use std::collections::{HashMap, HashSet};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::str::FromStr;

/// The longest name in bytes, as for `migrate --name`.
const LONGEST: usize = 255;

/// A VM as the command line names it: `NAME=unix:PATH[,HOST:PORT]`, or the name of a domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) way: Way,
}

/// How a VM is migrated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// By `platen migrate`.
    Monitor {
        monitor: UnixAddress,
        /// A receiver of its own.
        peer: Option<String>,
    },
    /// By `virsh migrate`: the name is that of the domain.
    Domain,
}

impl Entry {
    /// Parses the name of a domain of libvirt.
    ///
    /// # Errors
    /// No domain can have this name.
    pub(super) fn domain(name: &str) -> Result<Self, String> {
        if name.is_empty() || name.len() > LONGEST || name.contains(char::is_control) {
            return Err(format!("'{}' is no name of a domain", name.escape_debug()));
        }
        Ok(Self { name: name.to_owned(), way: Way::Domain })
    }

    fn monitor(&self) -> Option<&UnixAddress> {
        match &self.way {
            Way::Monitor { monitor, .. } => Some(monitor),
            Way::Domain => None,
        }
    }
}

impl FromStr for Entry {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, rest) = text
            .split_once('=')
            .filter(|(name, _)| !name.starts_with("unix:"))
            .ok_or_else(|| format!("'{text}' is not NAME=unix:PATH or NAME=unix:PATH,HOST:PORT"))?;
        if name.is_empty() || name.len() > LONGEST || name.contains(char::is_control) {
            return Err(format!(
                "the name in '{text}' has {} bytes: 1 to {LONGEST} are allowed, none a control \
                 character",
                name.len()
            ));
        }
        // A path may have a comma, but what is behind it then has no port or is no host.
        let is_address = |peer: &str| peer.contains(':') && !peer.contains('/');
        let (address, peer) = match rest.rsplit_once(',') {
            Some((address, peer)) if is_address(peer) => (address, Some(peer.to_owned())),
            _ => (rest, None),
        };
        let way = Way::Monitor { monitor: address.parse()?, peer };
        Ok(Self { name: name.to_owned(), way })
    }
}

/// Refuses a VM that is given twice: by its name, or by its monitor, whatever its path.
pub(super) fn refuse_twice(entries: &[Entry]) -> anyhow::Result<()> {
    let (mut names, mut monitors) = (HashSet::new(), HashMap::new());
    for entry in entries {
        let name = &entry.name;
        if !names.insert(name) {
            bail!(
                "the VM {name} is given twice: give each --vm and --domain once, with a name of \
                 its own"
            );
        }
        // A socket that is missing is reported as this VM's own failure.
        let Some(monitor) = entry.monitor() else { continue };
        let Ok(found) = monitor.path().metadata() else { continue };
        if let Some(other) = monitors.insert((found.dev(), found.ino()), name) {
            bail!("the VMs {other} and {name} have the same monitor {monitor}: give each VM once");
        }
    }
    Ok(())
}

/// Holds a VM against a second `platen evacuate`, until this is dropped or the process ends. `None`
/// if a user without a right to the VM holds the socket.
///
/// It is an abstract socket: the kernel frees it with the process, and no file is left behind.
#[derive(Debug)]
pub(super) struct Claim(#[expect(dead_code, reason = "held")] Option<UnixListener>);

impl Claim {
    /// Claims the VM behind this monitor.
    ///
    /// # Errors
    /// The monitor's socket does not exist, or another `platen evacuate` has the VM.
    pub(super) fn new(entry: &Entry) -> anyhow::Result<Self> {
        let (name, what) = match &entry.way {
            Way::Monitor { monitor, .. } => {
                let what = format!("monitor {monitor}");
                let found = monitor.path().metadata().with_context(|| what.clone())?;
                (format!("platen-evacuate-{:x}-{:x}", found.dev(), found.ino()), what)
            }
            // A name may be longer than the address of a socket.
            Way::Domain => {
                let sum = codec::checksum(entry.name.as_bytes());
                (format!("platen-evacuate-domain-{sum:x}"), format!("domain {}", entry.name))
            }
        };
        let address = SocketAddr::from_abstract_name(name).context("cannot claim the VM")?;
        match UnixListener::bind_addr(&address) {
            Ok(claim) => Ok(Self(Some(claim))),
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
                let Some(user) = stranger(&address, entry.monitor()) else {
                    bail!(
                        "another platen evacuate has this VM ({what}): wait for its end, or \
                         interrupt it"
                    );
                };
                say(&format!(
                    "{what}: user {user} claims this VM, and is neither root nor its owner: going on \
                     without the claim"
                ));
                Ok(Self(None))
            }
            Err(error) => Err(error).context("cannot claim the VM"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(text: &str) -> Entry {
        text.parse().unwrap()
    }

    #[test]
    fn an_entry_is_a_name_a_monitor_and_perhaps_a_receiver() {
        let web = entry("web=unix:/run/web/qmp");
        let way = |entry: &Entry| match &entry.way {
            Way::Monitor { monitor, peer } => (monitor.to_string(), peer.clone()),
            Way::Domain => panic!("a domain"),
        };
        assert_eq!((web.name.as_str(), way(&web)), ("web", ("unix:/run/web/qmp".into(), None)));
        let own = entry("web=unix:/run/a,b/qmp,[fe80::2]:4445");
        let there = Some("[fe80::2]:4445".to_owned());
        assert_eq!(way(&own), ("unix:/run/a,b/qmp".into(), there));
        assert_eq!(way(&entry("web=unix:/run/a,b:/qmp")).1, None);
        let long = format!("{}=unix:/q", "x".repeat(256));
        for bad in ["web", "unix:/run/web/qmp", "=unix:/q", "a\nb=unix:/q", "web=/run/qmp", &long] {
            assert!(bad.parse::<Entry>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_vm_is_given_once() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let of = |name: &str, file: &str| entry(&format!("{name}=unix:{}", at(file).display()));
        std::fs::write(at("one"), "").unwrap();
        std::os::unix::fs::symlink(at("one"), at("same")).unwrap();
        assert!(refuse_twice(&[of("a", "one"), of("b", "two"), of("c", "two")]).is_ok());
        let said = |entries: &[Entry]| refuse_twice(entries).unwrap_err().to_string();
        assert!(said(&[of("a", "one"), of("a", "two")]).contains("VM a is given twice"));
        let same = said(&[of("a", "one"), of("b", "same")]);
        assert!(same.contains("VMs a and b") && same.contains("same monitor"), "{same}");
    }

    #[test]
    fn a_vm_is_claimed_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let entry = entry(&format!("web=unix:{}", path.display()));
        assert!(Claim::new(&entry).unwrap_err().to_string().contains("monitor"));
        std::fs::write(&path, "").unwrap();
        let claim = Claim::new(&entry).unwrap();
        let refused = Claim::new(&entry).unwrap_err().to_string();
        assert!(refused.contains("another platen evacuate has this VM"), "{refused}");
        drop(claim);
        assert!(Claim::new(&entry).is_ok());
        let name = format!("a domain of test {}", std::process::id());
        let domain = Entry::domain(&name).unwrap();
        let _claim = Claim::new(&domain).unwrap();
        assert!(Claim::new(&domain).unwrap_err().to_string().contains(&name));
        assert!(Entry::domain("").is_err() && Entry::domain("a\nb").is_err());
    }

    #[test]
    fn a_claim_of_a_user_without_a_right_to_the_vm_keeps_no_vm_here() {
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: only root can act as another user");
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        std::fs::write(&path, "").unwrap();
        let web = entry(&format!("web=unix:{}", path.display()));
        let name = format!("another domain of test {}", std::process::id());
        let domain = Entry::domain(&name).unwrap();
        for entry in [&web, &domain] {
            let as_another = || {
                let user = rustix::thread::Uid::from_raw(64055);
                // Of this thread only.
                rustix::thread::set_thread_res_uid(user, user, user).unwrap();
                Claim::new(entry).unwrap()
            };
            let theirs = std::thread::scope(|scope| scope.spawn(as_another).join().unwrap());
            Claim::new(entry).unwrap();
            if entry == &web {
                // The owner of the monitor may move its VM.
                std::os::unix::fs::chown(&path, Some(64055), None).unwrap();
                assert!(Claim::new(entry).is_err());
            }
            drop(theirs);
        }
    }
}
