//! The machine's memory, and how much of it programs could have without swapping.

use std::fs::File;
use std::os::unix::fs::FileExt;

/// An open `/proc/meminfo`: reading it again asks the kernel for no memory.
#[derive(Debug)]
pub(crate) struct Available(Option<File>);

impl Available {
    /// Opens the file. If it cannot be read, [`look`](Self::look) returns `None`.
    pub(crate) fn new() -> Self {
        let this = Self(File::open("/proc/meminfo").ok());
        // The kernel allocates its buffer at the first read.
        this.look();
        this
    }

    #[cfg(test)]
    pub(crate) fn of(file: File) -> Self {
        Self(Some(file))
    }

    /// Bytes of `MemTotal` and `MemAvailable`.
    pub(crate) fn look(&self) -> Option<(u64, u64)> {
        // Both are in the first three lines.
        let mut bytes = [0; 256];
        let read = self.0.as_ref()?.read_at(&mut bytes, 0).ok()?;
        let text = &bytes[..read];
        Some((field(text, b"MemTotal:")?, field(text, b"MemAvailable:")?))
    }
}

/// A line's number of KiB, as bytes.
fn field(text: &[u8], name: &[u8]) -> Option<u64> {
    let line = text.split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(name))?;
    let line = line.trim_ascii_start();
    let digits =
        line.iter().position(|byte| !byte.is_ascii_digit()).filter(|&digits| digits > 0)?;
    std::str::from_utf8(&line[..digits]).ok()?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_reports_total_and_available_memory() {
        let (total, available) = Available::new().look().unwrap();
        assert!(total >= available && available > 0, "{available} of {total}");
    }

    #[test]
    fn truncated_or_unknown_lines_give_no_value() {
        let text = b"MemTotal:         217532 kB\nMemFree:  1 kB\nMemAvailable:    81720 kB\nBuf";
        assert_eq!(field(text, b"MemTotal:"), Some(217_532 * 1024));
        assert_eq!(field(text, b"MemAvailable:"), Some(81_720 * 1024));
        assert_eq!(field(text, b"Buffers:"), None);
        assert_eq!(field(&text[..20], b"MemTotal:"), None);
        assert_eq!(field(b"MemTotal: kB\n", b"MemTotal:"), None);
        assert_eq!(field(b"MemTotal: 99999999999999999999 kB\n", b"MemTotal:"), None);
    }
}
