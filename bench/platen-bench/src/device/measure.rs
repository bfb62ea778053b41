//! Helpers of all parts: times, CPU time, figures of them, random orders, aligned memory.

use rustix::time::{clock_gettime, ClockId};
use std::time::Instant;

use device::PAGE;

/// Bytes with the alignment that direct I/O requires.
pub(super) struct Aligned {
    bytes: Vec<u8>,
    start: usize,
}

impl Aligned {
    pub(super) fn new(len: usize) -> Self {
        let bytes = vec![0; len + PAGE];
        let start = bytes.as_ptr().align_offset(PAGE);
        Self { bytes, start }
    }

    pub(super) fn of(plain: &[u8]) -> Self {
        let mut this = Self::new(plain.len());
        this.all().copy_from_slice(plain);
        this
    }

    pub(super) fn all(&mut self) -> &mut [u8] {
        let len = self.bytes.len() - PAGE;
        &mut self.bytes[self.start..self.start + len]
    }
}

#[inline]
pub(super) fn timed<R>(
    times: &mut Vec<f32>,
    run: impl FnOnce() -> anyhow::Result<R>,
) -> anyhow::Result<R> {
    let start = Instant::now();
    let result = run()?;
    times.push(start.elapsed().as_secs_f32() * 1e6);
    Ok(result)
}

/// The median, and the 99th percentile.
pub(super) fn percentiles(times: &mut [f32]) -> (f64, f64) {
    times.sort_unstable_by(f32::total_cmp);
    let at = |part: usize| times.get(times.len() * part / 100).copied().map_or(0.0, f64::from);
    (at(50), at(99))
}

pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => 0.0,
        odd if odd % 2 == 1 => values[middle],
        _ => f64::midpoint(values[middle - 1], values[middle]),
    }
}

/// Microseconds of this process's CPU time.
pub(crate) fn process_cpu() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 * 1e6 + time.tv_nsec as f64 / 1e3
}

pub(super) struct Random(pub(super) u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    /// The numbers below `count`, in random order.
    pub(super) fn order(&mut self, count: u64) -> Vec<u64> {
        let mut order: Vec<u64> = (0..count).collect();
        for last in (1..order.len()).rev() {
            let other = usize::try_from(self.next() % (last as u64 + 1)).expect("below last");
            order.swap(last, other);
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_is_a_permutation() {
        let mut order = Random(3).order(1000);
        assert_ne!(order, (0..1000).collect::<Vec<_>>());
        order.sort_unstable();
        assert_eq!(order, (0..1000).collect::<Vec<_>>());
        assert_eq!((median(vec![3.0, 1.0, 2.0]), median(vec![4.0, 1.0])), (2.0, 2.5));
    }
}
