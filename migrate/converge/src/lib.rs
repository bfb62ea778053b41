//! Decides how and when a migration ends, within what the operator allows.
//!
//! ```text
//!  QEMU's monitor, relay ─► Sample, four a second ─► Controller ─► Action  ─► QEMU's monitor
//!                                                        └──────► Decision ─► --explain
//! ```
//!
//! Pure logic: no thread, no I/O, no clock; the caller passes the time.
//!
//! # When QEMU stops the VM
//!
//! QEMU sends what its dirty bitmap shows. When less than a threshold is left it reads the dirty
//! log (a *synchronisation*), and if still less than the threshold is left it stops the VM and
//! sends the rest. The threshold is `downtime-limit` x bandwidth. QEMU takes the bandwidth of its
//! last 100 ms, or `avail-switchover-bandwidth` (8.2 and later).
//!
//! That bandwidth is wrong where the last pages compress less than those before, and QEMU does not
//! know the bytes in flight in the relays. The controller knows both. With a drain rate D of the
//! latest pages, and a time F that is spent in any case (bytes in flight, device state), it sets a
//! threshold of 0.9 D (downtime - F). The tenth is for guests whose last pages compress even less.
//!
//! # What it does when the migration stalls
//!
//! It examines the bytes that are left right after a synchronisation. If they fall from window to
//! window, it does nothing. If they do not, it takes the next of these steps whenever the former
//! ones do not help:
//!
//! 1. A longer downtime: first half of what is allowed, then more, up to all of it. The migration
//!    so ends at a moment at which little is left.
//! 2. Slower vCPUs (QEMU's auto-converge): as slow as the drain rate asks for, then slower.
//! 3. Postcopy.
//! 4. A message with the figures, and with the options that would end the migration.
//!
//! A guest that dirties pages faster than they drain during a whole pass does so in each shorter
//! time, too: the dirtied pages of a time t grow less than t does, since a page counts once. So one
//! pass is enough to tell, and the controller does not wait for several of them.
//!
//! # What fails
//!
//! Nothing: impossible figures are bounded on input. A wrong figure costs time or downtime, and the
//! VM's bytes do not depend on it.
//!
//! # Limits
//!
//! The time F of the device state is a guess before the VM stops. Nothing is known of a guest's
//! dirtying before the end of the first pass.

mod controller;
mod decision;
mod forecast;
mod limits;
mod passes;
mod rates;
mod sample;
mod step;
mod switchover;

pub use controller::Controller;
pub use decision::{Decision, Remedy, Stuck, Why};
pub use forecast::downtime_for;
pub use limits::{Limits, Postcopy};
pub use sample::{Phase, Sample};
pub use step::{Action, Step};
pub use switchover::{bytes_for, to_u64, Switchover};
