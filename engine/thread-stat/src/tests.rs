use super::*;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Instant;

fn gettid() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs()
}

#[test]
fn the_kernel_distinguishes_a_sleeping_thread_from_a_running_one() {
    for mut kernel in [Proc::own(), Proc::of(std::process::id())] {
        let (say, said) = channel();
        let (end, ended) = channel::<()>();
        let sleeps = std::thread::spawn(move || {
            assert_eq!(kernel.thread(gettid()).unwrap().state, b'R');
            say.send(gettid()).unwrap();
            let _ = ended.recv();
        });
        let thread = said.recv().unwrap();
        assert!(kernel.threads().contains(&thread));
        // Until it sleeps for good.
        let deadline = Instant::now() + Duration::from_secs(120);
        loop {
            let before = kernel.thread(thread).unwrap();
            std::thread::sleep(Duration::from_millis(50));
            let after = kernel.thread(thread).unwrap();
            if before == after && after.state == b'S' {
                break;
            }
            assert!(Instant::now() < deadline, "{before:?} {after:?}");
        }
        let me = gettid();
        let before = kernel.thread(me).unwrap();
        assert!(before.times > 0);
        while kernel.thread(me).unwrap().ran < before.ran + Duration::from_millis(50) {
            assert!(Instant::now() < deadline);
        }
        assert_eq!(kernel.thread(me).unwrap().state, b'R');
        drop(end);
        sleeps.join().unwrap();
        // Its join may return while the kernel still ends it.
        while kernel.thread(thread).is_some() {
            assert!(Instant::now() < deadline);
        }
        assert_eq!(kernel.thread(u32::MAX), None);
    }
}

#[test]
fn facts_are_parsed_whatever_the_thread_s_name_is() {
    let stat = |name: &str| format!("7 ({name}) S 1 7 7 0 -1 4194560 9 0 0 0 3 2 0 0 20 0 1 0 5\n");
    for name in ["platen", "a) R 1", ") ", "a b", ""] {
        let found = parse(&stat(name), "123456789 5 42\n");
        let expected =
            ThreadStat { state: b'S', ran: Duration::from_nanos(123_456_789), times: 42 };
        assert_eq!(found, Some(expected), "{name:?}");
        // Without schedstat, in ticks.
        let expected = ThreadStat { state: b'S', ran: Duration::from_millis(50), times: 0 };
        assert_eq!(parse(&stat(name), ""), Some(expected), "{name:?}");
    }
    assert_eq!(delay("123456789 5 42\n"), Some(Duration::from_nanos(5)));
    assert_eq!(delay(""), None);
    assert_eq!(parse("", ""), None);
    assert_eq!(parse("7 (a) S 1 7", ""), None);
}

/// More threads than CPUs: some wait.
#[test]
fn the_time_for_which_threads_wait_for_a_cpu_is_counted() {
    if delay(&std::fs::read_to_string("/proc/self/schedstat").unwrap_or_default()).is_none() {
        println!("skipped: this kernel has no schedstat");
        return;
    }
    let before: Duration = Proc::own().delayed().values().sum();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..=std::thread::available_parallelism().unwrap().get() {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let deadline = Instant::now() + Duration::from_secs(120);
        let is_counted = || {
            Proc::own().delayed().values().sum::<Duration>() >= before + Duration::from_millis(10)
        };
        while !is_counted() && Instant::now() < deadline {}
        let counted = is_counted();
        over.store(true, Ordering::Relaxed);
        assert!(counted);
    });
}

#[test]
fn a_thread_is_starved_if_it_is_runnable_and_has_not_run_since_the_last_look() {
    struct Told(Vec<(u32, ThreadStat)>);
    impl Process for Told {
        fn thread(&mut self, thread: u32) -> Option<ThreadStat> {
            self.0.iter().find(|(other, _)| *other == thread).map(|(_, stat)| *stat)
        }
        fn threads(&mut self) -> Vec<u32> {
            // One has ended since.
            self.0.iter().map(|(thread, _)| *thread).chain([99]).collect()
        }
    }
    let waits = ThreadStat { state: b'R', ran: Duration::from_secs(1), times: 4 };
    let sleeps = ThreadStat { state: b'S', ..waits };
    let mut threads = Threads::default();
    let mut told = Told(vec![(1, sleeps), (2, waits)]);
    assert!(!threads.look(&mut told), "there was no look before");
    assert!(threads.look(&mut told));
    told.0[1].1.times += 1;
    assert!(!threads.look(&mut told), "it has run");
    told.0[1].1.ran += Duration::from_millis(10);
    assert!(!threads.look(&mut told), "it has run");
    assert!(threads.look(&mut told));
    threads.clear();
    assert!(!threads.look(&mut told));
    told.0[1].1.state = b'D';
    assert!(!threads.look(&mut told), "none waits for a CPU");
}
