//! libqpl as the driver calls it: a trait, so that a test can be a library with faults.

use std::fmt;

/// The maker of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// An IAA device.
    Hardware,
    /// This CPU.
    Software,
}

impl Path {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hardware => "hardware",
            Self::Software => "software",
        }
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A `qpl_status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status(pub u32);

impl Status {
    /// The job is done.
    pub const OK: Self = Self(0);
    /// The device is still working on the job.
    pub const BEING_PROCESSED: Self = Self(1);
    /// The output does not fit.
    pub const MORE_OUTPUT_NEEDED: Self = Self(2);
    /// Every queue is full.
    pub const QUEUES_ARE_BUSY: Self = Self(5);
    /// A device's status for an output that does not fit.
    pub const DST_IS_SHORT: Self = Self(225);
    /// A completion record's status for an output that does not fit.
    pub const OUTPUT_OVERFLOW: Self = Self(311);
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.0 {
            0 => "QPL_STS_OK",
            1 => "QPL_STS_BEING_PROCESSED",
            2 => "QPL_STS_MORE_OUTPUT_NEEDED",
            5 => "QPL_STS_QUEUES_ARE_BUSY_ERR",
            6 => "QPL_STS_LIBRARY_INTERNAL_ERR",
            8 => "QPL_STS_NOT_SUPPORTED_BY_WQ",
            54 => "QPL_STS_PATH_ERR",
            101 => "QPL_STS_NO_MEM_ERR",
            225 => "QPL_STS_DST_IS_SHORT_ERR",
            319 => "QPL_STS_TRANSFER_SIZE_INVALID",
            500..600 => return write!(f, "initialisation error {}", self.0),
            other => return write!(f, "status {other} of qpl/c_api/status.h"),
        };
        write!(f, "{name} ({})", self.0)
    }
}

/// libqpl.
pub trait Library: fmt::Debug + Send + Sync {
    /// `qpl_get_library_version`.
    fn version(&self) -> String;

    /// `qpl_get_job_size`.
    ///
    /// # Errors
    /// The library's status: without a device there is no hardware path.
    fn job_size(&self, path: Path) -> Result<u32, Status>;

    /// Makes a job of `size` bytes with an input and an output of `capacity` bytes each:
    /// `qpl_init_job`.
    ///
    /// # Errors
    /// The library's status.
    fn job(&self, path: Path, size: u32, capacity: usize) -> Result<Box<dyn Job>, Status>;
}

/// A job, with its buffers: a device writes to them until the job has ended.
pub trait Job: fmt::Debug + Send {
    /// The input. It must not be accessed while the job runs.
    fn input(&mut self) -> &mut [u8];

    /// Begins to compress the first `len` bytes of the input into at most `room` bytes.
    fn start(&mut self, len: usize, room: usize) -> Status;

    /// The job's status; [`Status::BEING_PROCESSED`] until it has ended.
    fn check(&mut self) -> Status;

    /// Bytes of output, as the library states them.
    fn written(&self) -> u32;

    /// The whole output. It must not be accessed while the job runs.
    fn output(&self) -> &[u8];

    /// Leaves the memory of a job that has not ended to the device, for ever.
    fn abandon(self: Box<Self>);
}
