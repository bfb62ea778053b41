//! The C interface of QAT data compression, as in both qatlib 24.02 (API 3.2) and 26.08 (API 5.9).
//!
//! Only layouts, constants and function types: no code, no library, no unsafe. The driver (`qat`)
//! and the simulated device (`qat-sim`) both use it. So that they cannot share an error unnoticed,
//! every layout is asserted at compile time against the offsets of Intel's headers, and a test
//! compiles those headers if they are installed.
//!
//! Names are Intel's, so that its documents can be searched for them. C enums are 4-byte integers
//! here and not Rust enums, because a library may return values that this version does not know.
//! Sources: `cpa.h`, `cpa_dc.h`, `icp_sal_user.h`, `icp_sal_poll.h` of qatlib 24.02.0; libusdm's
//! functions from its exported symbols.
//!
//! Limits: x86-64 and AArch64 Linux (8-byte pointers, 4-byte enums).

#![allow(non_snake_case, reason = "fields and constants keep the names of Intel's headers")]

mod calls;
mod layout;

pub use calls::*;
pub use layout::*;

use std::ffi::c_void;

/// `CpaStatus`: the result of every call.
pub type CpaStatus = i32;
/// The call succeeded; for a submission, the device has the request.
pub const CPA_STATUS_SUCCESS: CpaStatus = 0;
/// The call was refused or has failed.
pub const CPA_STATUS_FAIL: CpaStatus = -1;
/// The ring is full (submit), nothing was there (poll), or requests are pending (remove session).
pub const CPA_STATUS_RETRY: CpaStatus = -2;
/// Memory or another resource is exhausted.
pub const CPA_STATUS_RESOURCE: CpaStatus = -3;
/// An argument is out of bounds.
pub const CPA_STATUS_INVALID_PARAM: CpaStatus = -4;
/// The device is beyond repair.
pub const CPA_STATUS_FATAL: CpaStatus = -5;
/// This device does not support the call.
pub const CPA_STATUS_UNSUPPORTED: CpaStatus = -6;
/// The device is being reset.
pub const CPA_STATUS_RESTARTING: CpaStatus = -7;

/// `CpaBoolean`: exactly 0 or 1.
pub type CpaBoolean = u32;
/// False.
pub const CPA_FALSE: CpaBoolean = 0;
/// True.
pub const CPA_TRUE: CpaBoolean = 1;

/// `CpaInstanceHandle`: opaque.
pub type CpaInstanceHandle = *mut c_void;
/// `CpaDcSessionHandle`: pinned memory of the caller, of the size that `cpaDcGetSessionSize`
/// returned.
pub type CpaDcSessionHandle = *mut c_void;
/// `CpaPhysicalAddr`: an address of the device; with an IOMMU an IOVA.
pub type CpaPhysicalAddr = u64;

/// `CpaInstanceEvent`: the device is going down for a reset.
pub const CPA_INSTANCE_EVENT_RESTARTING: u32 = 0;
/// The device is back.
pub const CPA_INSTANCE_EVENT_RESTARTED: u32 = 1;
/// The device has died.
pub const CPA_INSTANCE_EVENT_FATAL_ERROR: u32 = 2;

/// `CpaAccelerationServiceType`: data compression.
pub const CPA_ACC_SVC_TYPE_DATA_COMPRESSION: u32 = 1;

/// `CpaDcFlush`: the last of a stream. The final deflate block is marked as such.
pub const CPA_DC_FLUSH_FINAL: u32 = 1;
/// Flushed to a byte boundary.
pub const CPA_DC_FLUSH_SYNC: u32 = 2;
/// Flushed, with the history reset.
pub const CPA_DC_FLUSH_FULL: u32 = 3;

/// `CpaDcHuffType`: the fixed trees.
pub const CPA_DC_HT_STATIC: u32 = 0;
/// Trees given by the caller (not implemented by devices of today).
pub const CPA_DC_HT_PRECOMP: u32 = 1;
/// Trees made for the data.
pub const CPA_DC_HT_FULL_DYNAMIC: u32 = 2;

/// `CpaDcCompType`: deflate.
pub const CPA_DC_DEFLATE: u32 = 3;
/// LZ4.
pub const CPA_DC_LZ4: u32 = 4;
/// LZ4s, the sequences for a software zstd.
pub const CPA_DC_LZ4S: u32 = 5;

/// `CpaDcCompWindowSize`: 32 KiB.
pub const CPA_DC_WINSIZE_32K: u32 = 3;

/// `CpaDcChecksum`: CRC-32 of the plain data, as in gzip.
pub const CPA_DC_CRC32: u32 = 1;
/// Adler-32 of the plain data, as in zlib.
pub const CPA_DC_ADLER32: u32 = 2;
/// Both.
pub const CPA_DC_CRC32_ADLER32: u32 = 3;
/// xxHash-32, for LZ4.
pub const CPA_DC_XXHASH32: u32 = 4;

/// `CpaDcSessionDir`: compress.
pub const CPA_DC_DIR_COMPRESS: u32 = 0;
/// Decompress.
pub const CPA_DC_DIR_DECOMPRESS: u32 = 1;
/// Both.
pub const CPA_DC_DIR_COMBINED: u32 = 2;

/// `CpaDcSessionState`: the history spans requests.
pub const CPA_DC_STATEFUL: u32 = 0;
/// Each request is independent.
pub const CPA_DC_STATELESS: u32 = 1;

/// `CpaDcAutoSelectBest`: static or dynamic trees, and stored blocks with headers where neither
/// gains.
pub const CPA_DC_ASB_UNCOMP_STATIC_DYNAMIC_WITH_STORED_HDRS: u32 = 2;
/// As [`CPA_DC_ASB_UNCOMP_STATIC_DYNAMIC_WITH_STORED_HDRS`], without the headers.
pub const CPA_DC_ASB_UNCOMP_STATIC_DYNAMIC_WITH_NO_HDRS: u32 = 3;
/// All of these choices.
pub const CPA_DC_ASB_ENABLED: u32 = 4;

/// `CpaDcReqStatus`: the request was carried out.
pub const CPA_DC_OK: i32 = 0;
/// Deflate: a block type that does not exist.
pub const CPA_DC_INVALID_BLOCK_TYPE: i32 = -1;
/// Deflate: a stored block whose lengths do not agree.
pub const CPA_DC_BAD_STORED_BLOCK_LEN: i32 = -2;
/// Deflate: too many codes.
pub const CPA_DC_TOO_MANY_CODES: i32 = -3;
/// Deflate: a code that is not complete.
pub const CPA_DC_INCOMPLETE_CODE_LENS: i32 = -4;
/// Deflate: a repeat with nothing before it.
pub const CPA_DC_REPEATED_LENS: i32 = -5;
/// Deflate: a repeat without a previous length.
pub const CPA_DC_BAD_LITLEN_CODES: i32 = -7;
/// Deflate: bad distance codes.
pub const CPA_DC_BAD_DIST_CODES: i32 = -8;
/// Deflate: a code that stands for nothing.
pub const CPA_DC_INVALID_CODE: i32 = -9;
/// Deflate: a distance beyond the history.
pub const CPA_DC_INVALID_DIST: i32 = -10;
/// The output buffer is too small.
pub const CPA_DC_OVERFLOW: i32 = -11;
/// An error of the device.
pub const CPA_DC_FATALERR: i32 = -13;
/// Compress-and-verify found that the output does not decompress to the input.
pub const CPA_DC_VERIFY_ERROR: i32 = -18;

/// Requests that fit an instance's ring (`NumConcurrentRequests`); at most one less is in flight.
pub const RING_REQUESTS: usize = 512;
/// The smallest destination, in bytes, of a compress request with dynamic trees on 4xxx (qatlib's
/// Gen4 minimum).
pub const MIN_DEST_DYNAMIC: usize = 512;
/// The smallest destination with static trees.
pub const MIN_DEST_STATIC: usize = 1024;
