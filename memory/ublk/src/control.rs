//! Control commands: create, start, recover, stop and delete devices.
//!
//! A command goes through a ring of its own. It may take long (starting waits for every queue,
//! stopping for all users of the disk) or for ever, because kernels have been seen to crash in the
//! middle of one. Each wait has a time limit. After it the memory that the kernel may still write
//! to is leaked, and the [`Control`] cannot be used any more.

mod command;
mod remains;

use std::fs::File;
use std::io;
use std::time::{Duration, Instant};

use io_uring::{cqueue, squeue, IoUring};

use crate::geometry::{parameters, Geometry, Info};
use crate::payload::Payload;
use crate::sys::{self, Command, DeviceInfo, Parameters};

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
    /// The device that has this number now was made for somebody else.
    #[error("ublk device {id} is another one by now: its mark is {mark:016x}, not {wanted:016x}")]
    Another {
        /// The device.
        id: u32,
        /// Its mark.
        mark: u64,
        /// The mark of the device that was looked for.
        wanted: u64,
    },
}

impl ControlError {
    /// The driver's errno, if it returned one.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Driver(source) | Self::Ring(source) | Self::Refused { source, .. } => {
                source.raw_os_error()
            }
            Self::Silent { .. } | Self::Another { .. } => None,
        }
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

    /// Creates a device with this mark; the driver chooses its number. If it `recovers`, its disk
    /// stays without a server, and the next one gets the requests of the dead one (user recovery,
    /// reissue).
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn add(
        &mut self,
        geometry: &Geometry,
        mark: u64,
        recovers: bool,
    ) -> Result<Info, ControlError> {
        let wanted = recovery(recovers);
        let ask = DeviceInfo {
            queues: geometry.queues,
            depth: geometry.depth,
            max_io: geometry.max_io,
            id: u32::MAX,
            pid: pid(),
            flags: wanted | if self.ioctl { sys::CMD_IOCTL_ENCODE } else { 0 },
            server_flags: mark,
            ..DeviceInfo::default()
        };
        let mut payload = Payload::of_info(&ask);
        self.run(Command::Add, "adding", -1, 64, &mut payload, 0)?;
        let info = payload.to_info();
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
    /// The driver's error.
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
    /// The driver's error.
    pub fn size(&mut self, id: u32) -> Result<u64, ControlError> {
        // The length of the struct in the buffer is sent with it.
        let asked = Parameters { len: 64, ..Parameters::default() };
        let mut payload = Payload::of_parameters(&asked);
        self.run(Command::GetParameters, "asking for its size", id.into(), 64, &mut payload, 0)?;
        Ok(payload.sectors().saturating_mul(sys::SECTOR))
    }

    /// Changes the size of a disk that is started.
    ///
    /// # Errors
    ///
    /// The driver's error; [`io::ErrorKind::Unsupported`] if the driver cannot change a size.
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
    /// The driver's error.
    pub fn start(&mut self, id: u32) -> Result<(), ControlError> {
        let mut payload = Payload::new();
        let pid = u64::from(pid().unsigned_abs());
        self.run(Command::Start, "starting", id.into(), 0, &mut payload, pid).map(drop)
    }

    /// Stops the disk, which ends the queues.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn stop(&mut self, id: u32) -> Result<(), ControlError> {
        self.run(Command::Stop, "stopping", id.into(), 0, &mut Payload::new(), 0).map(drop)
    }

    /// Deletes a device; its number may be reused.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn delete(&mut self, id: u32) -> Result<(), ControlError> {
        self.run(Command::Delete, "deleting", id.into(), 0, &mut Payload::new(), 0).map(drop)
    }

    /// Announces a new server of a device whose server has died.
    ///
    /// # Errors
    ///
    /// The driver's error; EBUSY while the rings of the old server are not torn down.
    pub fn start_recovery(&mut self, id: u32) -> Result<(), ControlError> {
        let payload = &mut Payload::new();
        self.run(Command::StartRecovery, "starting recovery", id.into(), 0, payload, 0).map(drop)
    }

    /// The time at which a wait that begins now reaches its limit.
    pub(crate) fn deadline(&self) -> Instant {
        Instant::now() + self.timeout
    }

    /// Ends recovery, so that requests flow again. All queues must fetch their tags while this
    /// waits.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn end_recovery(&mut self, id: u32) -> Result<(), ControlError> {
        let mut payload = Payload::new();
        let pid = u64::from(pid().unsigned_abs());
        self.run(Command::EndRecovery, "ending recovery", id.into(), 0, &mut payload, pid).map(drop)
    }
}

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Control").field("ioctl", &self.ioctl).finish_non_exhaustive()
    }
}

const EBUSY: i32 = 16;

/// The flags of a device that another server may take over. Without them the driver removes the
/// disk of a server that dies.
fn recovery(recovers: bool) -> u64 {
    if recovers {
        sys::USER_RECOVERY | sys::USER_RECOVERY_REISSUE
    } else {
        0
    }
}

fn pid() -> i32 {
    i32::try_from(std::process::id()).expect("process numbers are positive ints")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_device_that_another_server_takes_over_stays_without_one() {
        assert_eq!(recovery(true), sys::USER_RECOVERY | sys::USER_RECOVERY_REISSUE);
        assert_eq!(recovery(false), 0);
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
