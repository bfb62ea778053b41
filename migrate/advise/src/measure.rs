//! Measures the codecs on pages of a guest, or on the built-in ones.

use crate::pages::built_in;
use crate::vm::Saved;
use codec::Deflate;
use codec::{Codec, Decoder, Encoder, Settings, UnitHeader};
use forecast::{Candidate, Sampled};
use qpl::Qpl;
use rehearse::{measure_pages, Page};
use rustix::time::{clock_gettime, ClockId};
use std::sync::Arc;
use std::time::{Duration, Instant};

const PAGE: usize = 4096;
/// Pages measured one by one, at most.
const SINGLE: usize = 2048;

/// Where the pages are from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// A guest's memory.
    Guest,
    /// Built into the program.
    BuiltIn,
}

/// Sizes and costs of the codecs on pages, on this host.
#[derive(Clone, Debug)]
pub struct Measured {
    /// Where the pages are from.
    pub origin: Origin,
    /// The results in chunks, as a migration sends them.
    pub sampled: Sampled,
    /// Why the results lack codec qpl, although libqpl could be loaded.
    pub qpl_failed: Option<String>,
    /// The results page by page, as a device in memory stores them: zstd 1 and lz4.
    pub single: Vec<Candidate>,
    /// CPU time of zstd 1 for each byte of the built-in pages, ns: how fast this host is.
    pub reference: f64,
    /// CPU time of the first write to a page of memory, for each byte, ns.
    pub first_touch: f64,
}

/// Measures the codecs on `saved`, and on `later`, which holds the same ranges some seconds later;
/// or on built-in pages if `saved` is `None`. The measurement takes about `time`. `qpl` is a
/// further codec.
///
/// # Errors
/// A codec cannot be set up, or decodes to other bytes.
pub fn measure(
    saved: Option<&Saved>,
    later: Option<&Saved>,
    qpl: Option<&Qpl>,
    time: Duration,
) -> Result<Measured, String> {
    let end = Instant::now() + time;
    let left = || end.saturating_duration_since(Instant::now());
    let made = built_in();
    let of = |(nth, bytes)| Page { address: (nth * PAGE) as u64, bytes };
    let made: Vec<Page<'_>> = made.chunks(PAGE).enumerate().map(of).collect();
    let zstd_1 = [Settings::default()];
    let on_made = measure_pages(&made, &[], &zstd_1, None, time / 8)?;
    let reference = on_made.first.zstd_1().map_or(0.0, Candidate::cost);
    let from = |page: crate::vm::SavedPage<'_>| (page.address, page.bytes.to_vec());
    let owned: Vec<(u64, Vec<u8>)> = saved.into_iter().flat_map(Saved::pages).map(from).collect();
    let changed: Vec<(u64, Vec<u8>)> = match (saved, later) {
        (Some(saved), Some(later)) => later.changed(saved).map(from).collect(),
        _ => Vec::new(),
    };
    fn view((address, bytes): &(u64, Vec<u8>)) -> Page<'_> {
        Page { address: *address, bytes }
    }
    let guest: Vec<Page<'_>> = owned.iter().map(view).collect();
    let again: Vec<Page<'_>> = changed.iter().map(view).collect();
    let is_data = |page: &Page<'_>| page.bytes.iter().any(|byte| *byte != 0);
    let is_guest = guest.iter().any(is_data);
    let (origin, pages) = if is_guest { (Origin::Guest, &guest) } else { (Origin::BuiltIn, &made) };
    let compressor = qpl.map(|qpl| qpl.compressor(codec::MAX_PLAIN)).transpose();
    let compressor = compressor.map_err(|error| error.to_string())?;
    let counters = compressor.as_ref().map(|one| Arc::clone(one.counters()));
    let compressor = compressor.map(|one| -> Box<dyn Deflate> { Box::new(one) });
    let mut all = settings();
    all.extend(qpl.map(|_| Settings::qpl()));
    let mut sampled = {
        let time = left().saturating_sub(time / 4);
        measure_pages(pages, &again, &all, compressor, time)?
    };
    let qpl_failed = counters.and_then(|counters| failure(&counters.snapshot()));
    if qpl_failed.is_some() {
        sampled.first.0.retain(|one| !one.settings.is_qpl());
        sampled.again.0.retain(|one| !one.settings.is_qpl());
    }
    let single = single(pages, left())?;
    Ok(Measured { origin, sampled, qpl_failed, single, reference, first_touch: first_touch() })
}

/// Why some streams are not libqpl's: libdeflate has made them.
fn failure(seen: &qpl::Snapshot) -> Option<String> {
    let others = seen.failures + seen.without;
    let why = seen.last_failure.as_deref().unwrap_or("no reason given");
    (others > 0).then(|| format!("libqpl failed to compress {others} units: {why}"))
}

/// The codecs that are measured: the candidates of `--codec auto`, zlib 1, and qatzip 1 in
/// software.
fn settings() -> Vec<Settings> {
    let more = [Codec::Zlib, Codec::DeflateQz].map(|codec| Settings::new(codec, Some(1)));
    controller::Config::candidates().into_iter().chain(more.into_iter().flatten()).collect()
}

/// CPU time of the first write to a page, for each byte, ns. A destination QEMU that has not
/// touched its RAM before spends it for each page. If this host is a virtual machine, a page may
/// take microseconds.
fn first_touch() -> f64 {
    const BYTES: usize = 32 << 20;
    // Zeroed memory, which is not touched before it is written to.
    let mut memory = vec![0_u8; BYTES];
    let begun = cpu_ns();
    for page in memory.chunks_mut(PAGE) {
        page[0] = 1;
    }
    let taken = cpu_ns().saturating_sub(begun);
    std::hint::black_box(&memory);
    #[expect(clippy::cast_precision_loss, reason = "ns of one measurement")]
    let cost = taken as f64 / BYTES as f64;
    cost
}

/// zstd 1 and lz4 on single pages.
fn single(pages: &[Page<'_>], time: Duration) -> Result<Vec<Candidate>, String> {
    let wrong = |error: &dyn std::fmt::Display| error.to_string();
    let is_data = |page: &&Page<'_>| page.bytes.iter().any(|byte| *byte != 0);
    let step = (pages.len() / SINGLE).max(1);
    let pages: Vec<&Page<'_>> = pages.iter().step_by(step).filter(is_data).collect();
    let lz4 = Settings::new(Codec::Lz4, None).map_err(|error| wrong(&error))?;
    let mut found = Vec::new();
    for settings in [Settings::default(), lz4] {
        let mut sum = Candidate::new(settings);
        let mut encoder = Encoder::with_limit(settings, PAGE).map_err(|error| wrong(&error))?;
        let mut decoder = Decoder::new();
        let (mut out, mut back) = (vec![0; PAGE], [0; PAGE]);
        let until = Instant::now() + time / 2;
        for page in &pages {
            let begun = cpu_ns();
            let encoded = encoder.encode(page.bytes, &mut out);
            let middle = cpu_ns();
            let header = UnitHeader::of(page.bytes, encoded);
            let is_raw = encoded.codec == Codec::Raw;
            let payload = if is_raw { page.bytes } else { out.get(..encoded.len).unwrap_or(&[]) };
            decoder.decode(&header, payload, &mut back).map_err(|error| wrong(&error))?;
            sum.add(PAGE as u64, encoded.len as u64, middle.saturating_sub(begun));
            sum.decode_ns += cpu_ns().saturating_sub(middle);
            if Instant::now() >= until {
                break;
            }
        }
        found.push(sum);
    }
    Ok(found)
}

fn cpu_ns() -> u64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    u64::try_from(now.tv_sec * 1_000_000_000 + now.tv_nsec).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_pages_are_measured_with_every_codec_and_labelled() {
        let found = measure(None, None, None, Duration::from_secs(60)).unwrap();
        assert_eq!(found.origin, Origin::BuiltIn);
        assert_eq!(found.sampled.first.0.len(), 9);
        assert!(found.sampled.first.0.iter().all(|one| one.pages > 0), "{found:?}");
        assert!(found.reference > 0.0 && found.first_touch > 0.0, "{found:?}");
        let [zstd, lz4] = found.single[..] else { panic!("{found:?}") };
        assert!(zstd.size() < lz4.size() && lz4.size() < 1.0, "{zstd:?} {lz4:?}");
    }
}
