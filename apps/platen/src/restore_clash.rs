//! Compares the VMs that are to run from one image: files that two of them would write to, and
//! identities by which other hosts would take two of them for one VM.

use crate::image_lock::processes_with;
use crate::restore_disks::{is_written, writable, Place, Writable};
use crate::restore_fit::get;
use crate::restore_vm::Vm;
use qmp::{Qmp, QmpError};
use serde_json::json;
use std::collections::BTreeMap;

/// The UUID of a VM that has none.
/// QEMU reports it for a VM that was started without a UUID.
pub(crate) const NO_UUID: &str = "00000000-0000-0000-0000-000000000000";

/// Folders of QEMU's object tree that contain devices.
const DEVICES: [&str; 3] =
    ["/machine/peripheral", "/machine/peripheral-anon", "/machine/unattached"];

/// Identity of a VM: addresses, UUID and writable files.
#[derive(Clone, Debug, Default)]
pub(crate) struct Traits {
    uuid: String,
    /// MAC addresses of its network cards.
    macs: Vec<String>,
    writable: Vec<Writable>,
}

impl Traits {
    /// Queries the traits of the VM of a QEMU.
    pub(crate) fn of(qmp: &mut Qmp) -> Result<Self, QmpError> {
        Ok(Self { uuid: qmp.query_uuid()?, macs: macs(qmp)?, writable: writable(qmp)? })
    }
}

/// The addresses of all devices that have a property `mac`.
fn macs(qmp: &mut Qmp) -> Result<Vec<String>, QmpError> {
    let mut all = Vec::new();
    for folder in DEVICES {
        let list = match qmp.execute("qom-list", Some(json!({ "path": folder }))) {
            Err(QmpError::Refused { .. }) => continue,
            list => list?,
        };
        for child in list.as_array().into_iter().flatten() {
            let kind = child["type"].as_str().unwrap_or_default();
            let Some(name) = child["name"].as_str().filter(|_| kind.starts_with("child<")) else {
                continue;
            };
            if let Some(mac) = get(qmp, &format!("{folder}/{name}"), "mac")?.as_str() {
                all.push(mac.to_ascii_lowercase());
            }
        }
    }
    Ok(all)
}

/// Conflicts between VMs that would run at once.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Clashes {
    /// Conflicts that would destroy the VMs' disks.
    pub(crate) grave: Vec<String>,
    /// Other conflicts, which the operator should know.
    pub(crate) other: Vec<String>,
}

/// Compares VMs.
pub(crate) fn clashes<'a>(vms: impl Iterator<Item = (&'a Vm, &'a Traits)>) -> Clashes {
    let (mut places, mut macs, mut uuids) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    let mut found = Clashes::default();
    for (vm, traits) in vms {
        for writable in &traits.writable {
            if writable.place == Place::Unknown {
                found.other.push(format!(
                    "{} of the VM at {} is a descriptor: platen cannot tell whether another VM writes to that file",
                    writable.name, vm.address
                ));
                continue;
            }
            note(&mut places, writable.place.clone(), vm).1 = Some(writable.name.clone());
        }
        for mac in &traits.macs {
            note(&mut macs, mac.clone(), vm);
        }
        if traits.uuid != NO_UUID {
            note(&mut uuids, traits.uuid.clone(), vm);
        }
    }
    for (place, (vms, name)) in &places {
        let name = name.as_deref().unwrap_or_default();
        if vms.len() > 1 {
            found.grave.push(format!("the VMs at {} would all write to {name}", listed(vms)));
        }
        let Place::File(dev, ino) = place else { continue };
        let writers = processes_with(*dev, *ino, is_written);
        if !writers.is_empty() {
            let (vms, writers) = (listed(vms), writers.join(", "));
            found.grave.push(format!(
                "{writers} writes to {name}, to which the VM at {vms} would write too"
            ));
        }
    }
    for (what, same) in [("MAC address", &macs), ("UUID", &uuids)] {
        for (value, (vms, _)) in same.iter().filter(|(_, (vms, _))| vms.len() > 1) {
            found.other.push(format!("the VMs at {} have {what} {value}", listed(vms)));
        }
    }
    found
}

/// The VMs that share a trait, and the trait's name.
type Owners = (Vec<String>, Option<String>);

/// Adds a VM to the owners of `key`, once.
fn note<'m, K: Ord>(all: &'m mut BTreeMap<K, Owners>, key: K, vm: &Vm) -> &'m mut Owners {
    let owners = all.entry(key).or_default();
    let address = vm.address.to_string();
    if owners.0.last() != Some(&address) {
        owners.0.push(address);
    }
    owners
}

fn listed(vms: &[String]) -> String {
    match vms {
        [all @ .., last] if !all.is_empty() => format!("{} and {last}", all.join(", ")),
        _ => vms.concat(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn traits(uuid: &str, macs: &[&str], files: &[Place]) -> Traits {
        let writable =
            files.iter().map(|place| Writable { name: "/disk".into(), place: place.clone() });
        let macs = macs.iter().map(|&mac| mac.into()).collect();
        Traits { uuid: uuid.into(), macs, writable: writable.collect() }
    }

    fn found(all: &[Traits]) -> Clashes {
        let qmp: Vec<_> =
            (0..all.len()).map(|nth| format!("unix:/{nth}").parse().unwrap()).collect();
        let vms = Vm::all(&qmp, None).unwrap();
        clashes(vms.iter().zip(all))
    }

    #[test]
    fn vms_of_their_own_do_not_clash() {
        let one = traits("a", &["52:54:00:00:00:01"], &[Place::Name("nbd://1".into())]);
        let two = traits("b", &["52:54:00:00:00:02"], &[Place::Name("nbd://2".into())]);
        let three = traits(NO_UUID, &[], &[]);
        assert_eq!(found(&[one, two, three.clone(), three]), Clashes::default());
    }

    #[test]
    fn what_several_vms_have_is_named_with_all_of_them() {
        let place = Place::Name("nbd://1".into());
        let same =
            traits("a", &["52:54:00:00:00:01", "52:54:00:00:00:01"], &[place.clone(), place]);
        let Clashes { grave, other } = found(&[same.clone(), same.clone(), same]);
        assert_eq!(grave, ["the VMs at unix:/0, unix:/1 and unix:/2 would all write to /disk"]);
        assert_eq!(
            other,
            [
                "the VMs at unix:/0, unix:/1 and unix:/2 have MAC address 52:54:00:00:00:01",
                "the VMs at unix:/0, unix:/1 and unix:/2 have UUID a",
            ]
        );
    }

    #[test]
    fn a_descriptor_is_not_compared() {
        let one = traits("a", &[], &[Place::Unknown]);
        let Clashes { grave, other } = found(&[one, traits("b", &[], &[Place::Unknown])]);
        assert_eq!((grave.len(), other.len()), (0, 2));
        assert!(other[1].contains("unix:/1"), "{other:?}");
    }
}
