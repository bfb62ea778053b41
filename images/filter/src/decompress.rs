//! Decompresses a stream to plain bytes.

use std::io::{Read, Write};

use pipeline::Job;
use zstd_safe::DCtx;

use crate::error::io_error;
use crate::member::Decoder;
use crate::ordered::Ordered;
use crate::source::Source;
use crate::zstd::StreamError;
use crate::{gzip, zstd, FilterError, Format, Totals};

/// The longest frame that a worker decodes, and the most plain bytes in it.
const MOST_FRAME: usize = 16 << 20;
const MOST_PLAIN: u64 = 16 << 20;

enum Unpacker {
    Zstd(DCtx<'static>),
    Gzip(Decoder),
}

/// A whole frame, and a buffer for its plain bytes.
struct Unpack {
    number: u64,
    offset: u64,
    frame: Vec<u8>,
    plain: Vec<u8>,
}

impl Job for Unpack {
    type Output = (Self, Result<(), String>);
    type Context = Unpacker;

    fn run(mut self, unpacker: &mut Unpacker) -> Self::Output {
        let done = match unpacker {
            Unpacker::Zstd(context) => zstd::unpack(context, &self.frame, &mut self.plain),
            Unpacker::Gzip(decoder) => gzip::unpack(decoder, &self.frame, &mut self.plain),
        };
        (self, done)
    }
}

/// Decompresses `input` to `output` on `threads` worker threads.
///
/// # Errors
///
/// [`FilterError`]. Then `output` has the plain bytes before the frame at fault. Of that frame it
/// has bytes only if the frame is longer than 16 MiB.
pub fn decompress(
    format: Format,
    threads: usize,
    input: &mut dyn Read,
    output: &mut dyn Write,
) -> Result<Totals, FilterError> {
    let context = |_| match format {
        Format::Zstd => Unpacker::Zstd(DCtx::create()),
        Format::Gzip => Unpacker::Gzip(Decoder::new()),
    };
    let frames = Ordered::new("unpack", threads.max(1), context);
    let mut this = Decompress {
        format,
        source: Source::new(input),
        output,
        frames: frames.map_err(io_error("start threads"))?,
        spare: Vec::new(),
        totals: Totals::default(),
    };
    while this.next()? {}
    this.write(true)?;
    this.output.flush().map_err(io_error("write"))?;
    this.totals.read = this.source.offset;
    Ok(this.totals)
}

/// An output that withholds the plain bytes of a frame until the frame is verified, or until they
/// exceed the memory for them.
struct Held<'a> {
    output: &'a mut dyn Write,
    held: Option<Vec<u8>>,
}

impl Held<'_> {
    fn release(&mut self) -> std::io::Result<()> {
        self.held.take().map_or(Ok(()), |held| self.output.write_all(&held))
    }
}

impl Write for Held<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        match &mut self.held {
            Some(held) if (held.len() + bytes.len()) as u64 <= MOST_PLAIN => {
                held.extend_from_slice(bytes);
                return Ok(bytes.len());
            }
            Some(_) => self.release()?,
            None => {}
        }
        self.output.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.output.flush()
    }
}

struct Decompress<'a> {
    format: Format,
    source: Source<'a>,
    output: &'a mut dyn Write,
    frames: Ordered<Unpack>,
    spare: Vec<Unpack>,
    totals: Totals,
}

impl Decompress<'_> {
    /// Passes the next frame to a worker, or decodes it here. Returns whether there was a frame.
    fn next(&mut self) -> Result<bool, FilterError> {
        self.write(false)?;
        let (number, offset) = (self.totals.frames, self.source.offset);
        if number > 0 && self.is_padding()? {
            return Ok(false);
        }
        if number == 0 && !self.source.want(1).map_err(io_error("read"))? {
            return Err(self.wrong(0, 0, "the stream is empty".to_owned()));
        }
        self.totals.frames += 1;
        let Some((len, plain_len)) = self.whole_frame()? else {
            self.write(true)?;
            let mut output = Held { output: &mut *self.output, held: Some(Vec::new()) };
            let done = match self.format {
                Format::Zstd => zstd::stream(&mut self.source, &mut output),
                Format::Gzip => gzip::stream(&mut self.source, &mut output),
            };
            if done.is_ok() {
                output.release().map_err(io_error("write"))?;
            }
            self.totals.written += done.map_err(|error| match error {
                StreamError::Filter(error) => error,
                StreamError::Frame(reason) => self.wrong(number, offset, reason),
            })?;
            return Ok(true);
        };
        let mut job = self.spare.pop().unwrap_or_else(|| Unpack {
            number,
            offset,
            frame: Vec::new(),
            plain: Vec::new(),
        });
        (job.number, job.offset) = (number, offset);
        job.frame.clear();
        job.frame.extend_from_slice(&self.source.held()[..len]);
        job.plain.resize(plain_len, 0);
        std::io::BufRead::consume(&mut self.source, len);
        self.frames.push(job);
        self.totals.parallel += 1;
        Ok(true)
    }

    /// Whether the stream ends here. gzip files may have zeros after the last member; zeros between
    /// two members are lost blocks of a file.
    fn is_padding(&mut self) -> Result<bool, FilterError> {
        let (number, begin) = (self.totals.frames, self.source.offset);
        loop {
            if !self.source.want(1).map_err(io_error("read"))? {
                return Ok(true);
            }
            let bytes = self.source.held();
            let zeros = bytes.iter().take_while(|&&byte| byte == 0).count();
            if self.format != Format::Gzip || zeros == 0 {
                let gap = self.source.offset - begin;
                if gap == 0 {
                    return Ok(false);
                }
                self.write(true)?;
                let reason = format!("{gap} zeros are in its place, and bytes behind them");
                return Err(self.wrong(number, begin, reason));
            }
            std::io::BufRead::consume(&mut self.source, zeros);
        }
    }

    /// Reads until the next frame is in memory. Returns the frame's length and its plain length;
    /// `None` if no worker can decode it.
    fn whole_frame(&mut self) -> Result<Option<(usize, usize)>, FilterError> {
        let mut wanted = 1;
        loop {
            let all = !self.source.want(wanted).map_err(io_error("read"))?;
            let bytes = self.source.held();
            let measured = match self.format {
                Format::Zstd => zstd::measure(bytes),
                Format::Gzip => gzip::measure(bytes),
            };
            match measured {
                Some((len, plain)) if len <= MOST_FRAME && plain <= MOST_PLAIN => {
                    let plain = usize::try_from(plain).expect("as many as fit memory");
                    return Ok(Some((len, plain)));
                }
                Some(_) => return Ok(None),
                None if all || bytes.len() >= MOST_FRAME || !self.may_be_whole() => {
                    return Ok(None);
                }
                None => wanted = (2 * bytes.len()).clamp(64 << 10, MOST_FRAME),
            }
        }
    }

    /// Whether more bytes could complete a frame that a worker can decode.
    fn may_be_whole(&self) -> bool {
        let bytes = self.source.held();
        match self.format {
            Format::Zstd => bytes.len() < 18 || zstd::states_at_most(bytes, MOST_PLAIN),
            Format::Gzip => gzip::may_state_its_length(bytes),
        }
    }

    /// Writes finished frames, in order; all of them if `all`.
    fn write(&mut self, all: bool) -> Result<(), FilterError> {
        while let Some((job, done)) = self.frames.pop(all || self.frames.is_full()) {
            done.map_err(|reason| self.wrong(job.number, job.offset, reason))?;
            self.output.write_all(&job.plain).map_err(io_error("write"))?;
            self.totals.written += job.plain.len() as u64;
            self.spare.push(job);
        }
        Ok(())
    }

    fn wrong(&self, number: u64, offset: u64, reason: String) -> FilterError {
        FilterError::Frame { format: self.format.name(), number, offset, reason }
    }
}
