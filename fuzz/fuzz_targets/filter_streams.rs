//! A hostile zstd or gzip stream: it is decoded or refused, in bounded memory, and what was written
//! is counted.
//!
//! Input: one byte, whose low bit chooses the format and whose next one the format's magic number
//! before the rest; then the stream.
#![no_main]

use filter::{decompress, Format};
use libfuzzer_sys::fuzz_target;

/// An output that only counts, up to a limit: a short stream can stand for a long one.
struct Count(u64);

impl std::io::Write for Count {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0 += bytes.len() as u64;
        match self.0 > 64 << 20 {
            true => Err(std::io::ErrorKind::StorageFull.into()),
            false => Ok(bytes.len()),
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fuzz_target!(|input: &[u8]| {
    let [choice, stream @ ..] = input else { return };
    let (format, magic) = match choice & 1 {
        0 => (Format::Zstd, &b"\x28\xb5\x2f\xfd"[..]),
        _ => (Format::Gzip, &b"\x1f\x8b\x08"[..]),
    };
    let magic = if choice & 2 == 0 { &[] } else { magic };
    let stream = [magic, stream].concat();
    let mut output = Count(0);
    match decompress(format, 1, &mut &*stream, &mut output) {
        Ok(totals) => {
            assert_eq!((totals.read, totals.written), (stream.len() as u64, output.0));
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
