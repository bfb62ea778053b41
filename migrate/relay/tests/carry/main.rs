//! The two relays together, between synthetic QEMUs that behave as real ones do: unix sockets and
//! threads on both sides, a real `Source`, a real `Server`, loopback TCP between them. Test names
//! are claims; the rules are those of `docs/wire.md`.
//!
//! No test waits for a fixed time where it can wait for an event. A claim that something does *not*
//! happen gets a short while in which it would ([`harness::A_WHILE`]), and every test has a
//! watchdog.

mod acknowledged;
mod bad_peers;
mod barriers;
mod channel_deltas;
mod commit;
mod cutter;
mod delayed;
mod deltas;
mod disks;
#[allow(dead_code, reason = "made for the driver's tests, which use all of it")]
#[path = "../../../../accel/qpl/tests/fake/mod.rs"]
mod fake_qpl;
mod flood;
mod fronts;
mod harness;
mod histories;
mod identity;
mod killed;
mod late;
mod link_rate;
mod lost_peer;
mod postcopy;
mod prepared;
mod proxy;
mod qpl_units;
mod replaced;
mod resume;
mod secured;
mod seed;
mod settling;
mod silent;
#[allow(dead_code, reason = "made for the driver's tests, which use all of it")]
#[path = "../../../../accel/qat/tests/simulated/sim.rs"]
mod sim;
mod starts;
mod strangers;
mod unconfirmed;
mod withheld;
