//! The links of --what-if.

use crate::link::Over;
use crate::rate::Rate;
use forecast::Link;
use std::str::FromStr;
use std::time::Duration;

/// The longest round trip of a --what-if, milliseconds.
const LONGEST: u64 = crate::link::LONGEST_TRIP;
/// Links without --peer and --what-if, bytes per second.
const DEFAULTS: [u64; 2] = [125_000_000, 1_250_000_000];

/// Links of one --what-if.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct WhatIf {
    rates: Vec<u64>,
    rtt: Duration,
}

impl WhatIf {
    pub(super) fn links(&self) -> Vec<Over> {
        let of = |rate: &u64| Over { link: Link::of_rate(*rate, self.rtt), is_measured: false };
        self.rates.iter().map(of).collect()
    }
}

impl FromStr for WhatIf {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("'{text}' is not link=RATE, link=RATE,RATE or link=RATE,rtt=MILLISECONDS");
        let mut words = text.strip_prefix("link=").ok_or_else(wrong)?.split(',');
        let (mut rates, mut rtt) = (Vec::new(), Duration::ZERO);
        let first = words.next().ok_or_else(wrong)?;
        for word in std::iter::once(first).chain(words) {
            if let Some(ms) = word.strip_prefix("rtt=") {
                let ms = ms.parse().ok().filter(|ms| *ms <= LONGEST);
                let ms = ms.ok_or_else(|| {
                    format!("'{word}' in '{text}' is not rtt=MILLISECONDS, 0 to {LONGEST}")
                })?;
                rtt = Duration::from_millis(ms);
            } else {
                rates.push(word.parse::<Rate>()?.0);
            }
        }
        if rates.is_empty() {
            return Err(wrong());
        }
        Ok(Self { rates, rtt })
    }
}

/// The links of a forecast for which none was named.
pub(super) fn defaults() -> Vec<Over> {
    let of = |rate| Over { link: Link::of_rate(rate, Duration::ZERO), is_measured: false };
    DEFAULTS.map(of).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_what_if_has_rates_and_perhaps_a_round_trip() {
        let parsed = |text: &str| text.parse::<WhatIf>();
        let one = parsed("link=100mbit").unwrap();
        assert_eq!((one.rates.as_slice(), one.rtt), (&[12_500_000][..], Duration::ZERO));
        let two = parsed("link=100mbit,1gbit,rtt=20").unwrap();
        assert_eq!(
            (two.rates.as_slice(), two.rtt.as_millis()),
            (&[12_500_000, 125_000_000][..], 20)
        );
        assert!((two.links()[0].link.rate() - 12_500_000.0).abs() < 1.0);
        for bad in [
            "",
            "100mbit",
            "link=",
            "link=fast",
            "link=1gbit,rtt=soon",
            "link=rtt=3",
            "link=1gbit,",
        ] {
            assert!(parsed(bad).is_err(), "{bad}");
        }
        assert!(parsed("link=1gbit,rtt=99999").unwrap_err().contains("10000"));
    }
}
