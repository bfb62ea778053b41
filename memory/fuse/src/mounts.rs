//! Determines whether a mount still exists, from the kernel's list of mounts: proc(5),
//! `/proc/PID/mountinfo`.
//!
//! A system call on the file itself could deadlock: this process answers it.

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Seek};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

/// A mount that is watched from its creation.
#[derive(Debug)]
pub(crate) struct Watched {
    list: File,
    /// The mount point, as escaped in the list.
    point: Vec<u8>,
    id: Vec<u8>,
    there: bool,
}

impl Watched {
    /// The topmost mount at `path`; `None` if none is visible.
    pub(crate) fn new(path: &Path) -> Option<Self> {
        let point = escaped(path.as_os_str().as_bytes());
        let list = File::open("/proc/self/mountinfo").ok()?;
        let mut this = Self { list, point, id: Vec::new(), there: true };
        // From here on the list reports changes.
        let _ = this.changed(Duration::ZERO);
        this.id = this.ids().ok()?.pop()?;
        Some(this)
    }

    /// Waits until mounts change, at most for `wait`; returns whether the mount still exists.
    pub(crate) fn is_there(&mut self, wait: Duration) -> bool {
        if self.there && self.changed(wait) {
            // If the list cannot be read, assume no change.
            self.there = self.ids().map_or(true, |ids| ids.contains(&self.id));
        }
        self.there
    }

    fn changed(&self, wait: Duration) -> bool {
        let mut fds = [PollFd::new(&self.list, PollFlags::PRI)];
        let wait = Timespec::try_from(wait).ok();
        poll(&mut fds, wait.as_ref()).is_ok_and(|ready| ready > 0)
    }

    /// IDs of the mounts at this point, the topmost last.
    fn ids(&self) -> io::Result<Vec<Vec<u8>>> {
        (&self.list).rewind()?;
        let mut ids = Vec::new();
        for line in BufReader::new(&self.list).split(b'\n') {
            let line = line?;
            let mut fields = line.split(|&byte| byte == b' ');
            if let (Some(id), Some(point)) = (fields.next(), fields.nth(3)) {
                if point == self.point {
                    ids.push(id.to_owned());
                }
            }
        }
        Ok(ids)
    }
}

/// Escapes a path as mountinfo does: blanks, tabs, line feeds and backslashes as three octal
/// digits.
fn escaped(path: &[u8]) -> Vec<u8> {
    path.iter().fold(Vec::with_capacity(path.len()), |mut out, &byte| {
        match byte {
            b' ' | b'\t' | b'\n' | b'\\' => out.extend(format!("\\{byte:03o}").bytes()),
            _ => out.push(byte),
        }
        out
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn existing_mounts_stay_and_other_paths_are_no_mounts() {
        let mut proc = Watched::new(Path::new("/proc")).unwrap();
        assert!(proc.is_there(Duration::from_millis(1)));
        proc.id = b"no such".to_vec();
        assert!(!proc.ids().unwrap().contains(&proc.id));
        assert!(Watched::new(Path::new("/nothing/is mounted/here")).is_none());
        assert_eq!(escaped(b"/a b\\c\td"), b"/a\\040b\\134c\\011d");
    }
}
