//! The argument `--adopt`: descriptors and process IDs that a supervisor hands over to the program
//! that its process executes (`execve`). The process keeps its descriptors and its children.

use super::inherited::{Inherited, FORMAT};
use std::fmt;
use std::str::FromStr;

/// Device and inode of a socket's file.
pub(super) type Place = (u64, u64);

/// Hand-over to another program. As text: `server=12,channel=9,...;store=3,...`; the part after the
/// semicolon is [`Inherited`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Adopt {
    /// PID of the active server, and the supervisor's end of the socket to it.
    pub(super) server: (u32, i32),
    /// PID of the stand-by server, and the supervisor's end of the socket to it.
    pub(super) successor: (u32, i32),
    /// Other children, to be killed and reaped.
    pub(super) dismissed: Vec<u32>,
    /// Descriptor of the lock on the device's name.
    pub(super) lock: i32,
    /// Descriptor of the listening socket for requests.
    pub(super) requests: i32,
    /// Descriptor of the client that requested the hand-over.
    pub(super) client: i32,
    /// Device and inode of the socket files: control, requests, NBD.
    pub(super) places: [Option<Place>; 3],
    /// Descriptors and names for servers.
    pub(super) inherited: Inherited,
}

impl FromStr for Adopt {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (own, inherited) = text.split_once(';').ok_or("nothing for servers is handed on")?;
        let mut this = Self { inherited: inherited.parse()?, ..Self::default() };
        let mut format = None;
        for part in own.split(',') {
            let wrong = || format!("'{part}' is not what a supervisor hands on");
            let (name, value) = part.split_once('=').ok_or_else(wrong)?;
            let number = || value.parse::<u32>().map_err(|_| wrong());
            let descriptor = || value.parse::<u16>().map(i32::from).map_err(|_| wrong());
            let place = || {
                let (device, inode) = value.split_once(':').ok_or_else(wrong)?;
                let number = |text: &str| text.parse::<u64>().map_err(|_| wrong());
                Ok::<_, String>(Some((number(device)?, number(inode)?)))
            };
            match name {
                "format" => format = Some(number()?),
                "server" => this.server.0 = number()?,
                "channel" => this.server.1 = descriptor()?,
                "successor" => this.successor.0 = number()?,
                "successor-channel" => this.successor.1 = descriptor()?,
                "dismissed" => this.dismissed.push(number()?),
                "lock" => this.lock = descriptor()?,
                "requests" => this.requests = descriptor()?,
                "client" => this.client = descriptor()?,
                "control-place" => this.places[0] = place()?,
                "requests-place" => this.places[1] = place()?,
                "nbd-place" => this.places[2] = place()?,
                _ => return Err(wrong()),
            }
        }
        if format != Some(FORMAT.into()) {
            return Err(format!("a hand-over of format {format:?}, this program takes {FORMAT}"));
        }
        Ok(this)
    }
}

impl fmt::Display for Adopt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "format={FORMAT},server={},channel={}", self.server.0, self.server.1)?;
        write!(f, ",successor={},successor-channel={}", self.successor.0, self.successor.1)?;
        for pid in &self.dismissed {
            write!(f, ",dismissed={pid}")?;
        }
        write!(f, ",lock={},requests={},client={}", self.lock, self.requests, self.client)?;
        for (name, place) in ["control", "requests", "nbd"].iter().zip(self.places) {
            if let Some((device, inode)) = place {
                write!(f, ",{name}-place={device}:{inode}")?;
            }
        }
        write!(f, ";{}", self.inherited)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hand_over_is_parsed_as_printed_and_another_format_is_refused() {
        let all = Adopt {
            server: (100, 5),
            successor: (101, 6),
            dismissed: vec![102, 103],
            lock: 7,
            requests: 8,
            client: 9,
            places: [Some((1, 2)), None, Some((3, u64::MAX))],
            inherited: "store=3,control=4,device=0,disk=/dev/ublkb0".parse().unwrap(),
        };
        let text = all.to_string();
        assert_eq!(text.parse(), Ok(all));
        let other = text.replace("format=1", "format=2").parse::<Adopt>().unwrap_err();
        assert!(other.contains("format Some(2), this program takes 1"), "{other}");
        for bad in ["", ";store=3", "server=1", "server=x;store=3", "more=1;store=3"] {
            assert!(bad.parse::<Adopt>().is_err(), "{bad}");
        }
    }
}
