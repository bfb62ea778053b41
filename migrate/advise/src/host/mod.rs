//! This host: cores, memory, network, accelerators, kernel.

mod accelerators;
mod kernel;
mod network;
mod read;

pub use accelerators::{Accelerators, Iaa, Qat};
pub use kernel::{Feature, Kernel};
pub use network::Nic;

use read::{entries, number, text};
use serde::Serialize;
use std::path::Path;

/// This host, as far as /sys, /proc and /dev show it.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Host {
    /// The processor's name.
    pub processor: Option<String>,
    /// CPUs that are online.
    pub cpus: Option<u64>,
    /// Processes that ran or waited for a CPU: means of 1, 5 and 15 minutes.
    pub load: Option<[f64; 3]>,
    /// Memory.
    pub memory: Memory,
    /// Network interfaces.
    pub nics: Vec<Nic>,
    /// Devices that compress.
    pub accelerators: Accelerators,
    /// The kernel.
    pub kernel: Kernel,
}

/// Memory of a host, bytes. A field is `None` if the kernel does not report it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Memory {
    /// All memory, bytes.
    pub total: Option<u64>,
    /// Memory available without swapping, by the kernel's estimate, bytes.
    pub available: Option<u64>,
    /// Swap space, bytes.
    pub swap: Option<u64>,
    /// Reserved huge pages of all sizes, bytes.
    pub huge_pages: u64,
    /// Huge pages that are free, bytes.
    pub huge_pages_free: u64,
    /// Transparent huge pages: always, madvise or never.
    pub transparent: Option<String>,
}

impl Host {
    /// Examines the host below `root` ("/", except in tests). Anything that cannot be read counts
    /// as absent.
    pub fn look(root: &Path) -> Self {
        Self {
            processor: processor(root),
            cpus: text(&root.join("sys/devices/system/cpu/online")).as_deref().and_then(count),
            load: text(&root.join("proc/loadavg")).as_deref().and_then(load),
            memory: Memory::look(root),
            nics: network::look(&root.join("sys/class/net")),
            accelerators: Accelerators::look(root, load_qat),
            kernel: Kernel::look(root),
        }
    }
}

fn processor(root: &Path) -> Option<String> {
    let text = text(&root.join("proc/cpuinfo"))?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    let name: String = line.split_once(':')?.1.trim().chars().take(128).collect();
    Some(name).filter(|name| !name.is_empty())
}

/// The number of CPUs in a list like 0-3,8.
fn count(list: &str) -> Option<u64> {
    let mut all = 0_u64;
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u64, u64) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        all = all.checked_add(last.checked_sub(first)?.checked_add(1)?)?;
    }
    Some(all)
}

fn load(text: &str) -> Option<[f64; 3]> {
    let mut numbers = text.split_whitespace().map(|word| word.parse::<f64>().ok());
    let load = [numbers.next()??, numbers.next()??, numbers.next()??];
    load.iter().all(|one| one.is_finite() && *one >= 0.0).then_some(load)
}

impl Memory {
    fn look(root: &Path) -> Self {
        let info = text(&root.join("proc/meminfo")).unwrap_or_default();
        let bytes = |name: &str| {
            let line = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
        };
        let pools = root.join("sys/kernel/mm/hugepages");
        let sum = |file: &str| {
            entries(&pools).into_iter().fold(0_u64, |sum, pool| {
                let size = pool.strip_prefix("hugepages-").and_then(|name| name.strip_suffix("kB"));
                let size = size.and_then(|size| size.parse::<u64>().ok()?.checked_mul(1024));
                let pages = number(&pools.join(&pool).join(file));
                sum.saturating_add(size.zip(pages).map_or(0, |(a, b)| a.saturating_mul(b)))
            })
        };
        Self {
            total: bytes("MemTotal"),
            available: bytes("MemAvailable"),
            swap: bytes("SwapTotal"),
            huge_pages: sum("nr_hugepages"),
            huge_pages_free: sum("free_hugepages"),
            transparent: text(&root.join("sys/kernel/mm/transparent_hugepage/enabled"))
                .and_then(|text| Some(text.split_once('[')?.1.split_once(']')?.0.to_owned())),
        }
    }
}

/// Loads libqat, and starts no device.
fn load_qat() -> Result<(), String> {
    let loaded = qat::Libraries::load(&qat::Location::System);
    loaded.map(drop).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests;
