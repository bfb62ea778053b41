//! Checks a configuration: each value alone, and the hosts against each other.

use super::{Config, HostEntry, MetricsAddress, PortRange};
use crate::error::HostError;
use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr};
use tls::Fingerprint;

/// The most hosts.
const MAX_HOSTS: usize = 64;
/// The most doors on a host; each needs a listening socket.
const MAX_DOORS: usize = 4096;
/// The least `max_bandwidth`, bytes per second: the handshakes of a session's links need some of
/// it.
const LEAST_BANDWIDTH: u64 = 128 << 10;
/// The most unix sockets for each other host.
const MAX_SOCKETS: u16 = 64;
/// The most bytes of a unix socket's path.
const MAX_PATH: usize = 107;
/// The most bytes of `run_dir`: the path of a carrier's socket has at most 107.
const MAX_RUN_DIR: usize = 60;

impl Config {
    pub(super) fn check(&self) -> Result<(), HostError> {
        let ensure = |good: bool, key: &str, detail: &dyn Fn() -> String| match good {
            true => Ok(()),
            false => Err(HostError::Value { key: key.into(), detail: detail() }),
        };
        ensure(self.port > 0, "port", &|| "0 is no port".into())?;
        ensure((1..=64).contains(&self.links), "links", &|| {
            format!("{} is not a number from 1 to 64", self.links)
        })?;
        ensure(self.resume_timeout <= 3600, "resume_timeout", &|| {
            format!("{} is not a number of seconds from 0 to 3600", self.resume_timeout)
        })?;
        ensure((1..=3600).contains(&self.setup_timeout), "setup_timeout", &|| {
            format!("{} is not a number of seconds from 1 to 3600", self.setup_timeout)
        })?;
        ensure([4096, 16384, 65536].contains(&self.page_size), "page_size", &|| {
            format!("{} is not 4096, 16384 or 65536", self.page_size)
        })?;
        for (key, threads) in [
            ("compress_threads", self.compress_threads),
            ("decompress_threads", self.decompress_threads),
        ] {
            ensure(threads.is_none_or(|threads| (1..=255).contains(&threads)), key, &|| {
                format!("{} is not a number from 1 to 255", threads.unwrap_or_default())
            })?;
        }
        for (key, rate) in
            [("max_bandwidth", self.max_bandwidth), ("max_bandwidth_host", self.max_bandwidth_host)]
        {
            let rate = rate.unwrap_or(LEAST_BANDWIDTH);
            ensure(rate >= LEAST_BANDWIDTH, key, &|| {
                format!("{rate} is less than {LEAST_BANDWIDTH} bytes per second")
            })?;
        }
        let cpu = self.max_cpu.unwrap_or(1.0);
        ensure((0.05..=4096.0).contains(&cpu), "max_cpu", &|| {
            format!("{cpu} is not a number of CPUs from 0.05 to 4096")
        })?;
        for text in &self.revoked {
            text.parse::<Fingerprint>()
                .map_err(|detail| HostError::Value { key: "revoked".into(), detail })?;
        }
        let run_dir = self.run_dir.as_os_str().len();
        ensure(self.run_dir.is_absolute() && run_dir <= MAX_RUN_DIR, "run_dir", &|| {
            format!(
                "'{}' is not an absolute path of at most {MAX_RUN_DIR} bytes",
                self.run_dir.display()
            )
        })?;
        ensure(self.sockets <= MAX_SOCKETS, "sockets", &|| {
            format!("{} is not a number from 0 to {MAX_SOCKETS}", self.sockets)
        })?;
        ensure(self.socket_dir.is_absolute(), "socket_dir", &|| {
            format!("'{}' is not an absolute path", self.socket_dir.display())
        })?;
        if let Some(metrics) = &self.metrics {
            MetricsAddress::parse(metrics)
                .map_err(|detail| HostError::Value { key: "metrics".into(), detail })?;
        }
        self.check_hosts()
    }

    fn check_hosts(&self) -> Result<(), HostError> {
        let wrong = |host: &HostEntry, key: &str, detail: String| {
            Err(HostError::Value { key: format!("{key} of host '{}'", host.name), detail })
        };
        let hosts = self.host.len();
        let ports: usize = self.host.iter().map(|host| host.ports.0.len()).sum();
        if hosts == 0 || hosts > MAX_HOSTS {
            let detail = format!(
                "there are {hosts}, allowed are 1 to {MAX_HOSTS}: write one for each host that \
                 sends or receives VMs"
            );
            return Err(HostError::Value { key: "[[host]]".into(), detail });
        }
        if ports > MAX_DOORS {
            let detail = format!(
                "the hosts have {ports} ports, allowed are {MAX_DOORS}: give each fewer, as many as \
                 VMs may come to it at a time"
            );
            return Err(HostError::Value { key: "ports of [[host]]".into(), detail });
        }
        self.check_names()?;
        let mut doors = HashSet::new();
        for (at, host) in self.host.iter().enumerate() {
            if !host.door.is_loopback() || host.door == Ipv4Addr::LOCALHOST {
                let detail = format!(
                    "{} is not a loopback address other than 127.0.0.1: give one like 127.80.0.2",
                    host.door
                );
                return wrong(host, "door", detail);
            }
            if !doors.insert(host.door) {
                return wrong(host, "door", format!("another host has {}, too", host.door));
            }
            let shares = |other: &&HostEntry| {
                let (ours, theirs) = (&host.ports.0, &other.ports.0);
                ours.start() <= theirs.end() && theirs.start() <= ours.end()
            };
            if let Some(other) = self.host[..at].iter().find(shares) {
                let detail = format!("host '{}' has some of them, too", other.name);
                return wrong(host, "ports", detail);
            }
            if host.ports.contains(self.port) {
                return wrong(host, "ports", format!("{} is `port`", self.port));
            }
            self.check_intercepted(host)?;
            if let Some(deliver) = host.deliver.filter(|deliver| !deliver.is_loopback()) {
                let detail = format!("{deliver} is not a loopback address");
                return wrong(host, "deliver", detail);
            }
        }
        Ok(())
    }

    /// Refuses ports of QEMUs that cannot be intercepted, or that have no door each.
    fn check_intercepted(&self, host: &HostEntry) -> Result<(), HostError> {
        let Some(PortRange(ports)) = &host.intercept else { return Ok(()) };
        let wrong = |detail: String| {
            Err(HostError::Value { key: format!("intercept of host '{}'", host.name), detail })
        };
        if ports.len() > host.ports.0.len() {
            return wrong(format!(
                "it has {} ports, and `ports` only {}: each needs one of them",
                ports.len(),
                host.ports.0.len()
            ));
        }
        if ports.contains(&self.port) {
            return wrong(format!("{} is `port`", self.port));
        }
        let shares = |other: &&HostEntry| {
            let doors = &other.ports.0;
            doors.start() <= ports.end() && ports.start() <= doors.end()
        };
        match self.host.iter().find(shares) {
            // No QEMU can listen where the doors listen.
            Some(other) => {
                wrong(format!("some of them are among `ports` of host '{}'", other.name))
            }
            None => Ok(()),
        }
    }

    /// Refuses names and addresses that two hosts share. Both are in a host's certificate, and a
    /// host whose certificate has another host's name passes for that host.
    fn check_names(&self) -> Result<(), HostError> {
        let mut owners = HashMap::new();
        for host in &self.host {
            let wrong = |key: &str, detail: String| {
                Err(HostError::Value { key: format!("{key} of host '{}'", host.name), detail })
            };
            if host.name.is_empty() || host.name.len() > 255 {
                return wrong("name", "a name has 1 to 255 bytes".into());
            }
            // The name is also that of a folder.
            if host.name.contains(['/', '\0']) || [".", ".."].contains(&host.name.as_str()) {
                return wrong("name", "it cannot be the name of a folder".into());
            }
            if !may_be_a_name(&host.name) {
                return wrong("name", "it is neither a host name nor an IP address".into());
            }
            if !host.address().chars().all(|char| char.is_ascii_graphic()) {
                let detail =
                    format!("'{}' is neither a host name nor an IP address", host.address());
                return wrong("address", detail);
            }
            let path = self.socket_of(&host.name, self.sockets);
            let len = path.as_os_str().len();
            if self.sockets > 0 && len > MAX_PATH {
                let path = path.display();
                let detail = format!(
                    "the socket {path} has a path of {len} bytes, allowed are {MAX_PATH}: give a \
                     shorter socket_dir"
                );
                return wrong("name", detail);
            }
            for (key, name) in [("name", host.name.as_str()), ("address", host.address())] {
                match owners.insert(canonical(name), host) {
                    Some(other) if !std::ptr::eq(other, host) => {
                        let other = &other.name;
                        let detail = format!(
                            "'{name}' is the same as the name or address of host '{other}'"
                        );
                        return wrong(key, detail);
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }
}

/// Whether a certificate can have this name. No host accepts links from another host.
fn may_be_a_name(name: &str) -> bool {
    let allowed = |char: char| char.is_ascii_alphanumeric() || "-_.".contains(char);
    name.parse::<IpAddr>().is_ok() || name.chars().all(allowed)
}

/// One spelling for all spellings of a name: names are the same in either case and with a dot at
/// their end, and an address has several forms.
fn canonical(name: &str) -> String {
    match name.parse::<IpAddr>() {
        Ok(address) => address.to_canonical().to_string(),
        Err(_) => name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase(),
    }
}
