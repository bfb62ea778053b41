//! Rates of a network, as users type them.

use crate::size::Size;
use std::str::FromStr;

/// Bytes per second, from `12500000`, `12M` (as QEMU's max-bandwidth) or `100mbit` (as tc).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rate(pub(crate) u64);

/// The least rate: the handshakes of a session's links need some of it, too.
const LEAST: u64 = 128 << 10;

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "'{text}' is not a rate: bytes per second, perhaps with K, M or G, or bits per second with kbit, \
                 mbit or gbit"
            )
        };
        let units = [("kbit", 125), ("mbit", 125_000), ("gbit", 125_000_000)];
        let lower = text.to_ascii_lowercase();
        let bits = units.iter().find_map(|(unit, bytes)| Some((lower.strip_suffix(unit)?, bytes)));
        let rate = match bits {
            Some((number, bytes)) => {
                let number = number.trim_end();
                if !number.starts_with(|first: char| first.is_ascii_digit()) {
                    return Err(wrong());
                }
                let number: u64 = number.parse().map_err(|_| wrong())?;
                number.checked_mul(*bytes).ok_or_else(|| format!("'{text}' is too large"))?
            }
            None => text.parse::<Size>().map_err(|_| wrong())?.0,
        };
        if rate < LEAST {
            return Err(format!(
                "'{text}' is less than the least rate, {} bytes per second",
                LEAST
            ));
        }
        Ok(Self(rate))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_bytes_or_bits_per_second() {
        let rate = |text: &str| text.parse::<Rate>().map(|rate| rate.0);
        assert_eq!(rate("12500000"), Ok(12_500_000));
        assert_eq!(rate("12M"), Ok(12 << 20));
        assert_eq!(rate("100mbit"), Ok(12_500_000));
        assert_eq!(rate("1Gbit"), Ok(125_000_000));
        assert_eq!(rate("2000 kbit"), Ok(250_000));
        for bad in ["", "fast", "-1M", "mbit", "1.5mbit", "+1mbit", "1mbps"] {
            assert!(rate(bad).unwrap_err().contains("not a rate"), "{bad}");
        }
        assert!(rate("1000").unwrap_err().contains("131072"));
        assert!(rate("999999999999999999gbit").unwrap_err().contains("too large"));
    }
}
