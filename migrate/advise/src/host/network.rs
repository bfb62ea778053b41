//! Network interfaces.

use super::read::{entries, link_name, text};
use serde::Serialize;
use std::path::Path;

/// The most interfaces: hosts of many VMs have hundreds of virtual ones.
const MOST: usize = 1024;

/// A network interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Nic {
    /// Name of the interface.
    pub name: String,
    /// Mbit/s; null if the driver does not report it.
    pub speed: Option<u64>,
    /// Whether it has a link.
    pub up: bool,
    /// Driver of the interface; null for an interface without a device.
    pub driver: Option<String>,
}

/// The interfaces with a device; others (bridges, veth, tun) carry nothing by themselves.
pub(super) fn look(folder: &Path) -> Vec<Nic> {
    let names = entries(folder).into_iter();
    let one = |name: String| {
        let at = folder.join(&name);
        at.join("device").exists().then(|| Nic {
            // -1: unknown, as without a link.
            speed: text(&at.join("speed"))
                .and_then(|text| text.parse().ok())
                .filter(|speed| *speed > 0),
            up: text(&at.join("operstate")).is_some_and(|state| state == "up"),
            driver: link_name(&at.join("device/driver")),
            name,
        })
    };
    names.filter_map(one).take(MOST).collect()
}
