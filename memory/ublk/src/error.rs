//! The error of a device that cannot be served.

use std::io;

use crate::control::ControlError;
use crate::geometry::{Geometry, Info};
use crate::queue::QueueError;

/// Why a device cannot be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The driver refused.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The requested geometry is not possible.
    #[error("a ublk device cannot have {what}")]
    Geometry {
        /// The wrong value.
        what: String,
    },
    /// The device to be recovered has another geometry.
    #[error("ublk device {id} has {has:?}, this server would have {wanted:?}")]
    Other {
        /// The device.
        id: u32,
        /// The driver's description.
        has: Box<Info>,
        /// The requested geometry.
        wanted: Box<Geometry>,
    },
    /// Another error of the kernel.
    #[error("ublk device {id}: cannot {action}")]
    Io {
        /// The device.
        id: u32,
        /// The operation that failed.
        action: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// A queue ended while the device was being started.
    #[error("ublk device {id}, queue {queue}")]
    Queue {
        /// The device.
        id: u32,
        /// The queue.
        queue: u16,
        /// The cause.
        source: QueueError,
    },
    /// The driver has ended commands of this server, in place of those of the dead one, before any
    /// request came. The next server can take the disk over.
    #[error(
        "ublk device {id}: the driver has ended commands of this server in place of the dead one's"
    )]
    Disturbed {
        /// The device.
        id: u32,
    },
    /// A queue's thread was not ready in time.
    #[error("ublk device {id}: a queue's thread has not been ready for {seconds} s")]
    Late {
        /// The device.
        id: u32,
        /// The time limit.
        seconds: u64,
    },
}
