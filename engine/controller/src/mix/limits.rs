//! The capacities available, and the time that a mix takes with them.

use crate::estimate::Point;

/// The capacities available, from which follows the time for a plain byte at a mix of cost c and
/// size s.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Bytes that the link transmits in a ns.
    pub(crate) link: f64,
    /// Cores of the codec threads.
    pub(crate) workers: f64,
    /// Cores shared by all work, and the CPU ns a plain byte of the work besides encoding.
    pub(crate) cores: Option<(f64, f64)>,
    /// Time that QEMU, at either end, takes for a plain byte in any case, ns; 0: not known.
    pub(crate) floor: f64,
    /// Share of the floor's time that the codec threads may spend on saving bytes.
    pub(crate) idle_use: f64,
    /// The share by which a mix may take longer than the fastest if it takes less CPU time.
    pub(crate) slack: f64,
}

impl Limits {
    pub(super) fn link_time(&self, at: Point) -> f64 {
        at.size / self.link
    }

    /// Time the CPU takes for a plain byte, ns.
    pub(crate) fn cpu_time(&self, at: Point) -> f64 {
        let shared = self.cores.map_or(0.0, |(cores, other)| (at.cost + other) / cores);
        shared.max(at.cost / self.workers)
    }

    /// Time for a plain byte, ns.
    pub(crate) fn time(&self, at: Point) -> f64 {
        self.link_time(at).max(self.cpu_time(at)).max(self.floor)
    }

    /// The share of the step from `from` to `to` at which time is least; the smallest of several.
    pub(super) fn best_share(&self, from: Point, to: Point) -> f64 {
        let rows = |at: Point| {
            let (cores, other) = self.cores.unwrap_or((f64::INFINITY, 0.0));
            [self.link_time(at), at.cost / self.workers, (at.cost + other) / cores]
        };
        let (start, end) = (rows(from), rows(to));
        let mut best = (self.time(from), 0.0);
        let mut consider = |share: f64| {
            let time = self.time(between(from, to, share));
            if share.is_finite() && time < best.0 * (1.0 - 1e-12) {
                best = (time, share);
            }
        };
        // The shares need not come in ascending order: the strict comparison above prefers the
        // first of equals, and equals occur only on a plateau caused by the floor.
        for row in &mut [(0, 1), (0, 2)] {
            let gap = |rows: &[f64; 3]| rows[row.0] - rows[row.1];
            let share = gap(&start) / (gap(&start) - gap(&end));
            if (0.0..=1.0).contains(&share) {
                consider(share);
            }
        }
        let to_floor = (start[0] - self.floor) / (start[0] - end[0]);
        if (0.0..=1.0).contains(&to_floor) {
            consider(to_floor);
        }
        consider(1.0);
        best.1
    }
}

/// The point a share of the way from `from` to `to`.
pub(super) fn between(from: Point, to: Point, share: f64) -> Point {
    Point {
        cost: from.cost + share * (to.cost - from.cost),
        size: from.size + share * (to.size - from.size),
    }
}
