//! The host's side: PCI functions, VFIO, limits, the service, telemetry.

use rustix::fs::Access;
use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::Path;

/// QAT on this host.
#[derive(Debug, Clone, Default, serde::Serialize)]
pub struct Host {
    /// QAT functions on PCI, physical and virtual, by address.
    pub functions: Vec<Function>,
    /// VFIO groups (/dev/vfio/N).
    pub vfio_groups: usize,
    /// VFIO groups that this user may open.
    pub vfio_usable: usize,
    /// Whether the container device /dev/vfio/vfio exists and may be opened.
    pub vfio: bool,
    /// Whether the kernel has IOMMU groups, which VFIO needs.
    pub iommu: bool,
    /// Reserved 2 MiB pages; optional for libusdm.
    pub hugepages: u64,
    /// Memory that this process may lock, bytes; `None` for no limit.
    pub memlock: Option<u64>,
    /// Whether the service's socket /run/qat/qatmgr.sock exists. Without it libqat looks for
    /// devices itself.
    pub service: bool,
    /// Telemetry of each device, by its folder's name in debugfs: counters and values. Needs root.
    pub telemetry: BTreeMap<String, BTreeMap<String, u64>>,
}

/// A QAT function on PCI.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Function {
    /// PCI address.
    pub address: String,
    /// The generation's name.
    pub part: &'static str,
    /// Whether it is a virtual function, which programs use, or a physical one, which the kernel
    /// drives.
    pub is_virtual: bool,
    /// The driver bound to it.
    pub driver: Option<String>,
    /// Its current virtual functions; physical functions only.
    pub virtual_functions: Option<u64>,
    /// The most virtual functions that it can have.
    pub virtual_functions_max: Option<u64>,
    /// Its configured services (`qat/cfg_services`).
    pub services: Option<String>,
    /// Its state (`qat/state`): "up" or "down".
    pub state: Option<String>,
}

/// A missing requirement, and its remedy.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Missing {
    /// The requirement.
    pub what: String,
    /// The remedy.
    pub remedy: String,
}

impl Missing {
    pub(super) fn new(what: &str, remedy: &str) -> Self {
        Self { what: what.to_owned(), remedy: remedy.to_owned() }
    }
}

/// Device identifiers: physical function, virtual function, name, and whether qatlib drives it.
const PARTS: [(u64, u64, &str, bool); 9] = [
    (0x4940, 0x4941, "4xxx", true),
    (0x4942, 0x4943, "401xx", true),
    (0x4944, 0x4945, "402xx", true),
    (0x4946, 0x4947, "420xx", true),
    (0x4948, 0x4949, "6xxx", true),
    (0x37c8, 0x37c9, "c62x", false),
    (0x6f54, 0x6f55, "d15xx", false),
    (0x19e2, 0x19e3, "c3xxx", false),
    (0x0435, 0x0443, "dh895xcc", false),
];
const INTEL: u64 = 0x8086;
/// The most bytes read of a file of /sys or /proc.
const MAX_FILE: u64 = 64 << 10;
/// The most entries read of a folder.
const MAX_ENTRIES: usize = 65_536;
/// Pinned memory, in bytes: 85 MiB for the slots of a relay's 8 codec threads (74 of 149.5 KB
/// each), and qatlib's own 16 MiB for each of 8 virtual functions, rounded up.
const MEMLOCK_WANTED: u64 = 256 << 20;

impl Host {
    /// Examines the host below `root`; anything unreadable counts as absent.
    pub fn look(root: &Path) -> Self {
        let mut functions: Vec<Function> = entries(&root.join("sys/bus/pci/devices"))
            .into_iter()
            .filter_map(|name| Function::look(&root.join("sys/bus/pci/devices").join(&name), name))
            .collect();
        functions.sort_by(|left, right| left.address.cmp(&right.address));
        let vfio = root.join("dev/vfio");
        let groups: Vec<String> = entries(&vfio)
            .into_iter()
            .filter(|name| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit()))
            .collect();
        let debug = root.join("sys/kernel/debug");
        let telemetry = entries(&debug)
            .into_iter()
            .filter(|name| name.starts_with("qat_"))
            .filter_map(|name| {
                let text = text(&debug.join(&name).join("telemetry/device_data"))?;
                Some((name, pairs(&text)))
            })
            .collect();
        Self {
            functions,
            vfio_usable: groups.iter().filter(|group| may_open(&vfio.join(group))).count(),
            vfio_groups: groups.len(),
            vfio: may_open(&vfio.join("vfio")),
            iommu: !entries(&root.join("sys/kernel/iommu_groups")).is_empty(),
            hugepages: number(&root.join("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"))
                .unwrap_or(0),
            memlock: memlock(&root.join("proc/self/limits")),
            service: root.join("run/qat/qatmgr.sock").exists(),
            telemetry,
        }
    }

    /// Requirements of libqat that are missing, most basic first.
    pub fn missing(&self) -> Vec<Missing> {
        let mut missing = Vec::new();
        let mut lacks = |what: &str, remedy: &str| missing.push(Missing::new(what, remedy));
        let supported =
            |function: &&Function| PARTS.iter().any(|part| part.2 == function.part && part.3);
        let physical: Vec<&Function> = self
            .functions
            .iter()
            .filter(supported)
            .filter(|function| !function.is_virtual)
            .collect();
        let virtuals: Vec<&Function> = self
            .functions
            .iter()
            .filter(supported)
            .filter(|function| function.is_virtual)
            .collect();
        if self.functions.is_empty() {
            lacks(
                "a QAT device on PCI",
                "4th generation Xeon Scalable or later has them (4xxx, 401xx, 402xx, 420xx, 6xxx); \
                 enable them in the firmware set-up, or pass a virtual function through to this VM",
            );
            return missing;
        }
        if physical.is_empty() && virtuals.is_empty() {
            let parts: Vec<&str> = self.functions.iter().map(|function| function.part).collect();
            lacks(
                &format!("a device that qatlib drives (found {})", parts.join(", ")),
                "devices before 4xxx need Intel's driver package for hardware version 1.x with its own libqat",
            );
            return missing;
        }
        for function in physical.iter().filter(|function| function.driver.is_none()) {
            lacks(
                &format!("a driver for {} ({})", function.address, function.part),
                "modprobe qat_4xxx (420xx: qat_420xx, 6xxx: qat_6xxx) and install linux-firmware",
            );
        }
        for function in &physical {
            if let Some(services) =
                function.services.as_deref().filter(|services| !services.contains("dc"))
            {
                lacks(
                    &format!("compression on {}: it is set up for {services}", function.address),
                    "set ServicesEnabled=dc in /etc/sysconfig/qat (or /etc/default/qat) and restart the service qat",
                );
            }
        }
        if !self.iommu {
            lacks(
                "an IOMMU",
                "enable VT-d in the firmware set-up and boot with intel_iommu=on (no-IOMMU mode needs qatlib 24.09)",
            );
        }
        if virtuals.is_empty() {
            lacks("virtual functions", "systemctl enable --now qat, which runs qat_init.sh");
        } else if !virtuals.iter().any(|function| function.driver.as_deref() == Some("vfio-pci")) {
            lacks(
                "a virtual function bound to vfio-pci",
                "systemctl restart qat, which runs qat_init.sh",
            );
        }
        if !self.vfio || self.vfio_usable == 0 {
            lacks(
                &format!(
                    "permission on /dev/vfio (of {} groups {} can be opened)",
                    self.vfio_groups, self.vfio_usable
                ),
                "usermod -a -G qat USER, then log in again",
            );
        }
        missing.extend(self.missing_memlock());
        missing
    }

    /// The memory that this process may not lock, if that is too little.
    pub fn missing_memlock(&self) -> Option<Missing> {
        let limit = self.memlock.filter(|&limit| limit < MEMLOCK_WANTED)?;
        let wanted = MEMLOCK_WANTED >> 10;
        Some(Missing::new(
            &format!("memory that may be locked: {} KiB, {wanted} wanted", limit >> 10),
            "raise memlock in /etc/security/limits.conf, or LimitMEMLOCK= of the service: 16 MiB \
             for each virtual function, and 11 MiB for each codec thread",
        ))
    }
}

impl Function {
    fn look(folder: &Path, address: String) -> Option<Self> {
        if number(&folder.join("vendor"))? != INTEL {
            return None;
        }
        let device = number(&folder.join("device"))?;
        let &(_, virtual_id, part, _) =
            PARTS.iter().find(|part| part.0 == device || part.1 == device)?;
        let driver = fs::read_link(folder.join("driver"))
            .ok()
            .and_then(|target| Some(target.file_name()?.to_string_lossy().into_owned()));
        Some(Self {
            address,
            part,
            is_virtual: device == virtual_id,
            driver,
            virtual_functions: number(&folder.join("sriov_numvfs")),
            virtual_functions_max: number(&folder.join("sriov_totalvfs")),
            services: text(&folder.join("qat/cfg_services")).map(|text| text.trim().to_owned()),
            state: text(&folder.join("qat/state")).map(|text| text.trim().to_owned()),
        })
    }
}

/// Names in a folder; none if it cannot be read.
fn entries(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    entries
        .take(MAX_ENTRIES)
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect()
}

fn text(path: &Path) -> Option<String> {
    let mut text = String::new();
    fs::File::open(path).ok()?.take(MAX_FILE).read_to_string(&mut text).ok()?;
    Some(text)
}

/// The number in a file, decimal or with 0x.
fn number(path: &Path) -> Option<u64> {
    let text = text(path)?;
    match text.trim().strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.trim().parse().ok(),
    }
}

/// Lines of a name and a number; other lines are skipped.
fn pairs(text: &str) -> BTreeMap<String, u64> {
    text.lines()
        .filter_map(|line| {
            let (name, value) = line.split_once(char::is_whitespace)?;
            Some((name.to_owned(), value.trim().parse().ok()?))
        })
        .collect()
}

/// The soft limit in /proc/self/limits; `None` if it is unlimited or unreadable.
fn memlock(path: &Path) -> Option<u64> {
    let text = text(path)?;
    let line = text.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    line.split_whitespace().next()?.parse().ok()
}

fn may_open(path: &Path) -> bool {
    rustix::fs::access(path, Access::READ_OK | Access::WRITE_OK).is_ok()
}

#[cfg(test)]
mod tests;
