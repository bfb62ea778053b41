//! Predicted cost of each method, and the method to use.

use crate::costs::Costs;
use crate::curve::curve;
use codec::{Codec, Settings};
use forecast::{
    to_u64, Candidate, Cores, DirtyCurve, End, Forecast, Guest, Link, Method, Pass, QemuSettings,
    Sampled, Setup, There, Work,
};
use std::time::Duration;

/// The guest may write this many times as much as measured, or as little.
const DOUBT: f64 = 1.4;
/// A method is worth its CPU time if it takes at most this part of the time.
const WORTH: f64 = 0.9;
/// Bytes of pages per second that a QAT device compresses at least: a quarter of the rate that
/// QEMU's QATzip document states for its four devices.
const DEVICE: f64 = 0.8e9;
/// Host CPU time for a byte of pages with a device, ns, measured on the simulated one.
const BY_DEVICE: f64 = 0.17;
/// The codec threads of `platen migrate`, at most.
const THREADS: f64 = 8.0;

/// The destination's CPUs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Destination {
    /// Both ends are this host, and share its cores.
    Here,
    /// Another host with this many free cores.
    Cores(f64),
}

/// A migration to give advice on.
#[derive(Clone, Debug)]
pub struct Figures {
    /// Bytes of RAM.
    pub ram: f64,
    /// Bytes of pages that are not zeros; `None`: unknown, and assumed to be all.
    pub data: Option<f64>,
    /// Bytes that the guest writes to, by time; empty for an idle guest.
    pub passes: Vec<Pass>,
    /// The rate that passes without bytes may hide, bytes per second: `Dirtying::unseen`, or 0
    /// where nothing was measured.
    pub unseen: f64,
    /// The pages' sizes and costs.
    pub sampled: Sampled,
    /// How fast this host is: `Measured::reference`.
    pub reference: f64,
    /// CPU time of the destination for the first write to its memory, for each byte, ns:
    /// `Measured::first_touch`, or 0 where its QEMU has touched its RAM before.
    pub first_touch: f64,
    /// Cores of the source.
    pub cores: f64,
    /// Those of them that a migration would get.
    pub free: f64,
    /// The destination's CPUs.
    pub there: Destination,
    /// QAT devices that can be used at the source.
    pub qat: usize,
    /// QEMU's version and settings.
    pub qemu: QemuSettings,
    /// QEMU's multifd compressors; empty: unknown, and assumed to be zlib and zstd.
    pub compressors: Vec<String>,
    /// The longest downtime.
    pub max_downtime: Duration,
    /// Whether platen may use postcopy with this QEMU.
    pub postcopy: bool,
}

/// Whether a migration converges.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The migration converges.
    Converges,
    /// The forecast is too close to say: it depends on whether the guest writes a little more or
    /// less.
    Uncertain,
    /// The migration does not converge.
    Never,
}

/// One method, and its forecast.
#[derive(Clone, Debug)]
pub struct Alternative {
    /// The method.
    pub method: Method,
    /// The forecast. Its time, bytes and CPU are of use unless the verdict is [`Verdict::Never`].
    pub forecast: Forecast,
    /// Whether the migration converges.
    pub verdict: Verdict,
    /// Why it does not converge, or may not, and which changes would make it.
    pub why: Option<String>,
}

/// All methods, and the one to use.
#[derive(Clone, Debug)]
pub struct Answer {
    /// All methods, in a fixed order.
    pub alternatives: Vec<Alternative>,
    /// The index of the method to use; `None` if none converges.
    pub choice: Option<usize>,
    /// The reason.
    pub because: String,
}

impl Figures {
    /// Answers for a link.
    pub fn answer(&self, link: Link) -> Answer {
        let setups = [1.0 / DOUBT, 1.0, DOUBT].map(|factor| self.setup(factor));
        let of = |method: Method| {
            let [few, usual, many] = &setups;
            let (forecast, why) = usual.forecast(method, link);
            let ends = |setup: &Setup| setup.forecast(method, link).0.end == End::Completes;
            let verdict = match (ends(few), ends(usual), ends(many)) {
                (_, true, true) => Verdict::Converges,
                (false, false, _) => Verdict::Never,
                _ => Verdict::Uncertain,
            };
            let why = match (verdict, why) {
                (Verdict::Converges, _) => None,
                (_, Some(why)) => Some(why.to_string()),
                (_, None) => {
                    let why = many.forecast(method, link).1;
                    why.map(|why| format!("with {}: {why}", self.more_writes()))
                }
            };
            Alternative { method, forecast, verdict, why }
        };
        let alternatives: Vec<Alternative> = self.methods().into_iter().map(of).collect();
        let (choice, because) = choose(&alternatives);
        Answer { alternatives, choice, because }
    }

    /// The writes that could decide, beyond those that were measured.
    fn more_writes(&self) -> String {
        if self.unseen > 0.0 && self.passes.iter().all(|pass| pass.bytes <= 0.0) {
            return format!("{:.1} MB/s of writes, which QEMU reports as 0", self.unseen / 1e6);
        }
        format!("{:.0} % more writes", (DOUBT - 1.0) * 100.0)
    }

    /// The methods that are available here.
    fn methods(&self) -> Vec<Method> {
        let has = |name: &str| {
            self.compressors.is_empty() || self.compressors.iter().any(|one| one == name)
        };
        let mut methods = vec![Method::Qemu];
        methods.extend(Some(Method::QemuZlib).filter(|_| has("zlib")));
        methods.extend(Some(Method::QemuZstd).filter(|_| has("zstd")));
        methods.push(Method::Platen);
        let mut codecs = vec![Codec::Zstd, Codec::Lz4];
        codecs.extend(Some(Codec::DeflateQz).filter(|_| self.qat > 0));
        let named = codecs.into_iter().filter_map(|codec| Settings::new(codec, Some(1)).ok());
        methods.extend(named.map(Method::PlatenWith));
        let qpl = self.sampled.first.of(Settings::qpl()).filter(|one| one.pages > 0);
        methods.extend(qpl.map(|one| Method::PlatenWith(one.settings)));
        methods
    }

    /// The model's input if the guest writes `factor` times as much.
    fn setup(&self, factor: f64) -> Setup {
        let costs = Costs::of(self.reference);
        let touch = self.first_touch.clamp(0.0, 100.0);
        let data = self.data.unwrap_or(self.ram).clamp(0.0, self.ram);
        let unseen = if factor > 1.0 { self.unseen } else { 0.0 };
        let more = |pass: &Pass| {
            let hidden = if pass.bytes > 0.0 { 0.0 } else { unseen * pass.seconds };
            Pass { bytes: pass.bytes * factor + hidden, ..*pass }
        };
        let passes: Vec<Pass> = self.passes.iter().map(more).collect();
        let guest = Guest {
            ram: self.ram,
            data,
            // One thread of the destination QEMU takes them.
            source: costs.source.min(1e9 / (costs.qemu[1].page + costs.qemu[1].wire + touch)),
            zeros: (self.ram - data) / costs.zeros,
            zeros_cpu: [1.0 / costs.zeros, costs.zeros_there / 1e9]
                .map(|seconds| (self.ram - data) * seconds),
            data_share: 1.0,
            curve: curve(&passes, self.ram),
        };
        let workers = self.cores.clamp(1.0, THREADS).floor();
        let free = match self.there {
            Destination::Here => None,
            Destination::Cores(cores) => Some(cores),
        };
        let cores = |[here, there]: [Work; 2]| Cores {
            workers,
            free: self.free,
            work: here,
            there: Some(There { free, workers, work: Work { page: there.page + touch, ..there } }),
        };
        #[expect(clippy::cast_precision_loss, reason = "a handful of devices")]
        let device = (self.qat > 0).then_some(DEVICE * self.qat as f64);
        Setup {
            guest,
            sampled: self.sampled(costs),
            cores: cores(costs.platen),
            qemu_cores: cores(costs.qemu),
            device,
            qemu: self.qemu,
            max_downtime: self.max_downtime,
            postcopy: self.postcopy,
        }
    }

    /// The samples, with QEMU's zlib instead of libdeflate's, and a device instead of software.
    fn sampled(&self, costs: Costs) -> Sampled {
        let mut sampled = self.sampled.clone();
        let Some(zstd_1) = sampled.first.zstd_1().copied() else { return sampled };
        for one in &mut sampled.first.0 {
            match one.settings.codec() {
                Codec::Zlib if !one.settings.is_qpl() => {
                    one.cpu_ns = scaled(zstd_1.cpu_ns, &zstd_1, one, costs.zlib[0]);
                    one.decode_ns = scaled(zstd_1.decode_ns, &zstd_1, one, costs.zlib[1]);
                }
                Codec::DeflateQz if self.qat > 0 => {
                    one.cpu_ns = to_u64(BY_DEVICE * float(one.pages));
                }
                _ => {}
            }
        }
        sampled
    }

    /// Whether the link carries pages slower than QEMU alone would send them.
    pub fn is_bound_by(&self, link: Link) -> bool {
        link.goodput < Costs::of(self.reference).source
    }

    /// The curve of the guest's writes.
    pub fn curve(&self) -> DirtyCurve {
        curve(&self.passes, self.ram)
    }
}

/// Scales `ns`, the cost of zstd 1 for its pages, by `factor` and by the ratio of the pages of
/// `one` to those of zstd 1.
fn scaled(ns: u64, zstd_1: &Candidate, one: &Candidate, factor: f64) -> u64 {
    to_u64(float(ns) * factor * float(one.pages) / float(zstd_1.pages).max(1.0))
}

#[expect(clippy::cast_precision_loss, reason = "bytes and ns of samples, far below 2^53")]
pub(crate) fn float(number: u64) -> f64 {
    number as f64
}

/// Chooses the fastest method, unless a simpler one takes hardly longer: first QEMU alone, then
/// platen's default.
fn choose(all: &[Alternative]) -> (Option<usize>, String) {
    let ends = |verdict: Verdict| {
        let of = move |(_, one): &(usize, &Alternative)| one.verdict == verdict;
        all.iter().enumerate().filter(of)
    };
    let seconds = |(_, one): &(usize, &Alternative)| one.forecast.seconds;
    let fastest = |verdict| ends(verdict).min_by(|a, b| seconds(a).total_cmp(&seconds(b)));
    let Some(best) = fastest(Verdict::Converges) else {
        return match fastest(Verdict::Uncertain) {
            Some((at, one)) => {
                let name = one.method.name();
                (Some(at), format!("nothing is certain to converge, and {name} is the likeliest"))
            }
            None => (None, "nothing converges".into()),
        };
    };
    let simple = [Method::Qemu, Method::Platen].into_iter().find_map(|method| {
        ends(Verdict::Converges)
            .find(|one| one.1.method == method && seconds(&best) >= WORTH * seconds(one))
    });
    let (at, one) = simple.unwrap_or(best);
    let because = match (one.method, best.1.method) {
        (Method::Qemu, Method::Qemu) => {
            "nothing is faster: compression would gain no time here".into()
        }
        (Method::Qemu, other) => {
            let (name, gain) =
                (other.name(), 100.0 * (1.0 - seconds(&best) / one.forecast.seconds));
            format!("{name} would save {gain:.0} % of the time, and costs CPU time on both hosts")
        }
        (method, other) if method == other => "it is the fastest".into(),
        (_, other) => {
            let (name, gain) =
                (other.name(), 100.0 * (1.0 - seconds(&best) / one.forecast.seconds));
            format!(
                "{name} would be {gain:.0} % faster by the model, and cannot adapt when the link or \
                 the guest changes"
            )
        }
    };
    (Some(at), because)
}

#[cfg(test)]
mod tests;
