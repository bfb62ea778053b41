//! The answer, for people and as JSON.

use super::command::Addresses;
use super::gather::{Gathered, Machine};
use super::AdviseArgs;
use crate::report_file::write_result;
use advise::vm::Vm;
use advise::{Accelerators, Alternative, Answer, Host, MemoryAdvice, Origin, Rule, Verdict};
use forecast::{rounded, Candidate, Method};
use serde::Serialize;
use std::path::Path;

/// A codec on the pages, on one core of this host.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Codec {
    /// Codec.
    pub(super) codec: &'static str,
    /// Level of the codec.
    pub(super) level: i32,
    /// Bytes of pages over bytes after compression.
    pub(super) ratio: f64,
    /// Bytes of pages that one core compresses in a second, MB.
    pub(super) compress: f64,
    /// Bytes of pages that one core decompresses in a second, MB.
    pub(super) decompress: f64,
    /// Bytes of pages that were measured.
    pub(super) sampled: u64,
}

/// One method, and its forecast.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Choice {
    /// Method of migrating.
    pub(super) method: &'static str,
    /// Whether it converges: converges, uncertain or never.
    pub(super) verdict: Verdict,
    /// Milliseconds from its start to its end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) total_time: Option<u64>,
    /// Milliseconds for which the VM is stopped; for a migration that does not converge, the time
    /// that the rest after a pass would take.
    pub(super) downtime: u64,
    /// Bytes on the network.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) transferred: Option<u64>,
    /// CPU seconds at the source, QEMU's part included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) cpu_source: Option<f64>,
    /// CPU seconds at the destination, QEMU's part included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) cpu_destination: Option<f64>,
    /// Why it does not converge, or may not, and the options that would make it converge.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) not_converging: Option<String>,
}

/// The advice for one machine and link.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Advice {
    /// Rate of the link, Mbit/s, headers included.
    pub(super) link: f64,
    /// Round trip of the link, milliseconds.
    pub(super) rtt: f64,
    /// Whether the link was measured (--peer).
    pub(super) measured: bool,
    /// Bytes of RAM.
    pub(super) ram: u64,
    /// Bytes of pages that are not zeros; left out if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) data: Option<u64>,
    /// Bytes of pages that the guest dirties per second, while few are dirty.
    pub(super) dirty_rate: u64,
    /// CPU cores of the source.
    pub(super) cores: f64,
    /// CPU cores that a migration would get at the source: those that are idle, or its share of
    /// those that others use.
    pub(super) free_cores: f64,
    /// Longest downtime, milliseconds.
    pub(super) max_downtime: u64,
    /// Assumed values: those that were neither given nor measured.
    pub(super) assumed: Vec<String>,
    /// Forecasts of all methods, by a model and not measured.
    pub(super) alternatives: Vec<Choice>,
    /// The method to use; left out if none converges.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) method: Option<&'static str>,
    /// Commands to run.
    pub(super) commands: Vec<String>,
    /// The reason.
    pub(super) because: String,
    /// Rules on accelerators and compression, applied.
    pub(super) rules: Vec<Rule>,
}

/// Intel's libqpl, with which codec qpl was measured.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct QplFound {
    /// Version of libqpl.
    pub(super) version: String,
    /// Compressor: hardware (an IAA device) or software (the CPU).
    pub(super) path: &'static str,
}

/// The report of `platen advise`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Report {
    /// Always `completed`: advice that fails has no report.
    pub(super) status: &'static str,
    /// This host.
    pub(super) host: Host,
    /// The QEMU, with --qmp.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) vm: Option<Vm>,
    /// The pages of the codecs' figures: guest or built-in.
    pub(super) pages: Origin,
    /// Codecs on these pages, in chunks of 512 KiB.
    pub(super) codecs: Vec<Codec>,
    /// Codecs on pages that the guest wrote to between two samples, as differences.
    pub(super) codecs_again: Vec<Codec>,
    /// Codecs on single pages of 4 KiB.
    pub(super) codecs_single: Vec<Codec>,
    /// IAA devices that can be used: enabled ones, where libqpl works on its hardware path.
    pub(super) usable_iaa: usize,
    /// Intel's libqpl; left out where it cannot be loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) qpl: Option<QplFound>,
    /// CPU time of the first write to a page of 4 KiB on this host, microseconds.
    pub(super) first_touch: f64,
    /// Advice for each machine and link.
    pub(super) advice: Vec<Advice>,
    /// Advice on compressed memory for this host.
    pub(super) memory: MemoryAdvice,
}

fn codecs(all: &[Candidate]) -> Vec<Codec> {
    let speed = |cost: f64| if cost > 0.0 { 1e3 / cost } else { 0.0 };
    let of = |one: &Candidate| Codec {
        codec: one.settings.name(),
        level: one.settings.level(),
        ratio: 1.0 / one.size().max(1e-6),
        compress: speed(one.cost()),
        decompress: speed(one.decode_cost()),
        sampled: one.pages,
    };
    all.iter().filter(|one| one.pages > 0).map(of).collect()
}

impl Choice {
    fn new(one: &Alternative) -> Self {
        let ends = one.verdict != Verdict::Never;
        let seen = &one.forecast;
        Self {
            method: one.method.name(),
            verdict: one.verdict,
            total_time: ends.then(|| rounded(seen.seconds * 1e3)),
            downtime: rounded(seen.downtime * 1e3),
            transferred: ends.then(|| rounded(seen.bytes)),
            cpu_source: ends.then_some(seen.cpu),
            cpu_destination: ends.then_some(seen.cpu_there),
            not_converging: one.why.clone(),
        }
    }
}

impl Advice {
    fn new(machine: &Machine, known: &Gathered, addresses: &Addresses) -> Self {
        let Machine { over, figures, assumed, .. } = machine;
        let answer = figures.answer(over.link);
        let Answer { alternatives, choice, because } = &answer;
        let chosen = choice.and_then(|at| alternatives.get(at)).map(|one| one.method);
        let (found, iaa) = accelerators(machine, known);
        let channels = rounded(figures.qemu.channels);
        Self {
            link: over.link.rate() * 8.0 / 1e6,
            rtt: over.link.rtt.as_secs_f64() * 1e3,
            measured: over.is_measured,
            ram: rounded(figures.ram),
            data: figures.data.map(rounded),
            dirty_rate: rounded(figures.curve().rate()),
            cores: figures.cores,
            free_cores: figures.free,
            max_downtime: u64::try_from(figures.max_downtime.as_millis()).unwrap_or(u64::MAX),
            assumed: assumed.clone(),
            alternatives: alternatives.iter().map(Choice::new).collect(),
            method: chosen.map(Method::name),
            commands: chosen.map_or(Vec::new(), |method| addresses.commands(method, channels)),
            because: because.clone(),
            rules: advise::rules(
                &found,
                iaa,
                figures.is_bound_by(over.link),
                chosen == Some(Method::Qemu),
            ),
        }
    }
}

/// The machine's accelerators, imagined ones of --what-if included, and its usable IAA devices.
fn accelerators(machine: &Machine, known: &Gathered) -> (Accelerators, usize) {
    let mut found = known.host.accelerators.clone();
    if machine.figures.qat != found.usable_qat() {
        found.qat_lacks.clear();
        found.qat.resize_with(machine.figures.qat, || advise::Qat {
            address: "imagined".into(),
            part: "4xxx".into(),
            driver: None,
        });
    }
    let here = found.usable_iaa(known.usable_qpl());
    let iaa = machine.iaa.unwrap_or(here);
    if iaa != here {
        // The shared virtual memory of the host's own devices tells nothing of these.
        let imagined = advise::Iaa {
            address: "imagined".into(),
            driver: None,
            enabled: Some(true),
            shared_memory: None,
        };
        found.iaa = vec![imagined; iaa];
    }
    (found, iaa)
}

impl Report {
    pub(super) fn new(args: &AdviseArgs, known: &Gathered) -> Self {
        let is_capped = known.vm.as_ref().is_some_and(|vm| vm.max_bandwidth.is_some());
        let addresses = Addresses::new(args, is_capped);
        let measured = &known.measured;
        let advice = known.machines.iter().map(|one| Advice::new(one, known, &addresses));
        Self {
            status: "completed",
            host: known.host.clone(),
            vm: known.vm.clone(),
            pages: measured.origin,
            codecs: codecs(&measured.sampled.first.0),
            codecs_again: codecs(&measured.sampled.again.0),
            codecs_single: codecs(&measured.single),
            usable_iaa: known.host.accelerators.usable_iaa(known.usable_qpl()),
            qpl: known
                .qpl
                .as_ref()
                .map(|qpl| QplFound { version: qpl.version().to_owned(), path: qpl.path().name() }),
            first_touch: measured.first_touch * 4.096,
            advice: advice.collect(),
            memory: advise::compressed_memory(&known.host, known.free, &measured.single),
        }
    }

    /// Writes the JSON file.
    pub(super) fn publish(&self, path: Option<&Path>) -> anyhow::Result<()> {
        write_result(path, &serde_json::to_value(self)?)
    }
}
