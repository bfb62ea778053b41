//! The configuration as the service and its carriers use it.

use super::users::{self, LookUp};
use super::ServiceArgs;
use crate::args::{compress_threads, default_threads, CodecChoice};
use crate::device::settings_file;
use crate::relay_options::delta_cache_default;
use crate::seed::source_seed;
use anyhow::{ensure, Context};
use codec::Settings as CodecSettings;
use host::{
    AllowedUsers, Change, Config, Door, DoorAddress, HostEntry, Place, PortRange, Target, What,
};
use relay::{AutoConfig, QemuAddress, SourceConfig, UnixAddress};
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tls::{Acceptor, Connector, Credentials, TlsError};

/// Reads and checks a configuration.
pub(super) fn read(path: &Path) -> anyhow::Result<Config> {
    let text = settings_file::read(path)?;
    let config = Config::parse(&text).with_context(|| path.display().to_string())?;
    codec(&config).with_context(|| format!("{}: codec", path.display()))?;
    Ok(config)
}

/// Codec and level; `None` for auto.
fn codec(config: &Config) -> anyhow::Result<Option<CodecSettings>> {
    let choice: CodecChoice = config.codec.parse().map_err(anyhow::Error::msg)?;
    ensure!(
        choice != CodecChoice::Qpl,
        "codec qpl is for `platen migrate` and `platen relay`; zlib makes the same units here"
    );
    choice.settings(config.level)
}

/// The name of this host, which is its name in the configuration, too, unless an option says so.
pub(super) fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// A configuration, and this host in it.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub(super) config: Config,
    me: String,
    /// Root and the users of `allow_users`. They are looked up once: a directory service (LDAP)
    /// that does not answer must not hold up a migration.
    users: Vec<u32>,
}

impl Settings {
    /// Reads the configuration, and finds this host in it.
    ///
    /// # Errors
    /// The file cannot be used, or a user cannot be looked up.
    pub(super) fn new(args: &ServiceArgs) -> anyhow::Result<Self> {
        Self::new_by(args, &users::by_name)
    }

    /// As [`new`](Self::new), with the users that `look_up` finds.
    pub(super) fn new_by(args: &ServiceArgs, look_up: LookUp<'_>) -> anyhow::Result<Self> {
        let mut config = read(&args.config)?;
        if let Some(run_dir) = &args.run_dir {
            config.run_dir.clone_from(run_dir);
        }
        let name = args.name.clone().unwrap_or_else(host_name);
        let me = config.find(&name).with_context(|| args.config.display().to_string())?;
        let me = me.name.clone();
        let users = users::numbers(&config.allow_users, look_up)?;
        Ok(Self { config, me, users })
    }

    /// The settings that a service has passed to its carrier.
    pub(super) fn given(config: Config, me: String) -> anyhow::Result<Self> {
        config.find(&me)?;
        let users = users::numbers(&config.allow_users, &users::by_name)?;
        Ok(Self { config, me, users })
    }

    /// The configuration for a carrier: it has numbers of users, and looks up no name.
    pub(super) fn for_carrier(&self) -> Config {
        let allow_users = self.users.iter().map(u32::to_string).collect();
        Config { allow_users, ..self.config.clone() }
    }

    /// These settings without the changes that a running service cannot adopt.
    pub(super) fn with(self, change: &Change) -> Self {
        Self { config: change.config.clone(), ..self }
    }

    /// This host.
    pub(super) fn me(&self) -> &HostEntry {
        self.config.find(&self.me).expect("was found before")
    }

    /// The other hosts with ports that are intercepted, and these ports.
    pub(super) fn intercepted(&self) -> impl Iterator<Item = (&HostEntry, &PortRange)> {
        self.others().filter_map(|host| Some((host, host.intercept.as_ref()?)))
    }

    /// The configured interception, a line for each other host, and the users whose connections the
    /// rules redirect. The service and `platen host intercept on` each read the configuration; the
    /// rules are made only if both results are equal.
    pub(super) fn interception(&self) -> String {
        let line = |(host, ports): (&HostEntry, &PortRange)| {
            let (door, to) = (host.door, &host.ports);
            format!("{} {} {ports:?} {door} {to:?}\n", host.name, host.address())
        };
        let lines: String = self.intercepted().map(line).collect();
        format!("{lines}users {:?}\nstopped {:?}\n", self.users, self.config.intercept_stopped)
    }

    /// The other hosts.
    pub(super) fn others(&self) -> impl Iterator<Item = &HostEntry> {
        self.config.host.iter().filter(|host| host.name != self.me)
    }

    /// The doors to the other hosts.
    pub(super) fn doors(&self) -> impl Iterator<Item = (Door, DoorAddress)> + use<'_> {
        let of_host = move |host: &HostEntry| {
            let (name, door) = (host.name.clone(), host.door);
            let named = name.clone();
            let ports = host.ports.0.clone().map(move |port| {
                let at = SocketAddr::from((door, port));
                (Door { peer: named.clone(), place: Place::Door(port) }, DoorAddress::Tcp(at))
            });
            let sockets = (1..=self.config.sockets).map(move |number| {
                let at = self.config.socket_of(&name, number);
                (Door { peer: name.clone(), place: Place::Socket(number) }, DoorAddress::Unix(at))
            });
            ports.chain(sockets)
        };
        self.others().flat_map(of_host)
    }

    /// Creates the folder in which this host's QEMUs listen at unix sockets, if there are any such
    /// sockets.
    pub(super) fn make_socket_folder(&self) -> anyhow::Result<()> {
        if self.config.sockets == 0 {
            return Ok(());
        }
        let folder = self.socket_folder();
        host::make_own_folder(&folder, &self.allowed_users())
            .with_context(|| format!("the folder of unix sockets {}", folder.display()))
    }

    /// The folder in which this host's QEMUs listen.
    pub(super) fn socket_folder(&self) -> PathBuf {
        self.config.socket_dir.join(&self.me)
    }

    /// Root and the users of `allow_users`, as whom libvirt and QEMU run.
    pub(super) fn qemu_users(&self) -> Vec<u32> {
        self.users.clone()
    }

    /// The users who may connect to a door.
    pub(super) fn allowed_users(&self) -> AllowedUsers {
        let own = rustix::process::geteuid().as_raw();
        AllowedUsers(self.qemu_users().into_iter().chain([own]).collect())
    }

    pub(super) fn credentials(&self) -> anyhow::Result<Credentials> {
        let file = |name| self.config.tls_dir.join(name);
        let (ca, cert, key) = (file(tls::CA_FILE), file(tls::CERT_FILE), file(tls::KEY_FILE));
        let credentials = Credentials::load(&ca, &cert, &key)
            .map_err(|error| match error {
                // The service has no such option.
                TlsError::Missing { what, path, .. } => {
                    TlsError::Missing { what, path, flag: "tls_dir" }
                }
                other => other,
            })
            .context("hosts prove to each other who they are (`platen cert` makes certificates)")?;
        credentials.check_dates()?;
        credentials.refusing(self.config.revoked()).context("revoked")
    }

    /// Accepts links of hosts whose certificate of the same CA names a host of the configuration.
    /// Also returns the end of this host's own certificate, in seconds since 1970.
    pub(super) fn acceptor(&self) -> anyhow::Result<(Acceptor, u64)> {
        let credentials = self.credentials()?;
        let names = self.config.host.iter().flat_map(|host| [&host.name[..], host.address()]);
        // An address with a zone (fe80::1%eth0) is in no certificate.
        let names: Vec<_> = names.filter(|name| tls::is_name(name)).map(String::from).collect();
        // An empty list would let everybody in.
        ensure!(
            !names.is_empty(),
            "no certificate can have the name of any host in the configuration"
        );
        Ok((Acceptor::new(&credentials, &names)?, credentials.valid_until()?))
    }

    /// The configuration of the source end of a migration to `target` at `peer`.
    pub(super) fn source(&self, peer: &HostEntry, target: Target) -> anyhow::Result<SourceConfig> {
        let config = &self.config;
        let codec = codec(config)?;
        let threads = compress_threads(config.max_cpu);
        let threads = config.compress_threads.map_or(threads, usize::from);
        Ok(SourceConfig {
            peer: peer.address_with(config.port),
            connector: Some(Connector::new(&self.credentials()?, &peer.name)?),
            settings: codec.unwrap_or_default(),
            auto: codec
                .is_none()
                .then(|| AutoConfig { max_cpu: config.max_cpu, ..AutoConfig::default() }),
            compress_threads: threads,
            compress_wait_thread: true,
            links: config.links,
            page_size: config.page_size,
            max_bandwidth: config.max_bandwidth,
            turns: None,
            name: Some(target.to_string()),
            setup: None,
            resume: Duration::from_secs(config.resume_timeout),
            silence: session::SILENCE,
            // A host whose service cannot be reached is a failure at once.
            connect_timeout: Duration::ZERO,
            // A service that is reached may be busy.
            answer_timeout: relay::ANSWER_TIMEOUT,
            setup_timeout: Duration::from_secs(config.setup_timeout),
            // Only RAM is sent again.
            delta_cache: match (codec, target.what) {
                (None, What::Vm) => delta_cache_default(),
                _ => 0,
            },
            pages: None,
            seed: match target.what {
                What::Vm => source_seed(codec),
                What::Disk => 0,
            },
            history: 0,
            qpl: None,
        })
    }

    /// Finds the target on this host that another host asks for.
    ///
    /// # Errors
    /// This host takes no VM there; the message is for the peer's user.
    pub(super) fn target(&self, named: &str) -> Result<Target, String> {
        let (ports, sockets) = (&self.me().ports, self.config.sockets);
        let may = |place: &Place| match place {
            Place::Door(port) => ports.contains(*port),
            Place::Socket(number) => *number <= sockets,
            Place::Address(address) => {
                let ports = self.me().intercept.as_ref();
                ports.is_some_and(|ports| ports.contains(address.port())) && is_own(*address.ip())
            }
        };
        let target = named.parse::<Target>().ok();
        target.filter(|target| may(&target.place)).ok_or_else(|| {
            let mut text = format!(
                "'{}' is no door of this host: its doors are door:{} to door:{}",
                named.escape_debug(),
                ports.0.start(),
                ports.0.end()
            );
            if sockets > 0 {
                text.push_str(&format!(", and socket:1 to socket:{sockets}"));
            }
            if let Some(ports) = &self.me().intercept {
                let (first, last) = (ports.0.start(), ports.0.end());
                text.push_str(&format!(", and ports {first} to {last} of its own addresses"));
            }
            text
        })
    }

    /// The address at which a QEMU of this host awaits the VM of `place`.
    pub(super) fn deliver(&self, place: Place) -> QemuAddress {
        match place {
            Place::Door(port) => QemuAddress::Tcp((self.me().deliver(), port).into()),
            Place::Socket(number) => {
                UnixAddress::from(self.config.socket_of(&self.me, number)).into()
            }
            Place::Address(address) => QemuAddress::Tcp(address.into()),
        }
    }

    /// Number of threads that decompress one migration.
    pub(super) fn decompress_threads(&self) -> usize {
        self.config.decompress_threads.map_or_else(default_threads, usize::from)
    }
}

/// Whether `address` is one of this host's own, by which other hosts reach it.
fn is_own(address: Ipv4Addr) -> bool {
    // To reach one of its own addresses, the kernel chooses that address as the source. Binding
    // proves less: the kernel may permit any address, as for a cluster's address that comes and
    // goes.
    let way = || -> std::io::Result<_> {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        socket.connect((address, 1))?;
        Ok(socket.local_addr()?.ip())
    };
    !address.is_loopback() && way().is_ok_and(|from| from == address)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::unistd::User;

    #[test]
    fn only_places_of_this_host_are_taken() {
        let text =
            "sockets = 2\n[[host]]\nname = \"a\"\ndoor = \"127.80.0.1\"\nports = \"100-109\"\n\
                    intercept = \"200-209\"\n";
        let settings = Settings::given(Config::parse(text).unwrap(), "a".into()).unwrap();
        for named in ["door:100", "door:109", "socket:1", "socket:2", "nbd:door:100"] {
            assert_eq!(settings.target(named).unwrap().to_string(), named);
        }
        for named in [
            "door:99",
            "nbd:door:99",
            "door:200",
            "socket:3",
            "vm",
            "",
            "address:127.80.0.1:200",
            "address:0.0.0.0:200",
            "address:192.0.2.7:200",
            "address:224.0.0.1:200",
            "address:255.255.255.255:200",
        ] {
            let error = settings.target(named).unwrap_err();
            assert!(error.contains("socket:1 to socket:2, and ports 200 to 209"), "{error}");
        }
    }

    #[test]
    fn a_carrier_looks_up_no_user() {
        let text =
            "allow_users = [\"daemon\", \"23456\", \"no-such-user\"]\n[[host]]\nname = \"a\"\n\
                    door = \"127.80.0.1\"\nports = \"1-9\"\n";
        let settings = Settings::given(Config::parse(text).unwrap(), "a".into()).unwrap();
        let daemon = User::from_name("daemon").unwrap().unwrap().uid.as_raw();
        assert_eq!(settings.qemu_users(), [0, daemon, 23456]);
        let given = settings.for_carrier();
        assert_eq!(given.allow_users, ["0", &daemon.to_string(), "23456"]);
        let carrier = Settings::given(given, "a".into()).unwrap();
        assert_eq!(carrier.qemu_users(), settings.qemu_users());
    }

    #[test]
    fn a_codec_that_is_none_is_refused_with_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("platen.toml");
        let said = |line: &str| {
            let host = "[[host]]\nname = \"a\"\ndoor = \"127.80.0.1\"\nports = \"1-9\"\n";
            let text = format!("{line}\n{host}");
            std::fs::write(&path, text).unwrap();
            format!("{:#}", read(&path).unwrap_err())
        };
        assert!(said("codec = \"zip\"").contains("'zip'"));
        assert!(said("level = 3").contains("auto"));
        assert!(said("codec = \"zlib\"\nlevel = 30").contains("30"));
        assert!(said("x = 1").contains("platen.toml"));
    }
}
