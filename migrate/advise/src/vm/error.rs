//! Failures of a QEMU, or of its monitor.

use qmp::QmpError;

/// A failure of a QEMU, or of its monitor.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VmError {
    /// The monitor refuses a command, or does not answer.
    #[error(transparent)]
    Monitor(#[from] QmpError),
    /// No QEMU gives this answer.
    #[error("{command} answers {what}, which makes no sense: is this a QEMU's monitor?")]
    Nonsense {
        /// The command.
        command: &'static str,
        /// The part of the answer.
        what: String,
    },
    /// Another client is measuring the dirty rate.
    #[error("another client measures this VM's dirty rate: try again when it has ended (query-dirty-rate)")]
    Measuring,
    /// The VM is being migrated.
    #[error(
        "the VM is {state:.64} and its migration {migration:.64}: to read its memory now could hang \
         QEMU. Try again when the migration has ended, or go without --sample and --sample-memory"
    )]
    Moving {
        /// The run state.
        state: String,
        /// The migration's status.
        migration: String,
    },
    /// QEMU shows memory that the guest does not have.
    #[error(
        "the VM has a {kind} device, of whose memory QEMU shows more than the guest has: sample without \
         --sample-memory, or use platen rehearse"
    )]
    Sparse {
        /// The kind of the device.
        kind: String,
    },
    /// A read of the guest's memory would allocate memory of the host.
    #[error(
        "the VM's memory {id} ({kind}) is not preallocated (prealloc=on): a read would allocate the \
         pages that the guest has never touched; sample without --sample-memory"
    )]
    Holes {
        /// The backend.
        id: String,
        /// The kind of memory in which the backend lies.
        kind: String,
    },
    /// The measurement of the dirty rate does not end.
    #[error("QEMU does not end its measurement of the dirty rate: {seconds} s were asked for, and {waited} s are over")]
    Endless {
        /// Seconds asked for.
        seconds: u64,
        /// Seconds waited.
        waited: u64,
    },
    /// QEMU's memory map has no RAM.
    #[error("QEMU's memory map (info mtree -f) shows no RAM: sample without --sample-memory, or use platen rehearse")]
    NoRam,
    /// QEMU cannot write the sample.
    #[error(
        "QEMU cannot save memory to {path}: run platen as QEMU's user, choose another folder with \
             TMPDIR, or use platen rehearse, which needs no file"
    )]
    Save {
        /// The file.
        path: String,
        /// QEMU's error.
        source: QmpError,
    },
    /// The sample cannot be read.
    #[error("cannot read the sample {path}: {reason}")]
    Sample {
        /// The file.
        path: String,
        /// The reason.
        reason: String,
    },
    /// The user ended the measurement.
    #[error("interrupted")]
    Interrupted,
}

/// The error for an answer that no QEMU gives.
pub(super) fn nonsense(command: &'static str, what: &str) -> VmError {
    VmError::Nonsense { command, what: what.chars().take(200).collect() }
}
