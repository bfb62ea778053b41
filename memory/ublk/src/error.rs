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
}
