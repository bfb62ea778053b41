//! Forecasts migrations: total time, downtime, bytes and CPU time, by method and link.
//!
//! ```text
//!  DirtyCurve ┐
//!  Guest ─────┤
//!  Sampled ───┼─► Setup ─► forecast(Method, Link) ─► Forecast, and why it does not converge
//!  Cores ─────┤              best: how pages drain     passes: QEMU's passes until the end
//!  QEMU ──────┘
//! ```
//!
//! Pure functions: no I/O, no clock. `rehearse` measures the input on a migration whose bytes are
//! discarded; `advise` measures it on samples, or gets it from the user.
//!
//! # What the forecast is
//!
//! A model of QEMU's passes ([`forecast`]). It is no measurement, and its errors are those of its
//! input: a guest that writes differently later, a link with other traffic.
//!
//! # Limits
//!
//! Single stream. The time of the device state is a guess. Dirtying beyond the longest pass is
//! extrapolated from the curve's last part.

mod best;
mod curve;
mod methods;
mod passes;
mod sizes;

pub use best::{best, Best, Cores, There, Work};
pub use converge::to_u64;
pub use curve::{DirtyCurve, Pass};
pub use methods::{Link, Method, QemuSettings, Setup};
pub use passes::{forecast, Course, End, Forecast, Guest};
pub use sizes::{Candidate, Sampled, Sizes};

/// The whole number next to `number`, as [`to_u64`] gives it.
pub fn rounded(number: f64) -> u64 {
    to_u64(number.round())
}
