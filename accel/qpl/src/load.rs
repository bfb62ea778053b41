//! The real library, found at run time. A build needs neither it nor its headers.

#![expect(unsafe_code, reason = "dlopen, and a C library's jobs")]

use crate::abi::{self, QplJob};
use crate::library::{Job, Library, Path, Status};
use libloading::os::unix::{Library as Handle, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{c_int, c_uint, CStr};
use std::path::{Path as FilePath, PathBuf};
use std::ptr::NonNull;

/// SONAME of the library.
pub const LIBRARY: &str = "libqpl.so.1";

/// Why the library cannot be used. None of these is an error of the host: it has no QPL.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The dynamic linker did not load the file.
    #[error("cannot load {file}: {reason}; install Intel's QPL (Debian 14: libqpl1)")]
    Library {
        /// The file.
        file: String,
        /// The dynamic linker's message.
        reason: String,
    },
    /// A function is missing: the file is another library.
    #[error("{file} has no function {symbol}: it is not Intel's QPL")]
    Symbol {
        /// The file.
        file: String,
        /// The function.
        symbol: &'static str,
    },
}

/// libqpl, loaded for the life of the process.
#[derive(Clone, Debug)]
pub struct Loaded {
    api: &'static Api,
}

#[derive(Debug)]
struct Api {
    version: abi::GetVersion,
    job_size: abi::GetJobSize,
    init: abi::InitJob,
    execute: abi::OnJob,
    submit: abi::OnJob,
    check: abi::OnJob,
    fini: abi::OnJob,
}

impl Loaded {
    /// Loads `file`, or [`LIBRARY`] from the dynamic linker's search path.
    ///
    /// # Errors
    /// [`LoadError`], which names the file and its package.
    pub fn new(file: Option<&FilePath>) -> Result<Self, LoadError> {
        let path = file.map_or_else(|| PathBuf::from(LIBRARY), FilePath::to_path_buf);
        let name = path.display().to_string();
        // SAFETY: loading runs the library's initialisers, which only choose its functions for this
        // CPU; a file named on the command line is trusted like an executable.
        let handle = unsafe { Handle::open(Some(&path), RTLD_NOW | RTLD_LOCAL) };
        let handle = handle.map_err(|error| {
            // libloading has the linker's message as the source.
            let reason = std::error::Error::source(&error)
                .map_or_else(|| error.to_string(), ToString::to_string);
            LoadError::Library { file: name.clone(), reason }
        })?;
        #[expect(
            clippy::multiple_unsafe_ops_per_block,
            reason = "the same promise for each symbol"
        )]
        // SAFETY: each name has the type that the header declares for it.
        let api = unsafe {
            Api {
                version: symbol(&handle, &name, "qpl_get_library_version")?,
                job_size: symbol(&handle, &name, "qpl_get_job_size")?,
                init: symbol(&handle, &name, "qpl_init_job")?,
                execute: symbol(&handle, &name, "qpl_execute_job")?,
                submit: symbol(&handle, &name, "qpl_submit_job")?,
                check: symbol(&handle, &name, "qpl_check_job")?,
                fini: symbol(&handle, &name, "qpl_fini_job")?,
            }
        };
        // Never dlclose: a device may still write to an abandoned job.
        std::mem::forget(handle);
        // One small leaked table a load, so that jobs on any thread share it.
        Ok(Self { api: Box::leak(Box::new(api)) })
    }
}

/// # Safety
///
/// `T` is the function pointer type of `symbol`.
unsafe fn symbol<T: Copy>(
    handle: &Handle,
    file: &str,
    symbol: &'static str,
) -> Result<T, LoadError> {
    // SAFETY: the caller's promise.
    unsafe { handle.get::<T>(symbol) }
        .map(|found| *found)
        .map_err(|_| LoadError::Symbol { file: file.to_owned(), symbol })
}

fn number(path: Path) -> c_uint {
    match path {
        Path::Hardware => abi::PATH_HARDWARE,
        Path::Software => abi::PATH_SOFTWARE,
    }
}

fn status(code: c_int) -> Status {
    Status(code.unsigned_abs())
}

impl Library for Loaded {
    fn version(&self) -> String {
        // SAFETY: no arguments.
        let text = unsafe { (self.api.version)() };
        if text.is_null() {
            return String::new();
        }
        // SAFETY: a string literal of the library, which is never unloaded.
        let text = unsafe { CStr::from_ptr(text) };
        text.to_string_lossy().chars().take(40).collect()
    }

    fn job_size(&self, path: Path) -> Result<u32, Status> {
        let mut size = 0;
        // SAFETY: `size` is writable for the call.
        let code = status(unsafe { (self.api.job_size)(number(path), &raw mut size) });
        if code == Status::OK {
            Ok(size)
        } else {
            Err(code)
        }
    }

    fn job(&self, path: Path, size: u32, capacity: usize) -> Result<Box<dyn Job>, Status> {
        let size = usize::try_from(size).unwrap_or(usize::MAX).max(size_of::<QplJob>());
        let mut job = RealJob {
            api: self.api,
            path,
            job: Memory::new(size),
            input: Memory::new(capacity),
            output: Memory::new(capacity),
            is_open: false,
            ended: Status::OK,
        };
        // SAFETY: the memory is aligned, zeroed, as long as the library asked for, and stays where
        // it is until `fini` or for ever.
        let code = status(unsafe { (self.api.init)(number(path), job.job.start.as_ptr().cast()) });
        if code != Status::OK {
            return Err(code);
        }
        job.is_open = true;
        Ok(Box::new(job))
    }
}

/// A cache line, to which libqpl and the device want their memory aligned.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([u8; 64]);

/// Memory that C and a device may write to: no reference to it lives while they do.
#[derive(Debug)]
struct Memory {
    start: NonNull<Line>,
    lines: usize,
}

impl Memory {
    /// Zeroed memory of at least `bytes`. Every page of it is touched, so that a device meets no
    /// page fault.
    fn new(bytes: usize) -> Self {
        let lines = bytes.div_ceil(64).max(1);
        let mut all = vec![Line([0; 64]); lines].into_boxed_slice();
        for line in all.iter_mut().step_by(4096 / 64) {
            // Not `= 0`: the compiler may omit such a write to memory that is zero.
            std::hint::black_box(&mut *line).0[0] = 0;
        }
        let start = NonNull::from(Box::leak(all)).cast();
        Self { start, lines }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let all = NonNull::slice_from_raw_parts(self.start, self.lines);
        // SAFETY: leaked in `new`, with this length; nobody else frees it.
        drop(unsafe { Box::from_raw(all.as_ptr()) });
    }
}

#[derive(Debug)]
struct RealJob {
    api: &'static Api,
    path: Path,
    job: Memory,
    input: Memory,
    output: Memory,
    is_open: bool,
    /// On the software path: the status of the job, which ends in `start`.
    ended: Status,
}

// SAFETY: libqpl's jobs have no thread affinity, and one thread at a time has this one.
unsafe impl Send for RealJob {}

impl RealJob {
    fn job(&self) -> *mut QplJob {
        self.job.start.as_ptr().cast()
    }

    fn len(memory: &Memory) -> usize {
        memory.lines * 64
    }
}

impl Job for RealJob {
    fn input(&mut self) -> &mut [u8] {
        let (start, len) = (self.input.start.as_ptr().cast(), Self::len(&self.input));
        // SAFETY: initialised memory of this length that `self` alone has: no job runs.
        unsafe { std::slice::from_raw_parts_mut(start, len) }
    }

    fn start(&mut self, len: usize, room: usize) -> Status {
        let of = |len: usize, memory: &Memory| {
            u32::try_from(len.min(Self::len(memory))).unwrap_or(u32::MAX)
        };
        let (len, room) = (of(len, &self.input), of(room, &self.output));
        let mut flags = abi::FLAG_FIRST | abi::FLAG_LAST | abi::FLAG_DYNAMIC_HUFFMAN;
        if self.path == Path::Software {
            // The compressor verifies samples. A device verifies itself.
            flags |= abi::FLAG_OMIT_VERIFY;
        }
        // SAFETY: an initialised job that `self` alone has; the library does not run.
        let job = unsafe { &mut *self.job() };
        job.op = abi::OP_COMPRESS;
        job.level = abi::LEVEL_DEFAULT;
        job.flags = flags;
        job.next_in_ptr = self.input.start.as_ptr().cast();
        job.available_in = len;
        job.next_out_ptr = self.output.start.as_ptr().cast();
        job.available_out = room;
        job.total_in = 0;
        job.total_out = 0;
        job.crc = 0;
        job.huffman_table = std::ptr::null_mut();
        job.dictionary = std::ptr::null_mut();
        job.numa_id = abi::NUMA_SOCKET;
        match self.path {
            Path::Software => {
                // SAFETY: job and buffers live as long as `self`.
                self.ended = status(unsafe { (self.api.execute)(self.job()) });
                Status::OK
            }
            Path::Hardware => {
                // SAFETY: job and buffers live until the job has ended, or for ever (`abandon`).
                status(unsafe { (self.api.submit)(self.job()) })
            }
        }
    }

    fn check(&mut self) -> Status {
        match self.path {
            Path::Software => self.ended,
            // SAFETY: a job that was submitted.
            Path::Hardware => status(unsafe { (self.api.check)(self.job()) }),
        }
    }

    fn written(&self) -> u32 {
        // SAFETY: an initialised job; the library does not run.
        unsafe { (*self.job()).total_out }
    }

    fn output(&self) -> &[u8] {
        let (start, len) = (self.output.start.as_ptr().cast(), Self::len(&self.output));
        // SAFETY: initialised memory of this length, to which nothing writes: no job runs.
        unsafe { std::slice::from_raw_parts(start, len) }
    }

    fn abandon(self: Box<Self>) {
        std::mem::forget(self);
    }
}

impl Drop for RealJob {
    fn drop(&mut self) {
        if self.is_open {
            // SAFETY: an initialised job that has ended.
            unsafe { (self.api.fini)(self.job()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_named_with_its_package() {
        let folder = tempfile::tempdir().unwrap();
        let error = Loaded::new(Some(&folder.path().join(LIBRARY))).unwrap_err().to_string();
        assert!(error.contains(LIBRARY) && error.contains("libqpl1"), "{error}");
    }

    #[test]
    fn a_library_without_the_functions_is_refused_with_the_name_of_the_first() {
        // The C library exists on every host and has none of them.
        let error = Loaded::new(Some(FilePath::new("libc.so.6"))).unwrap_err();
        let symbol = "qpl_get_library_version";
        assert_eq!(error, LoadError::Symbol { file: "libc.so.6".into(), symbol });
    }
}
