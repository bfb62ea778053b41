//! Chooses codec and level while a migration runs (`--codec auto`): what minimises completion time.
//!
//! ```text
//!  readers ─ Class::of(chunk), choose(class) ──► Choice ──► codec threads ──► link
//!               ▲ plan: one word a class              │ Observation: sizes, CPU time
//!               │                                     ▼
//!          mix (the best mix) ◄── estimates (what each candidate makes of a class)
//!               ▲
//!               └── flow (bottleneck, drain rate, cores) ◄── tick(Signals), every 25 to 100 ms
//! ```
//!
//! Logic alone: no thread, no I/O, no clock; time comes with the calls.
//!
//! # What is minimised
//!
//! A plain byte encoded by candidate i costs c_i ns of CPU and becomes s_i bytes. With a share f_i
//! of the chunks each, c = Σ f_i c_i and s = Σ f_i s_i, and as link and codec threads work at the
//! same time, a byte takes
//!
//! ```text
//!  t = max( s / B,  c / W,  (c + o) / C,  1 / Q )
//! ```
//!
//! for a link of B bytes/ns, W cores for the codec threads (`--max-cpu`, or what they get), C cores
//! shared with work of o ns a byte, and QEMUs that take Q bytes/ns. t grows with c and s, so its
//! minimum lies on the lower left of the convex hull of the points (c_i, s_i); and as a maximum of
//! linear functions it is least either at a vertex or where two of them are equal on an edge. For
//! link and CPU on the edge from a to b:
//!
//! ```text
//!  s/B = c/W   =>   f = (s_a/B - c_a/W) / (s_a/B - s_b/B + c_b/W - c_a/W)   of the chunks get b
//! ```
//!
//! So the best is a mix of two neighbours, not a level. Chunks differ: each has a [`Class`] by a
//! look that costs two microseconds, each class has its own points, and CPU time goes first where
//! it buys most bytes.
//!
//! Where a QEMU is the bottleneck, the time is QEMU's; up to 40 % of the codec threads' time
//! then goes into saving bytes, less where threads wait for cores, for QEMU would wait too.
//!
//! # Trying out
//!
//! A chunk now and then gets a candidate that could, as far as is known, be better than the mix,
//! and is sent so. What that takes more of codec threads or link than a usual chunk is held to 2 %
//! of either (8 % for a class's first 24 chunks). What one candidate makes of a chunk tells of the
//! others too, so a class that turns incompressible is known as such at once and tried out but
//! rarely.
//!
//! # What fails
//!
//! Nothing: figures that cannot be (no time, no bytes, more out than in, NaN) are bounded where
//! they come in. The worst a wrong figure does is a slow choice; every choice is a correct one.
//!
//! # Limits
//!
//! It does not hold threads back: `--max-cpu` is kept by choosing cheaper candidates, so without
//! `none` among them it is kept only as far as the cheapest allows.

mod config;
mod controller;
mod estimate;
mod explain;
mod flow;
mod mix;
mod probe;

pub use config::{Config, MAX_CANDIDATES};
pub use controller::{Choice, Controller, Observation};
pub use explain::{Candidate, ClassMix, Decision};
pub use flow::{Bottleneck, Signals};
pub use probe::Class;
