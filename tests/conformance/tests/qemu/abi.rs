//! Layouts and constants of `qatzip.h` in QATzip 1.1 to 1.3.1 (`libqatzip.so.3`).
//!
//! Names are Intel's. C enums are plain integers: the library may return a value unknown here.

#![allow(non_snake_case, reason = "names are those of Intel's header")]

use std::ffi::{c_int, c_long, c_uint, c_ulong, c_void};
use std::mem::{offset_of, size_of};

/// `QzSession_T`: one per session, written by the library throughout.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct QzSession {
    /// `QZ_OK` while the session may use a device.
    pub(crate) hw_session_stat: c_long,
    /// Internal status of the last call.
    pub(crate) thd_sess_stat: c_int,
    /// The library's private data. Null until set up; the library would then use its defaults.
    pub(crate) internal: *mut c_void,
    /// Bytes consumed by the last call.
    pub(crate) total_in: c_ulong,
    /// Bytes produced by the last call.
    pub(crate) total_out: c_ulong,
}

/// `QzSessionParamsCommon_T`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct QzSessionParamsCommon {
    /// `QZ_DIR_BOTH` (2) and others.
    pub(crate) direction: c_uint,
    /// 1 to 9.
    pub(crate) comp_lvl: c_uint,
    /// `QZ_DEFLATE` (8).
    pub(crate) comp_algorithm: u8,
    /// Maximum number of forks.
    pub(crate) max_forks: c_uint,
    /// Bit 0: software if there is no device; bit 1: always software.
    pub(crate) sw_backup: u8,
    /// Uncompressed bytes per request to the device.
    pub(crate) hw_buff_sz: c_uint,
    /// For the stream calls, which are not used here.
    pub(crate) strm_buff_sz: c_uint,
    /// Calls with fewer bytes run in software, whatever `sw_backup` is.
    pub(crate) input_sz_thrshold: c_uint,
    /// More pieces than this start a second thread.
    pub(crate) req_cnt_thrshold: c_uint,
    /// Calls between attempts to open the device.
    pub(crate) wait_cnt_thrshold: c_uint,
    /// 0 sleeps between polls, 1 does not.
    pub(crate) polling_mode: c_uint,
    /// 0.
    pub(crate) is_sensitive_mode: c_uint,
}

/// `QzSessionParamsDeflate_T`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct QzSessionParamsDeflate {
    /// Parameters of all algorithms.
    pub(crate) common_params: QzSessionParamsCommon,
    /// `QZ_DYNAMIC_HDR` (0).
    pub(crate) huffman_hdr: c_uint,
    /// `QZ_DEFLATE_GZIP_EXT` (2).
    pub(crate) data_fmt: c_uint,
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

/// Success.
pub(crate) const QZ_OK: c_int = 0;
/// Already initialized; not an error.
pub(crate) const QZ_DUPLICATE: c_int = 1;

/// `qzGetDefaultsDeflate`
pub(crate) type GetDefaultsDeflate = unsafe extern "C" fn(*mut QzSessionParamsDeflate) -> c_int;
/// `qzInit`
pub(crate) type Init = unsafe extern "C" fn(*mut QzSession, u8) -> c_int;
/// `qzSetupSessionDeflate`
pub(crate) type SetupSessionDeflate =
    unsafe extern "C" fn(*mut QzSession, *mut QzSessionParamsDeflate) -> c_int;
