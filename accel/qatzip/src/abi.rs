//! Layouts and constants of `qatzip.h`, as QATzip 1.1 to 1.3.1 (`libqatzip.so.3`) have them.
//!
//! Names are Intel's. C enums are plain integers: the library may return a value unknown here.
//! `tests/header.rs` compiles the header where it is installed and compares; what the loaded
//! library itself believes is probed when it is loaded (`library.rs`).

#![allow(non_snake_case, reason = "names are those of Intel's header")]

use std::ffi::{c_int, c_long, c_uint, c_ulong, c_void};
use std::mem::{offset_of, size_of};

/// `QzSession_T`: one per session, written by the library throughout.
#[derive(Debug)]
#[repr(C)]
pub struct QzSession {
    /// `QZ_OK` while the session may use a device.
    pub hw_session_stat: c_long,
    /// How the last call ended inside.
    pub thd_sess_stat: c_int,
    /// The library's own; null until set up, and then the library would use its defaults.
    pub internal: *mut c_void,
    /// Bytes taken in by the last call.
    pub total_in: c_ulong,
    /// Bytes put out by the last call.
    pub total_out: c_ulong,
}

/// `QzSessionParamsCommon_T`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct QzSessionParamsCommon {
    /// [`QZ_DIR_BOTH`] and others.
    pub direction: c_uint,
    /// 1 to 9.
    pub comp_lvl: c_uint,
    /// [`QZ_DEFLATE`].
    pub comp_algorithm: u8,
    /// Forks permitted.
    pub max_forks: c_uint,
    /// Bit 0: software when there is no device; bit 1: software always.
    pub sw_backup: u8,
    /// Plain bytes the device is given at a time.
    pub hw_buff_sz: c_uint,
    /// For the stream calls, which we do not use.
    pub strm_buff_sz: c_uint,
    /// Calls with fewer bytes are done in software, whatever `sw_backup` says.
    pub input_sz_thrshold: c_uint,
    /// More pieces than this start a second thread.
    pub req_cnt_thrshold: c_uint,
    /// Calls between attempts to open the device.
    pub wait_cnt_thrshold: c_uint,
    /// 0 sleeps between polls, 1 does not.
    pub polling_mode: c_uint,
    /// 0.
    pub is_sensitive_mode: c_uint,
}

/// `QzSessionParamsDeflate_T`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct QzSessionParamsDeflate {
    /// What all algorithms have.
    pub common_params: QzSessionParamsCommon,
    /// [`QZ_DYNAMIC_HDR`].
    pub huffman_hdr: c_uint,
    /// [`QZ_DEFLATE_GZIP_EXT`].
    pub data_fmt: c_uint,
}

/// `QzStatus_T`. Not asked for: `qzGetStatus` of 1.3.1 answers `QZ_OK` and writes nothing.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct QzStatus {
    /// Devices found.
    pub qat_hw_count: u16,
    /// Whether services are initialised.
    pub qat_service_init: u8,
    /// Whether the memory driver is there.
    pub qat_mem_drvr: u8,
    /// Whether an instance is attached.
    pub qat_instance_attach: u8,
    /// Bytes allocated.
    pub memory_alloced: c_ulong,
    /// Whether huge pages are used.
    pub using_huge_pages: u8,
    /// As in [`QzSession`].
    pub hw_session_status: c_long,
    /// Algorithms in software.
    pub algo_sw: [u8; 255],
    /// Algorithms in hardware.
    pub algo_hw: [u8; 255],
}

macro_rules! layout {
    ($type:ty: $size:literal, $($field:ident $(. $inner:ident)* @ $at:literal),*) => {
        const _: () = {
            assert!(size_of::<$type>() == $size);
            $(assert!(offset_of!($type, $field $(. $inner)*) == $at);)*
        };
    };
}

layout!(QzSession: 40, hw_session_stat @ 0, thd_sess_stat @ 8, internal @ 16, total_in @ 24, total_out @ 32);
layout!(QzSessionParamsCommon: 48, direction @ 0, comp_lvl @ 4, comp_algorithm @ 8, max_forks @ 12,
    sw_backup @ 16, hw_buff_sz @ 20, strm_buff_sz @ 24, input_sz_thrshold @ 28, req_cnt_thrshold @ 32,
    wait_cnt_thrshold @ 36, polling_mode @ 40, is_sensitive_mode @ 44);
layout!(QzSessionParamsDeflate: 56, common_params @ 0, huffman_hdr @ 48, data_fmt @ 52);
layout!(QzStatus: 544, qat_hw_count @ 0, qat_service_init @ 2, qat_mem_drvr @ 3, qat_instance_attach @ 4,
    memory_alloced @ 8, using_huge_pages @ 16, hw_session_status @ 24, algo_sw @ 32, algo_hw @ 287);

/// Done.
pub const QZ_OK: c_int = 0;
/// Was done before; no error.
pub const QZ_DUPLICATE: c_int = 1;
/// Output does not fit.
pub const QZ_BUF_ERROR: c_int = -3;
/// Input is not what it should be.
pub const QZ_DATA_ERROR: c_int = -4;
/// No device, software not allowed.
pub const QZ_NOSW_NO_HW: c_int = -101;
/// All instances are taken (or down), software not allowed; nothing was submitted.
pub const QZ_NOSW_NO_INST_ATTACH: c_int = -103;
/// No pinned memory, software not allowed.
pub const QZ_NOSW_LOW_MEM: c_int = -104;

/// `QzHuffmanHdr_T`: trees made for the data.
pub const QZ_DYNAMIC_HDR: c_uint = 0;
/// `QzDirection_T`: both.
pub const QZ_DIR_BOTH: c_uint = 2;
/// `QzDataFormat_T`: gzip with QATzip's extra field.
pub const QZ_DEFLATE_GZIP_EXT: c_uint = 2;
/// The algorithm.
pub const QZ_DEFLATE: u8 = 8;
/// `QzLogLevel_T`: silent.
pub const LOG_NONE: c_uint = 0;
/// Bit of `ext_rc`: some of the work was done in software.
pub const QZ_SW_EXECUTION_MASK: u64 = 1 << 4;

/// `qzSetLogLevel`
pub type SetLogLevel = unsafe extern "C" fn(c_uint) -> c_uint;
/// `qzGetDefaultsDeflate`
pub type GetDefaultsDeflate = unsafe extern "C" fn(*mut QzSessionParamsDeflate) -> c_int;
/// `qzSetDefaultsDeflate`
pub type SetDefaultsDeflate = unsafe extern "C" fn(*mut QzSessionParamsDeflate) -> c_int;
/// `qzInit`
pub type Init = unsafe extern "C" fn(*mut QzSession, u8) -> c_int;
/// `qzSetupSessionDeflate`
pub type SetupSessionDeflate =
    unsafe extern "C" fn(*mut QzSession, *mut QzSessionParamsDeflate) -> c_int;
/// `qzTeardownSession`
pub type TeardownSession = unsafe extern "C" fn(*mut QzSession) -> c_int;
/// `qzCompressExt`
pub type CompressExt = unsafe extern "C" fn(
    *mut QzSession,
    *const u8,
    *mut c_uint,
    *mut u8,
    *mut c_uint,
    c_uint,
    *mut u64,
) -> c_int;
/// `qzDecompressExt`
pub type DecompressExt = unsafe extern "C" fn(
    *mut QzSession,
    *const u8,
    *mut c_uint,
    *mut u8,
    *mut c_uint,
    *mut u64,
) -> c_int;
