//! The name of a target at the other host: a place there, and the kind of connection (W4b, W35).

use crate::place::Place;
use crate::record::What;
use std::fmt;
use std::str::FromStr;

/// Precedes the place in the names of NBD connections.
const NBD: &str = "nbd:";

/// A place at the other host, and the kind of connection to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// The place.
    pub place: Place,
    /// A VM, or a disk's NBD connection (`nbd:PLACE`).
    pub what: What,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.what {
            What::Vm => self.place.fmt(f),
            What::Disk => write!(f, "{NBD}{}", self.place),
        }
    }
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (what, place) = match text.strip_prefix(NBD) {
            Some(place) => (What::Disk, place),
            None => (What::Vm, text),
        };
        Ok(Self { place: place.parse()?, what })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_s_target_is_never_a_vm_s() {
        for (text, what) in [("door:49152", What::Vm), ("nbd:door:49152", What::Disk)] {
            let target: Target = text.parse().unwrap();
            assert_eq!((target.what, target.place), (what, Place::Door(49152)));
            assert_eq!(target.to_string(), text);
        }
        for text in ["nbd:", "nbd:nbd:door:1", "NBD:door:1", "nbd:vm", "nbd: door:1"] {
            assert!(text.parse::<Target>().is_err(), "{text}");
        }
    }
}
