//! Whether a mount is still there, as the kernel's list of mounts has it: proc(5),
//! `/proc/PID/mountinfo`.
//!
//! To ask the file itself would be to wait for one's own threads.

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Seek};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

/// One mount, from when it was seen.
#[derive(Debug)]
pub(crate) struct Watched {
    list: File,
    /// The mount point, as the list writes it.
    point: Vec<u8>,
    id: Vec<u8>,
    there: bool,
}

impl Watched {
    /// The mount on top at `path`. `None` if there is none to be seen.
    pub(crate) fn new(path: &Path) -> Option<Self> {
        let point = escaped(path.as_os_str().as_bytes());
        let list = File::open("/proc/self/mountinfo").ok()?;
        let mut this = Self { list, point, id: Vec::new(), there: true };
        // The list is asked whether it has changed from here on.
        let _ = this.changed(Duration::ZERO);
        this.id = this.ids().ok()?.pop()?;
        Some(this)
    }

    /// Waits for so long, or until mounts have changed.
    pub(crate) fn is_there(&mut self, wait: Duration) -> bool {
        if self.there && self.changed(wait) {
            // A list that cannot be read says nothing.
            self.there = self.ids().map_or(true, |ids| ids.contains(&self.id));
        }
        self.there
    }

    fn changed(&self, wait: Duration) -> bool {
        let mut fds = [PollFd::new(&self.list, PollFlags::PRI)];
        let wait = Timespec {
            tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: wait.subsec_nanos().into(),
        };
        poll(&mut fds, Some(&wait)).is_ok_and(|ready| ready > 0)
    }

    /// Mounts at this point, the last one on top.
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

/// Blanks, tabs, line feeds and backslashes are three octal digits.
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
    fn mounts_that_there_are_stay_and_others_are_none() {
        let mut proc = Watched::new(Path::new("/proc")).unwrap();
        assert!(proc.is_there(Duration::from_millis(1)));
        proc.id = b"no such".to_vec();
        assert!(!proc.ids().unwrap().contains(&proc.id));
        assert!(Watched::new(Path::new("/nothing/is mounted/here")).is_none());
        assert_eq!(escaped(b"/a b\\c\td"), b"/a\\040b\\134c\\011d");
    }
}
