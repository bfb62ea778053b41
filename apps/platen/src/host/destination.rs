//! A carrier beside the destination QEMU.

use super::carriage::{Carriage, Outcome};
use crate::seed::StoreSeed;
use anyhow::Context;
use host::{
    connection_owner, listener_owner, of_process, unix_listeners, Awaits, Phase, Record, Status,
    What,
};
use relay::{
    Destination, DestinationEnd, Host, Promise, QemuAddress, QemuSocket, RelayError, Server,
    ServerConfig,
};
use rustix::fs::{Access, AtFlags, CWD};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use serde_json::json;
use session::{Grants, Hello, Histories};
use std::net::TcpStream;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// Receives the VM, or the NBD connection, of the promised session, over the links that the service
/// passes.
pub(super) fn run(
    carriage: Carriage,
    promise: &Promise,
    links: &Receiver<(TcpStream, String)>,
) -> anyhow::Result<Outcome> {
    let settings = &carriage.settings;
    let address = settings.deliver(carriage.carrier.record().place());
    let path = match &address {
        QemuAddress::Unix(address) => Some(address.path().to_owned()),
        QemuAddress::Tcp(_) => None,
    };
    let config = ServerConfig {
        targets: vec![(promise.hello.name.clone(), address.clone())],
        acceptor: Some(settings.acceptor()?.0),
        decompress_threads: settings.decompress_threads(),
        qat: None,
        page_size: settings.config.page_size,
        grants: Grants::default(),
        // These sizes are those that the front has granted.
        delta_cache: promise.hello.delta_cache,
        seed: settings.config.seed.as_deref().map(StoreSeed::at),
        history: promise.hello.histories.map_or(0, Histories::bytes),
        resume: Duration::from_secs(settings.config.resume_timeout),
        silence: session::SILENCE,
    };
    let receiver = Arc::new(Receiving {
        carriage,
        listener: listener_at(&address).map_or_else(OnceLock::new, OnceLock::from),
        address,
        path,
        process: OnceLock::new(),
        outcome: Mutex::new(None),
    });
    let server = Server::new(config, receiver.clone())?;
    let stopping = server.clone();
    receiver.carriage.stop_by(move || stopping.stop());
    let leaving = server.clone();
    receiver.carriage.carrier.give_way_by(move || leaving.give_way());
    server.carry(promise, links)?;
    let outcome = receiver.outcome.lock().unwrap_or_else(PoisonError::into_inner).take();
    outcome.context("the session has ended without an outcome")
}

struct Receiving {
    carriage: Carriage,
    address: QemuAddress,
    /// The socket that listened there first.
    listener: OnceLock<u64>,
    /// The unix socket of the destination QEMU.
    path: Option<PathBuf>,
    /// The process behind the first connection there.
    process: OnceLock<i32>,
    outcome: Mutex<Option<Outcome>>,
}

impl Receiving {
    fn is_for_a_disk(&self) -> bool {
        self.carriage.carrier.record().what == What::Disk
    }

    /// Refuses a socket that listens in the place of the one at the session's begin. After an
    /// outage of the links the VM's QEMU may have ended, and libvirt gives its port to the next.
    fn is_of_this_vm(&self) -> Result<(), String> {
        // If nothing listens, no connection is made.
        let Some(now) = listener_at(&self.address) else { return Ok(()) };
        if let QemuAddress::Tcp(address) = self.address {
            if let Ok(Some(owner)) = listener_owner(address) {
                self.judge(owner.uid)?;
            }
        }
        if *self.listener.get_or_init(|| now) == now {
            return Ok(());
        }
        Err(format!(
            "another process listens at {} than at the begin of the session, and may have another \
             VM: migrate again",
            self.address
        ))
    }
}

impl Receiving {
    /// Refuses a process of a user who may not migrate: any user may listen at a port that no QEMU
    /// has, and would get the memory of a VM.
    fn judge(&self, uid: u32) -> Result<(), String> {
        if self.carriage.settings.allowed_users().0.contains(&uid) {
            return Ok(());
        }
        Err(format!(
            "user {uid} listens at {}, who may not migrate: allow_users in the configuration names \
             those who may",
            self.address
        ))
    }

    /// As [`judge`](Self::judge), for the process that has accepted a connection. Its listening
    /// socket may have been closed since.
    fn judge_owner(&self, socket: &TcpStream) -> Result<(), String> {
        let ends = socket.peer_addr().and_then(|there| Ok((there, socket.local_addr()?)));
        match ends.and_then(|(there, here)| connection_owner(there, here)) {
            Ok(Some(owner)) => self.judge(owner.uid),
            // It waits to be accepted.
            _ => Ok(()),
        }
    }
}

impl Host for Receiving {
    fn is_for_disks(&self) -> bool {
        self.is_for_a_disk()
    }

    fn prepare(&self, _: &Option<String>, _: &Hello) -> Result<(), String> {
        // libvirt has set the destination QEMU up.
        Ok(())
    }

    fn listen(&self, _: &Option<String>) -> Result<(), String> {
        self.is_of_this_vm()?;
        // The QEMU takes the first connection for its VM's (W36).
        if self.is_for_a_disk() && Awaits::at(&self.address) == Awaits::Vm {
            return Err(format!(
                "a QEMU awaits a VM at {}, and a connection that has written nothing is no \
                 migration's",
                self.address
            ));
        }
        self.path.as_deref().map_or(Ok(()), |path| is_of_one_vm(path).and_then(|()| is_open(path)))
    }

    fn connected(&self, socket: &QemuSocket) -> Result<(), String> {
        // It may have come between the look and the connection.
        self.is_of_this_vm()?;
        let (socket, path) = match (socket, &self.path) {
            (QemuSocket::Unix(socket), Some(path)) => (socket, path),
            (QemuSocket::Tcp(socket), _) => return self.judge_owner(socket),
            (QemuSocket::Unix(_), None) => return Ok(()),
        };
        // The second QEMU may have come between the first look and the connection.
        is_of_one_vm(path)?;
        let told = |error: rustix::io::Errno| format!("its user cannot be told: {error}");
        let user = socket_peercred(socket).map_err(told)?;
        self.judge(user.uid.as_raw())?;
        let pid = user.pid.as_raw_pid();
        let first = *self.process.get_or_init(|| pid);
        if pid != first {
            return Err(format!(
                "process {pid} listens at {}, and process {first} has the migration's first \
                 connection",
                path.display()
            ));
        }
        if let Some(vm) = of_process(pid) {
            self.carriage.carrier.update(|record| record.vm = Some(vm));
        }
        Ok(())
    }

    fn serve(&self, _: &Option<String>, destination: &Destination) {
        let progress = |record: &mut Record| {
            record.plain = destination.counters().plain.load(Ordering::Relaxed);
            record.transferred = destination.session().bytes_in.load(Ordering::Relaxed);
            record.ram = destination.counters().ram.load(Ordering::Relaxed);
            record.ram_sent =
                destination.counters().ram_seen(self.carriage.settings.config.page_size);
            let begun = destination.has_begun();
            // QEMU has all it needs, so the next VM may have its port.
            let over = destination.is_confirmed() || destination.session().failure().is_some();
            record.holds_port = !over && record.what == What::Vm;
            record.phase = match (begun, over) {
                (_, true) => Phase::Ending,
                (true, false) => Phase::Active,
                (false, false) => Phase::Opening,
            };
        };
        let report = || json!({ "status": "completed" }).to_string().into_bytes();
        let result = self.carriage.while_telling(progress, || destination.run(report));
        // Only the question of a source that has lost its links may still follow (W28).
        self.carriage.carrier.update(|record| {
            record.holds_port = false;
            if destination.has_begun() {
                // The migration may have been shorter than the time between two looks.
                record.reached = Phase::Active;
            }
            record.phase = Phase::Ending;
        });
        let outcome = match result {
            Ok(_) if self.is_for_a_disk() => Outcome::new(Status::Completed, None),
            result => outcome(destination.has_begun(), result),
        };
        *self.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
    }

    fn notice(&self, text: &str) {
        self.carriage.say(text);
    }
}

/// The inode of the only socket that listens at this address; `None` also if the kernel does not
/// tell.
fn listener_at(address: &QemuAddress) -> Option<u64> {
    match address {
        QemuAddress::Tcp(address) => listener_owner(*address).ok().flatten().map(|it| it.inode),
        QemuAddress::Unix(address) => match unix_listeners(address.path()).ok()?[..] {
            [only] => Some(only),
            _ => None,
        },
    }
}

/// Refuses a path that a second QEMU has taken from a first one that still waits there: the VM is
/// for one of them, and nothing shows for which.
fn is_of_one_vm(path: &Path) -> Result<(), String> {
    let found = unix_listeners(path).map_err(|error| {
        format!("the kernel does not tell who listens at {}: {error}", path.display())
    })?;
    if found.len() < 2 {
        return Ok(());
    }
    Err(format!(
        "{} QEMUs wait at {}: each of several migrations needs a socket of its own. End them, and \
         migrate again",
        found.len(),
        path.display()
    ))
}

/// Refuses a socket to which this process may not connect. The folder's list gives rights to new
/// sockets. The umask of the process that listens cuts them, and only its user can mend that.
fn is_open(path: &Path) -> Result<(), String> {
    match rustix::fs::accessat(CWD, path, Access::WRITE_OK, AtFlags::EACCESS) {
        Err(Errno::ACCESS) => {
            let mode = path.metadata().map_or(0, |found| found.mode() & 0o777);
            Err(format!(
                "the service (user {}) may not connect to {} (mode {mode:03o}): the umask of the \
                 QEMU there takes the group's right to write. Start it with umask 002, as libvirt \
                 does, or run the service as root",
                rustix::process::geteuid().as_raw(),
                path.display()
            ))
        }
        _ => Ok(()),
    }
}

fn outcome(begun: bool, result: Result<DestinationEnd, RelayError>) -> Outcome {
    match result {
        Ok(DestinationEnd { confirmed: true, .. }) => Outcome::new(Status::Completed, None),
        Ok(_) => {
            let cause = "the source QEMU used no return path".into();
            Outcome::new(Status::Unconfirmed, Some(cause))
        }
        Err(error) => {
            let error = anyhow::Error::from(error);
            Outcome::failed(if begun {
                format!("{error:#}")
            } else {
                format!("the source left before it migrated: {error:#}")
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::thread::{set_thread_res_uid, Uid};
    use std::fs::{set_permissions, Permissions};
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_socket_of_another_umask_is_refused_with_its_cause() {
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: needs root, to look as another user");
        }
        let folder = tempfile::tempdir().unwrap();
        set_permissions(folder.path(), Permissions::from_mode(0o711)).unwrap();
        let path = folder.path().join("1");
        let _qemu = UnixListener::bind(&path).unwrap();
        let seen_by = |user: u32, mode: u32| {
            set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            let look = || {
                let user = Uid::from_raw(user);
                // Of this thread only.
                set_thread_res_uid(user, user, user).unwrap();
                is_open(&path)
            };
            std::thread::scope(|scope| scope.spawn(look).join().unwrap())
        };
        let why = seen_by(12345, 0o755).unwrap_err();
        assert!(why.contains("user 12345") && why.contains("mode 755"), "{why}");
        assert!(why.contains("umask 002"), "{why}");
        seen_by(12345, 0o777).unwrap();
        // Root may.
        seen_by(0, 0o755).unwrap();
        // Nothing listens: the connection says so.
        std::fs::remove_file(&path).unwrap();
        is_open(&path).unwrap();
    }
}
