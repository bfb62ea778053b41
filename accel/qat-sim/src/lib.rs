//! A simulated QAT device behind the C interface of qatlib: for tests, and for measuring software
//! without hardware.
//!
//! This crate is built into two shared objects with the names of the real ones: `libusdm.so.0` has
//! [`Usdm`], the pinned memory with its IOVAs; `libqat.so.4` has [`Device`], the instances and
//! their engine threads. Programs built for QAT (such as Intel's QATzip and `qzip`) run on it
//! unmodified:
//!
//! ```text
//!  cpaDcCompressData2 ─► checks, cookie, task ─► ring ─► engine thread ─► copies by IOVA, deflates, verifies
//!  icp_sal_DcPollInstance ◄─ callbacks, results ◄──────── responses, due by the service model
//! ```
//!
//! The following is as on a real device: ring and RETRY, callbacks only from polls, completions in
//! any order, the statuses of good and bad requests, memory that must be pinned, events, death and
//! reset of a device. The simulated device is stricter: it refuses accesses by which a real one
//! would read or overwrite foreign memory. Missing are stateful sessions, LZ4, LZ4s, skip data,
//! integrity CRCs and the data-plane API. Faults come from a script; `SCRIPT.md` describes it.
//!
//! Figures measured on it show the cost of software and scheduling, and never a device's
//! throughput.

mod counters;
mod deflate;
mod device;
mod engine;
mod faults;
mod instance;
mod libraries;
mod machine;
mod random;
pub mod script;
mod service;
mod sgl;
mod usdm;

pub use counters::Counters;
pub use device::Device;
pub use libraries::libraries;
pub use machine::Dma;
pub use usdm::Usdm;

/// The environment's script: the value of `PLATEN_QAT_SIM`, or the file that it names.
///
/// # Errors
/// The file cannot be read.
pub fn script_from_environment() -> Result<Option<String>, String> {
    let Some(value) = std::env::var_os("PLATEN_QAT_SIM") else { return Ok(None) };
    let path = std::path::Path::new(&value);
    if path.is_file() {
        let text = std::fs::read_to_string(path);
        return text
            .map(Some)
            .map_err(|error| format!("PLATEN_QAT_SIM={}: {error}", path.display()));
    }
    value.into_string().map(Some).map_err(|_| "PLATEN_QAT_SIM is no text".into())
}
