//! The migration proxy of KubeVirt, played: its sockets, its connections, and nothing else of it.
//!
//! ```text
//!  source: libvirt, QEMU ─► UID-PORT-source.sock ─► proxy ═ TCP ═► proxy ─► target: libvirt, QEMU
//! ```
//!
//! A proxy has a socket for libvirt (port 0), for the migration (49152) and for NBD (49153). Each
//! of them has a TCP port of the target's proxy, chosen there, which leads to one socket of the
//! target. KubeVirt's connections have TLS, and these do not, and none is for NBD.

use crate::host::Host;
use anyhow::{Context, Result};
use rustix::thread::{move_into_link_name_space, LinkNameSpaceType};
use std::fs::{self, File, Permissions};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::thread::spawn;

/// The port of libvirt, and that of the migration.
const LIBVIRT: u16 = 0;
const MIGRATION: u16 = 49152;
/// The name of the VM's instance.
const UID: &str = "vmi1";

/// The proxies of a migration between two hosts. Their threads end with the test.
#[derive(Debug)]
pub struct Proxies {
    source: PathBuf,
    /// Bytes of the migration that the proxies have carried.
    carried: Arc<AtomicU64>,
}

/// The name of the proxy's socket for a port.
fn socket(port: u16) -> String {
    format!("{UID}-{port}-source.sock")
}

impl Proxies {
    /// Starts the proxies; the sockets are in these folders of the hosts, as this machine has them.
    ///
    /// # Errors
    /// A socket cannot be made.
    pub fn start(from: (&Host, &Path), to: (&Host, &Path)) -> Result<Self> {
        for (_, folder) in [from, to] {
            let _ = fs::remove_dir_all(folder);
            fs::create_dir(folder)?;
            // The destination QEMU makes a socket in it.
            fs::set_permissions(folder, Permissions::from_mode(0o1777))?;
        }
        let carried = Arc::new(AtomicU64::new(0));
        for port in [LIBVIRT, MIGRATION] {
            let target = match port {
                LIBVIRT => to.0.file("/run/libvirt/libvirt-sock"),
                port => to.1.join(socket(port)),
            };
            let counts = Arc::new(AtomicU64::new(0));
            let counts = if port == MIGRATION { carried.clone() } else { counts };
            let at = listen(to.0, target)?;
            let near = UnixListener::bind(from.1.join(socket(port)))?;
            fs::set_permissions(from.1.join(socket(port)), Permissions::from_mode(0o777))?;
            let address = to.0.address;
            let network = network(from.0)?;
            spawn(move || -> Result<()> {
                enter(&network)?;
                for client in near.incoming() {
                    let (client, counts) = (client?, counts.clone());
                    let server = TcpStream::connect((address, at))?;
                    spawn(move || both(&client, &server, &counts));
                }
                Ok(())
            });
        }
        Ok(Self { source: from.1.into(), carried })
    }

    /// Bytes of the migration that they have carried.
    pub fn carried(&self) -> u64 {
        self.carried.load(Ordering::Relaxed)
    }

    /// Puts a link to `socket` in the place of the proxy's socket for the migration.
    ///
    /// # Errors
    /// The folder cannot be changed.
    pub fn lead_to(&self, socket: &Path) -> Result<()> {
        let (place, new) = (self.source.join(self::socket(MIGRATION)), self.source.join("new"));
        std::os::unix::fs::symlink(socket, &new)?;
        // At once: QEMU finds one or the other.
        fs::rename(new, place).context("the proxy's socket")
    }

    /// The URIs of a migration, as KubeVirt writes them: that of the other libvirt, that of QEMU.
    /// `folder` is the name of the folder on both hosts.
    pub fn uris(folder: &Path) -> [String; 2] {
        let path = |port| folder.join(socket(port)).display().to_string();
        let libvirt = format!("qemu+unix:///system?socket={}", path(LIBVIRT));
        [libvirt, format!("unix://{}", path(MIGRATION))]
    }

    /// The name of the socket at which the destination QEMU listens.
    pub fn destination() -> String {
        socket(MIGRATION)
    }
}

fn network(host: &Host) -> Result<File> {
    File::open(format!("/proc/{}/ns/net", host.pid())).context("the host's network")
}

/// Takes this thread to a host's network.
fn enter(network: &File) -> Result<()> {
    Ok(move_into_link_name_space(network.as_fd(), Some(LinkNameSpaceType::Network))?)
}

/// The target's proxy: a TCP port that leads to one of its sockets.
fn listen(host: &Host, target: PathBuf) -> Result<u16> {
    let (network, address) = (network(host)?, host.address);
    let bind = move |address: Ipv4Addr| -> Result<TcpListener> {
        enter(&network)?;
        Ok(TcpListener::bind((address, 0))?)
    };
    let bound = spawn(move || bind(address)).join();
    let listener = bound.map_err(|_| anyhow::anyhow!("the proxy has panicked"))??;
    let port = listener.local_addr()?.port();
    spawn(move || -> Result<()> {
        for client in listener.incoming() {
            let client = client?;
            // A target that is not there closes the connection.
            let Ok(server) = UnixStream::connect(&target) else { continue };
            spawn(move || both(&server, &client, &AtomicU64::new(0)));
        }
        Ok(())
    });
    Ok(port)
}

/// Copies both directions. The end of one ends both, as in KubeVirt's proxy.
fn both(unix: &UnixStream, tcp: &TcpStream, out: &AtomicU64) {
    std::thread::scope(|scope| {
        scope.spawn(|| copy(tcp, unix, &AtomicU64::new(0), || close(unix, tcp)));
        copy(unix, tcp, out, || close(unix, tcp));
    });
}

fn close(unix: &UnixStream, tcp: &TcpStream) {
    let _ = unix.shutdown(Shutdown::Both);
    let _ = tcp.shutdown(Shutdown::Both);
}

fn copy(mut from: impl Read, mut to: impl Write, count: &AtomicU64, end: impl Fn()) {
    let mut piece = vec![0; 32 << 10];
    while let Ok(got @ 1..) = from.read(&mut piece) {
        count.fetch_add(got as u64, Ordering::Relaxed);
        if to.write_all(&piece[..got]).is_err() {
            break;
        }
    }
    end();
}
