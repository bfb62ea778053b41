//! Intel's QAT and IAA devices.

use super::read::{entries, link_name, number, text};
use qpl::Qpl;
use serde::Serialize;
use std::path::Path;

const INTEL: u64 = 0x8086;
/// IAA on PCI: Sapphire Rapids and later.
const IAA: u64 = 0x0cfe;
/// The most devices of a kind: a server has up to 16.
const MOST: usize = 256;

/// Devices that compress.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Accelerators {
    /// Physical QAT devices, or virtual functions where those are all that this machine has.
    pub qat: Vec<Qat>,
    /// Requirements of QAT that are missing, most basic first; empty where it works.
    pub qat_lacks: Vec<String>,
    /// IAA devices.
    pub iaa: Vec<Iaa>,
}

/// A QAT device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Qat {
    /// PCI address.
    pub address: String,
    /// The generation.
    pub part: String,
    /// The device's driver.
    pub driver: Option<String>,
}

/// An IAA device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Iaa {
    /// PCI address.
    pub address: String,
    /// The device's driver.
    pub driver: Option<String>,
    /// Whether the device is enabled, as the driver's `iaxN` reports.
    pub enabled: Option<bool>,
    /// Whether the device uses shared virtual memory (`pasid_enabled`).
    pub shared_memory: Option<bool>,
}

impl Accelerators {
    /// `load` loads libqat, without a start of a device.
    pub(super) fn look(root: &Path, load: impl FnOnce() -> Result<(), String>) -> Self {
        let found = qat::status::Host::look(root);
        let physical = found.functions.iter().any(|function| !function.is_virtual);
        let functions = found.functions.iter().filter(|one| !(physical && one.is_virtual));
        let qat = functions.take(MOST).map(|function| Qat {
            address: function.address.clone(),
            part: function.part.to_owned(),
            driver: function.driver.clone(),
        });
        let mut lacks: Vec<String> =
            found.missing().into_iter().map(|missing| missing.what).collect();
        // Most hosts have no device, and need no library.
        if lacks.is_empty() {
            lacks
                .extend(load().err().map(|why| format!("the libraries libqat and libusdm: {why}")));
        }
        Self { qat: qat.collect(), qat_lacks: lacks, iaa: iaa(root) }
    }

    /// The QAT devices that platen can use.
    pub fn usable_qat(&self) -> usize {
        if self.qat_lacks.is_empty() {
            self.qat.len()
        } else {
            0
        }
    }

    /// The IAA devices that platen can use; none without a libqpl that works on its hardware path.
    pub fn usable_iaa(&self, qpl: Option<&Qpl>) -> usize {
        match qpl.map(Qpl::path) {
            Some(qpl::Path::Hardware) => self.enabled_iaa(),
            _ => 0,
        }
    }

    fn enabled_iaa(&self) -> usize {
        self.iaa.iter().filter(|one| one.enabled == Some(true)).count()
    }

    /// Whether each IAA device uses shared virtual memory; `None` if no driver reports it.
    pub fn shared_memory(&self) -> Option<bool> {
        let told: Vec<bool> = self.iaa.iter().filter_map(|one| one.shared_memory).collect();
        (!told.is_empty()).then(|| told.iter().all(|yes| *yes))
    }
}

fn iaa(root: &Path) -> Vec<Iaa> {
    let folder = root.join("sys/bus/pci/devices");
    let one = |address: String| {
        let at = folder.join(&address);
        let is_it = number(&at.join("vendor"))? == INTEL && number(&at.join("device"))? == IAA;
        if !is_it {
            return None;
        }
        let names = entries(&at);
        // The driver idxd makes a folder iaxN below the device.
        let device = names.iter().find(|name| name.starts_with("iax")).map(|name| at.join(name));
        let of = |file: &str| device.as_ref().and_then(|device| text(&device.join(file)));
        Some(Iaa {
            driver: link_name(&at.join("driver")),
            enabled: of("state").map(|state| state == "enabled"),
            shared_memory: of("pasid_enabled").map(|value| value == "1"),
            address,
        })
    };
    entries(&folder).into_iter().filter_map(one).take(MOST).collect()
}
