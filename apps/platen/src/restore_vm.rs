//! The VMs of a restore: one QEMU each, which waits for the image.

use crate::say::say;
use anyhow::{bail, ensure};
use relay::UnixAddress;
use std::collections::HashSet;

/// Most VMs of one restore.
pub(crate) const MOST: u16 = 256;

/// Stands for the number of the VM in the address of a monitor.
const NUMBER: &str = "{n}";

/// A VM that is to be restored.
#[derive(Debug)]
pub(crate) struct Vm {
    pub(crate) number: usize,
    /// The QEMU's monitor.
    pub(crate) address: UnixAddress,
    /// Whether messages begin with the monitor's address.
    pub(crate) is_one_of_several: bool,
}

impl Vm {
    /// Makes the VMs of the arguments `--qmp` and `--clones`.
    ///
    /// # Errors
    ///
    /// The numbers do not fit, or a monitor occurs twice.
    pub(crate) fn all(qmp: &[UnixAddress], clones: Option<u16>) -> anyhow::Result<Vec<Self>> {
        let addresses = match (qmp, clones) {
            ([one], Some(clones)) if one.to_string().contains(NUMBER) => (1..=clones)
                .map(|nth| one.to_string().replace(NUMBER, &nth.to_string()).parse())
                .collect::<Result<Vec<UnixAddress>, _>>()
                .map_err(anyhow::Error::msg)?,
            ([one], Some(clones)) if clones > 1 => bail!(
                "--clones {clones} needs {clones} monitors: --qmp for each, or one --qmp with {NUMBER} in its place \
                 of the VM's number, as in unix:/run/vm-{NUMBER}.qmp (not {one})"
            ),
            (all, Some(clones)) if all.len() != usize::from(clones) => {
                bail!("--clones {clones} and {} monitors (--qmp): give as many", all.len())
            }
            (all, None) if all.iter().any(|one| one.to_string().contains(NUMBER)) => {
                bail!("--qmp with {NUMBER} needs the number of VMs: --clones")
            }
            (all, _) => all.to_vec(),
        };
        let most = usize::from(MOST);
        ensure!(addresses.len() <= most, "{} monitors; the limit is {most}", addresses.len());
        let mut seen = HashSet::new();
        for address in &addresses {
            // A second name of a socket that does not exist yet shows when it is connected.
            let path = address.path();
            let real = path.canonicalize().unwrap_or_else(|_| path.to_owned());
            ensure!(
                seen.insert(real),
                "monitor {address} is given twice: each VM has one of its own"
            );
        }
        let is_one_of_several = addresses.len() > 1;
        let vm = |(number, address)| Self { number, address, is_one_of_several };
        Ok(addresses.into_iter().enumerate().map(vm).collect())
    }

    /// Prints that this VM is loaded. Others may be loaded from the image still.
    pub(crate) fn say_loaded(&self) {
        match self.is_one_of_several {
            true => self.say("everything is loaded"),
            false => self.say("everything is loaded: the image is not needed any more"),
        }
    }

    /// Prints a message about this VM.
    pub(crate) fn say(&self, text: &str) {
        match self.is_one_of_several {
            true => say(&format!("{}: {text}", self.address)),
            false => say(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(qmp: &[&str], clones: Option<u16>) -> Result<Vec<String>, String> {
        let qmp: Vec<UnixAddress> = qmp.iter().map(|text| text.parse().unwrap()).collect();
        let vms = Vm::all(&qmp, clones).map_err(|error| format!("{error:#}"))?;
        Ok(vms.iter().map(|vm| vm.address.to_string()).collect())
    }

    #[test]
    fn monitors_are_listed_or_numbered() {
        assert_eq!(all(&["unix:/a"], None).unwrap(), ["unix:/a"]);
        assert_eq!(all(&["unix:/a"], Some(1)).unwrap(), ["unix:/a"]);
        assert_eq!(all(&["unix:/a", "unix:/b"], None).unwrap(), ["unix:/a", "unix:/b"]);
        assert_eq!(all(&["unix:/a", "unix:/b"], Some(2)).unwrap().len(), 2);
        let numbered = all(&["unix:/run/{n}/vm-{n}.qmp"], Some(2)).unwrap();
        assert_eq!(numbered, ["unix:/run/1/vm-1.qmp", "unix:/run/2/vm-2.qmp"]);
    }

    #[test]
    fn numbers_that_do_not_fit_and_monitors_given_twice_are_refused() {
        for (qmp, clones, expected) in [
            (&["unix:/a"][..], Some(3), "needs 3 monitors"),
            (&["unix:/a", "unix:/b"], Some(3), "--clones 3 and 2 monitors"),
            (&["unix:/a-{n}"], None, "needs the number of VMs"),
            (&["unix:/a-{n}", "unix:/b-{n}"], Some(3), "give as many"),
            (&["unix:/a", "unix:/a"], None, "unix:/a is given twice"),
        ] {
            let error = all(qmp, clones).unwrap_err();
            assert!(error.contains(expected), "{qmp:?} {clones:?}: {error}");
        }
        let many: Vec<String> = (0..=MOST).map(|nth| format!("unix:/{nth}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert!(all(&many, None).unwrap_err().contains("the limit is 256"));
    }
}
