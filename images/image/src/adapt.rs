//! Chooses the level of each unit by the work that waits for the compression threads.

use codec::{Codec, Settings};

/// Highest level: beyond it a level costs a third more CPU time for less than 1 % of the bytes.
const HIGHEST: i32 = 9;

/// The level of the next unit.
#[derive(Debug)]
pub(crate) struct Adapt {
    floor: Settings,
    now: Settings,
    /// Number of threads, and of units that they and their queues hold.
    threads: u64,
    depth: u64,
    /// Units to submit before the next change: a change shows once the queues hold units of the
    /// new level.
    rest: u64,
}

impl Adapt {
    /// Begins with the level of `floor`, which is also the lowest level.
    pub(crate) fn new(floor: Settings, threads: usize, depth: usize) -> Self {
        let (threads, depth) = (threads as u64, depth as u64);
        Self { floor, now: floor, threads, depth, rest: depth }
    }

    /// The settings of a unit that is submitted while `waiting` earlier units are not encoded yet.
    pub(crate) fn next(&mut self, waiting: u64) -> Settings {
        if self.rest > 0 {
            self.rest -= 1;
            return self.now;
        }
        // With fewer waiting units than threads, one of the threads had nothing to do.
        let step = if waiting < self.threads {
            1
        } else if waiting > self.depth / 2 {
            -1
        } else {
            return self.now;
        };
        let level = (self.now.level() + step).clamp(self.floor.level(), HIGHEST);
        if level != self.now.level() {
            self.now = Settings::new(Codec::Zstd, Some(level)).expect("1 to 9 are levels of zstd");
            self.rest = self.depth;
        }
        self.now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Units per time that two threads encode at each level from 1 on.
    const RATES: [f64; 9] = [10.0, 9.0, 6.0, 5.0, 3.0, 2.5, 2.0, 1.5, 1.2];

    /// Submits 3,000 units at `arrivals` per time to two threads with queues of 8. Returns the
    /// level of each, and the number of units that found the queues full.
    fn submitted(arrivals: f64) -> (Vec<i32>, usize) {
        let mut adapt = Adapt::new(Settings::new(Codec::Zstd, Some(1)).unwrap(), 2, 10);
        let (mut work, mut levels, mut full) = (Vec::<f64>::new(), Vec::new(), 0);
        for _ in 0..3000 {
            let mut time = 1.0 / arrivals;
            loop {
                while let Some(first) = work.first_mut() {
                    let done = first.min(time);
                    (*first, time) = (*first - done, time - done);
                    if *first > 0.0 {
                        break;
                    }
                    work.remove(0);
                }
                if work.len() < 10 {
                    break;
                }
                full += 1;
                time = work[0];
            }
            let settings = adapt.next(work.len() as u64);
            let level = settings.level();
            levels.push(level);
            work.push(1.0 / RATES[usize::try_from(level).unwrap() - 1]);
        }
        (levels, full)
    }

    #[test]
    fn the_level_is_the_highest_that_keeps_up() {
        for (arrivals, expected) in [(0.1, 9), (1.8, 7), (4.0, 4), (9.5, 1), (100.0, 1)] {
            let (levels, full) = submitted(arrivals);
            let late = &levels[1000..];
            let mean = f64::from(late.iter().sum::<i32>()) / late.len() as f64;
            assert!((mean - f64::from(expected)).abs() <= 1.0, "{arrivals}: {mean}");
            // Where a level keeps up, the writer does not wait.
            assert!(arrivals > 10.0 || full < 30, "{arrivals}: waited {full} times");
        }
    }
}
