//! Output of `--codec auto`: `--explain`, its part of the report, and a warning where the link is
//! faster than compression.

use crate::say::say;
use controller::{Bottleneck, Decision};
use relay::{AutoReport, Source};
use serde::Serialize;
use std::sync::mpsc::{self, Sender};

/// With `explain`, returns a channel whose decisions a thread prints on stderr; else `None`.
pub(crate) fn explainer(explain: bool) -> anyhow::Result<Option<Sender<Decision>>> {
    if !explain {
        return Ok(None);
    }
    let (sender, receiver) = mpsc::channel::<Decision>();
    std::thread::Builder::new()
        .name("explain".into())
        .spawn(move || receiver.iter().for_each(|decision| say(&decision.to_string())))?;
    Ok(Some(sender))
}

/// Bytes that were sent with one codec and level.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Part {
    /// Codec.
    pub(crate) codec: &'static str,
    /// Level of the codec.
    pub(crate) level: i32,
    /// Bytes before compression.
    pub(crate) plain: u64,
    /// Bytes after compression.
    pub(crate) size: u64,
}

/// Codecs of one class of data when the VM stopped, or at the end.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Mix {
    /// Class of data, by how well a sample compresses.
    pub(crate) class: String,
    /// Share of the class in all bytes, 0 to 1.
    pub(crate) share: f64,
    /// Codecs of the class.
    pub(crate) parts: Vec<Share>,
}

/// A codec and level, with its share of a class.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Share {
    /// Codec.
    pub(crate) codec: &'static str,
    /// Level of the codec.
    pub(crate) level: i32,
    /// Share of the class's chunks, 0 to 1.
    pub(crate) share: f64,
}

/// Decisions of `--codec auto`, for the report.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Auto {
    /// Resource that limited the migration for the longest time.
    pub(crate) bottleneck: &'static str,
    /// Highest throughput of the links over 200 ms, Mbit/s.
    pub(crate) link_peak: f64,
    /// Bytes by codec and level.
    pub(crate) codecs: Vec<Part>,
    /// Codecs by class of data when the VM stopped.
    pub(crate) mix: Vec<Mix>,
    /// Whether the link was so fast that QEMU alone would not be slower.
    pub(crate) link_too_fast: bool,
    #[serde(skip)]
    warning: Option<String>,
}

impl Auto {
    pub(crate) fn of(source: &Source) -> Option<Self> {
        source.auto().map(Self::from)
    }

    /// Warning for the user, if the link was too fast for compression.
    pub(crate) fn warning(&self) -> Option<&str> {
        self.warning.as_deref()
    }

    /// Formats codecs and their shares: "zstd 3 71 % (812 MB to 274 MB), none 29 % (...)".
    pub(crate) fn codecs_in_words(&self) -> String {
        let all: u64 = self.codecs.iter().map(|part| part.plain).sum();
        let words = self.codecs.iter().map(|part| {
            format!(
                "{} {:.1} % ({} to {} bytes)",
                named(part.codec, part.level),
                100.0 * part.plain as f64 / all.max(1) as f64,
                part.plain,
                part.size
            )
        });
        words.collect::<Vec<_>>().join(", ")
    }

    /// Formats classes and their codecs: "plain 83 %: zstd 3 60 %, zstd 5 40 %; dense 17 %: none".
    pub(crate) fn mix_in_words(&self) -> String {
        let words = self.mix.iter().map(|mix| {
            let parts = mix.parts.iter().map(|part| {
                format!("{} {:.0} %", named(part.codec, part.level), 100.0 * part.share)
            });
            let parts = parts.collect::<Vec<_>>().join(", ");
            format!("{} data ({:.0} %): {parts}", mix.class, 100.0 * mix.share)
        });
        words.collect::<Vec<_>>().join("; ")
    }
}

impl From<AutoReport> for Auto {
    fn from(report: AutoReport) -> Self {
        let mut codecs: Vec<_> = report
            .parts
            .iter()
            .map(|part| Part {
                codec: part.settings.name(),
                level: part.settings.level(),
                plain: part.plain,
                size: part.sent,
            })
            .collect();
        codecs.sort_by_key(|part| std::cmp::Reverse(part.plain));
        let mix = report.last.classes.iter().map(|mix| Mix {
            class: format!("{:?}", mix.class).to_lowercase(),
            share: mix.weight,
            parts: mix
                .parts
                .iter()
                .map(|(settings, share)| Share {
                    codec: settings.name(),
                    level: settings.level(),
                    share: *share,
                })
                .collect(),
        });
        let gigabits = |bytes: f64| bytes * 8.0 / 1e9;
        let warning = report.link_too_fast.then(|| {
            format!(
                "the link took {:.1} Gbit/s and was not full, while {:.1} Gbit/s of QEMU's bytes got through: on a link \
                 this fast QEMU alone (multifd where one thread does not fill it) is at least as fast, and needs less CPU",
                gigabits(report.link_peak),
                gigabits(report.plain_rate)
            )
        });
        Self {
            bottleneck: match report.bottleneck {
                Bottleneck::Workers => "codec threads",
                Bottleneck::Link => "link",
                Bottleneck::Destination => "destination",
                Bottleneck::Source => "source QEMU",
                Bottleneck::Unknown => "unknown",
            },
            link_peak: report.link_peak * 8.0 / 1e6,
            codecs,
            mix: mix.collect(),
            link_too_fast: report.link_too_fast,
            warning,
        }
    }
}

fn named(codec: &str, level: i32) -> String {
    match codec {
        "lz4" | "zstd" | "zstd-history" | "zlib" => format!("{codec} {level}"),
        _ => codec.to_string(),
    }
}
