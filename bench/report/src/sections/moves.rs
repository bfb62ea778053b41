//! The file of `migration_bench`: migrations by several methods.

use serde_json::Value;

use crate::data::{each, number, text};
use crate::figure::{Bar, Kind};
use crate::spread::Spread;

/// All runs of one method.
pub(crate) struct Moves {
    /// The benchmark's name of it.
    pub(crate) name: String,
    /// The page's name of it.
    pub(crate) label: String,
    pub(crate) kind: Kind,
    /// Runs that did not end within the limit, and runs that failed.
    pub(crate) unended: u64,
    pub(crate) failed: usize,
    runs: Vec<Value>,
}

/// The methods of a file, in its order.
pub(crate) fn moves(samples: &Value) -> Vec<Moves> {
    let methods = each(samples, "/methods").iter();
    let read = |method: &Value| {
        let name = text(method, "/name");
        let (label, kind) = label(&name);
        Moves {
            name,
            label,
            kind,
            unended: method["did-not-end"].as_u64().unwrap_or(0),
            failed: each(method, "/failures").len(),
            runs: each(method, "/runs").to_vec(),
        }
    };
    methods.map(read).collect()
}

/// Guest and link by the file, for a caption.
pub(crate) fn circumstances(samples: &Value) -> String {
    let link = link(samples);
    let data = number(samples, "/data-mib").unwrap_or(0.0);
    let dirty = each(samples, "/dirty").iter().filter_map(Value::as_u64).collect::<Vec<_>>();
    let guest = match dirty[..] {
        [rate, whole, mib] => format!(
            "a guest with {data:.0} MiB of data that writes {rate} times a second \
             ({whole} % whole pages) over {mib} MiB"
        ),
        _ => format!("an idle guest with {data:.0} MiB of data, all pages different"),
    };
    format!("{guest}, {link}, {}", text(samples, "/network"))
}

/// The link, in words.
pub(crate) fn link(samples: &Value) -> String {
    match number(samples, "/link-mbit").unwrap_or(0.0) {
        0.0 => "a link without a limit".to_owned(),
        mbit => format!("a link of {mbit:.0} Mbit/s"),
    }
}

fn label(name: &str) -> (String, Kind) {
    if let Some(rest) = name.strip_prefix("qemu-multifd") {
        let (channels, compression) = rest.split_once('-').unwrap_or((rest, "none"));
        return (format!("QEMU, {channels} channels, {compression}"), Kind::Other);
    }
    let known = match name {
        "qemu" => ("QEMU, 1 stream, none", Kind::Other),
        "qemu-compress" => ("QEMU, compress (8 + 2 threads)", Kind::Other),
        "qemu-xbzrle" => ("QEMU, xbzrle", Kind::Other),
        // The benchmark gives these no channels. A bar has room for 32 characters.
        "platen-default" => ("platen, default (auto), 1 stream", Kind::Platen),
        "platen-qatzip-software" => ("platen, qatzip on CPU, 1 stream", Kind::Platen),
        "platen-qpl-software" => ("platen, qpl (software), 1 stream", Kind::Platen),
        "platen-qatzip-simulated" => ("platen, SIMULATED QAT, 1 stream", Kind::Simulated),
        _ => ("", Kind::Platen),
    };
    match (known.0, name.strip_prefix("platen:")) {
        ("", Some(flags)) => (platen_label(flags), Kind::Platen),
        ("", None) => (name.to_owned(), Kind::Other),
        (label, _) => (label.to_owned(), known.1),
    }
}

/// The flags of a relay, as few words as possible.
fn platen_label(flags: &str) -> String {
    let of =
        |name: &str| flags.split(',').find_map(|flag| flag.strip_prefix(name)?.strip_prefix('='));
    let mut words = vec![format!("platen, {}", of("codec").unwrap_or("auto"))];
    if let Some(level) = of("level") {
        words[0].push_str(&format!(" {level}"));
    }
    match of("channels") {
        Some("0") if of("compress-threads").is_none() => words.push("1 stream".into()),
        Some("0") => {}
        Some(channels) => words.push(format!("{channels} channels")),
        None => {}
    }
    if let Some(threads) = of("compress-threads") {
        words.push(format!("{threads} threads"));
    }
    words.join(", ")
}

impl Moves {
    fn of(&self, pick: impl Fn(&Value) -> Option<f64>) -> Option<Spread> {
        // The median of only those that ended well would be too good.
        match (self.unended, self.failed) {
            (0, 0) => Spread::of(self.runs.iter().filter_map(pick)),
            _ => None,
        }
    }

    /// Seconds.
    pub(crate) fn total(&self) -> Option<Spread> {
        self.of(|run| Some(number(run, "/total-time")? / 1e3))
    }

    /// Milliseconds without a running VM.
    pub(crate) fn downtime(&self) -> Option<Spread> {
        self.of(|run| number(run, "/downtime"))
    }

    /// Megabytes on the wire.
    pub(crate) fn wire(&self) -> Option<Spread> {
        self.of(|run| Some(number(run, "/wire")? / 1e6))
    }

    /// Mbit/s on the wire.
    pub(crate) fn throughput(&self) -> Option<Spread> {
        self.of(|run| per(number(run, "/wire")? * 8.0 / 1e6, number(run, "/total-time")?))
    }

    /// Pages a second over the whole migration, zero pages included.
    pub(crate) fn pages(&self) -> Option<Spread> {
        self.of(|run| {
            let of = |name: &str| number(run, &format!("/query-migrate/ram/{name}"));
            per(of("normal")? + of("duplicate")?, number(run, "/total-time")?)
        })
    }

    /// CPU seconds of the source's QEMU and relay.
    pub(crate) fn sender(&self) -> Option<Spread> {
        self.of(|run| cpu(run, "source"))
    }

    /// CPU seconds of the source's relay alone.
    pub(crate) fn sending_relay(&self) -> Option<Spread> {
        self.of(|run| number(run, "/cpu-seconds/source-relay"))
    }

    /// CPU seconds of the destination's.
    pub(crate) fn receiver(&self) -> Option<Spread> {
        self.of(|run| cpu(run, "destination"))
    }

    /// The sender's CPU time, per cent of one CPU.
    pub(crate) fn sender_percent(&self) -> Option<Spread> {
        self.of(|run| per(cpu(run, "source")? * 100.0, number(run, "/total-time")?))
    }

    /// The receiver's.
    pub(crate) fn receiver_percent(&self) -> Option<Spread> {
        self.of(|run| per(cpu(run, "destination")? * 100.0, number(run, "/total-time")?))
    }

    /// The median total time against another method's, as a bar.
    pub(crate) fn against(
        &self,
        base: &Self,
        pick: impl Fn(&Self) -> Option<Spread>,
    ) -> Option<Bar> {
        let base = pick(base)?.median;
        let ratio = pick(self).filter(|_| base > 0.0)?.map(|value| value / base);
        Some(Bar::new(&self.label, self.kind, ratio))
    }

    /// The words in the place of figures.
    pub(crate) fn remark(&self, limit: Option<f64>) -> Option<String> {
        match (self.unended, self.failed) {
            (0, 0) => None,
            (0, failed) => Some(format!("{failed} runs failed")),
            _ => Some(format!("did not end in {:.0} s", limit.unwrap_or(0.0))),
        }
    }
}

fn cpu(run: &Value, end: &str) -> Option<f64> {
    let of = |part: &str| number(run, &format!("/cpu-seconds/{end}-{part}"));
    Some(of("qemu")? + of("relay")?)
}

/// `value` a second, of a time in milliseconds.
fn per(value: f64, ms: f64) -> Option<f64> {
    (ms > 0.0).then_some(value * 1e3 / ms)
}

/// The method of this name.
pub(crate) fn named<'a>(all: &'a [Moves], name: &str) -> Option<&'a Moves> {
    all.iter().find(|moves| moves.name == name)
}

/// A cell: the spread, or a dash.
pub(crate) fn cell(spread: Option<Spread>, digits: usize) -> String {
    spread.map_or_else(|| "–".to_owned(), |spread| spread.show(digits))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn figures_come_from_each_run_and_unended_methods_have_none() {
        let run = |ms: u64| {
            json!({"total-time": ms, "downtime": 7, "wire": 1_000_000,
                "cpu-seconds": {"source-qemu": 0.5, "source-relay": 0.5,
                    "destination-qemu": 0.2, "destination-relay": 0.0},
                "query-migrate": {"ram": {"normal": 900, "duplicate": 100}}})
        };
        let samples = json!({"link-mbit": 1000, "data-mib": 200, "dirty": [], "methods": [
            {"name": "qemu-multifd8-zstd", "did-not-end": 0, "runs": [run(1000), run(2000)]},
            {"name": "platen:codec=zlib,level=1,channels=8", "did-not-end": 1, "runs": [run(500)]},
            {"name": "qemu", "runs": [run(900)], "failures": ["the link broke"]},
        ]});
        let all = moves(&samples);
        assert_eq!(all[0].label, "QEMU, 8 channels, zstd");
        assert_eq!(all[0].total().unwrap().show(1), "1.5 (1.0 to 2.0)");
        assert_eq!(all[0].throughput().unwrap().most, 8.0);
        assert_eq!(all[0].pages().unwrap().most, 1000.0);
        assert_eq!(all[0].sender_percent().unwrap().most, 100.0);
        assert_eq!(all[1].label, "platen, zlib 1, 8 channels");
        assert!(all[1].total().is_none());
        assert_eq!(all[1].remark(Some(60.0)).unwrap(), "did not end in 60 s");
        assert!(all[2].total().is_none() && all[2].wire().is_none());
        assert_eq!(all[2].remark(Some(60.0)).unwrap(), "1 runs failed");
        assert!(circumstances(&samples).contains("idle guest with 200 MiB"));
        assert!(moves(&json!([1, 2])).is_empty());
    }

    /// Regression: rows of one stream stood in the table over 8 channels without a word.
    #[test]
    fn a_row_without_channels_says_so_also_beside_its_bar() {
        for name in ["default", "qatzip-software", "qpl-software", "qatzip-simulated"] {
            let label = label(&format!("platen-{name}")).0;
            assert!(label.ends_with(", 1 stream") && label.chars().count() <= 32, "{label}");
        }
        assert_eq!(label("platen:codec=zstd,channels=0").0, "platen, zstd, 1 stream");
    }
}
