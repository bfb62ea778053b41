//! Memory pressure, from the kernel's pressure stall information (PSI).
//!
//! If the kernel accepts a trigger, the trigger wakes the policy after a window with too much
//! stall. If not (an old kernel, a container), the policy polls the same file for the average of
//! the last ten seconds.

use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::fs::{fstatfs, OFlags};

use crate::settings::Pressure;

/// How long memory counts as short after pressure was last seen.
const LASTS: Duration = Duration::from_secs(10);

/// Magic numbers (statfs(2)) of procfs and cgroup2: no other file is written to.
const KERNELS: [i128; 2] = [0x9fa0, 0x6367_7270];

/// The source of pressure information.
#[derive(Debug)]
enum Source {
    /// A PSI trigger: ready after a window with too much stall.
    Trigger(File),
    /// A file to poll; a higher average than this, in hundredths of a per cent, is pressure.
    Average(File, u32),
    /// There is no such file: memory is never short.
    None,
}

/// Determines whether memory is short.
#[derive(Debug)]
pub(crate) struct Gauge {
    source: Source,
    until: Option<Instant>,
    /// Set when the source has failed, for other threads.
    lost: Arc<AtomicBool>,
}

impl Gauge {
    /// The kind of source without which memory is never short.
    pub(crate) const NONE: &'static str = "none";

    pub(crate) fn new(settings: &Pressure) -> Self {
        Self { source: source(settings), until: None, lost: Arc::default() }
    }

    /// A flag that becomes true when the source of pressure information fails.
    pub(crate) fn lost(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.lost)
    }

    /// Records that the source has failed, for example because the cgroup is gone.
    fn lose(&mut self) {
        self.source = Source::None;
        self.lost.store(true, Ordering::Release);
    }

    /// The descriptor to poll, and the events.
    pub(crate) fn fd(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        match &self.source {
            Source::Trigger(file) => Some((file.as_fd(), PollFlags::PRI)),
            Source::Average(..) | Source::None => None,
        }
    }

    /// Handles the events that poll returned.
    pub(crate) fn handle_events(&mut self, flags: PollFlags) {
        if flags.contains(PollFlags::ERR) {
            self.lose();
        } else if flags.contains(PollFlags::PRI) {
            self.until = Some(Instant::now() + LASTS);
        }
    }

    /// Whether memory is short now.
    pub(crate) fn is_pressed(&mut self) -> bool {
        if let Source::Average(file, most) = &self.source {
            let mut text = [0; 128];
            match file.read_at(&mut text, 0) {
                Ok(len) if average(&text[..len]).is_some_and(|average| average > *most) => {
                    self.until = Some(Instant::now() + LASTS);
                }
                Ok(_) => {}
                // The read may fail for lack of memory. It is tried again later.
                Err(error)
                    if matches!(error.kind(), ErrorKind::OutOfMemory | ErrorKind::Interrupted) => {}
                Err(_) => self.lose(),
            }
        }
        self.until.is_some_and(|until| Instant::now() < until)
    }

    /// The kind of source, for a person.
    pub(crate) fn describe(&self) -> &'static str {
        match self.source {
            Source::Trigger(_) => "trigger",
            Source::Average(..) => "average",
            Source::None => Self::NONE,
        }
    }
}

fn source(settings: &Pressure) -> Source {
    let Pressure { file, stall, window } = settings;
    // Without O_NONBLOCK, opening a pipe would wait for a writer.
    let flags = i32::try_from((OFlags::NONBLOCK | OFlags::NOCTTY).bits()).expect("low bits");
    let open = |write| OpenOptions::new().read(true).write(write).custom_flags(flags).open(file);
    let Ok(plain) = open(false) else { return Source::None };
    let of_kernel =
        fstatfs(&plain).is_ok_and(|at| KERNELS.contains(&(i128::from(at.f_type) & 0xffff_ffff)));
    let trigger = || -> std::io::Result<File> {
        let mut opened = open(true)?;
        let line = format!("some {} {}\0", u64::from(*stall) * 1000, u64::from(*window) * 1000);
        std::io::Write::write_all(&mut opened, line.as_bytes())?;
        Ok(opened)
    };
    if let Some(Ok(file)) = of_kernel.then(trigger) {
        return Source::Trigger(file);
    }
    Source::Average(plain, stall.saturating_mul(10_000) / window.max(&1))
}

/// The share of the last ten seconds in which some task was stalled, in hundredths of a per cent.
pub(crate) fn average(text: &[u8]) -> Option<u32> {
    let line = text.split(|&byte| byte == b'\n').find(|line| line.starts_with(b"some "))?;
    let field = line.split(|&byte| byte == b' ').find_map(|word| word.strip_prefix(b"avg10="))?;
    let (whole, part) = std::str::from_utf8(field).ok()?.split_once('.')?;
    let part: u32 = part.get(..2)?.parse().ok()?;
    whole.parse::<u32>().ok()?.checked_mul(100)?.checked_add(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_lines_are_read() {
        let text = b"some avg10=12.34 avg60=0.00 avg300=0.00 total=7\nfull avg10=99.00 avg60=0\n";
        assert_eq!(average(text), Some(1234));
        for bad in ["", "full avg10=1.00", "some avg60=1.00", "some avg10=x.00", "some avg10=1"] {
            assert_eq!(average(bad.as_bytes()), None, "{bad}");
        }
    }

    #[test]
    fn memory_counts_as_short_during_pressure_and_for_a_while_after() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        // An ordinary file: it is polled, and nothing is written to it.
        let settings = Pressure { file: file.path().into(), stall: 200, window: 2000 };
        std::io::Write::write_all(&mut file, b"some avg10=09.99 x\n").unwrap();
        let mut gauge = Gauge::new(&settings);
        assert_eq!(gauge.describe(), "average");
        assert_eq!(std::fs::read(file.path()).unwrap(), b"some avg10=09.99 x\n");
        assert!(!gauge.is_pressed());
        file.as_file().write_all_at(b"some avg10=10.01 x\n", 0).unwrap();
        // The pressure may be over where this thread gets no CPU for so long.
        assert!((0..5).any(|_| gauge.is_pressed()));
        let missing = Pressure { file: "/nonexistent/pressure".into(), ..settings };
        let mut gauge = Gauge::new(&missing);
        assert_eq!((gauge.describe(), gauge.is_pressed()), ("none", false));
        let is_pressed = (0..5).any(|_| {
            gauge.handle_events(PollFlags::PRI);
            gauge.is_pressed()
        });
        assert!(is_pressed);
        let lost = gauge.lost();
        assert!(!lost.load(Ordering::Acquire));
        gauge.handle_events(PollFlags::ERR);
        assert!(lost.load(Ordering::Acquire));
        // A directory can be opened, but not read.
        let mut gauge = Gauge::new(&missing);
        gauge.source = Source::Average(File::open("/").unwrap(), 1000);
        assert!(!gauge.is_pressed() && gauge.lost().load(Ordering::Acquire));
        assert_eq!(gauge.describe(), "none");
    }

    #[test]
    fn a_pressure_file_of_no_kernel_is_neither_written_nor_polled() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("mine");
        std::fs::write(&path, "mine, and some more than a line of the kernel's").unwrap();
        let before = std::fs::read(&path).unwrap();
        let settings = |file| Pressure { file, stall: 200, window: 2000 };
        assert_eq!(Gauge::new(&settings(path.clone())).describe(), "average");
        assert_eq!(std::fs::read(&path).unwrap(), before);
        let pipe = folder.path().join("pipe");
        // Without a process: until its `execve` it would have copies of the sockets and stores that
        // the other tests close.
        let (kind, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR);
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, kind, mode, 0).unwrap();
        let mut gauge = Gauge::new(&settings(pipe));
        assert_eq!((gauge.describe(), gauge.is_pressed()), ("average", false));
    }
}
