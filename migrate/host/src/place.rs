//! The place at which a destination QEMU awaits a VM, as two services name it to each other (W4b).

use serde::{de::Error, Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::str::FromStr;

/// A place on the destination host of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Place {
    /// `door:PORT`: a port of the host's door address.
    Door(u16),
    /// `socket:N`: the host's Nth unix socket, from 1.
    Socket(u16),
    /// `address:IP:PORT`: an address of the host, which the source QEMU was given.
    Address(SocketAddrV4),
}

impl Place {
    /// The port, or the number of the socket.
    pub fn port(self) -> u16 {
        match self {
            Self::Door(port) | Self::Socket(port) => port,
            Self::Address(address) => address.port(),
        }
    }

    /// The place, for messages.
    pub fn in_words(self) -> String {
        match self {
            Self::Door(port) => format!("port {port}"),
            Self::Socket(number) => format!("socket {number}"),
            Self::Address(address) => address.to_string(),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Door(port) => write!(f, "door:{port}"),
            Self::Socket(number) => write!(f, "socket:{number}"),
            Self::Address(address) => write!(f, "address:{address}"),
        }
    }
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse::<u16>().ok().filter(|number| *number > 0);
        let place = text.split_once(':').and_then(|(kind, rest)| match kind {
            "door" => number(rest).map(Self::Door),
            "socket" => number(rest).map(Self::Socket),
            "address" => {
                let (address, port) = rest.split_once(':')?;
                let address = address.parse::<Ipv4Addr>().ok()?;
                Some(Self::Address(SocketAddrV4::new(address, number(port)?)))
            }
            _ => None,
        });
        // A place has one name: no sign, and no zeros before a number.
        place
            .filter(|place| place.to_string() == text)
            .ok_or_else(|| format!("'{}' names no place on this host", text.escape_debug()))
    }
}

impl Serialize for Place {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Place {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_has_one_name() {
        for text in ["door:49152", "socket:1", "address:10.0.0.2:60000"] {
            assert_eq!(text.parse::<Place>().unwrap().to_string(), text);
        }
        for text in [
            "door:+1",
            "door:01",
            "door:",
            "door:65536",
            "door:0",
            "49152",
            "vm",
            "socket:0",
            "socket:/x",
            "address:10.0.0.2",
            "address:10.0.0.02:1",
            "address:[::1]:1",
            "address:b:1",
            "address:10.0.0.2:0",
            "",
        ] {
            assert!(text.parse::<Place>().unwrap_err().contains("no place"), "{text}");
        }
    }

    #[test]
    fn any_bytes_are_a_place_with_one_name_or_none() {
        let mut state = 1_u64;
        let alphabet: Vec<char> = "doorscketaddress:::0123456789..+-\u{e4}".chars().collect();
        for _ in 0..200_000 {
            let mut text = String::new();
            for _ in 0..state % 24 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                text.push(alphabet[(state >> 33) as usize % alphabet.len()]);
            }
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let text = ["", "door:", "socket:", "address:1.2."][(state >> 60) as usize % 4]
                .to_owned()
                + &text;
            if let Ok(place) = text.parse::<Place>() {
                assert_eq!(place.to_string(), text);
            }
        }
    }
}
