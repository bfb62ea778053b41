//! Chooses codec and level during a migration (`--codec auto`) so that it completes soonest.
//!
//! ```text
//!  readers ─ Class::of(chunk), choose(class) ──► Choice ──► codec threads ──► link
//!               ▲ plan: one word a class              │ Observation: sizes, CPU time
//!               │                                     ▼
//!          mix (the best mix) ◄── estimates (size and cost of each candidate for a class)
//!               ▲
//!               └── flow (bottleneck, drain rate, cores) ◄── tick(Signals), every 10 to 100 ms
//! ```
//!
//! Pure logic: no thread, no I/O, no clock; callers pass the time.
//!
//! # The function to minimise
//!
//! A plain byte encoded by candidate i costs c_i ns of CPU and becomes s_i bytes. With a share f_i
//! of the chunks each, c = Σ f_i c_i and s = Σ f_i s_i, and as link and codec threads work at the
//! same time, a byte takes
//!
//! ```text
//!  t = max( s / B,  c / W,  (c + o) / C,  1 / Q )
//! ```
//!
//! for a link of B bytes/ns, W cores for the codec threads (`--max-cpu`, or the cores they get), C
//! cores shared with work of o ns a byte, and QEMUs that process Q bytes/ns. t grows with c and s,
//! so its minimum lies on the lower left of the convex hull of the points (c_i, s_i). As a maximum
//! of linear functions it is least either at a vertex or where two of them are equal on an edge.
//! For link and CPU on the edge from a to b:
//!
//! ```text
//!  s/B = c/W   =>   f = (s_a/B - c_a/W) / (s_a/B - s_b/B + c_b/W - c_a/W)   of the chunks get b
//! ```
//!
//! So the best is a mix of two neighbours, not a single level. Chunks differ: a probe that costs
//! two microseconds gives each a [`Class`], each class has its own points, and CPU time goes first
//! where it saves most bytes.
//!
//! The last percents of t cost most CPU time: behind a link, zstd 9 sends 6 % less than zstd 3 for
//! five times its CPU time. So of the mixes that take up to 2 % longer than the least time, the
//! cheapest is used if it takes much less CPU time (8 % for each percent), as long as pages are
//! sent for the first time. Pages that the guest writes meanwhile are sent again, and from then on
//! each percent of the rate counts for more than one of the time.
//!
//! Where a QEMU is the bottleneck, it determines the time. Up to 40 % of the codec threads' time is
//! then spent on saving bytes; less where threads wait for cores, since QEMU would wait too.
//!
//! # Exploring
//!
//! Now and then a chunk gets a candidate that could, by the observations so far, be better than the
//! mix. The additional time of codec threads and link is limited to 2 % of either (4 % for a
//! class's first 24 chunks). An observation of one candidate also updates the others, so a class
//! that becomes incompressible is noticed at once, and then explored only rarely. Observations age,
//! so a candidate that was tried on a few untypical chunks is tried again.
//!
//! # What fails
//!
//! Nothing fails. Impossible figures (no time, no bytes, more out than in, NaN) are bounded on
//! input. A wrong figure can only cause a slow choice; every choice is correct.
//!
//! # Limits
//!
//! The controller does not throttle threads: it meets `--max-cpu` by choosing cheaper candidates.
//! Without `none` among them, the cheapest candidate sets the minimum.

mod choice;
mod config;
mod controller;
mod estimate;
mod explain;
mod flow;
mod mix;
mod plan;
mod planner;
mod probe;

pub use choice::{Choice, Observation};
pub use config::{Config, MAX_CANDIDATES};
pub use controller::Controller;
pub use explain::{Candidate, ClassMix, Decision};
pub use flow::{Bottleneck, Signals};
pub use probe::Class;
