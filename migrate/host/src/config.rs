//! `/etc/platen/platen.toml`: the same file on every host.

mod check;

use crate::error::HostError;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use tls::Fingerprint;

/// Where the configuration is.
pub const DEFAULT_CONFIG: &str = "/etc/platen/platen.toml";

/// The configuration. A key that is left out has its default; an unknown key is an error.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// TCP port on which the service of each host listens for the services of the others.
    pub port: u16,
    /// Treatment of a migration to a host whose service cannot be reached: `refuse` ends it at
    /// once; `forward` connects to the same port of the host's address, without encryption.
    pub unreachable: Policy,
    /// Treatment of a connection to a door that is neither a QEMU migration nor an NBD client's:
    /// `refuse` or `forward`, as for `unreachable`.
    pub stranger: Policy,
    /// Treatment of migrations that would be intercepted while the service does not run:
    /// `forward` lets them go to the host as without platen; `refuse` makes them fail at once.
    pub intercept_stopped: Policy,
    /// Names or numbers of the users who may connect to a door, beside root and the user of the
    /// service. Names that this host does not have are ignored.
    pub allow_users: Vec<String>,
    /// Folder of the sockets and records of migrations.
    pub run_dir: PathBuf,
    /// Number of unix sockets for each other host, 0 to 64: `socket_dir/NAME/1`,
    /// `socket_dir/NAME/2` and so on, each for one migration at a time (`virsh migrate --migrateuri
    /// unix:PATH`).
    pub sockets: u16,
    /// Folder of these sockets, the same on every host.
    pub socket_dir: PathBuf,
    /// Folder with this host's ca.pem, cert.pem and key.pem, which `platen cert` makes.
    pub tls_dir: PathBuf,
    /// SHA-256 fingerprints of the keys of certificates that are revoked: no link to their owner is
    /// accepted. `issued` in the folder of the CA lists those of all hosts; `platen doctor` prints
    /// that of its host. Remove the fingerprint when the certificate has expired.
    pub revoked: Vec<String>,
    /// Codec: none, lz4, zlib, zstd, qatzip or auto.
    pub codec: String,
    /// Compression level of a named codec.
    pub level: Option<i32>,
    /// Number of compression threads of a migration, 1 to 255; the number of CPUs, at most 8, if it
    /// is omitted.
    pub compress_threads: Option<u16>,
    /// Number of decompression threads of a migration, 1 to 255; the number of CPUs, at most 8, if
    /// it is omitted.
    pub decompress_threads: Option<u16>,
    /// CPU time that the source end of a migration may use on average, in CPUs, with codec auto.
    pub max_cpu: Option<f64>,
    /// Bytes that a migration sends per second at most, 131072 or more; as many as the link takes
    /// if it is omitted.
    pub max_bandwidth: Option<u64>,
    /// Bytes that all migrations of a host together send per second at most, 131072 or more; as
    /// many as the link takes if it is omitted. A change holds for migrations that begin later.
    pub max_bandwidth_host: Option<u64>,
    /// Number of TCP connections of a migration between the hosts, 1 to 64.
    pub links: u16,
    /// Store of saved VMs, or one of its saves, on the host that a VM migrates to: pages that it
    /// holds are not sent, and the source host learns their hashes. A host without this folder
    /// receives all pages. None if it is omitted.
    pub seed: Option<PathBuf>,
    /// Store of saved VMs on the host that a VM migrates from: after the migration platen writes
    /// the VM's pages there, for `seed` when the VM comes back. During the migration the store's
    /// disk takes a temporary file as large as the VM's memory. A host without this folder writes
    /// nothing. None if it is omitted.
    pub write_seed: Option<PathBuf>,
    /// Bytes of the packs of `write_seed` beyond which the oldest of these seeds are removed.
    pub seed_limit: u64,
    /// Seconds to wait for the other host after every link to it is lost, 0 to 3600.
    pub resume_timeout: u64,
    /// Longest silence of a source QEMU while it prepares its RAM, in seconds, 1 to 3600. A VM of
    /// several TB may need more than the default.
    pub setup_timeout: u64,
    /// Page size of the guests in bytes: 4096, 16384 or 65536.
    pub page_size: u32,
    /// Address at which the service serves its metrics in Prometheus's text format: a loopback
    /// address with a port, such as 127.0.0.1:9464, or unix:PATH; none if it is omitted.
    pub metrics: Option<String>,
    /// The hosts.
    pub host: Vec<HostEntry>,
}

/// A host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostEntry {
    /// Name of the host: its host name, and a name in its certificate.
    pub name: String,
    /// Name or address at which the other hosts reach it; `name` if it is omitted.
    #[serde(default)]
    pub address: Option<String>,
    /// Door address of the host: a loopback address other than 127.0.0.1 that no other host has.
    pub door: Ipv4Addr,
    /// Ports from which its libvirt chooses one for each incoming VM, FIRST-LAST; no two hosts may
    /// share one. `platen host doors on` tells libvirt. The other hosts' services listen on them at
    /// `door`. libvirt takes no port on which anything listens on its own host, at whatever
    /// address. So the doors to other hosts must not be on the ports of this one.
    pub ports: PortRange,
    /// Ports at which its QEMUs await migrations at `address`, FIRST-LAST, for migrations by tools
    /// that know no doors; none if it is omitted. `platen host intercept on` redirects QEMU's
    /// connections to these ports to its door: the first port to the first of `ports`, and so on.
    #[serde(default)]
    pub intercept: Option<PortRange>,
    /// Address on which its service listens for other hosts; all its addresses if it is omitted.
    #[serde(default)]
    pub listen: Option<IpAddr>,
    /// Loopback address at which its own QEMUs listen; `door` if it is omitted.
    #[serde(default)]
    pub deliver: Option<Ipv4Addr>,
}

/// Where metrics are served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MetricsAddress {
    /// A loopback address: the endpoint authenticates no client.
    Tcp(SocketAddr),
    /// A socket that only its user and group may open.
    Unix(PathBuf),
}

impl MetricsAddress {
    /// Parses the value of `metrics`.
    ///
    /// # Errors
    /// The message says what is wrong with the value.
    pub fn parse(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:").map(PathBuf::from) {
            return match path.is_absolute() {
                true => Ok(Self::Unix(path)),
                false => Err(format!("'{text}': the path of the socket must be absolute")),
            };
        }
        match text.parse::<SocketAddr>() {
            Ok(address) if !address.ip().is_loopback() => Err(format!(
                "{address} can be reached from other hosts, and anybody may read it: give a loopback \
                 address, as 127.0.0.1:9464"
            )),
            Ok(address) if address.port() == 0 => Err(format!("{address} has no port")),
            Ok(address) => Ok(Self::Tcp(address)),
            Err(_) => Err(format!("'{text}' is neither unix:PATH nor like 127.0.0.1:9464")),
        }
    }
}

/// Treatment of a connection that platen does not carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// The connection is reset.
    Refuse,
    /// The connection is forwarded to the host unencrypted.
    Forward,
}

/// A range of ports, FIRST-LAST.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortRange(pub RangeInclusive<u16>);

impl PortRange {
    /// Whether the range contains `port`.
    pub fn contains(&self, port: u16) -> bool {
        self.0.contains(&port)
    }
}

impl Serialize for PortRange {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{}-{}", self.0.start(), self.0.end()))
    }
}

impl<'de> Deserialize<'de> for PortRange {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let parsed = text.split_once('-').and_then(|(first, last)| {
            let range = first.parse::<u16>().ok()?..=last.parse::<u16>().ok()?;
            (*range.start() > 0 && !range.is_empty()).then_some(range)
        });
        let wrong = || format!("'{text}' is not FIRST-LAST, for example 49152-49215");
        parsed.map(PortRange).ok_or_else(|| serde::de::Error::custom(wrong()))
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            port: 4444,
            unreachable: Policy::Refuse,
            stranger: Policy::Refuse,
            intercept_stopped: Policy::Forward,
            // The users as which Debian's and Fedora's libvirt run QEMU.
            allow_users: vec!["libvirt-qemu".into(), "qemu".into()],
            run_dir: "/run/platen/host".into(),
            sockets: 0,
            socket_dir: "/run/platen/doors".into(),
            tls_dir: tls::DEFAULT_DIR.into(),
            revoked: Vec::new(),
            codec: "auto".into(),
            level: None,
            compress_threads: None,
            decompress_threads: None,
            seed: None,
            write_seed: None,
            seed_limit: 16 << 30,
            max_cpu: None,
            max_bandwidth: None,
            max_bandwidth_host: None,
            links: 4,
            resume_timeout: 30,
            setup_timeout: 60,
            page_size: 4096,
            metrics: None,
            host: Vec::new(),
        }
    }
}

impl Config {
    /// Parses the text of a configuration and checks it.
    ///
    /// # Errors
    /// The error names the key and what is wrong with its value.
    pub fn parse(text: &str) -> Result<Self, HostError> {
        let config: Self =
            toml::from_str(text).map_err(|error| HostError::Syntax(Box::new(error)))?;
        config.check()?;
        Ok(config)
    }

    /// The path of a unix socket of this host.
    pub fn socket_of(&self, host: &str, number: u16) -> PathBuf {
        self.socket_dir.join(host).join(number.to_string())
    }

    /// The certificates that are revoked.
    pub fn revoked(&self) -> Vec<Fingerprint> {
        // All parse: the configuration was checked.
        self.revoked.iter().filter_map(|text| text.parse().ok()).collect()
    }

    /// The host of this name: its full name, or otherwise its name before the first dot.
    ///
    /// # Errors
    /// No host has this name, or more than one has.
    pub fn find(&self, name: &str) -> Result<&HostEntry, HostError> {
        let short = |name: &str| name.split('.').next().unwrap_or_default().to_owned();
        let exact = self.host.iter().find(|host| host.name == name);
        let mut alike = self.host.iter().filter(|host| short(&host.name) == short(name));
        let found = exact.or_else(|| alike.next().filter(|_| alike.next().is_none()));
        found.ok_or_else(|| {
            let known: Vec<_> = self.host.iter().map(|host| host.name.as_str()).collect();
            HostError::Unknown { name: name.into(), known: known.join(", ") }
        })
    }
}

impl HostEntry {
    /// The name or address at which the other hosts reach this host.
    pub fn address(&self) -> &str {
        self.address.as_deref().unwrap_or(&self.name)
    }

    /// HOST:PORT, with brackets around an IPv6 address.
    pub fn address_with(&self, port: u16) -> String {
        match self.address().parse::<IpAddr>() {
            Ok(IpAddr::V6(address)) => format!("[{address}]:{port}"),
            _ => format!("{}:{port}", self.address()),
        }
    }

    /// The address at which this host's own QEMUs listen.
    pub fn deliver(&self) -> Ipv4Addr {
        self.deliver.unwrap_or(self.door)
    }
}

#[cfg(test)]
mod tests;
