//! Decisions with the figures behind them, for `--explain`.

use std::fmt;
use std::time::Duration;

use codec::{Codec, Settings};

use crate::{Bottleneck, Class};

/// A decision, and its reasons.
#[derive(Clone, Debug)]
pub struct Decision {
    /// The time of the decision, on the clock of the ticks.
    pub at: Duration,
    /// The bottleneck at the last look.
    pub bottleneck: Bottleneck,
    /// Whether the VM has stopped: then latency counts, and the plan no longer changes.
    pub stopped: bool,
    /// Estimated capacity of the link, bytes/s; `None` until the link was the bottleneck once.
    pub drain_bytes_per_s: Option<f64>,
    /// Cores that the plan uses.
    pub cores: f64,
    /// Share of their time that the codec threads were busy, 0 to 1.
    pub busy_share: f64,
    /// Cores that the codec threads used.
    pub used_cores: f64,
    /// The rate of the QEMU that is the bottleneck, plain bytes/s.
    pub qemu_bytes_per_s: Option<f64>,
    /// Predicted for the mix: encoded bytes for a plain byte.
    pub encoded_share: f64,
    /// Predicted for the mix: CPU time of the codec threads for a plain byte, ns.
    pub encode_ns: f64,
    /// Predicted for the mix: link time for a plain byte, ns.
    pub link_ns: f64,
    /// Predicted for the mix: CPU time for a plain byte over the cores planned with, ns.
    pub cpu_ns: f64,
    /// Whether some CPU time is spent on saving bytes although the link is not the bottleneck.
    pub idle_used: bool,
    /// The classes with at least 1 % of the chunks.
    pub classes: Vec<ClassMix>,
}

/// The settings for the chunks of a class.
#[derive(Clone, Debug)]
pub struct ClassMix {
    /// The class.
    pub class: Class,
    /// Its share of the bytes, 0 to 1.
    pub weight: f64,
    /// The settings in use and their shares, which add up to 1.
    pub parts: Vec<(Settings, f64)>,
    /// The estimates of every candidate.
    pub candidates: Vec<Candidate>,
}

/// The estimates of a candidate in a class.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// Codec and level.
    pub settings: Settings,
    /// Encoded bytes for a plain byte; the ratio is its inverse.
    pub size: f64,
    /// CPU time for a plain byte, ns.
    pub cost_ns: f64,
    /// Observations behind these estimates, weighted by age.
    pub observations: f64,
}

impl Decision {
    /// Whether a mix of this size and cost, with this bottleneck, differs enough to be logged.
    pub(crate) fn differs(
        &self,
        at: Duration,
        bottleneck: Bottleneck,
        size: f64,
        cost: f64,
    ) -> bool {
        let far = |a: f64, b: f64| (a - b).abs() > 0.1 * a.max(b);
        let since = at.saturating_sub(self.at);
        let first = self.bottleneck == Bottleneck::Unknown;
        (self.bottleneck != bottleneck && (first || since >= Duration::from_secs(1)))
            || (far(self.encoded_share, size) || far(self.encode_ns, cost))
                && since >= Duration::from_millis(250)
    }

    /// The reason, in words.
    pub fn reason(&self) -> &'static str {
        match (self.stopped, self.bottleneck) {
            (true, _) => "the VM has stopped: what is encoded and sent soonest",
            (_, Bottleneck::Unknown) => "nothing was measured yet",
            (_, Bottleneck::Workers) => {
                "the codec threads are the bottleneck: cheaper, until the link is full"
            }
            (_, Bottleneck::Link) => {
                "the link is the bottleneck: smaller, while that gains time worth its CPU time"
            }
            (_, Bottleneck::Destination) => {
                "the destination is the bottleneck: idle CPU time saves bytes"
            }
            (_, Bottleneck::Source) => {
                "the source QEMU is the bottleneck: idle CPU time saves bytes"
            }
        }
    }
}

impl fmt::Display for Decision {
    /// One line for the decision, and one for each class.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.2} s: {}", self.at.as_secs_f64(), self.reason())?;
        if let Some(rate) = self.drain_bytes_per_s {
            write!(f, "; link {:.1} MB/s", rate / 1e6)?;
        }
        if let Some(rate) = self.qemu_bytes_per_s {
            write!(f, ", QEMU {:.0} MB/s", rate / 1e6)?;
        }
        write!(
            f,
            ", codec threads {:.0} % idle, {:.2} of {:.2} cores",
            100.0 * (1.0 - self.busy_share),
            self.used_cores,
            self.cores
        )?;
        for mix in &self.classes {
            write!(f, "\n  {:?} ({:.0} %):", mix.class, 100.0 * mix.weight)?;
            for (at, (settings, share)) in mix.parts.iter().enumerate() {
                let comma = if at > 0 { "," } else { "" };
                write!(f, "{comma} {:.0} % {}", 100.0 * share, Name(*settings))?;
            }
            f.write_str(";")?;
            for candidate in &mix.candidates {
                write!(
                    f,
                    " {} {:.2}x {:.2} ns/B ({:.0});",
                    Name(candidate.settings),
                    1.0 / candidate.size,
                    candidate.cost_ns,
                    candidate.observations
                )?;
            }
        }
        Ok(())
    }
}

/// "zstd 3"; for a codec with at most one level, only its name.
struct Name(Settings);

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.codec() {
            Codec::Lz4 | Codec::Zlib | Codec::Zstd => {
                write!(f, "{} {}", self.0.name(), self.0.level())
            }
            codec => write!(f, "{codec}"),
        }
    }
}
