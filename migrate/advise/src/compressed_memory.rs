//! Advice on a block device of compressed memory.

use crate::answer::float;
use crate::host::{Feature, Host};
use forecast::{rounded, Candidate};
use serde::Serialize;

/// With less RAM than this, the device's own memory costs more than compression gains (the README's
/// guests of 128 and 256 MiB).
const LEAST: u64 = 2 << 30;
/// With fewer free cores than this, the advice is lz4.
const CORES: f64 = 1.0;
/// CPU time of the store for a page besides its codec, ns: a write and a read.
const STORE: (f64, f64) = (1500.0, 300.0);
/// The part of the RAM that may hold compressed pages.
const SHARE: u64 = 4;
/// Memory of the store for each byte of compressed pages, tables and half-empty slabs included.
const OVERHEAD: f64 = 1.06;
const PAGE: f64 = 4096.0;

/// Advice, with its reasons.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct MemoryAdvice {
    /// Whether compressed memory is useful on this host.
    pub worth_while: bool,
    /// ublk, nbd or fuse; null if the kernel has none of them.
    pub transport: Option<&'static str>,
    /// Codec to use.
    pub codec: &'static str,
    /// Size of the device, bytes.
    pub size: u64,
    /// Memory that the device may take, bytes.
    pub limit: u64,
    /// Plain bytes per byte of memory, for the measured pages.
    pub ratio: f64,
    /// CPU time of a page written and read, µs.
    pub page_cost: [f64; 2],
    /// Commands to run; the first one may be needed only once.
    pub commands: Vec<String>,
    /// The reasons.
    pub because: Vec<String>,
}

/// Advises a host with `free` cores. `single` are measurements of zstd 1 and lz4 on single pages.
pub fn compressed_memory(host: &Host, free: f64, single: &[Candidate]) -> MemoryAdvice {
    let total = host.memory.total.unwrap_or(0);
    let is_busy = free < CORES;
    let codec = if is_busy { "lz4" } else { "zstd" };
    let measured = single.iter().find(|one| one.settings.codec().name() == codec);
    let of = |pick: fn(&Candidate) -> f64| measured.map_or(0.0, pick);
    let ratio = 1.0 / (of(Candidate::size).max(0.01) * OVERHEAD);
    let (transport, first) = transport(host);
    let limit = (total / SHARE) >> 20;
    let size = rounded(float(limit) * ratio).max(limit);
    let worth_while = total >= LEAST && transport.is_some();
    let mut because = Vec::new();
    if total < LEAST {
        because.push(format!(
            "{} MiB of RAM: below {} GiB programs and buffers of the device cost more than it gains",
            total >> 20,
            LEAST >> 30
        ));
    }
    because.push(if is_busy {
        format!("lz4: {free:.1} cores are free, and a read with zstd takes longer")
    } else {
        format!("zstd: {free:.1} cores are free, and it stores more than lz4")
    });
    because.push(match transport {
        Some("ublk") => "ublk: the kernel has it, and it costs least".into(),
        Some("nbd") => "NBD: the kernel has no ublk".into(),
        Some(_) => "FUSE with a loop device: the kernel has neither ublk nor NBD; a lone page costs four to ten \
                    times zram's CPU time"
            .into(),
        None => "the kernel has neither ublk nor NBD nor FUSE".to_owned(),
    });
    let mut commands: Vec<String> = first.into_iter().filter(|_| worth_while).collect();
    commands.extend(transport.filter(|_| worth_while).map(|transport| {
        let way = match transport {
            "fuse" => "--fuse /run/platen-memory",
            "nbd" => "--nbd unix:/run/platen-swap --swap",
            _ => "--ublk --swap",
        };
        let serve = "platen device serve";
        format!("{serve} --size {size}M --mem-limit {limit}M --codec {codec} {way}")
    }));
    MemoryAdvice {
        worth_while,
        transport,
        codec,
        size: size << 20,
        limit: limit << 20,
        ratio,
        page_cost: [
            (of(Candidate::cost) * PAGE + STORE.0) / 1e3,
            (of(Candidate::decode_cost) * PAGE + STORE.1) / 1e3,
        ],
        commands,
        because,
    }
}

/// The best transport that the kernel has, and the command that loads its module.
fn transport(host: &Host) -> (Option<&'static str>, Option<String>) {
    let kernel = &host.kernel;
    let known = [
        ("ublk", kernel.ublk, "ublk_drv"),
        ("nbd", kernel.nbd, "nbd"),
        ("fuse", kernel.fuse, "fuse"),
    ];
    let found = known.iter().find(|(_, feature, _)| *feature != Feature::Absent);
    let Some((name, feature, module)) = found else { return (None, None) };
    (Some(*name), (*feature == Feature::Module).then(|| format!("modprobe {module}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::{Kernel, Memory};
    use codec::{Codec, Settings};

    fn single() -> Vec<Candidate> {
        let of = |codec, encoded, cpu_ns, decode_ns| {
            let settings = Settings::new(codec, None).unwrap();
            Candidate { settings, pages: 4096, encoded, cpu_ns, decode_ns }
        };
        vec![of(Codec::Zstd, 1640, 12_000, 5_000), of(Codec::Lz4, 2100, 6_000, 2_000)]
    }

    fn host(gib: u64, ublk: Feature, nbd: Feature) -> Host {
        Host {
            memory: Memory { total: Some(gib << 30), ..Memory::default() },
            kernel: Kernel { ublk, nbd, fuse: Feature::Ready, release: None },
            ..Host::default()
        }
    }

    #[test]
    fn cores_choose_the_codec_and_the_kernel_the_transport() {
        let advice = compressed_memory(&host(32, Feature::Module, Feature::Ready), 4.0, &single());
        assert_eq!(
            (advice.transport, advice.codec, advice.worth_while),
            (Some("ublk"), "zstd", true)
        );
        assert_eq!((advice.limit >> 30, advice.size >> 30), (8, 18));
        assert_eq!(advice.commands[0], "modprobe ublk_drv");
        let serve = &advice.commands[1];
        assert!(serve.contains(&format!("--size {}M --mem-limit 8192M", advice.size >> 20)));
        assert!(serve.ends_with("--codec zstd --ublk --swap"), "{serve}");
        assert!(
            (advice.page_cost[0] - 13.5).abs() < 0.1 && (advice.page_cost[1] - 5.3).abs() < 0.1
        );
        let busy = compressed_memory(&host(32, Feature::Absent, Feature::Ready), 0.5, &single());
        assert_eq!((busy.transport, busy.codec), (Some("nbd"), "lz4"));
        assert_eq!(busy.commands.len(), 1);
    }

    #[test]
    fn a_small_host_and_a_kernel_without_anything_are_told() {
        let small = compressed_memory(&host(1, Feature::Ready, Feature::Absent), 4.0, &single());
        assert!(!small.worth_while && small.because[0].contains("1024 MiB"), "{small:?}");
        assert!(small.commands.is_empty() && small.limit == 256 << 20, "{small:?}");
        let nothing = compressed_memory(&Host::default(), 4.0, &[]);
        assert!(!nothing.worth_while && nothing.commands.is_empty(), "{nothing:?}");
        assert!(nothing.ratio.is_finite() && nothing.size == nothing.limit);
    }
}
