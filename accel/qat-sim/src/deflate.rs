//! The work of the device's slices: deflate, inflate, checksums.
//!
//! libdeflate makes the dynamic streams; zlib-rs makes those with fixed trees and those that end
//! with a flush, and inflates. Status codes and tolerated errors are those of qatlib on a Gen4
//! device (its `dc_datapath.c`).

use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};
use libdeflater::{Adler32, CompressionLvl, Compressor, Crc};
use qat_abi::{
    CPA_DC_ADLER32, CPA_DC_ASB_ENABLED, CPA_DC_ASB_UNCOMP_STATIC_DYNAMIC_WITH_NO_HDRS,
    CPA_DC_ASB_UNCOMP_STATIC_DYNAMIC_WITH_STORED_HDRS, CPA_DC_BAD_DIST_CODES,
    CPA_DC_BAD_LITLEN_CODES, CPA_DC_BAD_STORED_BLOCK_LEN, CPA_DC_CRC32, CPA_DC_CRC32_ADLER32,
    CPA_DC_HT_STATIC, CPA_DC_INCOMPLETE_CODE_LENS, CPA_DC_INVALID_BLOCK_TYPE, CPA_DC_INVALID_CODE,
    CPA_DC_INVALID_DIST, CPA_DC_OVERFLOW, CPA_DC_REPEATED_LENS, CPA_DC_TOO_MANY_CODES,
    CPA_DC_VERIFY_ERROR,
};

/// A request's parameters, from session and operation.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Params {
    /// `CpaDcCompLvl`.
    pub(crate) level: u32,
    /// `CpaDcHuffType`.
    pub(crate) huffman: u32,
    /// `CpaDcAutoSelectBest`.
    pub(crate) best: u32,
    /// `CpaDcChecksum`.
    pub(crate) checksum: u32,
    /// Whether the last block is marked as final (FINAL); otherwise the output ends with a full
    /// flush (FULL).
    pub(crate) last: bool,
    /// Whether to return stored blocks if verification fails.
    pub(crate) recover: bool,
}

/// The result of an executed request; the output is in the caller's vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Done {
    pub(crate) consumed: usize,
    /// Compression: whether the output is stored blocks. Decompression: whether the end of the
    /// final block was reached.
    pub(crate) flag: bool,
}

/// The state of one engine; requests are independent.
pub(crate) struct Slices {
    compressors: Vec<Option<Compressor>>,
    inflate: Decompress,
    verify: Vec<u8>,
}

impl Slices {
    pub(crate) fn new() -> Self {
        Self {
            compressors: (0..13).map(|_| None).collect(),
            inflate: Decompress::new(false),
            verify: Vec::new(),
        }
    }

    /// Deflates `input` into at most `room` bytes, decompresses it again and compares.
    ///
    /// # Errors
    /// A `CpaDcReqStatus`: OVERFLOW, or VERIFY_ERROR if the request does not allow recovery.
    pub(crate) fn compress(
        &mut self,
        input: &[u8],
        params: Params,
        room: usize,
        out: &mut Vec<u8>,
    ) -> Result<Done, i32> {
        let fits = self.deflate(input, params, room, out);
        let stored = matches!(
            params.best,
            CPA_DC_ASB_UNCOMP_STATIC_DYNAMIC_WITH_STORED_HDRS | CPA_DC_ASB_ENABLED
        );
        let naked = params.best == CPA_DC_ASB_UNCOMP_STATIC_DYNAMIC_WITH_NO_HDRS;
        if fits {
            let smaller = if naked { input.len() } else { stored_len(input.len()) };
            // At equal size too: libdeflate may have made stored blocks itself, and the results
            // must state that.
            if !((stored || naked) && smaller <= out.len()) {
                return match self.verify(input, out) {
                    true => Ok(Done { consumed: input.len(), flag: false }),
                    false if params.recover => store(input, params.last, room, out),
                    false => Err(CPA_DC_VERIFY_ERROR),
                };
            }
        }
        if naked && input.len() <= room {
            out.clear();
            out.extend_from_slice(input);
            return Ok(Done { consumed: input.len(), flag: true });
        }
        if stored {
            return store(input, params.last, room, out);
        }
        Err(CPA_DC_OVERFLOW)
    }

    fn deflate(&mut self, input: &[u8], params: Params, room: usize, out: &mut Vec<u8>) -> bool {
        out.clear();
        if params.last && params.huffman != CPA_DC_HT_STATIC {
            out.resize(room.min(stored_len(input.len()) + 4096), 0);
            let level = params.level.clamp(1, 12);
            let compressor = self.compressors[level as usize].get_or_insert_with(|| {
                let level = i32::try_from(level).expect("at most 12");
                Compressor::new(CompressionLvl::new(level).expect("1 to 12 are levels"))
            });
            let made = compressor.deflate_compress(input, out);
            out.truncate(*made.as_ref().unwrap_or(&0));
            return made.is_ok();
        }
        // zlib-rs's level 1 has only fixed trees, the other levels have dynamic ones.
        let level = match params.huffman {
            CPA_DC_HT_STATIC => 1,
            _ => params.level.clamp(2, 9),
        };
        let mut deflate = Compress::new(Compression::new(level), false);
        let flush = if params.last { FlushCompress::Finish } else { FlushCompress::Full };
        out.resize(room, 0);
        let result = deflate.compress(input, out, flush);
        let made = usize::try_from(deflate.total_out()).unwrap_or(usize::MAX);
        let all = deflate.total_in() == input.len() as u64;
        out.truncate(made);
        match result {
            Ok(Status::StreamEnd) => true,
            // A flush that fills the buffer completely may be incomplete.
            Ok(Status::Ok) => !params.last && all && made < room,
            _ => false,
        }
    }

    fn verify(&mut self, input: &[u8], deflated: &[u8]) -> bool {
        let mut plain = std::mem::take(&mut self.verify);
        let result = self.decompress(deflated, input.len(), &mut plain);
        let same = matches!(result, Ok(done) if done.consumed == deflated.len()) && plain == input;
        self.verify = plain;
        same
    }

    /// Inflates the first stream in `input` into at most `room` bytes.
    ///
    /// A truncated input is no error on Gen4: the flag stays false.
    ///
    /// # Errors
    /// A `CpaDcReqStatus`.
    pub(crate) fn decompress(
        &mut self,
        input: &[u8],
        room: usize,
        out: &mut Vec<u8>,
    ) -> Result<Done, i32> {
        self.inflate.reset(false);
        out.clear();
        // One byte more than allowed: whether it is written distinguishes an overflow from a
        // truncated input.
        out.resize(room + 1, 0);
        let result = self.inflate.decompress(input, out, FlushDecompress::Finish);
        let made = usize::try_from(self.inflate.total_out()).unwrap_or(usize::MAX);
        let consumed = usize::try_from(self.inflate.total_in()).unwrap_or(usize::MAX);
        out.truncate(made);
        match result {
            Ok(_) if made > room => Err(CPA_DC_OVERFLOW),
            Ok(status) => Ok(Done { consumed, flag: status == Status::StreamEnd }),
            Err(error) => Err(code_of(error.message().unwrap_or_default())),
        }
    }
}

/// The session's kind of checksum over `plain`, continued from `seed`.
pub(crate) fn checksum(kind: u32, seed: u32, plain: &[u8]) -> u32 {
    match kind {
        CPA_DC_CRC32 | CPA_DC_CRC32_ADLER32 => {
            let mut crc = Crc::with_initial(seed);
            crc.update(plain);
            crc.sum()
        }
        CPA_DC_ADLER32 => {
            // QATzip leaves the seed at 0, which is no valid Adler-32 state: the device starts at
            // 1.
            let mut adler = Adler32::with_initial(if seed == 0 { 1 } else { seed });
            adler.update(plain);
            adler.sum()
        }
        _ => 0,
    }
}

/// The length of `len` bytes in stored blocks.
pub(crate) fn stored_len(len: usize) -> usize {
    len + 5 * len.div_ceil(STORED_MAX).max(1)
}

/// Writes `input` as stored blocks.
///
/// # Errors
/// OVERFLOW.
pub(crate) fn store(input: &[u8], last: bool, room: usize, out: &mut Vec<u8>) -> Result<Done, i32> {
    out.clear();
    if stored_len(input.len()) > room {
        return Err(CPA_DC_OVERFLOW);
    }
    let mut blocks = input.chunks(STORED_MAX).peekable();
    while let Some(block) = blocks.next() {
        let len = u16::try_from(block.len()).expect("chunks of 65535 at most");
        out.push(u8::from(last && blocks.peek().is_none()));
        out.extend_from_slice(&len.to_le_bytes());
        out.extend_from_slice(&(!len).to_le_bytes());
        out.extend_from_slice(block);
    }
    Ok(Done { consumed: input.len(), flag: true })
}

const STORED_MAX: usize = 65_535;

fn code_of(message: &str) -> i32 {
    match message {
        "invalid block type" => CPA_DC_INVALID_BLOCK_TYPE,
        "invalid stored block lengths" => CPA_DC_BAD_STORED_BLOCK_LEN,
        "too many length or distance symbols" => CPA_DC_TOO_MANY_CODES,
        "invalid code lengths set" => CPA_DC_INCOMPLETE_CODE_LENS,
        "invalid bit length repeat" => CPA_DC_REPEATED_LENS,
        "invalid literal/lengths set" | "invalid code -- missing end-of-block" => {
            CPA_DC_BAD_LITLEN_CODES
        }
        "invalid distances set" => CPA_DC_BAD_DIST_CODES,
        "invalid distance too far back" => CPA_DC_INVALID_DIST,
        _ => CPA_DC_INVALID_CODE,
    }
}
