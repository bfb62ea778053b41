use super::*;
use pulse::Pulse;
use std::collections::BTreeMap;

const PROCESS: u32 = 10;

/// A kernel with made-up facts.
#[derive(Default)]
struct Told(BTreeMap<u32, ThreadStat>);

impl Process for Told {
    fn thread(&mut self, thread: u32) -> Option<ThreadStat> {
        self.0.get(&thread).copied()
    }
    fn threads(&mut self) -> Vec<u32> {
        self.0.keys().copied().collect()
    }
}

/// A server with one thread that has started a request, and a clock.
struct Scene {
    told: Told,
    pulse: Pulse,
    watchdog: Watchdog,
    now: Instant,
    thread: u32,
}

impl Scene {
    fn new() -> Self {
        let pulse = Pulse::private();
        pulse.slot(3).begin();
        let thread = pulse.slot(3).look().thread;
        let mut told = Told::default();
        let asleep = ThreadStat { state: b'S', ran: Duration::ZERO, times: 1 };
        told.0.extend([(PROCESS, asleep), (thread, asleep)]);
        Self { told, pulse, watchdog: Watchdog::default(), now: Instant::now(), thread }
    }

    fn after(&mut self, seconds: u64) -> Option<Hang> {
        self.now += Duration::from_secs(seconds);
        let state = self.told.0.get(&PROCESS).map(|seen| seen.state);
        self.watchdog.look(self.now, self.pulse.slots(), state, &mut self.told)
    }

    /// Looks each second, after calling `each`. Returns after how many looks the server counts
    /// as hung, and why.
    fn until_hung(&mut self, most: u32, each: impl Fn(&mut Self)) -> Option<(u32, String)> {
        (1..=most).find_map(|second| {
            each(self);
            Some((second, self.after(1)?.why))
        })
    }

    fn seen(&mut self, thread: u32) -> &mut ThreadStat {
        self.told.0.get_mut(&thread).unwrap()
    }
}

#[test]
fn a_thread_that_sleeps_in_a_request_hangs_unless_it_waits_for_a_disk_or_progresses() {
    let mut scene = Scene::new();
    let (second, why) = scene.until_hung(100, |_| ()).unwrap();
    assert!((4..8).contains(&second), "after {second} s");
    assert!(why.contains("nothing wakes it"), "{why}");

    let mut scene = Scene::new();
    assert_eq!(scene.until_hung(100, |scene| scene.pulse.slot(3).advance()), None);
    assert_eq!(scene.until_hung(3, |_| ()), None);
    scene.pulse.slot(3).while_waiting(|| {
        let now = scene.now;
        for second in 1..100 {
            let now = now + Duration::from_secs(second);
            let look = &mut scene.watchdog;
            let state = Some(b'S');
            assert_eq!(look.look(now, scene.pulse.slots(), state, &mut scene.told), None);
        }
    });
    let mut scene = Scene::new();
    scene.pulse.slot(3).end();
    assert_eq!(scene.until_hung(100, |_| ()), None);
}

#[test]
fn a_thread_that_spins_hangs_and_one_that_gets_no_cpu_does_not() {
    let spin = |millis: u64| {
        move |scene: &mut Scene| {
            let thread = scene.thread;
            let seen = scene.seen(thread);
            seen.state = b'R';
            seen.ran += Duration::from_millis(millis);
            seen.times += u64::from(millis > 0);
        }
    };
    let (second, why) = Scene::new().until_hung(100, spin(900)).unwrap();
    assert!((4..8).contains(&second), "after {second} s");
    assert!(why.contains("over one page"), "{why}");
    // A tenth of a CPU is enough to detect it, later.
    let (second, _) = Scene::new().until_hung(100, spin(100)).unwrap();
    assert!((15..20).contains(&second), "after {second} s");
    assert_eq!(Scene::new().until_hung(1000, spin(0)), None, "starved");
    // A hundredth, as of a thread that polls now and then.
    let (second, why) = Scene::new().until_hung(1000, spin(1)).unwrap();
    assert!((60..65).contains(&second), "after {second} s");
    assert!(why.contains("no page in 60 s"), "{why}");
}

#[test]
fn a_thread_that_may_wait_for_a_starved_thread_gets_time() {
    let mut scene = Scene::new();
    let starved = ThreadStat { state: b'R', ran: Duration::ZERO, times: 4 };
    scene.told.0.insert(99, starved);
    assert_eq!(scene.until_hung(50, |_| ()), None);
    // It gets a CPU, and wakes no other thread.
    let run = |scene: &mut Scene| scene.seen(99).times += 1;
    assert!(scene.until_hung(3, run).is_some());
}

/// A write that waits for the store's keeper looks at it now and then.
#[test]
fn a_thread_that_polls_while_another_thread_is_starved_gets_time() {
    let mut scene = Scene::new();
    let starved = ThreadStat { state: b'R', ran: Duration::ZERO, times: 4 };
    scene.told.0.insert(99, starved);
    let poll = |scene: &mut Scene| {
        let thread = scene.thread;
        scene.seen(thread).times += 1;
    };
    assert_eq!(scene.until_hung(500, poll), None);
    // It gets a CPU. The thread that polls has its minute from now on.
    let run = |scene: &mut Scene| {
        poll(scene);
        scene.seen(99).times += 1;
    };
    let (second, why) = scene.until_hung(500, run).unwrap();
    assert!((59..65).contains(&second), "after {second} s");
    assert!(why.contains("no page in 60 s"), "{why}");
    // One that runs on and on hangs, whichever thread it keeps from its CPU.
    let mut scene = Scene::new();
    scene.told.0.insert(99, starved);
    let spin = |scene: &mut Scene| {
        let thread = scene.thread;
        let seen = scene.seen(thread);
        (seen.state, seen.times) = (b'R', seen.times + 1);
        seen.ran += Duration::from_millis(900);
    };
    let (second, why) = scene.until_hung(100, spin).unwrap();
    assert!((4..8).contains(&second), "after {second} s");
    assert!(why.contains("over one page"), "{why}");
}

#[test]
fn a_process_that_is_stopped_hangs_and_one_that_is_traced_does_not() {
    let mut scene = Scene::new();
    scene.pulse.slot(3).end();
    scene.seen(PROCESS).state = b'T';
    let (second, why) = scene.until_hung(100, |_| ()).unwrap();
    assert!((5..8).contains(&second), "after {second} s");
    assert!(why.contains("SIGSTOP"), "{why}");
    let mut scene = Scene::new();
    scene.seen(PROCESS).state = b't';
    assert_eq!(scene.until_hung(100, |_| ()), None);
    // Stopped and continued repeatedly.
    let mut scene = Scene::new();
    scene.pulse.slot(3).end();
    for _ in 0..20 {
        scene.seen(PROCESS).state = b'T';
        assert_eq!(scene.until_hung(4, |_| ()), None);
        scene.seen(PROCESS).state = b'S';
        assert_eq!(scene.after(1), None);
    }
}

#[test]
fn seconds_without_a_check_do_not_count() {
    let mut scene = Scene::new();
    for _ in 0..100 {
        assert_eq!(scene.after(7), None);
    }
    scene.seen(PROCESS).state = b'T';
    for _ in 0..100 {
        assert_eq!(scene.after(3600), None);
    }
}
