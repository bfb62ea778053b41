//! Threads that wait for a disk and hold no descriptor of the process but the file's.
//!
//! A thread that waits for a disk survives SIGKILL until the disk answers. With the process's table
//! of descriptors such a thread would hold the connections to QEMU and to the helper process open,
//! and neither would notice that the process has died.

#![expect(unsafe_code, reason = "the standard library and rustix have no close_range")]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::mpsc::sync_channel;
use std::thread;

use libc::{c_uint, CLOSE_RANGE_UNSHARE};

/// Starts a thread that does `work` with `file`. Nothing waits for its end.
///
/// # Errors
///
/// The system has no memory for a thread, or is a Linux before 5.9; `work` was not called.
pub(crate) fn start(
    name: &str,
    file: &File,
    work: impl FnOnce(BorrowedFd<'_>) + Send + 'static,
) -> io::Result<()> {
    let fd = file.as_raw_fd();
    let (ready, is_ready) = sync_channel(1);
    let apart = move || {
        let own = own_table(fd);
        let is_own = own.is_ok();
        let _ = ready.send(own);
        if is_own {
            // SAFETY: the thread's own table has the file until the thread ends.
            work(unsafe { BorrowedFd::borrow_raw(fd) });
        }
    };
    thread::Builder::new().name(name.into()).spawn(apart)?;
    // `file` is open until this returns, so that the thread's table has it.
    is_ready.recv().map_err(io::Error::other)?
}

/// Makes the bytes of `file` durable. A process that is killed meanwhile lets go of all else at
/// once.
pub(crate) fn sync(file: &File) -> io::Result<()> {
    let (synced, is_synced) = sync_channel(1);
    let work = move |fd: BorrowedFd<'_>| {
        let _ = synced.send(rustix::fs::fsync(fd));
    };
    match start("fsync", file, work) {
        Ok(()) => Ok(is_synced.recv().map_err(io::Error::other)??),
        Err(_) => Ok(rustix::fs::fsync(file.as_fd())?),
    }
}

/// Gives this thread a table of descriptors of its own, with `fd` alone.
fn own_table(fd: RawFd) -> io::Result<()> {
    let fd = c_uint::try_from(fd).map_err(io::Error::other)?;
    close_range(fd + 1, c_uint::MAX)?;
    match fd.checked_sub(1) {
        Some(last) => close_range(0, last),
        None => Ok(()),
    }
}

/// Closes these descriptors in a copy of the table, which this thread uses from now on. A table
/// that no other thread uses is changed in place.
fn close_range(first: c_uint, last: c_uint) -> io::Result<()> {
    // SAFETY: the other threads still have their table, and this thread, which has just begun, has
    // no object with a descriptor.
    let closed = unsafe { libc::syscall(libc::SYS_close_range, first, last, CLOSE_RANGE_UNSHARE) };
    if closed < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::PathBuf;

    #[test]
    fn the_thread_has_no_descriptor_but_the_file_and_the_process_has_all_of_its_own() {
        // Descriptors below and above that of the file.
        let below = File::open("/dev/null").unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        let above = File::open("/dev/null").unwrap();
        let (tell, told) = sync_channel(1);
        start("test", file.as_file(), move |fd| {
            // Before its folder is opened.
            let own = PathBuf::from(format!("/proc/self/task/{}/fd", rustix::thread::gettid()));
            let held: Vec<_> = fs::read_dir(own)
                .unwrap()
                .map(|entry| fs::read_link(entry.unwrap().path()).unwrap())
                .collect();
            tell.send((held, rustix::fs::fstat(fd).unwrap().st_ino)).unwrap();
        })
        .unwrap();
        let (held, inode) = told.recv().unwrap();
        // And the folder that lists them.
        assert_eq!(held.len(), 2, "{held:?}");
        assert!(held.iter().any(|path| path == file.path()), "{held:?}");
        use std::os::unix::fs::MetadataExt;
        assert_eq!(inode, file.as_file().metadata().unwrap().ino());
        for of_process in [&below, file.as_file(), &above] {
            of_process.metadata().expect("the process still has it");
        }
        sync(file.as_file()).unwrap();
    }

    #[test]
    fn an_error_of_fsync_is_reported() {
        let (reader, _writer) = std::io::pipe().unwrap();
        let error = sync(&File::from(std::os::fd::OwnedFd::from(reader))).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
    }
}
