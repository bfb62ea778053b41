//! The methods of migrating over a link: those of platen, and those of QEMU by itself.

use crate::best::{best, Best, Cores, There};
use crate::passes::{forecast, Course, End, Forecast, Guest};
use crate::sizes::{Candidate, Sampled, Sizes};
use codec::{Codec, Settings};
use converge::{bytes_for, downtime_for, to_u64, Remedy, Stuck};
use std::time::Duration;

/// Bytes of a full segment with its headers (Ethernet, IP, TCP) over those of its data, with an MTU
/// of 1500.
const HEADERS: f64 = 1514.0 / 1448.0;
/// The time for which bytes are under way in the relays, besides the path's (W16).
const IN_RELAYS: Duration = Duration::from_millis(15);
/// Bytes of a page record's head over those of a page, and of a record of zeros.
const RECORD: f64 = 8.0 / 4096.0;
const ZERO: f64 = 9.0 / 4096.0;
/// The part by which QEMU's zstd takes longer than platen's for the same pages, which it compresses
/// one by one into a stream: 4.17 CPU seconds where platen's codec explains 3.7 (docs/figures.md).
const QEMU_ZSTD: (u64, u64) = (3, 20);
/// The longest downtime that is proposed.
const LONGEST: Duration = Duration::from_secs(60);
/// From this version on QEMU counts the bytes of its own compression as they are sent.
const COUNTS_SENT: (u32, u32) = (8, 1);

/// A link between the hosts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Bytes per second without headers.
    pub goodput: f64,
    /// The round trip.
    pub rtt: Duration,
}

impl Link {
    /// A link of `rate` bytes per second, headers included.
    #[expect(clippy::cast_precision_loss, reason = "a rate; 53 bits are plenty")]
    pub fn of_rate(rate: u64, rtt: Duration) -> Self {
        Self { goodput: rate as f64 / HEADERS, rtt }
    }

    /// Bytes per second, headers included.
    pub fn rate(&self) -> f64 {
        self.goodput * HEADERS
    }
}

/// A method of migrating.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// `platen migrate` with its defaults, a single stream.
    Platen,
    /// `platen migrate --codec` with this codec and level, a single stream without differences.
    PlatenWith(Settings),
    /// QEMU alone, a single stream, uncompressed.
    Qemu,
    /// QEMU alone, multifd with zstd 1.
    QemuZstd,
    /// QEMU alone, multifd with zlib 1.
    QemuZlib,
}

impl Method {
    /// The methods that need no other samples than those of `--codec auto`.
    pub const USUAL: [Self; 3] = [Self::Platen, Self::Qemu, Self::QemuZstd];

    /// The method's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Platen => "platen",
            Self::PlatenWith(settings) if settings.is_qpl() => "platen, qpl",
            Self::PlatenWith(settings) => match settings.codec() {
                Codec::Raw | Codec::SameFilled => "platen, none",
                Codec::Lz4 => "platen, lz4",
                Codec::Zlib => "platen, zlib",
                Codec::Zstd => "platen, zstd",
                Codec::DeflateQz => "platen, qatzip",
            },
            Self::Qemu => "QEMU, no compression",
            Self::QemuZstd => "QEMU, multifd zstd",
            Self::QemuZlib => "QEMU, multifd zlib",
        }
    }

    /// Whether platen's relays carry the migration.
    pub fn is_platen(self) -> bool {
        matches!(self, Self::Platen | Self::PlatenWith(_))
    }
}

/// QEMU's version and settings, as they were before the rehearsal.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QemuSettings {
    /// Major and minor version.
    pub version: (u32, u32),
    /// max-bandwidth, bytes per second; `None` for no limit.
    pub max_bandwidth: Option<f64>,
    /// multifd-channels.
    pub channels: f64,
}

/// Inputs of a forecast.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The guest.
    pub guest: Guest,
    /// Sizes and costs of its pages.
    pub sampled: Sampled,
    /// CPU time of platen's methods.
    pub cores: Cores,
    /// CPU time of QEMU's own methods; its codec threads are its channels.
    pub qemu_cores: Cores,
    /// Bytes of pages per second that QAT devices compress, for codec qatzip; `None` if software
    /// compresses.
    pub device: Option<f64>,
    /// QEMU, for its own methods.
    pub qemu: QemuSettings,
    /// The longest downtime.
    pub max_downtime: Duration,
    /// Whether platen may use postcopy with this QEMU.
    pub postcopy: bool,
}

impl Setup {
    /// Forecasts a migration by `method` over `link`; the forecast's bytes include headers. For a
    /// migration that does not converge, the second result names the cause and the changes that
    /// would make it converge.
    pub fn forecast(&self, method: Method, link: Link) -> (Forecast, Option<Stuck>) {
        let course = self.course(method, link, self.max_downtime);
        let seen = forecast(&self.guest, &course);
        let seen = Forecast { bytes: seen.bytes * HEADERS, ..seen };
        let End::Never { left } = seen.end else { return (seen, None) };
        let drain = course.again.drain / self.guest.data_share.clamp(0.01, 1.0);
        let stuck = Stuck {
            left: to_u64(left),
            drain,
            wire: course.again.drain * course.again.size * HEADERS,
            dirty: Some(self.guest.curve.rate()).filter(|rate| *rate > 0.0),
            needs: seconds(seen.downtime),
            fixed: seconds(course.fixed),
            max: self.max_downtime,
            throttle: 0,
            would: self.remedies(method, link),
        };
        (seen, Some(stuck))
    }

    /// The changes of which each alone would make the migration converge, by the same model.
    fn remedies(&self, method: Method, link: Link) -> Vec<Remedy> {
        const STEP: u64 = 50;
        let ends = |course: &Course, guest: &Guest| forecast(guest, course).end == End::Completes;
        let mut found = Vec::new();
        let mut downtime = self.max_downtime.max(Duration::from_millis(STEP));
        while downtime < LONGEST {
            downtime = downtime.mul_f64(1.1) + Duration::from_millis(10);
            if ends(&self.course(method, link, downtime), &self.guest) {
                let ms = u64::try_from(downtime.as_millis()).unwrap_or(u64::MAX);
                found.push(Remedy::Downtime(Duration::from_millis(ms.div_ceil(STEP) * STEP)));
                break;
            }
        }
        let course = self.course(method, link, self.max_downtime);
        let slow = (20..=95).step_by(5).find(|percent| ends(&course, &self.guest.slowed(*percent)));
        found.extend(slow.map(Remedy::Throttle));
        if self.postcopy || !method.is_platen() {
            found.push(Remedy::Postcopy);
        }
        let faster = (1..=60).map(|step| link.goodput * 1.1_f64.powi(step));
        let enough = faster
            .map(|goodput| Link { goodput, ..link })
            .find(|link| ends(&self.course(method, *link, self.max_downtime), &self.guest));
        found.extend(enough.map(|link| Remedy::Link(link.rate())));
        found
    }

    fn course(&self, method: Method, link: Link, max: Duration) -> Course {
        let sampled = &self.sampled;
        match method {
            Method::Platen => {
                // The choice of the controller of `--codec auto`.
                let auto = |sizes: Sizes| {
                    let never = [Codec::Zlib, Codec::DeflateQz];
                    let mut sizes = sizes;
                    sizes.0.retain(|one| !never.contains(&one.settings.codec()));
                    sizes
                };
                self.platen(auto(sampled.first.clone()), auto(sampled.again()), link, max)
            }
            Method::PlatenWith(settings) => {
                let first = sampled.first.of(settings);
                let again = first.map(|first| sampled.again_whole(first));
                let of = |one: Option<Candidate>| Sizes(one.into_iter().collect());
                self.platen(of(first.copied()), of(again), link, max)
            }
            Method::Qemu => {
                let cores = self.qemu_cores;
                let raw = best(
                    &Sizes::default(),
                    link.goodput / (1.0 + RECORD),
                    self.guest.source,
                    cores,
                );
                let drain = self.qemu.max_bandwidth.map_or(raw.drain, |most| raw.drain.min(most));
                let raw = Best { drain, size: 1.0 + RECORD, ..raw };
                self.qemu_course(raw, raw, link, max)
            }
            Method::QemuZstd => {
                self.multifd(sampled.first.zstd_1(), sampled.again_zstd_1(), link, max)
            }
            Method::QemuZlib => {
                let first = sampled.first.named(Codec::Zlib, 1);
                let again = first.map(|first| sampled.again_whole(first));
                self.multifd(first, again.as_ref(), link, max)
            }
        }
    }

    fn platen(&self, first: Sizes, again: Sizes, link: Link, max: Duration) -> Course {
        let is_qat = |one: &Candidate| one.settings.codec() == Codec::DeflateQz;
        let device = self.device.filter(|_| first.0.iter().any(is_qat));
        let source = self.guest.source.min(device.unwrap_or(f64::INFINITY));
        let first = best(&first, link.goodput, source, self.cores);
        let again = best(&again, link.goodput, source, self.cores);
        let drain = again.drain / self.guest.data_share.clamp(0.01, 1.0);
        let delay = IN_RELAYS + link.rtt;
        let threshold = |goal| {
            #[expect(clippy::cast_precision_loss, reason = "bytes of RAM, far below 2^53")]
            let bytes = bytes_for(goal, drain, delay) as f64;
            bytes
        };
        // The controller begins with half of the downtime that is allowed.
        let thresholds = vec![threshold(max / 2), threshold(max)];
        let fixed = downtime_for(0, drain, delay).as_secs_f64();
        Course { first, again, zero: 0.0, thresholds, fixed }
    }

    /// The course of QEMU's multifd with a codec, for pages with these samples.
    fn multifd(
        &self,
        first: Option<&Candidate>,
        again: Option<&Candidate>,
        link: Link,
        max: Duration,
    ) -> Course {
        let first = self.compressed(first, link);
        self.qemu_course(first, self.compressed(again, link), link, max)
    }

    fn compressed(&self, sizes: Option<&Candidate>, link: Link) -> Best {
        let more = |mut one: Candidate| {
            if one.settings.codec() == Codec::Zstd {
                one.cpu_ns += one.cpu_ns * QEMU_ZSTD.0 / QEMU_ZSTD.1;
                one.decode_ns += one.decode_ns * QEMU_ZSTD.0 / QEMU_ZSTD.1;
            }
            one
        };
        let sizes = Sizes(sizes.copied().into_iter().map(more).collect());
        let there =
            self.qemu_cores.there.map(|there| There { workers: self.qemu.channels, ..there });
        let cores = Cores { workers: self.qemu.channels, there, ..self.qemu_cores };
        let one = best(&sizes, link.goodput, self.guest.source, cores);
        let counted = if self.qemu.version >= COUNTS_SENT { one.size } else { 1.0 };
        let most = self.qemu.max_bandwidth.map_or(f64::INFINITY, |most| most / counted);
        Best { drain: one.drain.min(most), ..one }
    }

    fn qemu_course(&self, first: Best, again: Best, link: Link, max: Duration) -> Course {
        let counted = if self.qemu.version >= COUNTS_SENT { again.size } else { 1.0 };
        // QEMU compares bytes of pages with the bytes that it counts in its downtime.
        let threshold = again.drain * counted * max.as_secs_f64();
        let drain = again.drain / self.guest.data_share.clamp(0.01, 1.0);
        let fixed = downtime_for(0, drain, link.rtt).as_secs_f64();
        Course { first, again, zero: ZERO, thresholds: vec![threshold], fixed }
    }
}

fn seconds(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds.clamp(0.0, 1e9))
}

#[cfg(test)]
mod tests;
