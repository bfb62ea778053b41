//! Control commands: create, start, recover, stop and delete devices.
//!
//! A command goes through a ring of its own. It may take long (starting waits for every queue,
//! stopping for all users of the disk) or for ever, because kernels have been seen to crash in the
//! middle of one. Each wait has a time limit. After it the memory that the kernel may still write
//! to is leaked, and the [`Control`] cannot be used any more.
#![expect(unsafe_code, reason = "pushes entries that name memory to the kernel")]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use io_uring::{cqueue, opcode, squeue, types, IoUring};

use crate::payload::Payload;
use crate::sys::{self, Command, ControlCommand, DeviceInfo, Parameters};

/// Why a control command failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// There is no driver, or this process may not use it.
    #[error("cannot open {path}: is the module ublk_drv loaded, and is this root?", path = sys::CONTROL)]
    Driver(#[source] io::Error),
    /// The kernel has no ring for the commands.
    #[error("cannot make an io_uring for ublk's control commands")]
    Ring(#[source] io::Error),
    /// The driver refused the command.
    #[error("ublk device {id}: {action} fails")]
    Refused {
        /// The device; -1 if the driver was to choose.
        id: i64,
        /// The command.
        action: &'static str,
        /// The driver's error.
        source: io::Error,
    },
    /// The driver did not answer in time.
    #[error("ublk device {id}: {action} has not been answered for {seconds} s")]
    Silent {
        /// The device; -1 if the driver was to choose.
        id: i64,
        /// The command.
        action: &'static str,
        /// The time limit.
        seconds: u64,
    },
}

impl ControlError {
    /// The driver's errno, if it returned one.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Driver(source) | Self::Ring(source) | Self::Refused { source, .. } => {
                source.raw_os_error()
            }
            Self::Silent { .. } => None,
        }
    }
}

/// The parameters of a new device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Size of the disk in bytes: a multiple of 4096.
    pub size: u64,
    /// The number of queues, each with a thread.
    pub queues: u16,
    /// Requests in flight of a queue.
    pub depth: u16,
    /// The most bytes of a request: a multiple of 4096.
    pub max_io: u32,
}

/// The state of a device's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskState {
    /// It was not started, or is stopped.
    Dead,
    /// It has a server.
    Live,
    /// Its server is gone; requests wait for the next one.
    Quiesced,
    /// A state of later kernels.
    Other(u16),
}

/// The driver's description of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info {
    /// Its number: `/dev/ublkb0` is 0.
    pub id: u32,
    /// The number of queues that the driver has made, at most as many as requested.
    pub queues: u16,
    /// Requests in flight of a queue.
    pub depth: u16,
    /// The most bytes of a request.
    pub max_io: u32,
    /// The state of its disk.
    pub state: DiskState,
    /// The process id of its server.
    pub pid: i32,
}

impl From<DeviceInfo> for Info {
    fn from(info: DeviceInfo) -> Self {
        let state = match info.state {
            sys::DEAD => DiskState::Dead,
            sys::LIVE => DiskState::Live,
            sys::QUIESCED => DiskState::Quiesced,
            other => DiskState::Other(other),
        };
        let DeviceInfo { queues, depth, max_io, id, pid, .. } = info;
        Self { id, queues, depth, max_io, state, pid }
    }
}

/// The driver's control device.
pub struct Control {
    file: File,
    ring: Option<IoUring<squeue::Entry128, cqueue::Entry>>,
    timeout: Duration,
    ioctl: bool,
    features: u64,
}

impl Control {
    /// Opens the driver's control device. `timeout` limits the wait for each command.
    ///
    /// # Errors
    ///
    /// [`ControlError::Driver`] without the module `ublk_drv` or the right to use it.
    pub fn open(timeout: Duration) -> Result<Self, ControlError> {
        let file = File::options()
            .read(true)
            .write(true)
            .open(sys::CONTROL)
            .map_err(ControlError::Driver)?;
        let ring = IoUring::builder().build(4).map_err(ControlError::Ring)?;
        let mut control = Self { file, ring: Some(ring), timeout, ioctl: true, features: 0 };
        let mut payload = Payload::new();
        match control.run(Command::Features, "asking for features", -1, 8, &mut payload, 0) {
            Ok(_) => {
                let [a, b, c, d, e, f, g, h, ..] = payload.0;
                control.features = u64::from_ne_bytes([a, b, c, d, e, f, g, h]);
            }
            // Before Linux 6.5 the driver does not know the command, before 6.4 not even the ioctl
            // encoding.
            Err(ControlError::Refused { .. }) => control.ioctl = false,
            Err(error) => return Err(error),
        }
        Ok(control)
    }

    /// Whether commands must be encoded as ioctls, as Linux 6.5 and later want.
    pub fn speaks_ioctl(&self) -> bool {
        self.ioctl
    }

    /// The driver's feature bits; 0 before Linux 6.5, which has no command for them.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Creates a device with user recovery and reissue; the driver chooses its number.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn add(&mut self, geometry: &Geometry) -> Result<Info, ControlError> {
        let ask = DeviceInfo {
            queues: geometry.queues,
            depth: geometry.depth,
            max_io: geometry.max_io,
            id: u32::MAX,
            pid: pid(),
            flags: sys::USER_RECOVERY
                | sys::USER_RECOVERY_REISSUE
                | if self.ioctl { sys::CMD_IOCTL_ENCODE } else { 0 },
            ..DeviceInfo::default()
        };
        let mut payload = Payload::of_info(&ask);
        self.run(Command::Add, "adding", -1, 64, &mut payload, 0)?;
        let info = payload.to_info();
        let wanted = sys::USER_RECOVERY | sys::USER_RECOVERY_REISSUE;
        if info.flags & wanted != wanted {
            let _ = self.delete(info.id);
            return Err(ControlError::Refused {
                id: i64::from(info.id),
                action: "adding with user recovery",
                source: io::ErrorKind::Unsupported.into(),
            });
        }
        Ok(info.into())
    }

    /// Sets size and limits of a device that is not started: 4 KiB blocks, no volatile cache,
    /// discard and write-zeroes in units of 4 KiB.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn set_parameters(&mut self, id: u32, geometry: &Geometry) -> Result<(), ControlError> {
        let parameters = parameters(geometry);
        let mut payload = Payload::of_parameters(&parameters);
        self.run(Command::SetParameters, "setting its size", id.into(), 64, &mut payload, 0)
            .map(drop)
    }

    /// Whether the driver can change the size of a disk, as Linux 6.16 and later can.
    pub fn changes_sizes(&self) -> bool {
        self.features & sys::UPDATE_SIZE != 0
    }

    /// The size of a disk in bytes.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn size(&mut self, id: u32) -> Result<u64, ControlError> {
        // The length of the buffer's struct goes in with it.
        let asked = Parameters { len: 64, ..Parameters::default() };
        let mut payload = Payload::of_parameters(&asked);
        self.run(Command::GetParameters, "asking for its size", id.into(), 64, &mut payload, 0)?;
        Ok(payload.sectors().saturating_mul(sys::SECTOR))
    }

    /// Changes the size of a disk that is started.
    ///
    /// # Errors
    ///
    /// The driver's; [`io::ErrorKind::Unsupported`] from one that cannot.
    pub fn set_size(&mut self, id: u32, size: u64) -> Result<(), ControlError> {
        const ACTION: &str = "changing its size";
        if !self.changes_sizes() {
            let source = io::ErrorKind::Unsupported.into();
            return Err(ControlError::Refused { id: id.into(), action: ACTION, source });
        }
        let payload = &mut Payload::new();
        self.run(Command::UpdateSize, ACTION, id.into(), 0, payload, size / sys::SECTOR).map(drop)
    }

    /// The driver's description of a device.
    ///
    /// # Errors
    ///
    /// The driver's: ENODEV if there is none.
    pub fn info(&mut self, id: u32) -> Result<Info, ControlError> {
        let mut payload = Payload::new();
        self.run(Command::DeviceInfo, "asking about it", id.into(), 64, &mut payload, 0)?;
        Ok(payload.to_info().into())
    }

    /// Starts the disk. All queues must fetch their tags while this waits.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn start(&mut self, id: u32) -> Result<(), ControlError> {
        let mut payload = Payload::new();
        let pid = u64::from(pid().unsigned_abs());
        self.run(Command::Start, "starting", id.into(), 0, &mut payload, pid).map(drop)
    }

    /// Stops the disk, which ends the queues.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn stop(&mut self, id: u32) -> Result<(), ControlError> {
        self.run(Command::Stop, "stopping", id.into(), 0, &mut Payload::new(), 0).map(drop)
    }

    /// Deletes a device; its number may be reused.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn delete(&mut self, id: u32) -> Result<(), ControlError> {
        self.run(Command::Delete, "deleting", id.into(), 0, &mut Payload::new(), 0).map(drop)
    }

    /// Announces a new server of a device whose server has died. The driver notices a death only
    /// when the dead server's rings are torn down; until then it returns EBUSY, and this function
    /// retries.
    ///
    /// # Errors
    ///
    /// The driver's; EBUSY if the old server is not gone within the time limit.
    pub fn start_recovery(&mut self, id: u32) -> Result<(), ControlError> {
        let begin = Instant::now();
        loop {
            let payload = &mut Payload::new();
            match self.run(Command::StartRecovery, "starting recovery", id.into(), 0, payload, 0) {
                Err(error) if error.errno() == Some(EBUSY) && begin.elapsed() < self.timeout => {
                    std::thread::sleep(Duration::from_millis(2));
                }
                result => return result.map(drop),
            }
        }
    }

    /// Ends recovery, so that requests flow again. All queues must fetch their tags while this
    /// waits.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn end_recovery(&mut self, id: u32) -> Result<(), ControlError> {
        let mut payload = Payload::new();
        let pid = u64::from(pid().unsigned_abs());
        self.run(Command::EndRecovery, "ending recovery", id.into(), 0, &mut payload, pid).map(drop)
    }

    fn run(
        &mut self,
        command: Command,
        action: &'static str,
        id: i64,
        len: u16,
        payload: &mut Payload,
        data: u64,
    ) -> Result<i32, ControlError> {
        let silent = ControlError::Silent { id, action, seconds: self.timeout.as_secs() };
        let refused = |source| ControlError::Refused { id, action, source };
        let Some(mut ring) = self.ring.take() else { return Err(silent) };
        // On the heap, so that it can be leaked to the kernel.
        let mut shared = Box::new(*payload);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "-1 is all ones"
        )]
        let dev_id = id as u32;
        let message = ControlCommand {
            dev_id,
            queue_id: u16::MAX,
            len,
            addr: if len == 0 { 0 } else { (&raw mut *shared).addr() as u64 },
            data,
            ..ControlCommand::default()
        };
        let number = if self.ioctl { command.ioctl() } else { command as u32 };
        let entry = opcode::UringCmd80::new(types::Fd(self.file.as_raw_fd()), number)
            .cmd(message.to_bytes())
            .build();
        // SAFETY: `shared` is not dropped before the command is answered, and leaked if it is not.
        let pushed = unsafe { ring.submission().push(&entry) };
        assert!(pushed.is_ok(), "one command at a time, in a ring of four");
        match wait(&mut ring, self.timeout) {
            Ok(Some(result)) => {
                self.ring = Some(ring);
                *payload = *shared;
                if result < 0 {
                    return Err(refused(io::Error::from_raw_os_error(-result)));
                }
                Ok(result)
            }
            Ok(None) => {
                // Dropping the ring would wait for the command.
                std::mem::forget((ring, shared));
                Err(silent)
            }
            Err(source) => {
                std::mem::forget((ring, shared));
                Err(refused(source))
            }
        }
    }
}

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Control").field("ioctl", &self.ioctl).finish_non_exhaustive()
    }
}

const EBUSY: i32 = 16;

/// Submits the command and waits for its completion; `None` if there is none in time.
fn wait(
    ring: &mut IoUring<squeue::Entry128, cqueue::Entry>,
    timeout: Duration,
) -> io::Result<Option<i32>> {
    let deadline = Instant::now() + timeout;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let time = types::Timespec::from(left.max(Duration::from_millis(1)));
        let args = types::SubmitArgs::new().timespec(&time);
        let entered = ring.submitter().submit_with_args(1, &args);
        if let Some(entry) = ring.completion().next() {
            return Ok(Some(entry.result()));
        }
        match entered {
            Err(error) if !matches!(error.raw_os_error(), Some(ETIME | EINTR | EAGAIN)) => {
                return Err(error)
            }
            _ if left.is_zero() => return Ok(None),
            // No memory now: retry.
            Err(error) if error.raw_os_error() == Some(EAGAIN) => {
                std::thread::sleep(Duration::from_millis(1));
            }
            _ => {}
        }
    }
}

const EINTR: i32 = 4;
const EAGAIN: i32 = 11;
const ETIME: i32 = 62;

fn pid() -> i32 {
    i32::try_from(std::process::id()).expect("process numbers are positive ints")
}

/// The disk's parameters.
fn parameters(geometry: &Geometry) -> Parameters {
    const PAGE_SHIFT: u8 = 12;
    let sectors = geometry.size / sys::SECTOR;
    // A discard has no data and costs little a page, but a discard of the whole disk must not hold
    // a tag for seconds. 256 MiB.
    let discard = u32::try_from(sectors).unwrap_or(u32::MAX).min(1 << 19);
    Parameters {
        len: 64,
        types: Parameters::BASIC | Parameters::DISCARD,
        // Non-rotational, so that swap allocates clusters for each CPU, and without a volatile
        // cache, so that no flush is needed.
        attributes: 0,
        logical_shift: PAGE_SHIFT,
        physical_shift: PAGE_SHIFT,
        io_opt_shift: PAGE_SHIFT,
        io_min_shift: PAGE_SHIFT,
        max_sectors: geometry.max_io >> 9,
        sectors,
        discard_granularity: 1 << PAGE_SHIFT,
        max_discard_sectors: discard,
        max_write_zeroes_sectors: discard,
        max_discard_segments: 1,
        ..Parameters::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn parameters_have_the_offsets_of_the_struct() {
        let geometry = Geometry { size: 1 << 30, queues: 2, depth: 64, max_io: 512 << 10 };
        let p = parameters(&geometry);
        assert_eq!((p.sectors, p.max_sectors), (1 << 21, 1024));
        let bytes = Payload::of_parameters(&p).0;
        let at = |offset: usize| u32::from_ne_bytes(bytes[offset..offset + 4].try_into().unwrap());
        assert_eq!(at(offset_of!(Parameters, max_sectors)), 1024);
        assert_eq!(at(offset_of!(Parameters, sectors)), 1 << 21);
        assert_eq!(at(offset_of!(Parameters, discard_granularity)), 4096);
        assert_eq!(at(offset_of!(Parameters, max_write_zeroes_sectors)), 1 << 19);
        assert_eq!(bytes[offset_of!(Parameters, max_discard_segments)], 1);
        assert_eq!(Payload(bytes).sectors(), 1 << 21);
    }

    #[test]
    fn without_the_driver_the_error_says_what_to_do() {
        if std::path::Path::new(sys::CONTROL).exists() {
            println!("skipped: this machine has the driver");
            return;
        }
        println!("no {}: the driver is tested in guests", sys::CONTROL);
        let error = Control::open(Duration::from_secs(1)).unwrap_err();
        assert!(error.to_string().contains("ublk_drv"), "{error}");
    }
}
