//! The arguments of `platen receive`.

use crate::args::default_threads;
use crate::qat_args::{Accelerator, QatLibraries};
use crate::relay_options::{
    delta_cache_default, delta_cache_size, history_grant, history_size, RelayOptions,
};
use crate::size::Size;
use crate::source_end::MAX_NAME;
use anyhow::bail;
use clap::Args;
use relay::UnixAddress;
use std::path::PathBuf;
use std::str::FromStr;

/// A name and an address, as `[NAME=]unix:PATH`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Named {
    pub(crate) name: Option<String>,
    pub(crate) address: UnixAddress,
}

impl FromStr for Named {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, address) = match text.split_once('=') {
            Some((name, address)) if !name.starts_with("unix:") => {
                (Some(name.to_string()), address)
            }
            _ => (None, text),
        };
        if name.as_deref() == Some("") {
            return Err(format!("the name in '{text}' is empty"));
        }
        if let Some(name) = name.as_ref().filter(|name| name.len() > MAX_NAME) {
            return Err(format!("the name has {} bytes, allowed are {MAX_NAME}", name.len()));
        }
        Ok(Self { name, address: address.parse()? })
    }
}

/// Arguments of `platen receive`.
#[derive(Args, Debug)]
pub(crate) struct ReceiveArgs {
    /// Address to listen on
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) listen: String,
    /// Socket on which the destination QEMU listens; required without --allow. Repeat the option,
    /// with names, for several VMs
    #[arg(long, required_unless_present = "allow", value_name = "[NAME=]unix:PATH")]
    pub(crate) deliver: Vec<Named>,
    /// Socket for the VM of this name; its QEMU may start later. Repeatable
    #[arg(long, value_name = "NAME=unix:PATH", value_parser = with_name)]
    pub(crate) allow: Vec<Named>,
    /// Monitor socket of the destination QEMU of that name: platen sets the migration's parameters
    /// and runs migrate-incoming. Start QEMU with -incoming defer. Repeatable
    #[arg(long, value_name = "[NAME=]unix:PATH")]
    pub(crate) qmp: Vec<Named>,
    /// Exit after one migration; the exit status is 0 if it succeeded
    #[arg(long)]
    pub(crate) once: bool,
    /// Number of decompression threads, 1 to 255 [default: the number of CPUs, at most 8]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=255))]
    pub(crate) decompress_threads: Option<u16>,
    /// Decompressor for codec qatzip
    // Not auto: a daemon would hold instances that a sender on this host may want, to save little.
    // libdeflate decodes a gigabyte a second on a core.
    #[arg(long, value_enum, default_value = "none")]
    pub(crate) accelerator: Accelerator,
    #[command(flatten)]
    pub(crate) qat: QatLibraries,
    /// Largest memory that one migration may use here for copies of sent pages (--delta-cache of
    /// `platen migrate`); 0 refuses it, 64G at most [default: 256M or 1/16 of the memory that is
    /// available at the start, the smaller]
    #[arg(long, value_name = "SIZE", value_parser = delta_cache_size)]
    pub(crate) delta_cache: Option<Size>,
    /// Largest memory that one migration may use here for what was sent before (--history of
    /// `platen migrate`); 0 refuses it, 4G at most [default: 64M or 1/64 of the memory that is
    /// available at the start, the smaller]
    #[arg(long, value_name = "SIZE", value_parser = history_size)]
    pub(crate) history: Option<Size>,
    /// Store of saved VMs, or one of its saves, on this host: pages that it holds are not sent. The
    /// sources learn the hashes of its newest pages, 4194304 at most, for each migration
    #[arg(long, value_name = "PATH")]
    pub(crate) seed: Option<PathBuf>,
    /// Accept only sources with a certificate for this name. Repeatable [default: every certificate
    /// that a trusted CA has signed]
    #[arg(long, value_name = "NAME")]
    pub(crate) peer_name: Vec<String>,
    #[command(flatten)]
    pub(crate) relay: RelayOptions,
    /// Write the report of each migration to this file, one line of JSON each
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

impl ReceiveArgs {
    /// The most bytes of delta cache to grant.
    pub(crate) fn delta_cache(&self) -> u64 {
        self.delta_cache.map_or_else(delta_cache_default, |size| size.0)
    }

    /// The most bytes of histories to grant.
    pub(crate) fn history(&self) -> u64 {
        self.history.map_or_else(history_grant, |size| size.0)
    }

    /// Checks that the targets' names are consistent.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        let targets: Vec<_> = self.targets().collect();
        for (at, target) in targets.iter().enumerate() {
            if targets[..at].iter().any(|earlier| earlier.name == target.name) {
                bail!(
                    "--deliver or --allow is given twice for {}: name them, NAME=unix:PATH",
                    shown(&target.name)
                );
            }
        }
        for monitor in &self.qmp {
            if !targets.iter().any(|target| target.name == monitor.name) {
                bail!(
                    "--qmp is given for {}, but no --deliver or --allow of that name",
                    shown(&monitor.name)
                );
            }
        }
        Ok(())
    }

    /// All targets.
    pub(crate) fn targets(&self) -> impl Iterator<Item = &Named> {
        self.deliver.iter().chain(&self.allow)
    }

    pub(crate) fn threads(&self) -> usize {
        self.decompress_threads.map_or_else(default_threads, usize::from)
    }
}

/// Parses a target, which must have a name.
fn with_name(text: &str) -> Result<Named, String> {
    let named: Named = text.parse()?;
    match named.name {
        Some(_) => Ok(named),
        None => Err(format!("'{text}' does not say which VM: NAME=unix:PATH")),
    }
}

pub(crate) fn shown(name: &Option<String>) -> String {
    name.as_ref().map_or("the unnamed target".into(), |name| {
        // The text comes from another host: it must not write control characters to a terminal.
        format!("target '{}'", name.escape_debug())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_may_have_names() {
        let named: Named = "vm1=unix:/run/a".parse().unwrap();
        assert_eq!(
            (named.name.as_deref(), named.address.to_string().as_str()),
            (Some("vm1"), "unix:/run/a")
        );
        let odd: Named = "unix:/run/a=b".parse().unwrap();
        assert_eq!((odd.name, odd.address.to_string().as_str()), (None, "unix:/run/a=b"));
        assert!(with_name("vm1=unix:/run/a").is_ok());
        let long = format!("{}=unix:/run/a", "a".repeat(9000));
        let said = long.parse::<Named>().unwrap_err();
        assert_eq!(said, "the name has 9000 bytes, allowed are 255");
        assert!(long[9000 - MAX_NAME..].parse::<Named>().is_ok());
        assert!(with_name("unix:/run/a").unwrap_err().contains("which VM"));
        assert!("=unix:/x".parse::<Named>().is_err());
        assert!("vm1=/x".parse::<Named>().is_err());
    }
}
