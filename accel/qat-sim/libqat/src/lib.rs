//! libqat.so.4 of the simulated QAT device: Intel's C functions, and two for tests.
//!
//! The script comes from `PLATEN_QAT_SIM` (directives, or a file of them) and from
//! `platen_qat_sim_control`. Counters go to `platen_qat_sim_counters` and, as JSON, to the file in
//! `PLATEN_QAT_SIM_REPORT` when the library is stopped and when the process ends. Nothing is
//! written to stdout, because qzip streams its data there.

#![allow(non_snake_case, reason = "Intel's names")]
#![allow(unsafe_code, reason = "exports C functions")]

/// Exports C functions that are methods of the device. Each has the type by which the driver calls
/// it.
///
/// # Safety
/// Each pointer is null or valid: those of a request until its callback, and arrays for the number
/// of entries that the call states.
macro_rules! forward {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $of:ty),*): $type:ty = $method:ident($($given:ident),*);)*) => {$(
        $(#[$doc])*
        #[no_mangle]
        pub(crate) unsafe extern "C" fn $name($($arg: $of),*) -> qat_abi::CpaStatus {
            #[allow(unused_unsafe, reason = "methods without pointers are safe")]
            // SAFETY: the caller's promise.
            unsafe { crate::DEVICE.$method($($given),*) }
        }

        const _: $type = $name;
    )*};
}

mod instances;
mod requests;

use qat_sim::script::{MemoryMode, Settings};
use qat_sim::{Counters, Device, Dma};
use std::ffi::{c_char, c_int, CStr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::LazyLock;

extern "C" {
    fn platen_usdm_read(iova: u64, into: *mut u8, bytes: usize) -> c_int;
    fn platen_usdm_write(iova: u64, from: *const u8, bytes: usize) -> c_int;
    fn platen_usdm_configure(slab: c_int, limit: u64);
    fn platen_usdm_violations() -> u64;
}

/// Pinned memory, in the other library.
struct Usdm;

impl Dma for Usdm {
    fn read(&self, iova: u64, into: &mut [u8]) -> bool {
        // SAFETY: a slice is valid for its length.
        unsafe { platen_usdm_read(iova, into.as_mut_ptr(), into.len()) != 0 }
    }

    fn write(&self, iova: u64, from: &[u8]) -> bool {
        // SAFETY: a slice is valid for its length.
        unsafe { platen_usdm_write(iova, from.as_ptr(), from.len()) != 0 }
    }

    fn configure(&self, settings: &Settings) {
        let slab = c_int::from(settings.memory == MemoryMode::Slab);
        // SAFETY: two numbers.
        unsafe { platen_usdm_configure(slab, settings.usdm_bytes.unwrap_or(u64::MAX)) };
    }

    fn violations(&self) -> u64 {
        // SAFETY: no arguments.
        unsafe { platen_usdm_violations() }
    }
}

/// The environment's script is invalid: then there is no device, so that a typing error cannot pass
/// for a good run.
static BROKEN: AtomicBool = AtomicBool::new(false);

static DEVICE: LazyLock<Device> = LazyLock::new(|| {
    let device = Device::new(&Usdm);
    let script = qat_sim::script_from_environment();
    let applied = script.and_then(|text| text.map_or(Ok(()), |text| device.control(&text)));
    if let Err(problem) = applied {
        eprintln!("qat-sim: PLATEN_QAT_SIM: {problem}");
        BROKEN.store(true, Ordering::Relaxed);
    }
    device
});

/// Writes the report, if one is requested.
extern "C" fn report() {
    // Also in a process that never used the device: the report's reader may want the zeros.
    let Some(path) = std::env::var_os("PLATEN_QAT_SIM_REPORT") else { return };
    if let Err(error) = std::fs::write(&path, DEVICE.counters().to_json()) {
        eprintln!("qat-sim: PLATEN_QAT_SIM_REPORT={}: {error}", path.display());
    }
}

/// Runs at `exit`, after libqatzip's own destructor, which depends on this library.
#[used]
#[link_section = ".fini_array"]
static AT_EXIT: extern "C" fn() = report;

/// Sets a script: returns 0, or -1 with a line on stderr. Its faults replace all earlier ones;
/// set-up lines need a stopped library.
///
/// # Safety
/// `script` is null or a C string.
#[no_mangle]
pub unsafe extern "C" fn platen_qat_sim_control(script: *const c_char) -> c_int {
    if script.is_null() {
        return -1;
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(script) }.to_string_lossy();
    match DEVICE.control(&text) {
        Ok(()) => {
            BROKEN.store(false, Ordering::Relaxed);
            0
        }
        Err(problem) => {
            eprintln!("qat-sim: {problem}");
            -1
        }
    }
}

/// The counters, as `qat_sim::Counters`.
///
/// # Safety
/// `counters` is null or valid for a write.
#[no_mangle]
pub unsafe extern "C" fn platen_qat_sim_counters(counters: *mut Counters) {
    if !counters.is_null() {
        // SAFETY: not null, and the caller's promise.
        unsafe { counters.write(DEVICE.counters()) };
    }
}
