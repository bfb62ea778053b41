//! Jobs on devices, which end later.

use super::*;

/// A job of a device: the device finishes jobs later, in the order that `finish` decides.
struct Slow {
    number: u64,
}

/// A worker's device. It holds a few jobs and finishes the youngest first, a random few at a time.
struct Device {
    kept: Vec<(u64, Ticket<(u64, u64)>)>,
    depth: usize,
    seed: u64,
    most: Arc<AtomicU64>,
}

impl Device {
    fn random(&mut self) -> u64 {
        self.seed = self.seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.seed >> 33
    }
}

impl Job for Slow {
    type Output = (u64, u64);
    type Context = Device;

    fn run(self, _device: &mut Device) -> (u64, u64) {
        (self.number, self.number * 2)
    }

    fn start(
        self,
        device: &mut Device,
        ticket: Ticket<(u64, u64)>,
    ) -> Option<(Ticket<(u64, u64)>, (u64, u64))> {
        assert!(device.kept.len() < device.depth, "a job came without room");
        // The device refuses some jobs; these run at once.
        if device.random().is_multiple_of(7) {
            return Some((ticket, self.run(device)));
        }
        device.kept.push((self.number, ticket));
        device.most.fetch_max(device.kept.len() as u64, Ordering::Relaxed);
        None
    }

    fn in_flight(device: &Device) -> usize {
        device.kept.len()
    }

    fn has_room(device: &Device) -> bool {
        device.kept.len() < device.depth
    }

    fn poll(device: &mut Device, idle: bool, done: &mut dyn FnMut(Ticket<(u64, u64)>, (u64, u64))) {
        if idle {
            thread::sleep(Duration::from_micros(20));
        }
        for _ in 0..device.random() % 3 {
            if let Some((number, ticket)) = device.kept.pop() {
                done(ticket, (number, number * 2));
            }
        }
    }
}

/// A pool whose workers each own a device of `depth`, and the most jobs that a device held.
fn devices(threads: usize, depth: usize) -> (Arc<Pool<Slow>>, Arc<AtomicU64>) {
    let most = Arc::new(AtomicU64::new(0));
    let config = PoolConfig { threads, ring_capacity: 4, name: "device" };
    let pool = Pool::new(config, |number| Device {
        kept: Vec::new(),
        depth,
        seed: number as u64,
        most: Arc::clone(&most),
    });
    (pool.expect("threads can be made"), most)
}

#[test]
fn jobs_on_devices_come_back_exactly_once_to_their_own_submitter() {
    const SUBMITTERS: u64 = 3;
    const EACH: u64 = 20_000;
    let (pool, most) = devices(2, 8);
    let submitters: Vec<_> = (0..SUBMITTERS)
        .map(|who| {
            let pool = Arc::clone(&pool);
            thread::spawn(move || {
                let results = Results::new(64);
                let mut seen = vec![false; usize::try_from(EACH).unwrap()];
                let mut came = 0;
                let mut take = |(number, double): (u64, u64)| {
                    assert_eq!(double, number * 2);
                    assert_eq!(number / EACH, who, "an output of another submitter");
                    let seen = &mut seen[usize::try_from(number % EACH).unwrap()];
                    assert!(!*seen, "{number} came twice");
                    *seen = true;
                };
                for number in 0..EACH {
                    let mut job = Slow { number: who * EACH + number };
                    while let Err(back) = pool.try_submit(job, &results) {
                        job = back;
                        // No wait here: the rings may be full of other threads' jobs while none of
                        // this thread's is out.
                        match results.pop() {
                            Some(output) => {
                                take(output);
                                came += 1;
                            }
                            None => thread::yield_now(),
                        }
                    }
                }
                while came < EACH {
                    let Popped::Item(output) = results.pop_until(None) else { unreachable!() };
                    take(output);
                    came += 1;
                }
                assert!(results.is_empty());
            })
        })
        .collect();
    for submitter in submitters {
        submitter.join().unwrap();
    }
    assert_eq!(most.load(Ordering::Relaxed), 8, "the devices were never full");
}

#[test]
fn closing_waits_for_jobs_of_devices() {
    let (pool, _) = devices(2, 64);
    let results = Results::new(256);
    let mut queued = 0;
    for number in 0..100 {
        if pool.try_submit(Slow { number }, &results).is_ok() {
            queued += 1;
        }
    }
    pool.join();
    let mut came = 0;
    while results.pop().is_some() {
        came += 1;
    }
    assert_eq!(came, queued);
    assert!(pool.try_submit(Slow { number: 0 }, &results).is_err());
}
