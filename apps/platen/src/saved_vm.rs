//! Functions that `save` and `restore` share.

use anyhow::{ensure, Context};
use image::Image;
use qmp::Qmp;
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time limit for a VM that is loaded to leave `inmigrate`.
const STARTS: Duration = Duration::from_secs(60);

/// Capability settings that a plain stream requires, where QEMU has the capability.
pub(crate) const PLAIN: [(&str, bool); 14] = [
    ("events", true),
    ("return-path", true),
    ("multifd", false),
    ("postcopy-ram", false),
    ("postcopy-preempt", false),
    ("xbzrle", false),
    ("compress", false),
    ("zero-copy-send", false),
    ("mapped-ram", false),
    ("background-snapshot", false),
    ("pause-before-switchover", false),
    ("switchover-ack", false),
    // `save` refuses these two. A destination with one of them on would read another block table,
    // or wait for a second VM.
    ("x-ignore-shared", false),
    ("x-colo", false),
];

/// Why a folder cannot be opened as an image.
pub(crate) const FOLDER: &str = "it is a folder: name an image, or a save of a store as STORE/NAME";

/// Opens an image. Errors name its path.
pub(crate) fn open(path: &Path) -> anyhow::Result<Arc<Image>> {
    ensure!(!path.is_dir(), "image {}: {FOLDER}", path.display());
    let image = Image::open(path).with_context(|| format!("image {}", path.display()))?;
    Ok(Arc::new(image))
}

/// Waits until the VM leaves `inmigrate`; returns its run state.
pub(crate) fn wait_started(qmp: &mut Qmp) -> anyhow::Result<String> {
    let until = Instant::now() + STARTS;
    loop {
        let vm = qmp.query_status()?.status;
        if vm != "inmigrate" || Instant::now() > until {
            return Ok(vm);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Formats a number of bytes with its unit.
pub(crate) fn bytes(count: u64) -> String {
    match count {
        0..1_048_576 => format!("{} KiB", count.div_ceil(1024)),
        _ => format!("{:.1} MiB", count as f64 / f64::from(1 << 20)),
    }
}

/// Writes a report as one line of JSON. An error is only printed: the exit status shows what became
/// of the VM.
pub(crate) fn write_json(path: Option<&std::path::Path>, report: &Value) {
    let Some(path) = path else { return };
    if let Err(error) = crate::report_file::write_whole(path, &format!("{report}\n")) {
        crate::say::say(&format!("cannot write the report to {}: {error}", path.display()));
    }
}
