//! The state of QAT on this host, and the missing parts: the data of `platen qat status`.
//!
//! Reads only /sys, /proc, /dev and this process's own state, below a root that tests can set.
//! Sources: Linux `Documentation/ABI/testing/sysfs-driver-qat` and `debugfs-driver-qat_telemetry`;
//! qatlib's INSTALL and `qat_init.sh`; PCI identifiers from the kernel's `adf_accel_devices.h`.

mod host;

pub use host::{Function, Host, Missing};

use crate::counters::Snapshot;
use crate::instance::{InstanceInfo, Unfit};
use crate::load::{Libraries, LoadError};
use crate::mailbox::State;
use crate::process::Qat;
use crate::start::StartError;
use std::path::Path;

/// The state of QAT.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Status {
    /// The libraries.
    pub libraries: LibraryStatus,
    /// Why the device could not be started, if that was tried.
    pub start_error: Option<String>,
    /// Instances of this process, in the order in which they are claimed.
    pub instances: Vec<InstanceStatus>,
    /// Instances that cannot be used, and why.
    pub unfit: Vec<Unfit>,
    /// The host.
    pub host: Host,
    /// Requirements of QAT that are missing, most basic first. If QAT works: at most
    /// the memory that may be locked.
    pub missing: Vec<Missing>,
}

/// The libraries.
#[derive(Debug, Clone, Default, serde::Serialize)]
pub struct LibraryStatus {
    /// Path of libusdm, as requested; `None` if it is not loaded.
    pub usdm: Option<String>,
    /// Path of libqat.
    pub qat: Option<String>,
    /// Functions that only some versions have, and whether these libraries have them.
    pub optional: Vec<(&'static str, bool)>,
    /// Why the libraries are not loaded.
    pub error: Option<String>,
}

/// One instance.
#[derive(Debug, Clone, serde::Serialize)]
pub struct InstanceStatus {
    /// The library's description.
    pub info: InstanceInfo,
    /// The last event.
    pub state: State,
    /// Whether an engine has it.
    pub claimed: bool,
    /// Whether its engine suspects it, or is gone while it still had requests.
    pub neglected: bool,
    /// FATAL_ERROR events.
    pub fatals: u64,
    /// RESTARTED events.
    pub restarts: u64,
    /// Callbacks without a request.
    pub strays: u64,
    /// Why the last engine that claimed it could not use it.
    pub problem: Option<String>,
    /// Counters of the engine that has it.
    pub counters: Option<Snapshot>,
}

impl Status {
    /// Examines the host below `root` ("/", except in tests), and the process's libraries and
    /// device.
    pub fn collect(
        root: &Path,
        libraries: Result<&Libraries, &LoadError>,
        device: Option<Result<&Qat, &StartError>>,
    ) -> Self {
        let host = Host::look(root);
        let mut missing = host.missing();
        let library_status = match libraries {
            Ok(libraries) => LibraryStatus {
                usdm: Some(libraries.usdm().display().to_string()),
                qat: Some(libraries.qat().display().to_string()),
                optional: libraries.optional().to_vec(),
                error: None,
            },
            Err(error) => {
                missing.push(Missing::new(
                    "the libraries libqat and libusdm",
                    "install qatlib: `apt install libqat4 libusdm0 qatlib-service`, or `dnf install qatlib`",
                ));
                LibraryStatus { error: Some(error.to_string()), ..LibraryStatus::default() }
            }
        };
        let (mut instances, mut unfit, mut start_error) = (Vec::new(), Vec::new(), None);
        match device {
            Some(Ok(qat)) => {
                // QAT works, so nothing is missing but memory for more threads.
                missing = host.missing_memlock().into_iter().collect();
                instances = qat.all().iter().map(|instance| InstanceStatus::of(instance)).collect();
                unfit = qat.unfit().to_vec();
            }
            Some(Err(error)) => {
                if let StartError::NoInstance(found) = error {
                    unfit.clone_from(found);
                    missing.push(Missing::new(
                        "an instance for compression",
                        "set ServicesEnabled=dc in /etc/sysconfig/qat (or /etc/default/qat) and restart the service qat",
                    ));
                }
                start_error = Some(error.to_string());
            }
            None => {}
        }
        Self { libraries: library_status, start_error, instances, unfit, host, missing }
    }
}

impl InstanceStatus {
    fn of(instance: &crate::instance::Instance) -> Self {
        use std::sync::atomic::Ordering::Relaxed;
        let (counters, problem) = instance.reported();
        Self {
            info: instance.info.clone(),
            state: instance.mailbox.state(),
            claimed: instance.is_claimed(),
            neglected: instance.neglected.load(Relaxed),
            fatals: instance.mailbox.fatals.load(Relaxed),
            restarts: instance.mailbox.restarts.load(Relaxed),
            strays: instance.mailbox.strays.load(Relaxed),
            problem,
            counters: counters.map(|counters| counters.snapshot()),
        }
    }
}
