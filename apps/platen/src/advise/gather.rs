//! Facts for the advice: this host, a QEMU, a peer, and the machines that are imagined.

use super::what_if::WhatIf;
use super::AdviseArgs;
use crate::link::{measure as measure_link, Over};
use crate::load::Load;
use crate::monitor::open_monitor;
use advise::vm::{dirtying, Dirtying, Saved, Vm};
use advise::{Destination, Figures, Host, Measured};
use anyhow::Context;
use forecast::{Link, Pass, QemuSettings};
use qmp::Qmp;
use qpl::Qpl;
use std::path::Path;
use std::time::Duration;

/// Rates of the links to advise on where no link is known, bytes per second.
const DEFAULTS: [u64; 2] = [125_000_000, 1_250_000_000];
/// The most multifd channels that the advice proposes.
const CHANNELS: f64 = 8.0;
/// The time between two samples of the memory where the guest's writes are not measured meanwhile.
const APART: Duration = Duration::from_secs(2);

/// All facts that are known for the advice.
pub(super) struct Gathered {
    pub(super) host: Host,
    pub(super) vm: Option<Vm>,
    /// The part of the sampled pages that is not zeros.
    pub(super) data_share: Option<f64>,
    /// The guest's writes; `None`: not measured.
    pub(super) dirtying: Option<Dirtying>,
    pub(super) measured: Measured,
    /// libqpl, if it can be loaded.
    pub(super) qpl: Option<Qpl>,
    /// Cores that this process may use, and those that are free.
    pub(super) cores: f64,
    pub(super) free: f64,
    pub(super) machines: Vec<Machine>,
}

impl Gathered {
    /// libqpl, unless it has failed in the measurement.
    pub(super) fn usable_qpl(&self) -> Option<&Qpl> {
        self.qpl.as_ref().filter(|_| self.measured.qpl_failed.is_none())
    }
}

/// One machine to advise on.
pub(super) struct Machine {
    pub(super) over: Over,
    pub(super) figures: Figures,
    /// IAA devices of --what-if; `None`: those of this host.
    pub(super) iaa: Option<usize>,
    /// Assumed values: those that were neither given nor measured.
    pub(super) assumed: Vec<String>,
}

pub(super) fn gather(args: &AdviseArgs, go_on: &dyn Fn() -> bool) -> anyhow::Result<Gathered> {
    let peer = args.peer.as_deref();
    let over = peer.map(|peer| measure_link(peer, &args.tls, args.peer_name.as_deref()));
    let over = over.transpose()?;
    let host = Host::look(Path::new("/"));
    let load = Load::now();
    let looked = args.qmp.as_ref().map(|address| {
        let monitor = || format!("monitor {address}");
        let mut qmp = open_monitor(address)?;
        look(args, &mut qmp, go_on).with_context(monitor)
    });
    let looked = looked.transpose()?.unwrap_or_default();
    let time = Duration::from_secs(args.seconds);
    let [saved, later] = &looked.saved;
    let qpl = match args.qpl.open() {
        Ok(qpl) => Some(qpl),
        // Most hosts have none.
        Err(_) if args.qpl.qpl_library.is_none() => None,
        Err(error) => return Err(error),
    };
    let measured = advise::measure(saved.as_ref(), later.as_ref(), qpl.as_ref(), time);
    let measured =
        measured.map_err(|error| anyhow::anyhow!("cannot measure the codecs: {error}"))?;
    let mut gathered = Gathered {
        data_share: saved.as_ref().and_then(Saved::data_share),
        vm: looked.vm,
        dirtying: looked.dirtying,
        measured,
        qpl,
        cores: std::thread::available_parallelism().map_or(1, usize::from) as f64,
        free: load.cores_to_get(host.load.map_or(0.0, |load| load[0])),
        host,
        machines: Vec::new(),
    };
    gathered.machines = machines(args, &gathered, over);
    Ok(gathered)
}

/// The data that were read from a QEMU.
#[derive(Default)]
struct Looked {
    vm: Option<Vm>,
    dirtying: Option<Dirtying>,
    saved: [Option<Saved>; 2],
}

fn look(args: &AdviseArgs, qmp: &mut Qmp, go_on: &dyn Fn() -> bool) -> anyhow::Result<Looked> {
    let vm = Vm::look(qmp)?;
    let mut looked = Looked::default();
    if args.sample || args.sample_memory {
        vm.may_be_read(qmp)?;
    }
    if args.sample_memory {
        looked.saved[0] = Some(Saved::take(qmp, go_on)?);
    }
    if args.sample {
        looked.dirtying = Some(dirtying(qmp, vm.ram, go_on)?);
    } else if args.sample_memory {
        std::thread::sleep(APART);
    }
    if let Some(saved) = &looked.saved[0] {
        looked.saved[1] = Some(saved.again(qmp, go_on)?);
    }
    looked.vm = Some(vm);
    Ok(looked)
}

/// The machines to advise on: one for each --what-if, or one for each link that is known.
fn machines(args: &AdviseArgs, known: &Gathered, over: Option<Over>) -> Vec<Machine> {
    let imagined = |rate| Over { link: Link::of_rate(rate, Duration::ZERO), is_measured: false };
    let fastest = known.host.nics.iter().filter(|nic| nic.up).filter_map(|nic| nic.speed).max();
    let usual: Vec<Over> = match (over, fastest) {
        (Some(over), _) => vec![over],
        (None, Some(mbit)) => vec![imagined(mbit.saturating_mul(125_000))],
        (None, None) => DEFAULTS.map(imagined).to_vec(),
    };
    if args.what_if.is_empty() {
        return usual.iter().map(|over| machine(args, known, &WhatIf::default(), *over)).collect();
    }
    let of = |what_if: &WhatIf| {
        let overs = match what_if.link {
            Some(rate) => vec![imagined(rate)],
            None => usual.clone(),
        };
        let with_trip = |over: &Over| match what_if.rtt {
            Some(rtt) => Over { link: Link { rtt, ..over.link }, is_measured: false },
            None => *over,
        };
        let of = |over: &Over| machine(args, known, what_if, with_trip(over));
        overs.iter().map(of).collect::<Vec<_>>()
    };
    args.what_if.iter().flat_map(of).collect()
}

fn machine(args: &AdviseArgs, known: &Gathered, what_if: &WhatIf, over: Over) -> Machine {
    let mut assumed = Vec::new();
    let vm = known.vm.as_ref();
    let ram = what_if.ram.or(vm.map(|vm| vm.ram)).unwrap_or_else(|| {
        assumed.push("the VM has as much RAM as this host".to_owned());
        known.host.memory.total.unwrap_or(1 << 30)
    }) as f64;
    let data = what_if.data.map(|data| data as f64).or(known.data_share.map(|share| share * ram));
    if data.is_none() {
        assumed.push("none of the RAM is zeros".to_owned());
    }
    let steady = |rate: u64| {
        let bytes = |seconds: f64| (rate as f64 * seconds).min(ram);
        [1.0, 5.0].map(|seconds| Pass { seconds, bytes: bytes(seconds) }).to_vec()
    };
    let given = what_if.dirty.map(|rate| Dirtying { passes: steady(rate), unseen: 0.0 });
    let dirtying = given.or_else(|| known.dirtying.clone()).unwrap_or_else(|| {
        assumed.push("the guest writes nothing".to_owned());
        Dirtying::default()
    });
    let cores = what_if.cores.unwrap_or(known.cores);
    let there = match (args.same_host, what_if.there) {
        (true, None) => Destination::Here,
        (_, Some(cores)) => Destination::Cores(cores),
        (false, None) => {
            assumed.push(format!("the destination has {cores} free cores, as fast as these"));
            Destination::Cores(cores)
        }
    };
    if let Some(most) = vm.and_then(|vm| vm.max_bandwidth) {
        let mb = most as f64 / 1e6;
        assumed.push(format!(
            "QEMU alone keeps to its max-bandwidth, {mb:.0} MB/s (`migrate_set_parameter max-bandwidth 0` lifts it)"
        ));
    }
    if let Some(why) = &known.measured.qpl_failed {
        assumed.push(format!("codec qpl cannot be used here: {why}"));
    } else if let Some(qpl) = known.qpl.as_ref().filter(|qpl| qpl.path() == qpl::Path::Software) {
        let version = qpl.version();
        assumed.push(format!(
            "codec qpl is libqpl {version} in software: it has found no IAA device here"
        ));
    }
    if what_if.iaa.is_some_and(|count| count > 0) {
        assumed.push(
            "an IAA device has no forecast, only a rule: none was at hand to measure".to_owned(),
        );
    }
    let version = vm.map_or((9, 1), |vm| vm.version);
    let qemu = QemuSettings {
        version,
        max_bandwidth: vm.and_then(|vm| vm.max_bandwidth).map(|rate| rate as f64),
        channels: channels(vm, cores),
    };
    let figures = Figures {
        ram,
        data,
        passes: dirtying.passes,
        unseen: dirtying.unseen,
        sampled: known.measured.sampled.clone(),
        reference: known.measured.reference,
        first_touch: known.measured.first_touch,
        cores,
        free: if what_if.cores.is_some() { cores } else { known.free },
        there,
        qat: what_if.qat.unwrap_or_else(|| known.host.accelerators.usable_qat()),
        qemu,
        compressors: vm.map(|vm| vm.compressors.clone()).unwrap_or_default(),
        max_downtime: Duration::from_millis(
            args.max_downtime.or(vm.map(|vm| vm.downtime_limit)).unwrap_or(300),
        ),
        postcopy: true,
    };
    Machine { over, figures, iaa: what_if.iaa, assumed }
}

/// Channels of QEMU's own multifd: those that are set, or, where they are QEMU's default, those
/// that this advice proposes.
fn channels(vm: Option<&Vm>, cores: f64) -> f64 {
    let set = vm.map_or(2, |vm| vm.channels);
    if set == 2 {
        cores.floor().clamp(2.0, CHANNELS)
    } else {
        set as f64
    }
}
