//! `--what-if`: machines that are not here.

use crate::link::LONGEST_TRIP;
use crate::size::Size;
use std::str::FromStr;
use std::time::Duration;

/// The most RAM of a VM, bytes: 16 TiB.
const MOST_RAM: u64 = 16 << 40;
/// The most that a guest writes to per second, bytes: 1 TiB.
const MOST_DIRTY: u64 = 1 << 40;
/// Gbit/s of the fastest link: Terabit Ethernet and some room.
const FASTEST: f64 = 10_000.0;
/// Mbit/s of the slowest one.
const SLOWEST: f64 = 1.0;

/// A machine to advise on. A field that is `None` has the value of this host.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct WhatIf {
    /// Bytes per second, headers included.
    pub(super) link: Option<u64>,
    pub(super) rtt: Option<Duration>,
    /// Cores at the source, all of them free.
    pub(super) cores: Option<f64>,
    /// Cores at the destination.
    pub(super) there: Option<f64>,
    /// Bytes of RAM.
    pub(super) ram: Option<u64>,
    /// Bytes that are not zeros.
    pub(super) data: Option<u64>,
    /// Bytes of pages that the guest writes to per second.
    pub(super) dirty: Option<u64>,
    /// QAT devices.
    pub(super) qat: Option<usize>,
    /// IAA devices.
    pub(super) iaa: Option<usize>,
}

/// The keys, in the order of the help.
const KEYS: &str = "link, rtt, cores, there, ram, data, dirty, qat, iaa";
/// The most devices of a kind.
const MOST_DEVICES: usize = 64;

impl FromStr for WhatIf {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut found = Self::default();
        let mut seen = Vec::new();
        for word in text.split(',') {
            let (key, value) = word.split_once('=').ok_or_else(|| {
                format!("'{word}' in '{text}' is not KEY=VALUE with a KEY of {KEYS}")
            })?;
            if seen.contains(&key) {
                return Err(format!(
                    "'{text}' has {key} twice: repeat --what-if for another machine"
                ));
            }
            seen.push(key);
            match key {
                "link" => found.link = Some(link(value)?),
                "rtt" => found.rtt = Some(trip(value)?),
                "cores" => found.cores = Some(crate::cpus::cores(value)?),
                "there" => found.there = Some(crate::cpus::cores(value)?),
                "ram" => found.ram = Some(bytes(value, 1 << 20, MOST_RAM)?),
                "data" => found.data = Some(bytes(value, 0, MOST_RAM)?),
                "dirty" => {
                    let value = value.strip_suffix("/s").unwrap_or(value);
                    found.dirty = Some(bytes(value, 0, MOST_DIRTY)?);
                }
                "qat" => found.qat = Some(devices(value, "QAT")?),
                "iaa" => found.iaa = Some(devices(value, "IAA")?),
                _ => return Err(format!("'{key}' in '{text}' is none of {KEYS}")),
            }
        }
        if let (Some(data), Some(ram)) = (found.data, found.ram) {
            if data > ram {
                return Err(format!("'{text}' has {} of data in {} of RAM", Size(data), Size(ram)));
            }
        }
        Ok(found)
    }
}

/// Bytes per second, from bits: 25g, 25gbit, 200m, 200mbit. Links are sold by bits.
fn link(text: &str) -> Result<u64, String> {
    let wrong = || format!("'{text}' is not the rate of a link: 200m (Mbit/s) or 25g (Gbit/s)");
    let lower = text.to_ascii_lowercase();
    let short = lower.strip_suffix("bit").unwrap_or(&lower);
    let (number, mbit) = match (short.strip_suffix('g'), short.strip_suffix('m')) {
        (Some(number), _) => (number, 1e3),
        (_, Some(number)) => (number, 1.0),
        _ => return Err(wrong()),
    };
    if !number.starts_with(|first: char| first.is_ascii_digit()) {
        return Err(wrong());
    }
    let rate = number.parse::<f64>().map_err(|_| wrong())? * mbit;
    if !(SLOWEST..=FASTEST * 1e3).contains(&rate) {
        return Err(format!("'{text}' is not a rate from {SLOWEST} Mbit/s to {FASTEST} Gbit/s"));
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked above")]
    let bytes = (rate * 125_000.0) as u64;
    Ok(bytes)
}

fn devices(text: &str, kind: &str) -> Result<usize, String> {
    let count = text.parse().ok().filter(|count| *count <= MOST_DEVICES);
    count.ok_or_else(|| format!("'{text}' is not a number of {kind} devices, 0 to {MOST_DEVICES}"))
}

fn trip(text: &str) -> Result<Duration, String> {
    let number = text.strip_suffix("ms").unwrap_or(text);
    let ms = number.parse::<f64>().ok().filter(|ms| (0.0..=LONGEST_TRIP as f64).contains(ms));
    let wrong = || format!("'{text}' is not a round trip in milliseconds, 0 to {LONGEST_TRIP}");
    Ok(Duration::from_secs_f64(ms.ok_or_else(wrong)? / 1e3))
}

fn bytes(text: &str, least: u64, most: u64) -> Result<u64, String> {
    let size: Size = text.parse()?;
    if (least..=most).contains(&size.0) {
        return Ok(size.0);
    }
    Err(format!("'{text}' is not between {} and {}", Size(least), Size(most)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<WhatIf, String> {
        text.parse()
    }

    #[test]
    fn a_machine_is_what_is_said_and_else_as_here() {
        let found = parsed("link=25g,cores=32,ram=256G,dirty=500M/s,rtt=0.2").unwrap();
        assert_eq!(found.link, Some(3_125_000_000));
        assert_eq!((found.cores, found.there), (Some(32.0), None));
        assert_eq!((found.qat, found.iaa), (None, None));
        assert_eq!((found.ram, found.dirty), (Some(256 << 30), Some(500 << 20)));
        assert_eq!(found.rtt, Some(Duration::from_micros(200)));
        for (text, rate) in [("200m", 25_000_000), ("1Gbit", 125_000_000), ("2.5g", 312_500_000)] {
            assert_eq!(parsed(&format!("link={text}")).unwrap().link, Some(rate));
        }
        let found = parsed("qat=4,iaa=2").unwrap();
        assert_eq!((found.qat, found.iaa), (Some(4), Some(2)));
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        for (text, word) in [
            ("", "KEY=VALUE"),
            ("link", "KEY=VALUE"),
            ("link=25", "25g"),
            ("link=-1g", "25g"),
            ("link=nang", "25g"),
            ("link=1e99g", "10000 Gbit/s"),
            ("link=0.1m", "1 Mbit/s"),
            ("speed=1g", "'speed'"),
            ("link=1g,link=2g", "twice"),
            ("cores=0", "cores"),
            ("ram=1K", "1M"),
            ("ram=99999T", "16384G"),
            ("ram=1G,data=2G", "2G of data in 1G"),
            ("rtt=-1", "round trip"),
            ("rtt=inf", "round trip"),
            ("qat=1000", "QAT devices, 0 to 64"),
            ("iaa=-1", "IAA devices, 0 to 64"),
            ("dirty=2T/s", "1024G"),
        ] {
            let error = parsed(text).unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
