//! The libraries, found at run time: `libusdm.so.0` (pinned memory) and `libqat.so.4` (the device).
//!
//! Absence is normal: most hosts have no QAT, and a build must not need it. libusdm is loaded
//! first, and both with RTLD_GLOBAL, so that libqat's reference to libusdm resolves to the file
//! chosen here (glibc matches by SONAME). They are never unloaded, because their threads and
//! destructors do not expect it.

#![expect(unsafe_code, reason = "dlopen and dlsym")]

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use qat_abi as abi;
use std::path::{Path, PathBuf};

/// The location of the two libraries.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Location {
    /// The dynamic linker's search path.
    #[default]
    System,
    /// A folder with both, by their SONAMEs.
    Folder(PathBuf),
    /// Two files.
    Files {
        /// `libusdm`.
        usdm: PathBuf,
        /// `libqat`.
        qat: PathBuf,
    },
}

/// Why the libraries cannot be used. None of these is an error of the host: it has no QAT.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The dynamic linker did not load a file.
    #[error("cannot load {file}: {reason}; install qatlib (Debian: libqat4, libusdm0; Fedora, RHEL: qatlib)")]
    Library {
        /// The file.
        file: String,
        /// The dynamic linker's message.
        reason: String,
    },
    /// A function is missing: the file is another library, or older than qatlib 22.
    #[error("{file} has no function {symbol}: not qatlib 22 or later")]
    Symbol {
        /// The file.
        file: String,
        /// The function.
        symbol: &'static str,
    },
}

/// SONAME of the pinned memory library.
pub const USDM: &str = "libusdm.so.0";
/// SONAME of the device library.
pub const QAT: &str = "libqat.so.4";

/// Both libraries, loaded, with their functions.
#[derive(Debug, Clone)]
pub struct Libraries {
    pub(crate) api: &'static Api,
    usdm: PathBuf,
    qat: PathBuf,
}

impl Libraries {
    /// Loads the libraries for the life of the process.
    ///
    /// # Errors
    ///
    /// [`LoadError`], which names the missing file and its package.
    pub fn load(location: &Location) -> Result<Self, LoadError> {
        let (usdm, qat) = match location {
            Location::System => (PathBuf::from(USDM), PathBuf::from(QAT)),
            Location::Folder(folder) => (folder.join(USDM), folder.join(QAT)),
            Location::Files { usdm, qat } => (usdm.clone(), qat.clone()),
        };
        let usdm_library = open(&usdm)?;
        let qat_library = open(&qat)?;
        let api =
            Api::resolve(&Source::new(&usdm, &usdm_library), &Source::new(&qat, &qat_library))?;
        // Never dlclose: callbacks and destructors of the libraries may run until the process ends.
        std::mem::forget((usdm_library, qat_library));
        // One small leaked table a load, so that engines on any thread share it without a reference
        // count.
        Ok(Self { api: Box::leak(Box::new(api)), usdm, qat })
    }

    /// The file of libusdm, as it was asked for.
    pub fn usdm(&self) -> &Path {
        &self.usdm
    }

    /// The file of libqat, as it was asked for.
    pub fn qat(&self) -> &Path {
        &self.qat
    }

    /// Functions that only newer versions have, and whether these libraries have them.
    pub fn optional(&self) -> [(&'static str, bool); 3] {
        [
            ("icp_sal_DcGetFileDescriptor", self.api.file_descriptor),
            ("qaeMemMapContiguousIova", self.api.map_contiguous),
            ("cpaDcDeflateCompressBound", self.api.compress_bound.is_some()),
        ]
    }
}

/// The functions that this driver calls, by the libraries' names without prefix.
#[derive(Debug)]
pub(crate) struct Api {
    pub(crate) is_available: abi::IcpSalUserIsQatAvailable,
    pub(crate) start: abi::IcpSalUserStartMultiProcess,
    pub(crate) stop: abi::IcpSalUserStop,
    pub(crate) poll_events: abi::IcpSalPollDeviceEvents,
    pub(crate) poll_instance: abi::IcpSalDcPollInstance,
    pub(crate) num_instances: abi::CpaDcGetNumInstances,
    pub(crate) instances: abi::CpaDcGetInstances,
    pub(crate) info2: abi::CpaDcInstanceGetInfo2,
    pub(crate) capabilities: abi::CpaDcQueryCapabilities,
    pub(crate) set_notification: abi::CpaDcInstanceSetNotificationCb,
    pub(crate) set_translation: abi::CpaDcSetAddressTranslation,
    pub(crate) num_intermediate: abi::CpaDcGetNumIntermediateBuffers,
    pub(crate) start_instance: abi::CpaDcStartInstance,
    pub(crate) stop_instance: abi::CpaDcStopInstance,
    pub(crate) meta_size: abi::CpaDcBufferListGetMetaSize,
    pub(crate) session_size: abi::CpaDcGetSessionSize,
    pub(crate) init_session: abi::CpaDcInitSession,
    pub(crate) remove_session: abi::CpaDcRemoveSession,
    pub(crate) compress: abi::CpaDcCompressData2,
    pub(crate) decompress: abi::CpaDcDecompressData,
    pub(crate) compress_bound: Option<abi::CpaDcDeflateCompressBound>,
    pub(crate) mem_alloc: abi::QaeMemAllocNuma,
    pub(crate) mem_free: abi::QaeMemFreeNuma,
    pub(crate) virt_to_phys: abi::QaeVirtToPhysNuma,
    file_descriptor: bool,
    map_contiguous: bool,
}

impl Api {
    fn resolve(usdm: &Source<'_>, qat: &Source<'_>) -> Result<Self, LoadError> {
        #[expect(
            clippy::multiple_unsafe_ops_per_block,
            reason = "the same promise for each symbol"
        )]
        // SAFETY: each name is given the type that Intel's headers declare for it (`qat_abi` checks
        // those headers).
        unsafe {
            Ok(Self {
                is_available: qat.required("icp_sal_userIsQatAvailable")?,
                start: qat.required("icp_sal_userStartMultiProcess")?,
                stop: qat.required("icp_sal_userStop")?,
                poll_events: qat.required("icp_sal_poll_device_events")?,
                poll_instance: qat.required("icp_sal_DcPollInstance")?,
                num_instances: qat.required("cpaDcGetNumInstances")?,
                instances: qat.required("cpaDcGetInstances")?,
                info2: qat.required("cpaDcInstanceGetInfo2")?,
                capabilities: qat.required("cpaDcQueryCapabilities")?,
                set_notification: qat.required("cpaDcInstanceSetNotificationCb")?,
                set_translation: qat.required("cpaDcSetAddressTranslation")?,
                num_intermediate: qat.required("cpaDcGetNumIntermediateBuffers")?,
                start_instance: qat.required("cpaDcStartInstance")?,
                stop_instance: qat.required("cpaDcStopInstance")?,
                meta_size: qat.required("cpaDcBufferListGetMetaSize")?,
                session_size: qat.required("cpaDcGetSessionSize")?,
                init_session: qat.required("cpaDcInitSession")?,
                remove_session: qat.required("cpaDcRemoveSession")?,
                compress: qat.required("cpaDcCompressData2")?,
                decompress: qat.required("cpaDcDecompressData")?,
                compress_bound: qat.optional("cpaDcDeflateCompressBound"),
                mem_alloc: usdm.required("qaeMemAllocNUMA")?,
                mem_free: usdm.required("qaeMemFreeNUMA")?,
                virt_to_phys: usdm.required("qaeVirtToPhysNUMA")?,
                file_descriptor: qat
                    .optional::<abi::IcpSalDcGetFileDescriptor>("icp_sal_DcGetFileDescriptor")
                    .is_some(),
                map_contiguous: usdm
                    .optional::<abi::QaeMemMapContiguousIova>("qaeMemMapContiguousIova")
                    .is_some(),
            })
        }
    }
}

fn open(path: &Path) -> Result<Library, LoadError> {
    // SAFETY: loading runs the library's initialisers. qatlib's only set its own variables; a file
    // named on the command line is trusted like an executable.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }.map_err(|error| {
        // libloading has the linker's message as the source.
        let reason = std::error::Error::source(&error)
            .map_or_else(|| error.to_string(), ToString::to_string);
        LoadError::Library { file: path.display().to_string(), reason }
    })
}

/// A loaded library and its name for messages.
struct Source<'a> {
    path: &'a Path,
    library: &'a Library,
}

impl<'a> Source<'a> {
    fn new(path: &'a Path, library: &'a Library) -> Self {
        Self { path, library }
    }

    /// # Safety
    ///
    /// `T` is the function pointer type of `symbol`.
    unsafe fn optional<T: Copy>(&self, symbol: &'static str) -> Option<T> {
        // SAFETY: the caller's promise.
        unsafe { self.library.get::<T>(symbol) }.ok().map(|found| *found)
    }

    /// # Safety
    ///
    /// `T` is the function pointer type of `symbol`.
    unsafe fn required<T: Copy>(&self, symbol: &'static str) -> Result<T, LoadError> {
        // SAFETY: the caller's promise.
        unsafe { self.optional(symbol) }
            .ok_or_else(|| LoadError::Symbol { file: self.path.display().to_string(), symbol })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_reported_with_its_package() {
        let folder = tempfile::tempdir().unwrap();
        let error = Libraries::load(&Location::Folder(folder.path().to_owned())).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(USDM) && text.contains("libusdm0"), "{text}");
    }

    #[test]
    fn a_library_that_lacks_a_function_is_refused_with_its_name() {
        // The C library exists on every host and has none of them.
        let libc = PathBuf::from("libc.so.6");
        let error =
            Libraries::load(&Location::Files { usdm: libc.clone(), qat: libc }).unwrap_err();
        assert_eq!(
            error,
            LoadError::Symbol { file: "libc.so.6".into(), symbol: "icp_sal_userIsQatAvailable" }
        );
    }
}
