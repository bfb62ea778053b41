//! The library itself: loaded once per process, never unloaded, probed before it is believed.

#![expect(
    unsafe_code,
    reason = "loads a C library and calls it; each block says why that is sound"
)]

use std::ffi::{c_int, c_uint};
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use libloading::os::unix::{Library, Symbol, RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW};

use crate::abi::{self, QzSessionParamsDeflate};
use crate::gate::Gate;
use crate::{Closed, LoadError, MIN_PLAIN};

/// Where the libraries are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Paths {
    /// Folder with `libusdm.so.0` and `libqat.so.4`, the system's or the simulated ones; `None`: as
    /// the system's loader finds them.
    pub drivers: Option<PathBuf>,
    /// `libqatzip.so.3`; `None`: as the system's loader finds it.
    pub qatzip: Option<PathBuf>,
}

/// QATzip, loaded. One per process: its state (instances, buffers, sizes) is the process's.
#[derive(Debug)]
pub struct QatZip {
    paths: Paths,
    pub(crate) calls: Calls,
    pub(crate) gate: Gate,
    /// Held while a session starts: without a device each `qzInit` eats a pthread key, so only one
    /// may find that out.
    pub(crate) starting: Mutex<()>,
}

static LOADED: Mutex<Option<Arc<QatZip>>> = Mutex::new(None);

impl QatZip {
    /// Loads QATzip, or gives the one that was loaded from the same paths before.
    ///
    /// Does not touch a device: that is what [`Session::new`](crate::Session::new) does first.
    ///
    /// # Errors
    ///
    /// A library that is missing, too old or of a layout not known, and other paths than before.
    pub fn load(paths: &Paths) -> Result<Arc<Self>, LoadError> {
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        match &*loaded {
            Some(library) if library.paths == *paths => return Ok(Arc::clone(library)),
            Some(library) => return Err(LoadError::Loaded { loaded: library.paths.clone() }),
            None => {}
        }
        if let Some(folder) = &paths.drivers {
            // QATzip names them by SONAME; the loader then takes those already there. libusdm
            // first: libqat needs it. Global, because libqat's plain symbols are looked up by
            // others.
            for name in ["libusdm.so.0", "libqat.so.4"] {
                std::mem::forget(open(&folder.join(name), RTLD_NOW | RTLD_GLOBAL)?);
            }
        }
        let name = paths.qatzip.clone().unwrap_or_else(|| PathBuf::from("libqatzip.so.3"));
        let calls = Calls::resolve(&name)?;
        let library = Arc::new(Self {
            paths: paths.clone(),
            calls,
            gate: Gate::default(),
            starting: Mutex::new(()),
        });
        library.calls.probe(&name)?;
        Ok(Arc::clone(loaded.insert(library)))
    }

    /// Why QATzip is out of use in this process, if it is.
    pub fn closed(&self) -> Option<Closed> {
        self.gate.closed()
    }
}

fn open(path: &Path, flags: c_int) -> Result<Library, LoadError> {
    // SAFETY: loading runs the constructors of Intel's libraries (or of the simulated ones), which
    // set up their own state only; the paths are the user's, as the program itself is.
    unsafe { Library::open(Some(path), flags) }.map_err(|error| {
        // libloading keeps the linker's message as the source.
        let reason = std::error::Error::source(&error)
            .map_or_else(|| error.to_string(), ToString::to_string);
        LoadError::Library { library: path.to_owned(), reason }
    })
}

/// Looks up a function whose type is that of `symbol` in qatzip.h: all callers are in
/// [`Calls::resolve`], which names the types of [`abi`] by its fields.
fn function<T: Copy>(library: &Library, name: &Path, symbol: &'static str) -> Result<T, LoadError> {
    // SAFETY: see above; the pointer stays valid, since the library is never unloaded.
    let found: Result<Symbol<T>, _> = unsafe { library.get(symbol) };
    let missing = |_| LoadError::Symbol { library: name.to_owned(), symbol };
    found.map(|found| *found).map_err(missing)
}

/// The functions of the library, resolved once.
#[derive(Debug)]
pub(crate) struct Calls {
    set_log_level: abi::SetLogLevel,
    get_defaults: abi::GetDefaultsDeflate,
    set_defaults: abi::SetDefaultsDeflate,
    pub(crate) init: abi::Init,
    pub(crate) setup: abi::SetupSessionDeflate,
    pub(crate) teardown: abi::TeardownSession,
    pub(crate) compress: abi::CompressExt,
    pub(crate) decompress: abi::DecompressExt,
}

impl Calls {
    fn resolve(name: &Path) -> Result<Self, LoadError> {
        let library = open(name, RTLD_NOW | RTLD_LOCAL)?;
        let calls = Self {
            set_log_level: function(&library, name, "qzSetLogLevel")?,
            get_defaults: function(&library, name, "qzGetDefaultsDeflate")?,
            set_defaults: function(&library, name, "qzSetDefaultsDeflate")?,
            init: function(&library, name, "qzInit")?,
            setup: function(&library, name, "qzSetupSessionDeflate")?,
            teardown: function(&library, name, "qzTeardownSession")?,
            compress: function(&library, name, "qzCompressExt")?,
            decompress: function(&library, name, "qzDecompressExt")?,
        };
        // Never unloaded: it has a thread of its own after `qzInit`, and pointers into it are
        // above.
        std::mem::forget(library);
        Ok(calls)
    }

    /// Checks that the library lays its parameters out as we do, silences it, and takes software
    /// out of its defaults.
    fn probe(&self, name: &Path) -> Result<(), LoadError> {
        let layout = |what: String| LoadError::Layout { library: name.to_owned(), what };
        // SAFETY: takes a number. INFO and DEBUG lines would go to standard output.
        unsafe { (self.set_log_level)(abi::LOG_NONE) };
        // Room behind the structure, so that a library with a longer one shows itself.
        #[repr(C)]
        struct Room {
            params: MaybeUninit<QzSessionParamsDeflate>,
            behind: [u8; 200],
        }
        let mut room = Room { params: MaybeUninit::zeroed(), behind: [0xa5; 200] };
        // SAFETY: the library writes its parameters there; `Room` is longer than any version's.
        let code = unsafe { (self.get_defaults)((&raw mut room).cast()) };
        if code != abi::QZ_OK || room.behind != [0xa5; 200] {
            return Err(layout(format!("qzGetDefaultsDeflate answers {code}, or writes too much")));
        }
        // SAFETY: zeroed above, and plain integers throughout.
        let mut params = unsafe { room.params.assume_init() };
        let common = params.common_params;
        let found = (common.comp_algorithm, common.hw_buff_sz, common.input_sz_thrshold);
        let min = c_uint::try_from(MIN_PLAIN).unwrap_or(c_uint::MAX);
        if found != (abi::QZ_DEFLATE, crate::HW_BUFFER, min)
            || params.data_fmt != abi::QZ_DEFLATE_GZIP_EXT
        {
            return Err(layout(format!("unexpected defaults {params:?}")));
        }
        // A session whose set-up failed has null inside, and QATzip then silently works with its
        // defaults, which are software. We never call with such a session; if we did, this makes it
        // an error.
        params.common_params.sw_backup = 0;
        // SAFETY: the layout has just been checked; the library copies it.
        let code = unsafe { (self.set_defaults)(&raw mut params) };
        if code != abi::QZ_OK {
            return Err(layout(format!("qzSetDefaultsDeflate answers {code}")));
        }
        Ok(())
    }

    /// The parameters of all our sessions but for the level.
    pub(crate) fn params(&self, level: u8) -> QzSessionParamsDeflate {
        let mut params = QzSessionParamsDeflate::default();
        // SAFETY: `probe` has found that the library's structure is this long.
        unsafe { (self.get_defaults)(&raw mut params) };
        let common = &mut params.common_params;
        common.direction = abi::QZ_DIR_BOTH;
        common.comp_lvl = level.into();
        common.comp_algorithm = abi::QZ_DEFLATE;
        // No software: what it does, it does without saying so, and on errors it goes on with
        // instances whose requests it has lost.
        common.sw_backup = 0;
        // One size for the process: the pinned slots of an instance are as large as the first
        // session's, and a larger one later overruns them.
        common.hw_buff_sz = crate::HW_BUFFER;
        params.huffman_hdr = abi::QZ_DYNAMIC_HDR;
        params.data_fmt = abi::QZ_DEFLATE_GZIP_EXT;
        params
    }
}
