//! Detects a server that hangs, by its heartbeats and the kernel's state of its threads.
//!
//! A thread that has had the same request for some seconds without finishing a page of it may hang,
//! or it may have got no CPU. The kernel tells the two apart:
//!
//! | the thread | counts as |
//! |---|---|
//! | stopped (state T of the process) | hung after 5 s |
//! | sleeps and was not woken once (S or D, not scheduled) | hung after 4 s; not while another thread of the server waits for a CPU in vain, because the sleeper may wait for that thread |
//! | runs (has used CPU) | hung when it has used 1.5 s of CPU in 4 s or more: a page takes milliseconds |
//! | is woken, and sleeps again | hung after 60 s |
//! | waits for a CPU (R, not scheduled) | starved: the second does not count |
//! | is traced (state t) | under a debugger: does not count |
//!
//! The watchdog counts its own looks, one a second. A late look does not count: whatever delayed
//! the supervisor (a suspended machine, no CPU) may have delayed the server too. A thread that
//! waits for a backing device reports that, and is not suspected.

use std::fs;
use std::io::Read;
use std::time::{Duration, Instant};

use pulse::{Look, Slot, State};

/// The time between two looks.
pub(super) const LOOK: Duration = Duration::from_secs(1);

/// A look that comes this long after the last one does not count.
const LATE: Duration = Duration::from_millis(2500);

/// After this many looks at a stopped process it counts as hung.
const STOPPED: u32 = 5;

/// After this many looks at a thread asleep in the same place it counts as hung.
const ASLEEP: u32 = 4;

/// The most CPU time of a page, however slow codec and machine are.
const SPENT: Duration = Duration::from_millis(1500);

/// After this many looks a thread counts as hung whatever it does, unless it gets no CPU.
const SLOW: u32 = 60;

/// The kernel's facts about a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Evidence {
    /// The letter of its state.
    pub(super) state: u8,
    /// The CPU time it has used.
    pub(super) ran: Duration,
    /// How often it was scheduled.
    pub(super) times: u64,
}

impl Evidence {
    /// Whether it waits for a CPU, and has not had one since `before`.
    fn starved_since(&self, before: &Self) -> bool {
        self.state == b'R' && self.times == before.times && self.ran == before.ran
    }
}

/// The source of facts: the kernel, or a test.
pub(super) trait Witness {
    /// The facts about a thread; `None` if it has ended.
    fn thread(&mut self, process: u32, thread: u32) -> Option<Evidence>;

    /// The numbers of all threads of the process.
    fn threads(&mut self, process: u32) -> Vec<u32>;
}

/// The watchdog's record of one slot.
#[derive(Clone, Copy, Debug)]
struct Suspicion {
    look: Look,
    evidence: Option<Evidence>,
    /// Looks that found the same step of the same request, and the thread not starved.
    looks: u32,
    asleep: u32,
    ran: Duration,
}

impl Suspicion {
    fn none(look: Look) -> Self {
        Self { look, evidence: None, looks: 0, asleep: 0, ran: Duration::ZERO }
    }
}

/// Watches one server.
#[derive(Debug, Default)]
pub(super) struct Watchdog {
    slots: Vec<Suspicion>,
    last: Option<Instant>,
    /// Consecutive looks that found the process stopped.
    stopped: u32,
    /// All threads of the server, while one is suspected.
    threads: Vec<(u32, Evidence)>,
}

impl Watchdog {
    /// Starts over, for another server.
    pub(super) fn reset(&mut self) {
        *self = Self::default();
    }

    /// Looks at the process, whose state letter the caller passes. Returns why the server hangs, if
    /// it does. Makes no system call while no thread is suspected.
    pub(super) fn look(
        &mut self,
        now: Instant,
        slots: &[Slot],
        (process, state): (u32, Option<u8>),
        witness: &mut dyn Witness,
    ) -> Option<String> {
        let since = self.last.replace(now);
        let counts = since.is_some_and(|last| now.saturating_duration_since(last) < LATE);
        match state {
            Some(b't') => {
                self.slots.clear();
                self.stopped = 0;
                return None;
            }
            Some(b'T') => {
                self.stopped += u32::from(counts);
                let why = || format!("it has been stopped (SIGSTOP) for {STOPPED} s");
                return (self.stopped >= STOPPED).then(why);
            }
            _ => self.stopped = 0,
        }
        if self.slots.is_empty() {
            self.slots = slots.iter().map(|slot| Suspicion::none(slot.look())).collect();
            return None;
        }
        let mut hung = None;
        for (suspicion, slot) in self.slots.iter_mut().zip(slots) {
            let look = slot.look();
            if look.state != State::Busy || look != suspicion.look || look.thread == 0 {
                *suspicion = Suspicion::none(look);
                continue;
            }
            let Some(evidence) = witness.thread(process, look.thread) else { continue };
            let Some(before) = suspicion.evidence.replace(evidence) else { continue };
            if counts && !evidence.starved_since(&before) {
                suspicion.looks += 1;
                suspicion.ran += evidence.ran.saturating_sub(before.ran);
                let same = evidence.state != b'R' && evidence.times == before.times;
                suspicion.asleep = if same { suspicion.asleep + 1 } else { 0 };
            }
            hung = hung.or_else(|| suspicion.verdict());
        }
        let suspected = self.slots.iter().any(|suspicion| suspicion.evidence.is_some());
        let starved = self.others(process, suspected, witness);
        match hung {
            Some(Verdict::Asleep(_)) if starved => None,
            hung => hung.map(|verdict| verdict.to_string()),
        }
    }

    /// Whether a thread of the server has waited for a CPU in vain since the last look.
    fn others(&mut self, process: u32, suspected: bool, witness: &mut dyn Witness) -> bool {
        if !suspected {
            self.threads.clear();
            return false;
        }
        let all = witness.threads(process);
        let all: Vec<_> = all
            .into_iter()
            .filter_map(|thread| Some((thread, witness.thread(process, thread)?)))
            .collect();
        let starved = all.iter().any(|(thread, evidence)| {
            let before = self.threads.iter().find(|(other, _)| other == thread);
            before.is_some_and(|(_, before)| evidence.starved_since(before))
        });
        self.threads = all;
        starved
    }
}

enum Verdict {
    Asleep(u32),
    Spins(u32, Duration),
    Slow(u32),
}

impl Suspicion {
    fn verdict(&self) -> Option<Verdict> {
        let thread = self.look.thread;
        if self.asleep >= ASLEEP {
            Some(Verdict::Asleep(thread))
        } else if self.ran >= SPENT && self.looks >= ASLEEP {
            Some(Verdict::Spins(thread, self.ran))
        } else if self.looks >= SLOW {
            Some(Verdict::Slow(thread))
        } else {
            None
        }
    }
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Asleep(thread) => {
                write!(f, "its thread {thread} sleeps in a request, and nothing wakes it")
            }
            Self::Spins(thread, ran) => {
                write!(f, "its thread {thread} has run for {ran:.1?} over one page")
            }
            Self::Slow(thread) => write!(f, "its thread {thread} has done no page in {SLOW} s"),
        }
    }
}

/// The kernel's facts, from /proc.
pub(super) struct Proc;

impl Witness for Proc {
    fn thread(&mut self, process: u32, thread: u32) -> Option<Evidence> {
        let folder = format!("/proc/{process}/task/{thread}");
        let mut bytes = [0; 1024];
        let stat = read(&format!("{folder}/stat"), &mut bytes)?;
        // The name may contain brackets and blanks.
        let mut fields = stat.rsplit_once(") ")?.1.split(' ');
        let state = *fields.next()?.as_bytes().first()?;
        let mut fields = fields.skip(10).map_while(|field| field.parse::<u64>().ok());
        let ticks = fields.next()? + fields.next()?;
        let mut bytes = [0; 128];
        // Without schedstat the watchdog cannot see wake-ups: the count stays 0, and CPU time has
        // the resolution of a tick.
        let stat = read(&format!("{folder}/schedstat"), &mut bytes).unwrap_or_default();
        let mut fields = stat.split_whitespace().map_while(|field| field.parse().ok());
        let ran = fields.next().map_or(Duration::from_millis(ticks * 10), Duration::from_nanos);
        let times = fields.nth(1).unwrap_or(0);
        Some(Evidence { state, ran, times })
    }

    fn threads(&mut self, process: u32) -> Vec<u32> {
        let tasks = fs::read_dir(format!("/proc/{process}/task"));
        let number = |task: fs::DirEntry| task.file_name().to_str()?.parse().ok();
        tasks.into_iter().flatten().flatten().filter_map(number).collect()
    }
}

fn read<'a>(path: &str, bytes: &'a mut [u8]) -> Option<&'a str> {
    let got = fs::File::open(path).ok()?.read(bytes).ok()?;
    std::str::from_utf8(&bytes[..got]).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use pulse::Pulse;
    use std::collections::BTreeMap;
    use std::sync::mpsc::channel;

    const PROCESS: u32 = 10;

    /// A kernel with made-up facts.
    #[derive(Default)]
    struct Told(BTreeMap<u32, Evidence>);

    impl Witness for Told {
        fn thread(&mut self, _: u32, thread: u32) -> Option<Evidence> {
            self.0.get(&thread).copied()
        }
        fn threads(&mut self, _: u32) -> Vec<u32> {
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
            let asleep = Evidence { state: b'S', ran: Duration::ZERO, times: 1 };
            told.0.extend([(PROCESS, asleep), (thread, asleep)]);
            Self { told, pulse, watchdog: Watchdog::default(), now: Instant::now(), thread }
        }

        fn after(&mut self, seconds: u64) -> Option<String> {
            self.now += Duration::from_secs(seconds);
            let process = (PROCESS, self.told.0.get(&PROCESS).map(|seen| seen.state));
            self.watchdog.look(self.now, self.pulse.slots(), process, &mut self.told)
        }

        /// Looks each second, after calling `each`. Returns after how many looks the server counts
        /// as hung, and why.
        fn until_hung(&mut self, most: u32, each: impl Fn(&mut Self)) -> Option<(u32, String)> {
            (1..=most).find_map(|second| {
                each(self);
                Some((second, self.after(1)?))
            })
        }

        fn seen(&mut self, thread: u32) -> &mut Evidence {
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
                let process = (PROCESS, Some(b'S'));
                assert_eq!(look.look(now, scene.pulse.slots(), process, &mut scene.told), None);
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
        let starved = Evidence { state: b'R', ran: Duration::ZERO, times: 4 };
        scene.told.0.insert(99, starved);
        assert_eq!(scene.until_hung(50, |_| ()), None);
        // It gets a CPU, and wakes no other thread.
        let run = |scene: &mut Scene| scene.seen(99).times += 1;
        assert!(scene.until_hung(3, run).is_some());
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

    #[test]
    fn the_kernel_distinguishes_a_sleeping_thread_from_a_running_one() {
        let (say, said) = channel();
        let (end, ended) = channel::<()>();
        let sleeps = std::thread::spawn(move || {
            say.send(rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs()).unwrap();
            let _ = ended.recv();
        });
        let (own, thread) = (std::process::id(), said.recv().unwrap());
        assert!(Proc.threads(own).contains(&thread));
        // Until it sleeps for good.
        let deadline = Instant::now() + Duration::from_secs(120);
        loop {
            let before = Proc.thread(own, thread).unwrap();
            std::thread::sleep(Duration::from_millis(50));
            let after = Proc.thread(own, thread).unwrap();
            if before == after && after.state == b'S' {
                break;
            }
            assert!(Instant::now() < deadline, "{before:?} {after:?}");
        }
        let me = rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs();
        let before = Proc.thread(own, me).unwrap();
        while Proc.thread(own, me).unwrap().ran < before.ran + Duration::from_millis(50) {
            assert!(Instant::now() < deadline);
        }
        assert_eq!(Proc.thread(own, me).unwrap().state, b'R');
        drop(end);
        sleeps.join().unwrap();
        assert_eq!(Proc.thread(own, u32::MAX), None);
    }
}
