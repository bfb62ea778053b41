//! Ctrl-C, SIGTERM or SIGHUP at a restore: ends the command, and says what becomes of the VMs.

use crate::leave;
use crate::say::say;
use anyhow::Context;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether a player, a process that serves the image, was told to serve a VM. It goes on without
/// the command, since the VMs would stop without it.
static PLAYS: AtomicBool = AtomicBool::new(false);
/// Whether the command itself has begun to send a VM to its QEMU.
static LOADS: AtomicBool = AtomicBool::new(false);

/// Notes that a player is told to serve a VM.
pub(crate) fn plays() {
    PLAYS.store(true, Ordering::Release);
}

/// Notes that the command begins to send a VM to its QEMU.
pub(crate) fn loads() {
    LOADS.store(true, Ordering::Release);
}

/// Lets an interrupt end this process with a message, and exit status 1.
///
/// # Errors
///
/// The kernel's.
pub(crate) fn explained() -> anyhow::Result<()> {
    ctrlc::set_handler(|| {
        for text in texts(PLAYS.load(Ordering::Acquire), LOADS.load(Ordering::Acquire)) {
            say(text);
        }
        leave::now(1);
    })
    .context("cannot handle signals")
}

/// The messages about what an interrupt leaves behind.
fn texts(plays: bool, loads: bool) -> impl Iterator<Item = &'static str> {
    let none = !plays && !loads;
    let texts = [
        (none, "interrupted: QEMU has received nothing of the VM"),
        (
            plays,
            "interrupted: the restore goes on without this command. Its player loads the VM, and \
             QEMU runs the VM. To give it up, end its QEMU",
        ),
        (
            loads,
            "interrupted: QEMU may not have received the whole VM. It does not run the VM then: end \
             that QEMU, if it has not ended by itself",
        ),
    ];
    texts.into_iter().filter_map(|(holds, text)| holds.then_some(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interrupt_says_what_goes_on() {
        let said = |plays, loads| texts(plays, loads).collect::<Vec<_>>();
        assert!(said(false, false)[0].contains("has received nothing"));
        assert!(said(true, false)[0].contains("goes on without this command"));
        assert!(said(false, true)[0].contains("does not run the VM then"));
        assert_eq!(said(true, true).len(), 2);
    }
}
