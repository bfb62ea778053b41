//! The argument `--inherited`: descriptors and names that a server has from its supervisor.

use anyhow::Context;
use std::fmt;
use std::os::fd::OwnedFd;
use std::str::FromStr;

/// Version of the hand-over between two programs: [`Inherited`], [`Adopt`](super::adopt::Adopt),
/// the messages on the socket to a server, the heartbeats, the buffers of a ublk disk. The store
/// has its own version.
pub(super) const FORMAT: u16 = 1;

/// Descriptors and names that a server has from its supervisor. As text:
/// `store=3,buffers=4,device=0,disk=/dev/nbd0`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Inherited {
    pub(crate) store: i32,
    pub(crate) buffers: Option<i32>,
    /// Memory of the server's heap.
    pub(crate) heap: Option<i32>,
    /// The backing device.
    pub(crate) backing: Option<i32>,
    /// Memory of the heartbeats of the server's threads, which the supervisor watches.
    pub(crate) pulse: Option<i32>,
    /// Text of the policy's settings, as the supervisor read it.
    pub(crate) policy: Option<i32>,
    /// Listening sockets.
    pub(crate) control: Option<i32>,
    pub(crate) nbd: Option<i32>,
    pub(crate) metrics: Option<i32>,
    /// Number of the existing ublk device.
    pub(crate) device: Option<u32>,
    /// The disk of the kernel's NBD client.
    pub(crate) disk: Option<String>,
    /// Stand by until the supervisor sends "go".
    pub(crate) standby: bool,
    /// Pidfd of a live server to replace. The new server stands by, reports that, and kills the
    /// present one on "go".
    pub(crate) succeeds: Option<i32>,
    /// Standard error of such a server once it stands by. Until then it is the requesting client.
    pub(crate) log: Option<i32>,
    /// Replaces a server that has exited: a failure of anything optional must not stop this one.
    pub(crate) replaces: bool,
    /// Uses no accelerator: a server before this one hung in the accelerator's driver.
    pub(crate) in_software: bool,
}

/// The arguments of "go" for a stand-by server, which started before they were known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Go {
    /// Number of the existing ublk device.
    pub(crate) device: Option<u32>,
    /// As in [`Inherited`].
    pub(crate) in_software: bool,
}

/// The word of [`Go`] for a server without an accelerator.
const IN_SOFTWARE: &str = "software";

impl From<&str> for Go {
    fn from(text: &str) -> Self {
        let mut words = text.split_whitespace();
        let device = words.next().and_then(|number| number.parse().ok());
        Self { device, in_software: words.any(|word| word == IN_SOFTWARE) }
    }
}

impl fmt::Display for Go {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.device {
            Some(device) => write!(f, "{device}")?,
            None => f.write_str("-")?,
        }
        if self.in_software {
            write!(f, " {IN_SOFTWARE}")?;
        }
        Ok(())
    }
}

/// Opens the file of an inherited descriptor once more.
pub(super) fn descriptor(number: i32) -> anyhow::Result<OwnedFd> {
    // Opening the path proves that the descriptor is open; using the number would need `unsafe`.
    let path = format!("/proc/self/fd/{number}");
    let file = std::fs::File::options().read(true).write(true).open(&path);
    let file = file.with_context(|| format!("the supervisor has not left descriptor {number}"))?;
    Ok(file.into())
}

impl FromStr for Inherited {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut this = Self { store: -1, ..Self::default() };
        for part in text.split(',') {
            let wrong = || format!("'{part}' is not what a supervisor hands on");
            let (name, value) = part.split_once('=').ok_or_else(wrong)?;
            let number = || value.parse::<u16>().map_err(|_| wrong());
            match name {
                "format" if number()? != FORMAT => {
                    return Err(format!(
                        "the present supervisor hands over in format {value}, this program takes \
                         format {FORMAT}"
                    ));
                }
                "format" => {}
                "succeeds" => this.succeeds = Some(number()?.into()),
                "log" => this.log = Some(number()?.into()),
                "store" => this.store = number()?.into(),
                "buffers" => this.buffers = Some(number()?.into()),
                "heap" => this.heap = Some(number()?.into()),
                "backing" => this.backing = Some(number()?.into()),
                "pulse" => this.pulse = Some(number()?.into()),
                "policy" => this.policy = Some(number()?.into()),
                "control" => this.control = Some(number()?.into()),
                "nbd" => this.nbd = Some(number()?.into()),
                "metrics" => this.metrics = Some(number()?.into()),
                "device" => this.device = Some(number()?.into()),
                "disk" => this.disk = Some(value.to_owned()),
                "standby" => this.standby = number()? == 1,
                "replaces" => this.replaces = number()? == 1,
                "software" => this.in_software = number()? == 1,
                _ => return Err(wrong()),
            }
        }
        if this.store < 3 {
            return Err(format!("'{text}' has no store"));
        }
        Ok(this)
    }
}

impl fmt::Display for Inherited {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "store={}", self.store)?;
        for (name, number) in [
            ("buffers", self.buffers),
            ("heap", self.heap),
            ("backing", self.backing),
            ("pulse", self.pulse),
            ("policy", self.policy),
            ("control", self.control),
            ("nbd", self.nbd),
            ("metrics", self.metrics),
        ] {
            if let Some(number) = number {
                write!(f, ",{name}={number}")?;
            }
        }
        if let Some(device) = self.device {
            write!(f, ",device={device}")?;
        }
        if let Some(disk) = &self.disk {
            write!(f, ",disk={disk}")?;
        }
        if self.standby {
            write!(f, ",standby=1")?;
        }
        if self.replaces {
            write!(f, ",replaces=1")?;
        }
        if self.in_software {
            write!(f, ",software=1")?;
        }
        if let (Some(succeeds), Some(log)) = (self.succeeds, self.log) {
            write!(f, ",succeeds={succeeds},log={log},format={FORMAT}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inherited_descriptors_are_parsed_as_they_were_printed() {
        let all = Inherited {
            store: 3,
            buffers: Some(4),
            heap: Some(14),
            backing: Some(5),
            pulse: Some(8),
            policy: Some(6),
            control: Some(9),
            nbd: Some(10),
            metrics: Some(11),
            device: Some(7),
            disk: Some("/dev/nbd0".to_owned()),
            standby: true,
            replaces: true,
            in_software: true,
            succeeds: Some(12),
            log: Some(13),
        };
        let text = all.to_string();
        assert_eq!(text.parse(), Ok(all));
        let other = text.replace(&format!("format={FORMAT}"), "format=999");
        let refused = other.parse::<Inherited>().unwrap_err();
        assert!(refused.contains("hands over in format 999"), "{refused}");
        let least = Inherited { store: 5, ..Inherited::default() };
        assert_eq!(least.to_string().parse(), Ok(least));
        for bad in ["", "store", "store=x", "store=1", "buffers=3", "store=3,more=4", "store=-1"] {
            assert!(bad.parse::<Inherited>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_standby_is_told_whether_there_is_a_disk_and_an_accelerator() {
        for device in [None, Some(0), Some(31)] {
            for in_software in [false, true] {
                let go = Go { device, in_software };
                assert_eq!(Go::from(go.to_string().as_str()), go);
            }
        }
    }
}
