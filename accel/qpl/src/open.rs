//! A library that was checked: its version, the size of its jobs, and a unit there and back.

use crate::abi::QplJob;
use crate::compressor::{inflates_to, Compressor, Options};
use crate::library::{Library, Path, Status};
use codec::{Deflate, Deflated, MAX_PLAIN};
use std::sync::Arc;

/// The least bytes of a job: the public part of `qpl_job`.
#[expect(clippy::cast_possible_truncation, reason = "some hundred bytes")]
const LEAST_JOB: u32 = size_of::<QplJob>() as u32;
/// The most bytes of a job that are credible: 1.9.0 takes less than 2 MiB.
const MOST_JOB: u32 = 32 << 20;
/// Bytes of the unit that the check compresses and inflates: the longest of a migration, because a
/// device's queue may refuse long transfers.
const KNOWN: usize = MAX_PLAIN;

/// Why a library is not used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The library has another version than 1.x.
    #[error("libqpl says that it is version '{0}', expected 1.x")]
    Version(String),
    /// The library does not work on this path.
    #[error("libqpl has no {path} path here: {status}")]
    Unavailable {
        /// The path.
        path: Path,
        /// The library's status.
        status: Status,
    },
    /// The library states an impossible size of a job.
    #[error("libqpl says that a job of the {path} path takes {size} bytes, expected {LEAST_JOB} to {MOST_JOB}")]
    JobSize {
        /// The path.
        path: Path,
        /// The stated size, bytes.
        size: u32,
    },
    /// The library has no job for a thread.
    #[error("libqpl has no job of the {path} path for a codec thread: {status}")]
    Job {
        /// The path.
        path: Path,
        /// The library's status.
        status: Status,
    },
    /// The library does not compress a known unit correctly.
    #[error("libqpl does not compress a known unit of {KNOWN} bytes on its {path} path: {reason}")]
    Known {
        /// The path.
        path: Path,
        /// The failure.
        reason: String,
    },
}

/// libqpl, ready for compressors.
#[derive(Clone, Debug)]
pub struct Qpl {
    library: Arc<dyn Library>,
    path: Path,
    job_size: u32,
    version: String,
    options: Options,
    /// Why the hardware path is not used.
    no_hardware: Option<OpenError>,
    required: bool,
}

impl Qpl {
    /// Uses `library`: its hardware path if it has one that works, else its software path.
    ///
    /// # Errors
    /// [`OpenError`] of the software path, or of the version.
    pub fn open(library: Arc<dyn Library>, options: Options) -> Result<Self, OpenError> {
        let version = library.version();
        if version.split('.').next() != Some("1") {
            return Err(OpenError::Version(version));
        }
        let on = |path| Self::on(&library, path, &version, options);
        match on(Path::Hardware) {
            Ok(found) => Ok(found),
            Err(error) => Ok(Self { no_hardware: Some(error), ..on(Path::Software)? }),
        }
    }

    fn on(
        library: &Arc<dyn Library>,
        path: Path,
        version: &str,
        options: Options,
    ) -> Result<Self, OpenError> {
        let unavailable = |status| OpenError::Unavailable { path, status };
        let size = library.job_size(path).map_err(unavailable)?;
        if !(LEAST_JOB..=MOST_JOB).contains(&size) {
            return Err(OpenError::JobSize { path, size });
        }
        let found = Self {
            library: Arc::clone(library),
            path,
            job_size: size,
            version: version.to_owned(),
            options,
            no_hardware: None,
            required: false,
        };
        found.known_unit()?;
        Ok(found)
    }

    /// Makes a unit whose bytes are known, and reads it.
    fn known_unit(&self) -> Result<(), OpenError> {
        let failed = |reason: String| OpenError::Known { path: self.path, reason };
        let plain = known();
        let mut out = vec![0; plain.len()];
        let job = self.library.job(self.path, self.job_size, plain.len());
        let job = job.map_err(|status| OpenError::Unavailable { path: self.path, status })?;
        let mut compressor = Compressor::new(Ok(job), self.options);
        match compressor.deflate(&plain, &mut out) {
            Deflated::Done(len) if inflates_to(&plain, &out[..len]) => Ok(()),
            Deflated::Done(_) => Err(failed("it inflates to other bytes".into())),
            Deflated::TooLong => Err(failed("it does not get smaller".into())),
            Deflated::Failed => {
                let why = compressor.counters().snapshot().last_failure;
                Err(failed(why.unwrap_or_default()))
            }
        }
    }

    /// Makes a thread without a job an error, instead of libdeflate's.
    #[must_use]
    pub fn require(self) -> Self {
        Self { required: true, ..self }
    }

    /// Makes a compressor for one thread and units of at most `capacity` bytes.
    ///
    /// # Errors
    /// The library has no job for it, and is [required](Self::require).
    pub fn compressor(&self, capacity: usize) -> Result<Compressor, OpenError> {
        let job = self.library.job(self.path, self.job_size, capacity.min(MAX_PLAIN));
        match job {
            Err(status) if self.required => Err(OpenError::Job { path: self.path, status }),
            job => Ok(Compressor::new(job, self.options)),
        }
    }

    /// The maker of the streams.
    pub fn path(&self) -> Path {
        self.path
    }

    /// The library's version.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Why the hardware path is not used; `None` if it is used.
    pub fn no_hardware(&self) -> Option<&OpenError> {
        self.no_hardware.as_ref()
    }
}

/// Returns bytes with matches near and far, literals, and a run.
fn known() -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = Vec::with_capacity(KNOWN);
    while bytes.len() < KNOWN {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let [kind, number, ..] = state.to_be_bytes();
        match kind % 4 {
            0 => bytes.extend_from_slice(b"a page of a guest's memory, "),
            1 => bytes.extend_from_slice(&state.to_le_bytes()),
            2 => bytes.resize(bytes.len() + usize::from(number), 0),
            _ => bytes.extend_from_slice(&[number % 16; 3]),
        }
    }
    bytes.truncate(KNOWN);
    bytes
}
