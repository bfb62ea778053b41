//! Compresses plain bytes to a stream.

use std::io::{Read, Write};

use libdeflater::Compressor;
use pipeline::Job;
use zstd_safe::CCtx;

use crate::error::io_error;
use crate::ordered::Ordered;
use crate::{gzip, zstd, FilterError, Format, Totals};

/// How to compress a stream.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The stream's format.
    pub format: Format,
    /// The codec's level: zstd 1 to 19, gzip 1 to 12 (libdeflate's).
    pub level: i32,
    /// Worker threads, at least one.
    pub threads: usize,
}

impl Options {
    /// The default level is low, since the VM is stopped while it is saved.
    pub fn new(format: Format, threads: usize) -> Self {
        Self { format, level: 1, threads }
    }
}

enum Packer {
    Zstd(CCtx<'static>),
    Gzip(Compressor),
}

impl Packer {
    fn new(options: &Options) -> Result<Self, String> {
        Ok(match options.format {
            Format::Zstd => Self::Zstd(zstd::packer(options.level)?),
            Format::Gzip => Self::Gzip(gzip::packer(options.level)),
        })
    }
}

/// A unit of plain bytes, and a buffer for its frame.
struct Pack {
    plain: Vec<u8>,
    frame: Vec<u8>,
}

impl Job for Pack {
    type Output = Result<Self, String>;
    type Context = Packer;

    fn run(mut self, packer: &mut Packer) -> Self::Output {
        match packer {
            Packer::Zstd(context) => zstd::pack(context, &self.plain, &mut self.frame)?,
            Packer::Gzip(context) => gzip::pack(context, &self.plain, &mut self.frame)?,
        }
        Ok(self)
    }
}

/// Compresses `input` to `output`, frame by frame. An empty input gives one empty frame.
///
/// # Errors
///
/// [`FilterError`]; `output` may then have whole frames of the input's beginning.
pub fn compress(
    options: &Options,
    input: &mut dyn Read,
    output: &mut dyn Write,
) -> Result<Totals, FilterError> {
    let format = options.format.name();
    let ((least, most), unit) = match options.format {
        Format::Zstd => (zstd::LEVELS, zstd::UNIT),
        Format::Gzip => (gzip::LEVELS, gzip::UNIT),
    };
    if !(least..=most).contains(&options.level) {
        return Err(FilterError::Level { format, level: options.level, least, most });
    }
    let codec = |reason| FilterError::Codec { format, reason };
    let threads = options.threads.max(1);
    let mut packers = Vec::with_capacity(threads);
    for _ in 0..threads {
        packers.push(Packer::new(options).map_err(codec)?);
    }
    let context = |_| packers.pop().expect("one for each thread");
    let mut units: Ordered<Pack> =
        Ordered::new("pack", threads, context).map_err(io_error("start threads"))?;
    let mut totals = Totals::default();
    let mut spare: Vec<Pack> = Vec::new();
    let mut ended = false;
    loop {
        // Whatever is ready is written before more input is read.
        while let Some(done) = units.pop(ended || units.is_full()) {
            let done = done.map_err(codec)?;
            output.write_all(&done.frame).map_err(io_error("write"))?;
            totals.written += done.frame.len() as u64;
            spare.push(done);
        }
        if ended {
            output.flush().map_err(io_error("write"))?;
            return Ok(totals);
        }
        let Pack { mut plain, frame } =
            spare.pop().unwrap_or_else(|| Pack { plain: Vec::new(), frame: Vec::new() });
        plain.clear();
        let read = (&mut *input).take(unit as u64).read_to_end(&mut plain);
        let read = read.map_err(io_error("read"))?;
        ended = read < unit;
        if read > 0 || totals.frames == 0 {
            totals.read += read as u64;
            totals.frames += 1;
            totals.parallel += 1;
            units.push(Pack { plain, frame });
        }
    }
}
