//! Whole-VM tests: real QEMUs, a guest that can verify every byte of its memory, and faults on the
//! way.
//!
//! ```text
//!   namespace s                                            namespace d
//!   source QEMU ─unix─ platen migrate ══ veth, tbf ══ platen receive ─unix─ destination QEMU
//!      │ QMP, console                                                          │ QMP, console
//!      └───────────────────────────────── Lab (this crate) ────────────────────┘
//! ```
//!
//! A [`Lab`] owns the network and a scratch folder and starts everything else: [`Vm`]s (a QEMU with
//! its monitor and its console), platen's processes ([`platen`]), and migrations by any [`Method`].
//! Nothing here trusts platen: the harness has its own monitor client, reads the bytes on the wire
//! from the network device and CPU time from the kernel, and the guest recomputes every byte of its
//! memory.
//!
//! Errors: every step returns an [`anyhow::Error`] that names the step and has the tail of the log
//! of the process it waited for. Everything that was started is stopped when its owner is dropped,
//! on a panic, on Ctrl-C and on SIGTERM ([`cleanup`]). If the harness itself is killed, the kernel
//! ends its children and the next run removes its namespaces.
//!
//! Limits: x86-64 Linux. Without root there are no namespaces and no shaped links: the two ends
//! then use the loopback device through a throttling forwarder in this process, and the run reports
//! that.

pub mod bench;
mod boot_state;
mod certificates;
pub mod cleanup;
mod console;
mod forward;
mod image;
mod lab;
mod long_path;
mod meter;
mod method;
mod monitor;
mod monitor_proxy;
mod net;
pub mod platen;
mod process;
mod qemu;
pub mod saved;
pub mod scratch;
mod services;
mod shard;
mod simulated;
pub mod swap;
pub mod table;
mod wild;

/// The end of a program: an error is one line, also where RUST_BACKTRACE asks for more. A
/// user who lacks a package does not look for it in this source.
pub fn end(program: &str, result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{program}: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The kernel and the initramfs of the guest, for other tests of whole VMs.
pub mod guest_image {
    pub use crate::image::{initramfs, kernel};
}

use std::process::ExitCode;

pub use certificates::Certificates;
pub use console::{Console, Verified};
pub use lab::{Lab, Memory, Qemu, VmSpec, MACHINE_10, MACHINE_11, MACHINE_7_2};
pub use long_path::LongPath;
pub use meter::Meter;
pub use method::{Compression, Cost, DidNotEnd, Method, Outcome, Patience};
pub use monitor::Monitor;
pub use monitor_proxy::MonitorProxy;
pub use net::{Net, Rate, Side};
pub use process::{Ended, Proc, Signal};
pub use qemu::Vm;
pub use services::{Services, PORTS};
pub use shard::Shard;
pub use simulated::SimulatedQat;
pub use wild::{Habits, WildLink};
