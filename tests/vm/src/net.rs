//! The network between the two ends: two namespaces and a shaped link, or the loopback device.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{bail, Context, Result};
use rustix::thread::{move_into_link_name_space, LinkNameSpaceType};
use serde_json::Value;

use crate::cleanup::{register, remove_namespace, Leftover, Ticket};
use crate::forward::{Forwarder, Pace};

/// One of the two ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Where VMs boot.
    Source,
    /// The first destination.
    Destination,
}

impl Side {
    /// The other end.
    pub fn other(self) -> Self {
        match self {
            Self::Source => Self::Destination,
            Self::Destination => Self::Source,
        }
    }
}

/// The speed of the link, each way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rate {
    /// As fast as it goes.
    Unlimited,
    /// Megabits (10^6) a second.
    Mbit(u32),
}

/// Sets the ports that the kernel gives to clients. The usual range has those on which QEMUs listen
/// here: once in many runs a client had such a port, and QEMU did not get it.
const CLIENT_PORTS: &str = "echo 50000 60999 > /proc/sys/net/ipv4/ip_local_port_range";

/// Two ends and the link between them.
#[derive(Debug)]
pub struct Net {
    kind: Kind,
    port: AtomicU16,
}

#[derive(Debug)]
enum Kind {
    Namespaces {
        source: String,
        destination: String,
        _tickets: [Ticket; 2],
    },
    /// Everything on 127.0.0.1, with a forwarder before each destination port that throttles and
    /// counts.
    Loopback {
        why: String,
        pace: Arc<Pace>,
        forwarders: std::sync::Mutex<Vec<Forwarder>>,
    },
}

const SOURCE_IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
const DESTINATION_IP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
const DEVICE: &str = "veth0";
/// A MAC address that no station on the link has.
const NOBODY: &str = "02:00:00:00:77:77";

impl Net {
    /// Makes two namespaces joined by a link, or says why it falls back to the loopback device.
    ///
    /// # Errors
    /// If neither works.
    pub fn new() -> Result<Self> {
        let kind = if std::env::var_os("PLATEN_VM_LOOPBACK").is_some() {
            Self::loopback("PLATEN_VM_LOOPBACK is set")
        } else {
            remove_stale_namespaces();
            match Self::namespaces() {
                Ok(kind) => kind,
                Err(error) => Self::loopback(&format!("{error:#}")),
            }
        };
        if let Kind::Loopback { why, .. } = &kind {
            println!("No network namespaces ({why}).");
            println!("Both ends meet on 127.0.0.1 through a throttling forwarder instead; run as root for real links.");
        }
        Ok(Self { kind, port: AtomicU16::new(4000) })
    }

    fn loopback(why: &str) -> Kind {
        let why = why.to_owned();
        Kind::Loopback { why, pace: Arc::default(), forwarders: std::sync::Mutex::default() }
    }

    fn namespaces() -> Result<Kind> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        if !rustix::process::geteuid().is_root() {
            bail!("not root");
        }
        let id = format!("platen-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let (source, destination) = (format!("{id}-s"), format!("{id}-d"));
        let tickets = [&source, &destination].map(|n| register(Leftover::Namespace(n.clone())));
        let build = || -> Result<()> {
            ip(&["netns", "add", &source])?;
            ip(&["netns", "add", &destination])?;
            let peer = ["peer", "name", DEVICE, "netns", &destination];
            let link = ["link", "add", DEVICE, "netns", &source, "type", "veth"];
            ip(&[link.as_slice(), &peer].concat())?;
            for (name, address) in [(&source, SOURCE_IP), (&destination, DESTINATION_IP)] {
                ip(&["-n", name, "addr", "add", &format!("{address}/24"), "dev", DEVICE])?;
                ip(&["-n", name, "link", "set", DEVICE, "up"])?;
                ip(&["-n", name, "link", "set", "lo", "up"])?;
                ip(&["netns", "exec", name, "sh", "-c", CLIENT_PORTS])?;
            }
            Ok(())
        };
        if let Err(error) = build() {
            remove_namespace(&source);
            remove_namespace(&destination);
            return Err(error);
        }
        Ok(Kind::Namespaces { source, destination, _tickets: tickets })
    }

    /// A description of the network.
    pub fn describe(&self) -> &'static str {
        match self.kind {
            Kind::Namespaces { .. } => "two network namespaces",
            Kind::Loopback { .. } => "loopback with a throttling forwarder",
        }
    }

    /// The addresses of both ends, as the other side writes them: source, destination.
    pub(crate) fn addresses(&self) -> [String; 2] {
        match self.kind {
            Kind::Namespaces { .. } => [SOURCE_IP, DESTINATION_IP].map(|ip| ip.to_string()),
            Kind::Loopback { .. } => [Ipv4Addr::LOCALHOST; 2].map(|ip| ip.to_string()),
        }
    }

    /// The prefix of a command at `side`.
    pub(crate) fn prefix(&self, side: Side) -> Vec<String> {
        match self.namespace(side) {
            Some(name) => ["ip", "netns", "exec", name].map(String::from).to_vec(),
            None => Vec::new(),
        }
    }

    fn namespace(&self, side: Side) -> Option<&str> {
        match (&self.kind, side) {
            (Kind::Namespaces { source, .. }, Side::Source) => Some(source),
            (Kind::Namespaces { destination, .. }, Side::Destination) => Some(destination),
            (Kind::Loopback { .. }, _) => None,
        }
    }

    /// Sets the speed of the link, for both directions, now.
    ///
    /// # Errors
    /// When `tc` refuses.
    pub fn shape(&self, rate: Rate) -> Result<()> {
        let Kind::Namespaces { source, destination, .. } = &self.kind else {
            if let Kind::Loopback { pace, .. } = &self.kind {
                pace.set(rate);
            }
            return Ok(());
        };
        for name in [source, destination] {
            match rate {
                Rate::Unlimited => {
                    // There may be none.
                    let _ = command("tc", &["-n", name, "qdisc", "del", "dev", DEVICE, "root"]);
                }
                Rate::Mbit(mbit) => {
                    // A burst of 1 ms (but at least one and a half segmentation-offload packets)
                    // and a queue of 10 ms, like a switch port.
                    let bytes_per_ms = u64::from(mbit) * 125;
                    let burst = bytes_per_ms.max(96 << 10).to_string();
                    let limit = (bytes_per_ms * 10).max(256 << 10).to_string();
                    let rate = format!("{mbit}mbit");
                    let words = ["-n", name, "qdisc", "replace", "dev", DEVICE, "root", "tbf"];
                    let tail = ["rate", &rate, "burst", &burst, "limit", &limit];
                    command("tc", &[words.as_slice(), &tail].concat())?;
                }
            }
        }
        Ok(())
    }

    /// Takes the link away, as a pulled cable does, or puts it back.
    ///
    /// # Errors
    /// When `ip` refuses.
    pub fn set_up(&self, up: bool) -> Result<()> {
        match &self.kind {
            Kind::Namespaces { source, .. } => {
                let state = if up { "up" } else { "down" };
                ip(&["-n", source, "link", "set", DEVICE, state]).map(drop)
            }
            Kind::Loopback { pace, .. } => {
                pace.set_up(up);
                Ok(())
            }
        }
    }

    /// Makes the link drop everything silently, in both directions, until [`Self::heal`]. False on
    /// the loopback device, which cannot do this.
    ///
    /// # Errors
    /// When `ip` refuses.
    pub fn swallow(&self) -> Result<bool> {
        let Kind::Namespaces { source, destination, .. } = &self.kind else { return Ok(false) };
        for (name, other) in [(source, DESTINATION_IP), (destination, SOURCE_IP)] {
            // Frames to an absent MAC address: the other end of the link drops them.
            let to = [&other.to_string(), "lladdr", NOBODY, "dev", DEVICE, "nud", "permanent"];
            ip(&[["-n", name, "neigh", "replace"].as_slice(), &to].concat())?;
        }
        Ok(true)
    }

    /// Undoes [`Self::swallow`].
    pub fn heal(&self) {
        let Kind::Namespaces { source, destination, .. } = &self.kind else { return };
        for (name, other) in [(source, DESTINATION_IP), (destination, SOURCE_IP)] {
            // There may be none.
            let _ = ip(&["-n", name, "neigh", "del", &other.to_string(), "dev", DEVICE]);
        }
    }

    /// An address on which a process at `side` can listen, and the address by which the other side
    /// reaches it.
    ///
    /// # Errors
    /// When no port is to be had.
    pub fn meeting_point(&self, side: Side) -> Result<(SocketAddr, SocketAddr)> {
        match &self.kind {
            Kind::Namespaces { .. } => {
                let port = self.port.fetch_add(1, Ordering::Relaxed);
                let ip = match side {
                    Side::Source => SOURCE_IP,
                    Side::Destination => DESTINATION_IP,
                };
                let address = SocketAddr::new(IpAddr::V4(ip), port);
                Ok((address, address))
            }
            Kind::Loopback { pace, forwarders, .. } => {
                // The port is free now; another process could take it before ours does, which only
                // tests risk.
                let local = IpAddr::V4(Ipv4Addr::LOCALHOST);
                let listen = TcpListener::bind((local, 0))?.local_addr()?;
                let forwarder = Forwarder::start(listen, Arc::clone(pace))?;
                let reach = forwarder.address();
                forwarders.lock().expect("no panic holds it").push(forwarder);
                Ok((listen, reach))
            }
        }
    }

    /// Bytes that have crossed the link so far, both ways together.
    ///
    /// # Errors
    /// When the kernel's counters cannot be read.
    pub fn crossed(&self) -> Result<u64> {
        self.count(Side::Destination, &["rx", "tx"])
    }

    /// Bytes that have arrived at `side` so far; on the loopback device both ways together.
    ///
    /// # Errors
    /// When the kernel's counters cannot be read.
    pub fn arrived(&self, side: Side) -> Result<u64> {
        self.count(side, &["rx"])
    }

    fn count(&self, side: Side, ways: &[&str]) -> Result<u64> {
        match (&self.kind, self.namespace(side)) {
            (_, Some(name)) => {
                let text = ip(&["-n", name, "-j", "-s", "link", "show", "dev", DEVICE])?;
                let json: Value = serde_json::from_str(&text).context("ip -j")?;
                let count = |way: &&str| {
                    json[0]["stats64"][*way]["bytes"]
                        .as_u64()
                        .with_context(|| format!("no {way} bytes"))
                };
                ways.iter().map(count).sum()
            }
            (Kind::Loopback { pace, .. }, None) => Ok(pace.counted()),
            (Kind::Namespaces { .. }, None) => bail!("each side has a namespace"),
        }
    }

    /// Opens a TCP connection as a process at `side` would.
    ///
    /// # Errors
    /// When it cannot be opened within two seconds.
    pub fn connect_from(&self, side: Side, to: SocketAddr) -> Result<TcpStream> {
        self.at(side, move || {
            TcpStream::connect_timeout(&to, Duration::from_secs(2))
                .with_context(|| format!("cannot connect to {to}"))
        })
    }

    /// Listens as a process at `side` would.
    ///
    /// # Errors
    /// When the address is taken.
    pub fn listen_at(&self, side: Side, at: SocketAddr) -> Result<TcpListener> {
        self.at(side, move || {
            TcpListener::bind(at).with_context(|| format!("cannot listen at {at}"))
        })
    }

    /// A function that moves the calling thread into the namespace of `side`, for good.
    ///
    /// # Errors
    /// When the namespace is gone.
    pub(crate) fn way_to(&self, side: Side) -> Result<impl FnOnce() -> Result<()> + Send> {
        let file = match self.namespace(side) {
            Some(name) => Some(std::fs::File::open(format!("/run/netns/{name}"))?),
            None => None,
        };
        Ok(move || {
            if let Some(file) = &file {
                move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))?;
            }
            Ok(())
        })
    }

    /// Runs `work` in the namespace of `side`: a socket stays in the namespace in which it was
    /// made.
    fn at<T: Send>(&self, side: Side, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let enter = self.way_to(side)?;
        std::thread::scope(|scope| {
            // A namespace belongs to a thread, so a thread of its own enters it and ends there.
            let thread = scope.spawn(|| {
                enter()?;
                work()
            });
            thread.join().expect("a panic in there is reported by its own message")
        })
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        if let Kind::Namespaces { source, destination, .. } = &self.kind {
            remove_namespace(source);
            remove_namespace(destination);
        }
    }
}

/// Removes namespaces of earlier runs whose process is gone (it was killed).
fn remove_stale_namespaces() {
    let Ok(entries) = std::fs::read_dir("/run/netns") else { return };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if owner_is_gone(&name) {
            remove_namespace(&name);
        }
    }
}

/// Whether `name` is a name of this harness (`platen-PID-...`) whose process is gone.
pub(crate) fn owner_is_gone(name: &str) -> bool {
    let mut words = name.split('-');
    let ours = words.next() == Some("platen");
    let pid = words.next().filter(|pid| pid.parse::<u32>().is_ok());
    pid.is_some_and(|pid| ours && words.next().is_some() && !Path::new("/proc").join(pid).exists())
}

fn ip(words: &[&str]) -> Result<String> {
    command("ip", words)
}

/// Runs a command and returns its output.
fn command(program: &str, words: &[&str]) -> Result<String> {
    let output = Command::new(program)
        .args(words)
        .output()
        .with_context(|| format!("cannot run {program}"))?;
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr);
        bail!("{program} {}: {}", words.join(" "), why.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
