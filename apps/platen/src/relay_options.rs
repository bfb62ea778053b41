//! Options that both ends of a migration have.

use crate::cpus::Cpus;
use crate::size::Size;
use clap::Args;
use std::path::PathBuf;
use std::time::Duration;

/// Seconds to wait for a lost peer: a switch that restarts a port, or a spanning tree that
/// converges, takes up to 30 s.
const RESUME: u64 = 30;

/// This host's certificate and its trusted CAs.
#[derive(Args, Debug)]
pub(crate) struct TlsOptions {
    /// Folder with this host's ca.pem, cert.pem and key.pem, which `platen cert` makes
    #[arg(long, value_name = "DIR", default_value = tls::DEFAULT_DIR)]
    pub(crate) tls_dir: PathBuf,
    /// PEM file with the certificates of the trusted CAs [default: ca.pem in --tls-dir]
    #[arg(long, value_name = "FILE")]
    pub(crate) tls_ca: Option<PathBuf>,
    /// PEM file with this host's certificate [default: cert.pem in --tls-dir]
    #[arg(long, value_name = "FILE")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// PEM file with the private key of this host's certificate [default: key.pem in --tls-dir]
    #[arg(long, value_name = "FILE")]
    pub(crate) tls_key: Option<PathBuf>,
    /// Turn TLS off. Guest memory then crosses the network unencrypted, and any program that can
    /// connect to the port can deliver a VM, or read the images that are served there
    #[arg(long, conflicts_with_all = ["tls_dir", "tls_ca", "tls_cert", "tls_key", "peer_name"])]
    pub(crate) insecure: bool,
}

impl TlsOptions {
    /// The paths of CA, certificate and key.
    pub(crate) fn paths(&self) -> (PathBuf, PathBuf, PathBuf) {
        let of = |given: &Option<PathBuf>, name: &str| {
            given.clone().unwrap_or_else(|| self.tls_dir.join(name))
        };
        (
            of(&self.tls_ca, tls::CA_FILE),
            of(&self.tls_cert, tls::CERT_FILE),
            of(&self.tls_key, tls::KEY_FILE),
        )
    }
}

/// Options of a relay at either end.
#[derive(Args, Debug)]
pub(crate) struct RelayOptions {
    /// CPUs on which the relay may run, in the kernel's list format, for example 0-3,8 [default:
    /// the CPUs of the calling process]
    #[arg(long, value_name = "LIST")]
    cpus: Option<Cpus>,
    /// Page size of the guests in bytes: 4096, 16384 or 65536. Both ends need the same
    #[arg(long, default_value = "4096", value_parser = page_size)]
    pub(crate) page_size: u32,
    /// Seconds to wait for the other end after every link to it is lost, 0 to 3600. With 0 the
    /// first lost link ends the migration
    #[arg(long, value_name = "SECONDS", default_value_t = RESUME, value_parser = clap::value_parser!(u64).range(..=3600))]
    resume_timeout: u64,
    #[command(flatten)]
    pub(crate) tls: TlsOptions,
}

impl RelayOptions {
    /// Restricts this process to its CPUs. Call it before there are threads.
    pub(crate) fn apply_cpus(&self) -> anyhow::Result<()> {
        self.cpus.as_ref().map_or(Ok(()), Cpus::apply)
    }

    /// The wait for the other end after every link to it is lost.
    pub(crate) fn resume(&self) -> Duration {
        Duration::from_secs(self.resume_timeout)
    }
}

/// How to wait for the peer.
#[derive(Args, Debug)]
pub(crate) struct ConnectOptions {
    /// Seconds to wait for a receiver that cannot be reached yet, or is too busy to answer, 0 to
    /// 3600. With 0 the first attempt decides
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(..=3600))]
    connect_timeout: u64,
}

impl ConnectOptions {
    /// The wait for a receiver that is not up yet, or is busy.
    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_secs(self.connect_timeout)
    }
}

fn page_size(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(size @ (4096 | 16384 | 65536)) => Ok(size),
        _ => Err(format!("'{text}' is not a page size: 4096, 16384 or 65536")),
    }
}

/// The default delta cache at either end: 256 MiB, but at most 1/16 of the available memory on a
/// host that is short of memory, which may be why it is being evacuated.
pub(crate) fn delta_cache_default() -> u64 {
    (256 << 20).min(available_memory().unwrap_or(u64::MAX) / 16)
}

/// The kernel's estimate of memory available without swapping, bytes (/proc/meminfo).
fn available_memory() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The default of the most memory for a session's histories at a receiver: two levels of zstd for
/// each of eight compression threads, with windows of 4 MiB; but at most 1/64 of the available
/// memory.
pub(crate) fn history_grant() -> u64 {
    (64 << 20).min(available_memory().unwrap_or(u64::MAX) / 64)
}

/// Parses a size of the histories of a session.
pub(crate) fn history_size(text: &str) -> Result<Size, String> {
    const MOST: u64 = 4 << 30;
    let size: Size = text.parse()?;
    if size.0 <= MOST {
        Ok(size)
    } else {
        Err(format!("histories have at most {}, not {size}", Size(MOST)))
    }
}

/// Parses a size of a delta cache.
pub(crate) fn delta_cache_size(text: &str) -> Result<Size, String> {
    /// Guests of 64 GiB; the table of the cache takes 1/512 of this, for multifd 1/170.
    const MOST: u64 = 64 << 30;
    let size: Size = text.parse()?;
    if size.0 <= MOST {
        Ok(size)
    } else {
        Err(format!("a delta cache has at most {}, not {size}", Size(MOST)))
    }
}
