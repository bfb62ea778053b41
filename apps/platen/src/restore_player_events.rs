//! The events of a player that carry figures or errors.

use player::{Decoded, PlayError, Played};
use serde_json::{json, Value};
use std::path::Path;
use std::time::Duration;

/// State of QEMU and the image after an error that ends the service of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failed {
    /// The image is damaged, and QEMU has received nothing: it waits for a player.
    Untouched,
    /// The image is damaged. A copy of it may be sound.
    Damaged,
    Otherwise,
}

impl Failed {
    pub(crate) fn of(error: &PlayError, untouched: bool) -> Self {
        match error {
            PlayError::Image(_) if untouched => Self::Untouched,
            PlayError::Image(_) => Self::Damaged,
            _ => Self::Otherwise,
        }
    }
}

/// The event of an error that ends the service of a VM.
pub(crate) fn failed(vm: usize, how: Failed, error: &str) -> Value {
    json!({
        "event": "failed", "vm": vm, "damaged": how != Failed::Otherwise,
        "untouched": how == Failed::Untouched, "error": error,
    })
}

/// The error with its causes, and the image if that is at fault.
pub(crate) fn described(error: &PlayError, image: &Path) -> String {
    let mut text = error.to_string();
    let mut cause: &dyn std::error::Error = error;
    while let Some(source) = cause.source() {
        text += &format!(": {source}");
        cause = source;
    }
    match error {
        PlayError::Image(_) => format!("image {}: {text}", image.display()),
        _ => text,
    }
}

/// The event of a restore that has ended, with its figures.
pub(crate) fn report(vm: usize, played: &Played) -> Value {
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    json!({
        "event": "done", "vm": vm, "running-ms": ms(played.running), "loaded-ms": ms(played.loaded),
        "requests": played.requests, "crossed": played.crossed, "pages": played.pages,
        "zeros": played.zeros, "hot": played.hot, "bytes": played.bytes,
        "served-p50-ms": ms(played.served_median), "served-p99-ms": ms(played.served_p99),
        "cpu-s": crate::report::process_cpu(),
    })
}

/// The player's own figures, at its end.
pub(crate) fn figures(decoded: Decoded) -> Value {
    json!({
        "event": "end", "decoded-units": decoded.units, "decoded-bytes": decoded.bytes,
        "peak-memory-bytes": peak_memory(), "cpu-s": crate::report::process_cpu(),
    })
}

/// The most memory that this process has had, bytes.
fn peak_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10)
}
