//! The main thread's stack, only a part of which is to be locked.
//!
//! The kernel gives a program 128 KiB below what it uses at its start, and locking all memory fills
//! them. The mapping grows downwards by itself, so a part that is unmapped comes back, locked, if
//! the thread ever needs it.
#![expect(unsafe_code, reason = "unmaps a part of the stack that is not in use")]

use std::ffi::c_void;
use std::fs;
use std::io;
use std::ops::Range;

use rustix::mm::munmap;

/// The part that stays below the caller's frame, in bytes: more than the 24 KiB that any thread of
/// a server uses (pages of their stacks that were written to, in a guest after groups were made).
const KEPT: usize = 32 << 10;

const PAGE: usize = 4096;

/// Unmaps the unused end of this thread's stack. Does nothing unless the thread is the main thread,
/// whose stack alone grows.
pub(super) fn shorten() -> io::Result<()> {
    let here = 0_u8;
    let used = (&raw const here).addr();
    let maps = fs::read_to_string("/proc/self/maps")?;
    let Some(unused) = unused(&maps, used) else { return Ok(()) };
    // SAFETY: the range ends `KEPT` bytes below a variable of this frame in the mapping of the main
    // thread's stack. Nothing is stored there: a stack is in use from its frames upwards.
    Ok(unsafe { munmap(unused.start as *mut c_void, unused.len()) }?)
}

/// The part of the main thread's stack, in a text as `/proc/PID/maps`, that ends `KEPT` bytes below
/// `used`. `None` if there is none, or `used` is in no such stack.
fn unused(maps: &str, used: usize) -> Option<Range<usize>> {
    let line = maps.lines().find(|line| line.ends_with(" [stack]"))?;
    let (start, rest) = line.split_once('-')?;
    let address = |text: &str| usize::from_str_radix(text, 16).ok();
    let (start, end) = (address(start)?, address(rest.split(' ').next()?)?);
    let kept = used.checked_sub(KEPT)? / PAGE * PAGE;
    ((start..end).contains(&used) && start < kept).then_some(start..kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_far_below_the_frames_in_use_is_unmapped() {
        let maps = "7f00000-7f10000 rw-p 00000000 00:00 0 \n\
                    7fe0000-8001000 rw-p 00000000 00:00 0                          [stack]\n";
        assert_eq!(unused(maps, 0x7ff_e123), Some(0x7fe_0000..0x7ff_6000));
        // Little is left below, or nothing.
        assert_eq!(unused(maps, 0x7fe_9000), Some(0x7fe_0000..0x7fe_1000));
        assert_eq!(unused(maps, 0x7fe_8fff), None);
        assert_eq!(unused(maps, 0x7fe_0010), None);
        // The frames of another thread, and no stack.
        assert_eq!(unused(maps, 0x7f0_8000), None);
        assert_eq!(unused("7f00000-7f10000 rw-p 00000000 00:00 0 \n", 0x7f0_8000), None);
    }

    #[test]
    fn another_thread_s_stack_stays() {
        let mappings = || fs::read_to_string("/proc/self/maps").unwrap().matches("[stack]").count();
        let before = mappings();
        shorten().unwrap();
        assert_eq!(mappings(), before);
    }
}
