//! The exclusive resources of a device: its name, its sockets, its metrics port.
//!
//! The supervisor claims them once and passes them to every server. No other process can take them
//! between two servers, so they cannot prevent the next server from starting; meanwhile clients
//! connect and wait.

mod files;
mod living;
mod lock;
mod note;
mod place;

pub(super) use self::files::Left;
use self::lock::Lock;
use super::adopt::Adopt;
use super::args::ServeArgs;
use super::inherited::Inherited;
use super::{control, requests};
use anyhow::{bail, Context};
use relay::Listening;
use rustix::io::{fcntl_setfd, FdFlags};
use std::net::TcpListener;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;

/// All claims of a device. Dropping them releases them and removes their files.
#[derive(Debug)]
pub(super) struct Claims {
    // Fields drop in this order: the name is released last.
    control: Listening,
    /// The supervisor's socket for requests, which servers do not get.
    pub(super) requests: Option<Listening>,
    nbd: Option<Listening>,
    metrics: Option<TcpListener>,
    lock: Lock,
}

impl Claims {
    /// Claims the name and the sockets.
    ///
    /// # Errors
    /// Another process holds one of them.
    pub(super) fn make(args: &ServeArgs, supervised: bool) -> anyhow::Result<Self> {
        let folder = control::make_folder(args.control.run_dir.as_deref())?;
        let lock = Lock::take(&folder, &args.name)?;
        check_that_none_lives(&folder, &args.name)?;
        let control = control::listen(&folder, &args.name)?;
        let requests = supervised.then(|| requests::address(&folder, &args.name).listen());
        let nbd = args.nbd.as_ref().map(|address| address.listen()).transpose()?;
        let metrics = args.prometheus.map(|address| {
            TcpListener::bind(address)
                .with_context(|| format!("cannot listen on {address} for Prometheus"))
        });
        let requests = requests.transpose()?;
        Ok(Self { control, requests, nbd, metrics: metrics.transpose()?, lock })
    }

    /// Removes the ublk disk of a former device of this name, whose processes were all killed, and
    /// notes the owner of this device's disk for the next one.
    pub(super) fn succeed(&self, owner: Option<ublk::Owner>) -> anyhow::Result<()> {
        let noted = note::succeed(&self.lock.fd, owner);
        noted.with_context(|| format!("cannot write to {}", self.lock.path.display()))
    }

    /// Takes over the claims that this process held before `execve`.
    pub(super) fn adopt(args: &ServeArgs, handed: &Adopt) -> anyhow::Result<Self> {
        let folder = control::folder(args.control.run_dir.as_deref())?;
        let servers = &handed.inherited;
        let control = taken(servers.control.context("no control socket is handed over")?)?;
        let nbd = servers.nbd.map(taken).transpose()?;
        let metrics = servers.metrics.map(taken).transpose()?.map(Into::into);
        let [control_place, requests_place, nbd_place] = handed.places;
        let address = control::address(&folder, &args.name);
        let control = Listening::adopt(control.into(), &address, control_place);
        let address = requests::address(&folder, &args.name);
        let listener = taken(handed.requests)?.into();
        let requests = Some(Listening::adopt(listener, &address, requests_place));
        let nbd = nbd.zip(args.nbd.as_ref());
        let nbd = nbd.map(|(nbd, address)| Listening::adopt(nbd.into(), address, nbd_place));
        let lock = Lock { fd: taken(handed.lock)?, path: Lock::path(&folder, &args.name) };
        Ok(Self { control, requests, nbd, metrics, lock })
    }

    /// Adds the descriptors that servers do not get to the hand-over to another program.
    pub(super) fn note_for_program(&self, handed: &mut Adopt) {
        let number = |listening: &Listening| listening.listener.as_raw_fd();
        handed.lock = self.lock.fd.as_raw_fd();
        handed.requests = self.requests.as_ref().map_or(-1, number);
        let [requests, nbd] = [&self.requests, &self.nbd];
        let place = |listening: &Option<Listening>| listening.as_ref().and_then(Listening::place);
        handed.places = [self.control.place(), place(requests), place(nbd)];
    }

    /// Clears `FD_CLOEXEC`, so that every process started from here inherits the descriptors.
    pub(super) fn hand_on(&self) -> anyhow::Result<()> {
        let nbd = self.nbd.as_ref().map(|nbd| nbd.listener.as_fd());
        let metrics = self.metrics.as_ref().map(AsFd::as_fd);
        let all: [Option<BorrowedFd<'_>>; 4] = [
            // If the supervisor is killed, its server continues to hold the name.
            Some(self.lock.fd.as_fd()),
            Some(self.control.listener.as_fd()),
            nbd,
            metrics,
        ];
        for fd in all.into_iter().flatten() {
            fcntl_setfd(fd, FdFlags::empty())?;
        }
        Ok(())
    }

    /// Adds the descriptors that servers inherit.
    pub(super) fn note(&self, inherited: &mut Inherited) {
        inherited.control = Some(self.control.listener.as_raw_fd());
        inherited.nbd = self.nbd.as_ref().map(|nbd| nbd.listener.as_raw_fd());
        inherited.metrics = self.metrics.as_ref().map(AsRawFd::as_raw_fd);
    }

    /// Listening sockets of a server without a supervisor.
    pub(super) fn ways(&self) -> anyhow::Result<Ways> {
        Ok(Ways {
            control: self.control.listener.try_clone()?,
            nbd: self.nbd.as_ref().map(|nbd| nbd.listener.try_clone()).transpose()?,
            metrics: self.metrics.as_ref().map(TcpListener::try_clone).transpose()?,
        })
    }
}

/// Refuses a name whose lock has been removed while its device is served.
fn check_that_none_lives(folder: &Path, name: &str) -> anyhow::Result<()> {
    let address = control::address(folder, name);
    let whole = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    let bound = [address.path(), control::address(&whole, name).path()].map(Path::to_owned);
    let Some(pid) = bound.iter().find_map(|path| living::listener(path)) else { return Ok(()) };
    if address.path().exists() {
        bail!("device {name} is served already, by process {pid}");
    }
    bail!(
        "device {name} is served already, by process {pid}, but its files were removed from {}: \
         end that process first",
        folder.display()
    )
}

/// Listening sockets of a server.
#[derive(Debug)]
pub(super) struct Ways {
    pub(super) control: UnixListener,
    pub(super) nbd: Option<UnixListener>,
    pub(super) metrics: Option<TcpListener>,
}

impl Ways {
    /// Listening sockets inherited from the supervisor.
    pub(super) fn inherited(inherited: &Inherited) -> anyhow::Result<Self> {
        let control = inherited.control.context("the supervisor has left no control socket")?;
        Ok(Self {
            control: left(control)?.into(),
            nbd: inherited.nbd.map(left).transpose()?.map(Into::into),
            metrics: inherited.metrics.map(left).transpose()?.map(Into::into),
        })
    }
}

/// Duplicates a descriptor inherited from the supervisor.
pub(super) fn left(number: i32) -> anyhow::Result<OwnedFd> {
    let fd = swap::supervisor::descriptor(number);
    fd.with_context(|| format!("the supervisor has not left descriptor {number}"))
}

/// Takes over a descriptor that this process held before `execve`, under a new number.
pub(super) fn taken(number: i32) -> anyhow::Result<OwnedFd> {
    let fd = swap::supervisor::take_descriptor(number);
    fd.with_context(|| format!("descriptor {number} is not handed over"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As a cleaner of /run leaves it.
    #[test]
    fn a_name_whose_files_are_gone_belongs_to_the_device_that_lives() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        check_that_none_lives(folder, "one").unwrap();
        let first = control::listen(folder, "one").unwrap();
        let refused = || check_that_none_lives(folder, "one").unwrap_err().to_string();
        let served = format!("device one is served already, by process {}", std::process::id());
        assert_eq!(refused(), served);
        std::fs::remove_file(control::address(folder, "one").path()).unwrap();
        let removed = format!("{served}, but its files were removed from {}", folder.display());
        assert!(refused().starts_with(&removed), "{}", refused());
        check_that_none_lives(folder, "another").unwrap();
        drop(first);
        living::tests::wait_until_none_listens(control::address(folder, "one").path());
        check_that_none_lives(folder, "one").unwrap();
    }
}
