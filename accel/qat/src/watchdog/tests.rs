use super::*;
use std::collections::HashMap;

/// A process of made-up threads, and its watchdog.
struct Scene {
    watchdog: Watchdog,
    now: Instant,
    calls: Arc<Calls>,
    kernel: Kernel,
}

#[derive(Default)]
struct Kernel(HashMap<u32, ThreadStat>);

impl Process for Kernel {
    fn thread(&mut self, thread: u32) -> Option<ThreadStat> {
        self.0.get(&thread).copied()
    }

    fn threads(&mut self) -> Vec<u32> {
        self.0.keys().copied().collect()
    }
}

/// Another thread of the process.
const OTHER: u32 = 1;

impl Scene {
    /// The thread in the call sleeps, the other one too.
    fn new() -> Self {
        let asleep = ThreadStat { state: b'S', ran: Duration::ZERO, times: 0 };
        let own = rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs();
        Self {
            watchdog: Watchdog::default(),
            now: Instant::now(),
            calls: Arc::default(),
            kernel: Kernel([(OTHER, asleep), (own, asleep)].into()),
        }
    }

    fn own(&mut self) -> &mut ThreadStat {
        self.kernel.0.iter_mut().find(|(thread, _)| **thread != OTHER).unwrap().1
    }

    fn look(&mut self, after: Duration) -> Option<Hang> {
        self.now += after;
        let engines = vec![Arc::clone(&self.calls)];
        self.watchdog.look_at(self.now, engines, &mut self.kernel)
    }

    /// Looks once a second, after `each`; the second in which the call was found to hang.
    fn until_hung(&mut self, seconds: u64, mut each: impl FnMut(&mut Self)) -> Option<u64> {
        (0..seconds).find(|_| {
            each(self);
            self.look(LOOK).is_some()
        })
    }
}

/// Runs the body with a call under way.
fn inside(scene: &mut Scene, body: impl FnOnce(&mut Scene)) {
    let calls = Arc::clone(&scene.calls);
    let _inside = calls.enter(Call::Compress);
    body(scene);
}

#[test]
fn a_call_asleep_or_spinning_hangs_after_ten_seconds_and_is_named() {
    for ran in [Duration::ZERO, Duration::from_secs(1)] {
        inside(&mut Scene::new(), |scene| {
            let found = scene.until_hung(60, |scene| scene.own().ran += ran).unwrap();
            assert!((LOOKS..LOOKS + 3).contains(&found), "after {found} s");
            let text = scene.look(LOOK).unwrap().to_string();
            assert!(text.contains("cpaDcCompressData2") && text.contains("for 11 s"), "{text}");
        });
    }
}

#[test]
fn calls_that_return_and_an_engine_without_one_never_hang() {
    let mut scene = Scene::new();
    assert_eq!(scene.until_hung(60, |_| ()), None);
    let calls = Arc::clone(&scene.calls);
    for _ in 0..10 {
        let _inside = calls.enter(Call::Poll);
        assert_eq!(scene.until_hung(9, |_| ()), None);
    }
}

#[test]
fn seconds_in_which_the_watchdog_did_not_run_do_not_count() {
    inside(&mut Scene::new(), |scene| {
        for _ in 0..100 {
            assert_eq!(scene.look(LATE), None);
        }
        // A machine that was suspended for an hour.
        assert_eq!(scene.until_hung(9, |_| ()), None);
        assert_eq!(scene.look(Duration::from_secs(3600)), None);
        assert!(scene.until_hung(4, |_| ()).is_some());
    });
}

#[test]
fn a_thread_that_gets_no_cpu_does_not_hang() {
    inside(&mut Scene::new(), |scene| {
        let starve = |scene: &mut Scene| scene.own().state = b'R';
        assert_eq!(scene.until_hung(100, starve), None);
        // It runs from now on.
        assert!(scene
            .until_hung(LOOKS + 2, |scene| scene.own().ran += Duration::from_nanos(1))
            .is_some());
    });
}

#[test]
fn a_sleeper_does_not_hang_while_another_thread_gets_no_cpu() {
    inside(&mut Scene::new(), |scene| {
        let starve = |scene: &mut Scene| scene.kernel.0.get_mut(&OTHER).unwrap().state = b'R';
        assert_eq!(scene.until_hung(100, starve), None);
        let spin = |scene: &mut Scene| scene.own().ran += Duration::from_nanos(1);
        assert!(scene.until_hung(LOOKS + 2, spin).is_some(), "it runs, and waits for nobody");
    });
}

#[test]
fn a_thread_under_a_debugger_does_not_hang() {
    inside(&mut Scene::new(), |scene| {
        assert_eq!(scene.until_hung(100, |scene| scene.own().state = b't'), None);
    });
}
