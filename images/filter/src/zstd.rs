//! zstd frames.

use std::io::{Read, Write};

use zstd_safe::{
    compress_bound, find_frame_compressed_size, get_error_name, get_frame_content_size, CCtx,
    CParameter, DCtx, InBuffer, OutBuffer,
};

use crate::error::io_error;
use crate::source::Source;
use crate::FilterError;

/// The levels that this module writes.
pub(crate) const LEVELS: (i32, i32) = (1, 19);

/// Plain bytes of a frame: as long as the windows of low levels. Shorter frames cost compression
/// ratio.
pub(crate) const UNIT: usize = 2 << 20;

/// Creates a context that compresses.
pub(crate) fn packer(level: i32) -> Result<CCtx<'static>, String> {
    let mut context = CCtx::create();
    for parameter in [
        CParameter::CompressionLevel(level),
        CParameter::ChecksumFlag(true),
        CParameter::ContentSizeFlag(true),
    ] {
        context.set_parameter(parameter).map_err(name)?;
    }
    Ok(context)
}

/// Makes one frame of `plain`.
pub(crate) fn pack(
    context: &mut CCtx<'static>,
    plain: &[u8],
    frame: &mut Vec<u8>,
) -> Result<(), String> {
    frame.clear();
    frame.reserve(compress_bound(plain.len()));
    context.compress2(frame, plain).map_err(name)?;
    Ok(())
}

/// The length of the frame with which `bytes` begin, and the length of its plain bytes; `None` if
/// the frame is not complete, or does not state both.
pub(crate) fn measure(bytes: &[u8]) -> Option<(usize, u64)> {
    let len = find_frame_compressed_size(bytes).ok()?;
    let plain = get_frame_content_size(bytes).ok()??;
    Some((len, plain))
}

/// Whether the frame with which `bytes` begin states at most `most` plain bytes.
pub(crate) fn states_at_most(bytes: &[u8], most: u64) -> bool {
    get_frame_content_size(bytes).is_ok_and(|plain| plain.is_some_and(|plain| plain <= most))
}

/// Decodes a whole frame into `plain`, which has the frame's content size.
pub(crate) fn unpack(
    context: &mut DCtx<'static>,
    frame: &[u8],
    plain: &mut [u8],
) -> Result<(), String> {
    match context.decompress(plain, frame).map_err(name)? {
        len if len == plain.len() => Ok(()),
        len => Err(format!("{len} bytes where it states {}", plain.len())),
    }
}

/// Decodes the next frame piece by piece; returns the number of plain bytes.
pub(crate) fn stream(source: &mut Source<'_>, output: &mut dyn Write) -> Result<u64, StreamError> {
    use std::io::BufRead;
    let mut context = DCtx::create();
    let mut plain = vec![0; DCtx::out_size()];
    let mut written = 0;
    loop {
        let bytes = source.fill_buf().map_err(io_error("read"))?;
        let ended = bytes.is_empty();
        let mut from = InBuffer::around(bytes);
        let mut to = OutBuffer::around(&mut plain[..]);
        let left = context.decompress_stream(&mut to, &mut from).map_err(name)?;
        let (taken, made) = (from.pos(), to.pos());
        source.consume(taken);
        output.write_all(&plain[..made]).map_err(io_error("write"))?;
        written += made as u64;
        if left == 0 {
            return Ok(written);
        }
        if ended && made == 0 {
            return Err("the stream ends within it".to_owned().into());
        }
    }
}

/// An error of the stream itself, or a reason for which the frame is wrong.
pub(crate) enum StreamError {
    Filter(FilterError),
    Frame(String),
}

impl From<FilterError> for StreamError {
    fn from(error: FilterError) -> Self {
        Self::Filter(error)
    }
}

impl From<String> for StreamError {
    fn from(reason: String) -> Self {
        Self::Frame(reason)
    }
}

/// Writes all bytes of `from` to `output`; returns their number.
pub(crate) fn copy(from: &mut dyn Read, output: &mut dyn Write) -> Result<u64, StreamError> {
    let mut plain = vec![0; 256 << 10];
    let mut written = 0;
    loop {
        match from.read(&mut plain) {
            Ok(0) => return Ok(written),
            Ok(count) => {
                output.write_all(&plain[..count]).map_err(io_error("write"))?;
                written += count as u64;
            }
            Err(error) => return Err(error.to_string().into()),
        }
    }
}

fn name(code: usize) -> String {
    get_error_name(code).to_owned()
}
