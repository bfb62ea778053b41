//! The report of a rehearsal, as a table and as JSON.

use super::vm::Rehearsed;
use crate::link::Over;
use crate::report_file::write_result;
use codec::Codec;
use forecast::{rounded, Candidate, End, Method, Setup, Sizes};
use serde::Serialize;
use std::fmt::Write;
use std::path::Path;

/// Bytes that are dirty after a time.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Dirtied {
    /// Seconds since the dirty log was read.
    seconds: f64,
    /// Bytes of distinct pages that the guest has written to.
    bytes: u64,
}

/// A codec and level on the guest's pages.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct CodecSize {
    /// Codec.
    codec: &'static str,
    /// Level of the codec.
    level: i32,
    /// Bytes after compression over bytes of pages.
    size: f64,
    /// CPU time, ns for each byte of pages.
    cost: f64,
    /// Bytes of pages in the samples.
    sampled: u64,
}

/// One migration that did not happen.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Forecast {
    /// Rate of the link, Mbit/s, headers included.
    link: f64,
    /// Round trip of the link, milliseconds.
    rtt: f64,
    /// Whether the link was measured (--peer) or is a --what-if.
    measured: bool,
    /// Method of migrating.
    method: &'static str,
    /// Whether the migration converges.
    converges: bool,
    /// Milliseconds from its start to its end.
    #[serde(skip_serializing_if = "Option::is_none")]
    total_time: Option<u64>,
    /// Milliseconds for which the VM is stopped; for a migration that does not converge, the time
    /// that the rest after a pass would take.
    downtime: u64,
    /// Bytes on the network.
    #[serde(skip_serializing_if = "Option::is_none")]
    transferred: Option<u64>,
    /// CPU seconds of the source relay, or of QEMU's compression.
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu_seconds: Option<f64>,
    /// Why the migration does not converge, and the options that would make it converge.
    #[serde(skip_serializing_if = "Option::is_none")]
    not_converging: Option<String>,
}

/// The report of a rehearsal.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Report {
    /// Always `completed`: a rehearsal that fails has no report.
    status: &'static str,
    /// Seconds that the rehearsal took.
    seconds: f64,
    /// Version of QEMU.
    qemu: String,
    /// Run state of the VM afterwards, at the source.
    vm: String,
    /// Milliseconds for which the VM was stopped, by QEMU's clock.
    pause: f64,
    /// Bytes of RAM.
    ram: u64,
    /// Bytes of pages that are not all zeros.
    data: u64,
    /// Bytes of pages dirtied per second, while few are dirty.
    dirty_rate: u64,
    /// Pages that the guest dirtied under migration, by the length of the passes.
    dirtied: Vec<Dirtied>,
    /// Codecs on pages sent for the first time.
    sizes: Vec<CodecSize>,
    /// Codecs on pages sent again, as differences where that is smaller.
    sizes_again: Vec<CodecSize>,
    /// CPU cores that were idle.
    free_cores: f64,
    /// Longest downtime of the forecasts, milliseconds.
    max_downtime: u64,
    /// Forecasts, by a model and not measured.
    forecasts: Vec<Forecast>,
}

fn sizes(sizes: &Sizes) -> Vec<CodecSize> {
    let sampled = sizes.0.iter().filter(|one| one.pages > 0);
    let of = |one: &Candidate| CodecSize {
        codec: one.settings.codec().name(),
        level: one.settings.level(),
        size: one.size(),
        cost: one.cost(),
        sampled: one.pages,
    };
    sampled.map(of).collect()
}

impl Forecast {
    fn new(setup: &Setup, over: &Over, method: Method) -> Self {
        let (seen, why) = setup.forecast(method, over.link);
        let converges = seen.end == End::Completes;
        let cpu_seconds = Some(seen.cpu).filter(|_| converges && method != Method::Qemu);
        Self {
            link: over.link.rate() * 8.0 / 1e6,
            rtt: over.link.rtt.as_secs_f64() * 1e3,
            measured: over.is_measured,
            method: method.name(),
            converges,
            total_time: converges.then_some(rounded(seen.seconds * 1e3)),
            downtime: rounded(seen.downtime * 1e3),
            transferred: converges.then_some(rounded(seen.bytes)),
            cpu_seconds,
            not_converging: why.map(|why| why.to_string()),
        }
    }
}

impl Report {
    pub(super) fn new(seen: &Rehearsed, setup: &Setup, over: &[Over]) -> Self {
        let forecasts = over
            .iter()
            .flat_map(|over| Method::USUAL.map(|method| Forecast::new(setup, over, method)));
        let dirtied = setup.guest.curve.points().iter();
        Self {
            status: "completed",
            seconds: seen.seconds,
            qemu: seen.version.to_string(),
            vm: seen.vm.clone(),
            pause: seen.pause.as_secs_f64() * 1e3,
            ram: seen.ram,
            data: rounded(setup.guest.data),
            dirty_rate: rounded(setup.guest.curve.rate()),
            dirtied: dirtied
                .map(|one| Dirtied { seconds: one.seconds, bytes: rounded(one.bytes) })
                .collect(),
            sizes: sizes(&setup.sampled.first),
            sizes_again: sizes(&setup.sampled.again),
            free_cores: setup.cores.free,
            max_downtime: u64::try_from(setup.max_downtime.as_millis()).unwrap_or(u64::MAX),
            forecasts: forecasts.collect(),
        }
    }

    /// Writes the JSON file.
    pub(super) fn publish(&self, path: Option<&Path>) -> anyhow::Result<()> {
        write_result(path, &serde_json::to_value(self)?)
    }

    /// The report for people.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        let _ = self.write(&mut text);
        text
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        writeln!(out, "measured (QEMU {}, {:.1} s)", self.qemu, self.seconds)?;
        let (ram, data) = (megabytes(self.ram), megabytes(self.data));
        writeln!(out, "  RAM          {ram}, {data} of it not zeros")?;
        let dirtied: Vec<_> = self.dirtied.iter().map(Dirtied::in_words).collect();
        let dirtied = if dirtied.is_empty() { "nothing".into() } else { dirtied.join(", ") };
        writeln!(out, "  dirtied      {dirtied}")?;
        writeln!(out, "  sizes        {}", in_words(&self.sizes))?;
        if !self.sizes_again.is_empty() {
            writeln!(out, "  sent again   {}", in_words(&self.sizes_again))?;
        }
        writeln!(out, "  idle cores   {:.1}", self.free_cores)?;
        for over in self.forecasts.iter().filter(|one| one.measured).take(1) {
            writeln!(out, "  link         {:.1} Mbit/s, round trip {:.1} ms", over.link, over.rtt)?;
        }
        writeln!(out, "forecasts, by a model (downtime of {} ms at most)", self.max_downtime)?;
        writeln!(
            out,
            "  {:<14} {:<20} {:>9} {:>10} {:>11} {:>8}",
            "link", "method", "total", "downtime", "network", "CPU"
        )?;
        for one in &self.forecasts {
            one.write(out)?;
        }
        Ok(())
    }
}

impl Forecast {
    fn write(&self, out: &mut String) -> std::fmt::Result {
        let mark = if self.measured { " *" } else { "" };
        let link = format!("{:.0} Mbit/s{mark}", self.link);
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".into());
        let total = self.total_time.map(|ms| format!("{:.1} s", ms as f64 / 1e3));
        let downtime = self.converges.then(|| format!("{} ms", self.downtime));
        let cpu = self.cpu_seconds.map(|seconds| format!("{seconds:.1} s"));
        writeln!(
            out,
            "  {link:<14} {:<20} {:>9} {:>10} {:>11} {:>8}",
            self.method,
            or_dash(total),
            or_dash(downtime),
            or_dash(self.transferred.map(megabytes)),
            or_dash(cpu)
        )?;
        match &self.not_converging {
            Some(why) => writeln!(out, "    does not converge: {why}"),
            None => Ok(()),
        }
    }
}

impl Dirtied {
    fn in_words(&self) -> String {
        format!("{} in {:.2} s", megabytes(self.bytes), self.seconds)
    }
}

fn in_words(sizes: &[CodecSize]) -> String {
    let one = |one: &CodecSize| {
        let level =
            if one.codec == Codec::Zstd.name() { format!(" {}", one.level) } else { String::new() };
        format!("{}{level} {:.2}", one.codec, one.size)
    };
    let words: Vec<_> = sizes.iter().map(one).collect();
    if words.is_empty() {
        "no samples".into()
    } else {
        words.join(", ")
    }
}

fn megabytes(bytes: u64) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_labels_forecasts_and_gives_reasons() {
        let ends = Forecast {
            link: 1000.0,
            rtt: 0.2,
            measured: true,
            method: "platen",
            converges: true,
            total_time: Some(12_340),
            downtime: 120,
            transferred: Some(140_000_000),
            cpu_seconds: Some(8.0),
            not_converging: None,
        };
        let never = Forecast {
            measured: false,
            converges: false,
            total_time: None,
            transferred: None,
            cpu_seconds: None,
            not_converging: Some("the guest dirties 9.0 MB/s".into()),
            ..ends_copy(&ends)
        };
        let report = Report {
            status: "completed",
            seconds: 20.0,
            qemu: "7.2.0".into(),
            vm: "running".into(),
            pause: 0.0,
            ram: 400_000_000,
            data: 200_000_000,
            dirty_rate: 9_000_000,
            dirtied: vec![Dirtied { seconds: 0.1, bytes: 900_000 }],
            sizes: Vec::new(),
            sizes_again: Vec::new(),
            free_cores: 1.0,
            max_downtime: 300,
            forecasts: vec![ends, never],
        };
        let text = report.text();
        for words in [
            "forecasts, by a model",
            "1000 Mbit/s *  platen",
            "12.3 s     120 ms    140.0 MB    8.0 s",
            "does not converge: the guest dirties 9.0 MB/s",
            "0.9 MB in 0.10 s",
            "link         1000.0 Mbit/s, round trip 0.2 ms",
        ] {
            assert!(text.contains(words), "no '{words}' in:\n{text}");
        }
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["forecasts"][0]["total-time"], 12_340);
        assert!(json["forecasts"][1].get("total-time").is_none());
    }

    fn ends_copy(of: &Forecast) -> Forecast {
        Forecast { not_converging: None, ..*of }
    }
}
