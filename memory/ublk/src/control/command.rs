//! Sends one control command to the driver, and waits for its answer up to a time limit.
//!
//! After the limit the memory that the kernel may still write to is leaked.
#![expect(unsafe_code, reason = "pushes entries that name memory to the kernel")]

use std::io;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use io_uring::{cqueue, opcode, squeue, types, IoUring};

use super::{Control, ControlError};
use crate::payload::Payload;
use crate::sys::{Command, ControlCommand};

impl Control {
    pub(super) fn run(
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

/// Submits the command and waits for its completion. Returns `None` if it does not complete in
/// time.
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
