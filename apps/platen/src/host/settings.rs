//! The configuration as the service and its carriers use it.

use super::ServiceArgs;
use crate::args::{compress_threads, default_threads, delta_cache_default, CodecChoice};
use crate::device::settings_file;
use anyhow::{ensure, Context};
use codec::Settings as CodecSettings;
use host::{AllowedUsers, Change, Config, HostEntry};
use nix::unistd::User;
use relay::{AutoConfig, SourceConfig};
use std::net::Ipv4Addr;
use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;
use tls::{Acceptor, Connector, Credentials};

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
    choice.settings(config.level)
}

/// A configuration, and this host in it.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub(super) config: Config,
    me: String,
}

impl Settings {
    /// Reads the configuration, and finds this host in it.
    pub(super) fn new(args: &ServiceArgs) -> anyhow::Result<Self> {
        let mut config = read(&args.config)?;
        if let Some(run_dir) = &args.run_dir {
            config.run_dir.clone_from(run_dir);
        }
        let name = args
            .name
            .clone()
            .unwrap_or_else(|| rustix::system::uname().nodename().to_string_lossy().into_owned());
        let me = config.find(&name).with_context(|| args.config.display().to_string())?;
        let me = me.name.clone();
        Ok(Self { config, me })
    }

    /// Those that a service has given to its carrier.
    pub(super) fn given(config: Config, me: String) -> anyhow::Result<Self> {
        config.find(&me)?;
        Ok(Self { config, me })
    }

    /// This configuration, changed in what a service that runs can change.
    pub(super) fn with(&self, change: &Change) -> Self {
        Self { config: change.config.clone(), me: self.me.clone() }
    }

    /// This host.
    pub(super) fn me(&self) -> &HostEntry {
        self.config.find(&self.me).expect("was found before")
    }

    /// The other hosts.
    pub(super) fn others(&self) -> impl Iterator<Item = &HostEntry> {
        self.config.host.iter().filter(|host| host.name != self.me)
    }

    /// The doors to the other hosts.
    pub(super) fn doors(
        &self,
    ) -> impl Iterator<Item = (String, Ipv4Addr, RangeInclusive<u16>)> + use<'_> {
        self.others().map(|host| (host.name.clone(), host.door, host.ports.0.clone()))
    }

    /// The users who may connect to a door.
    pub(super) fn allowed_users(&self) -> AllowedUsers {
        let named = self.config.allow_users.iter().filter_map(|name| {
            let found = || User::from_name(name).ok().flatten();
            name.parse().ok().or_else(|| found().map(|user| user.uid.as_raw()))
        });
        let own = rustix::process::geteuid().as_raw();
        AllowedUsers([0, own].into_iter().chain(named).collect())
    }

    pub(super) fn credentials(&self) -> anyhow::Result<Credentials> {
        let file = |name| self.config.tls_dir.join(name);
        let (ca, cert, key) = (file(tls::CA_FILE), file(tls::CERT_FILE), file(tls::KEY_FILE));
        let credentials = Credentials::load(&ca, &cert, &key)
            .context("hosts prove to each other who they are (`platen cert` makes certificates)")?;
        credentials.check_dates()?;
        credentials.refusing(self.config.revoked()).context("revoked")
    }

    /// Takes links of hosts whose certificate of the same CA names a host of the configuration. With
    /// the end of this host's own certificate, in seconds since 1970.
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

    /// The source end of a migration to `peer`, for the VM that `port` stands for.
    pub(super) fn source(&self, peer: &HostEntry, port: u16) -> anyhow::Result<SourceConfig> {
        let config = &self.config;
        let codec = codec(config)?;
        let threads = compress_threads(config.max_cpu);
        Ok(SourceConfig {
            peer: peer.address_with(config.port),
            connector: Some(Connector::new(&self.credentials()?, &peer.name)?),
            settings: codec.unwrap_or_default(),
            auto: codec
                .is_none()
                .then(|| AutoConfig { max_cpu: config.max_cpu, ..AutoConfig::default() }),
            compress_threads: config.compress_threads.map_or(threads, usize::from),
            compress_wait_thread: true,
            links: config.links,
            page_size: config.page_size,
            max_bandwidth: config.max_bandwidth,
            name: Some(target(port)),
            setup: None,
            resume: Duration::from_secs(config.resume_timeout),
            // A host whose service cannot be reached is a failure at once.
            connect_timeout: Duration::ZERO,
            delta_cache: if codec.is_none() { delta_cache_default() } else { 0 },
        })
    }

    /// Threads that decompress one migration.
    pub(super) fn decompress_threads(&self) -> usize {
        self.config.decompress_threads.map_or_else(default_threads, usize::from)
    }
}

/// The name of a door as a target (W4b).
pub(super) fn target(port: u16) -> String {
    format!("{TARGET}{port}")
}

/// The port of a target that is a door.
pub(super) fn port_of(target: &str) -> Option<u16> {
    let port = target.strip_prefix(TARGET)?;
    let port = port.parse().ok()?;
    // One name for a port: no sign, no zeros before it.
    (self::target(port) == target).then_some(port)
}

const TARGET: &str = "door:";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_door_has_one_name_as_a_target() {
        assert_eq!(port_of(&target(49152)), Some(49152));
        for other in ["door:+1", "door:01", "door:", "door:65536", "49152", "vm"] {
            assert_eq!(port_of(other), None, "{other}");
        }
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
