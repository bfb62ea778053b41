//! The policy beside clients: whatever it does, a page reads as last written.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use corpus::Corpus;
use device::guard::Allocator;
use device::{Device, DeviceOptions, DeviceQueue, Queue, PAGE};
use policy::{Passes, Policy, Settings, Step};
use store::{Keeper, Options, Store};

/// The policy's thread and the clients' may not allocate: a debug build ends at once.
#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

fn device(pages: u64, options: Options) -> (Arc<Store>, Device) {
    let store = Store::create(pages, options).unwrap();
    let options = DeviceOptions { workers: 0, ..DeviceOptions::default() };
    let device = Device::new(&store, &options).unwrap();
    (store, device)
}

/// A page that states its number and version; neighbours have much in common.
fn page(index: u64, version: u64) -> [u8; PAGE] {
    let mut page = [0; PAGE];
    let mut state = (index / 8) << 20 | version << 8 | 1;
    for chunk in page.chunks_exact_mut(16) {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        chunk[..6].copy_from_slice(&(state >> 16).to_le_bytes()[..6]);
    }
    page[..8].copy_from_slice(&index.to_le_bytes());
    page[8..16].copy_from_slice(&version.to_le_bytes());
    page
}

fn settings() -> Settings {
    Settings { idle: 1, idle_pressed: 1, ..Settings::default() }
}

fn pass(passes: &mut Passes, idle: u8) {
    loop {
        match passes.step(idle) {
            Step::More => {}
            // The keeper has some as soon as it has been notified.
            Step::NoRoom => thread::sleep(Duration::from_millis(1)),
            Step::Done => return,
        }
    }
}

fn verify(queue: &mut DeviceQueue, pages: u64, version: impl Fn(u64) -> Option<u64>) {
    let mut out = [0; PAGE];
    for index in 0..pages {
        queue.read_now(index, &mut out).unwrap();
        let expected = version(index).map_or([0; PAGE], |version| page(index, version));
        assert!(out == expected, "page {index} has another content");
    }
}

#[test]
fn idle_neighbours_become_groups_and_read_as_before() {
    const PAGES: u64 = 1000;
    let (store, device) = device(PAGES, Options::default());
    let mut queue = device.queue().unwrap();
    for index in 0..PAGES {
        // Every tenth is not there, every seventh is zeros.
        match index {
            _ if index % 10 == 0 => {}
            _ if index % 7 == 0 => queue.write_now(index, &[0; PAGE]).unwrap(),
            _ => queue.write_now(index, &page(index, 1)).unwrap(),
        }
    }
    let version = |index: u64| (!index.is_multiple_of(10) && !index.is_multiple_of(7)).then_some(1);
    let before = store.stats();
    let mut passes = Passes::new(&store, &settings()).unwrap();
    pass(&mut passes, 1);
    assert_eq!(store.stats().grouped_pages, 0, "nothing is idle");
    passes.grow_older();
    // These are touched.
    let mut out = [0; PAGE];
    for index in 500..600 {
        queue.read_now(index, &mut out).unwrap();
    }
    pass(&mut passes, 1);
    let stats = store.stats();
    let idle = (0..PAGES).filter(|index| !(500..600).contains(index) && version(*index).is_some());
    // The last few of a stretch are too few for a group.
    let idle = idle.count() as u64;
    assert!((idle - 6..=idle).contains(&stats.grouped_pages), "{} of {idle}", stats.grouped_pages);
    assert_eq!(
        (stats.orig_data_size, stats.same_pages),
        (before.orig_data_size, before.same_pages)
    );
    assert!(stats.compr_data_size * 2 < before.compr_data_size, "{before:?} {stats:?}");
    let done = passes.stats();
    assert_eq!((done.pages_grouped, done.groups_made), (stats.grouped_pages, stats.groups));
    assert_eq!((done.pages_changed, done.damaged), (0, 0));
    verify(&mut queue, PAGES, version);
    // A part of a page in a group is changed.
    queue.patch(773, 100, b"patched").unwrap();
    let mut patched = page(773, 1);
    patched[100..107].copy_from_slice(b"patched");
    queue.read_now(773, &mut out).unwrap();
    assert!(out == patched);
    assert!(queue.extent(771, 3).is_ok_and(|extent| extent.pages == 3 && !extent.hole));
    queue.write_now(773, &page(773, 1)).unwrap();
    // A page that was read is warm, and leaves its group.
    passes.grow_older();
    passes.grow_older();
    queue.read_now(111, &mut out).unwrap();
    pass(&mut passes, 2);
    assert_eq!(passes.stats().pages_warm, 1);
    verify(&mut queue, PAGES, version);
    // Most leave: so do the others, which nobody has read for long.
    passes.grow_older();
    passes.grow_older();
    for index in (0..400).filter(|index| index % 4 > 0) {
        queue.write_now(index, &page(index, 2)).unwrap();
    }
    pass(&mut passes, 7);
    assert!(passes.stats().pages_spread > 50, "{:?}", passes.stats());
    let version = |index: u64| {
        version(index)
            .filter(|_| index >= 400 || index.is_multiple_of(4))
            .or_else(|| (index < 400 && !index.is_multiple_of(4)).then_some(2))
    };
    verify(&mut queue, PAGES, version);
}

/// Regression: a pass begins when the ages have just been incremented, and took only pages of age 0
/// for read ones.
#[test]
fn a_page_that_was_read_before_a_pass_leaves_its_group_and_an_unread_one_stays() {
    const PAGES: u64 = 64;
    for (idle, idle_pressed) in [(2, 1), (2, 2), (6, 1)] {
        let (store, device) = device(PAGES, Options::default());
        let mut queue = device.queue().unwrap();
        for index in 0..PAGES {
            queue.write_now(index, &page(index, 1)).unwrap();
        }
        let settings = Settings { idle, idle_pressed, ..Settings::default() };
        let mut passes = Passes::new(&store, &settings).unwrap();
        // Under pressure the groups are made as soon as they may be.
        (0..idle_pressed).for_each(|_| passes.grow_older());
        pass(&mut passes, idle_pressed);
        let grouped = passes.stats().pages_grouped;
        assert!(grouped > 50, "{:?}", passes.stats());
        queue.read_now(11, &mut [0; PAGE]).unwrap();
        // Still under pressure, it would be in a group again at once if it were a period older.
        passes.grow_older();
        if idle_pressed == 1 {
            pass(&mut passes, idle_pressed);
            assert_eq!(passes.stats().pages_warm, 0, "{idle} {idle_pressed}");
        }
        pass(&mut passes, idle);
        let stats = passes.stats();
        assert_eq!((stats.pages_warm, stats.pages_spread), (1, 0), "{idle} {idle_pressed}");
        assert_eq!(store.stats().grouped_pages, grouped - 1);
        verify(&mut queue, PAGES, |_| Some(1));
    }
}

#[test]
fn pages_without_gain_are_tried_once() {
    // As many as there are.
    const PAGES: u64 = 256;
    let (store, device) = device(PAGES, Options::default());
    let mut queue = device.queue().unwrap();
    let noise = Corpus::made("noise is the same everywhere");
    let noise = noise.set("random").unwrap();
    for (index, page) in (0..PAGES).zip(noise.pages().chunks_exact(PAGE)) {
        queue.write_now(index, page).unwrap();
    }
    let mut passes = Passes::new(&store, &settings()).unwrap();
    passes.grow_older();
    pass(&mut passes, 1);
    let first = passes.stats();
    assert_eq!((first.pages_no_gain, first.pages_grouped), (PAGES, 0), "{first:?}");
    passes.grow_older();
    pass(&mut passes, 1);
    let second = passes.stats();
    assert_eq!(second.pages_no_gain, PAGES);
    let mut out = [0; PAGE];
    for (index, page) in (0..PAGES).zip(noise.pages().chunks_exact(PAGE)) {
        queue.read_now(index, &mut out).unwrap();
        assert!(out == *page);
    }
}

// Over 80 lines: the threads share the state that each checks.
#[test]
fn clients_that_write_read_and_discard_meanwhile_read_their_own_pages() {
    const PAGES: u64 = 512;
    const THREADS: u64 = 3;
    // A thread that gets no CPU may hold a lock of the kernel for which the keeper waits.
    let patience = Duration::from_secs(600);
    let options = Options { reserve: 8 << 20, patience, ..Options::default() };
    let (store, device) = device(PAGES, options);
    let keeper = Keeper::start(&store).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let done = Arc::new(AtomicU64::new(0));
    let clients: Vec<_> = (0..THREADS)
        .map(|thread| {
            let mut queue = device.queue().unwrap();
            let (stop, done) = (Arc::clone(&stop), Arc::clone(&done));
            thread::spawn(move || {
                let mut versions = vec![None; usize::try_from(PAGES).unwrap()];
                let mut random = 0x9e37_79b9 + thread;
                let mut out = [0; PAGE];
                while !stop.load(Ordering::Relaxed) {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    // Its own pages lie among the others', so that groups are shared.
                    let index = (random >> 40) % (PAGES / THREADS) * THREADS + thread;
                    let held = &mut versions[usize::try_from(index).unwrap()];
                    match random >> 60 {
                        0..4 => {
                            let next = held.unwrap_or(0_u64) + 1;
                            queue.write_now(index, &page(index, next)).unwrap();
                            *held = Some(next);
                        }
                        // As it was before, so that its object may look like the one that was read.
                        4..6 if held.is_some_and(|version| version > 1) => {
                            queue.write_now(index, &page(index, 1)).unwrap();
                            *held = Some(1);
                        }
                        6 => {
                            let zeroes = device::Op::WriteZeroes { keep: false };
                            let request = device::Request {
                                op: if random & 1 == 0 { zeroes } else { device::Op::Discard },
                                page: index,
                                pages: 1,
                                buffer: device::Buffer::NONE,
                            };
                            assert_eq!(queue.submit(0, request), Some(Ok(())));
                            *held = None;
                        }
                        7 if held.is_some() => {
                            // The version's lowest byte.
                            let next = held.unwrap() / 256 * 256 + (random >> 20 & 0xff);
                            let whole = page(index, next);
                            queue.patch(index, 0, &whole).unwrap();
                            *held = Some(next);
                        }
                        _ => {
                            queue.read_now(index, &mut out).unwrap();
                            let expected = held.map_or([0; PAGE], |version| page(index, version));
                            assert!(out == expected, "page {index} is not what was written");
                        }
                    }
                    done.fetch_add(1, Ordering::Relaxed);
                }
                (queue, versions)
            })
        })
        .collect();
    let mut passes = Passes::new(&store, &settings()).unwrap();
    let begun = Instant::now();
    let enough = |stats: policy::PolicyStats| {
        stats.pages_changed > 50
            && stats.pages_grouped > 300
            && stats.pages_warm + stats.pages_spread > 50
    };
    while done.load(Ordering::Relaxed) < 30_000 || !enough(passes.stats()) {
        assert!(begun.elapsed() < Duration::from_secs(300), "{:?}", passes.stats());
        passes.grow_older();
        pass(&mut passes, 1);
        store.compact_step(100);
    }
    stop.store(true, Ordering::Relaxed);
    let clients: Vec<_> = clients.into_iter().map(|client| client.join().unwrap()).collect();
    println!("{:?}", passes.stats());
    let stats = passes.stats();
    assert_eq!(stats.damaged, 0);
    for (thread, (mut queue, versions)) in (0..THREADS).zip(clients) {
        let mut out = [0; PAGE];
        for index in (thread..PAGES / THREADS * THREADS).step_by(usize::try_from(THREADS).unwrap())
        {
            queue.read_now(index, &mut out).unwrap();
            let version = versions[usize::try_from(index).unwrap()];
            assert!(out == version.map_or([0; PAGE], |version| page(index, version)));
        }
    }
    assert_eq!(store.stats().mem_used_total, store.resident().unwrap());
    drop(keeper);
}

#[test]
fn a_store_at_its_limit_continues_to_accept_writes() {
    const PAGES: u64 = 2000;
    let options = Options { mem_limit: 3 << 20, reserve: 0, ..Options::default() };
    let (store, device) = device(PAGES, options);
    let mut queue = device.queue().unwrap();
    let stored: Vec<u64> =
        (0..PAGES).filter(|&index| queue.write_now(index, &page(index, 1)).is_ok()).collect();
    assert!((stored.len() as u64) < PAGES, "the limit was to be met");
    let mut passes = Passes::new(&store, &settings()).unwrap();
    for _ in 0..3 {
        passes.grow_older();
        pass(&mut passes, 1);
        store.compact();
    }
    let mut out = [0; PAGE];
    for &index in &stored {
        queue.read_now(index, &mut out).unwrap();
        assert!(out == page(index, 1), "page {index} has another content");
    }
    let stats = store.stats();
    assert!(stats.mem_used_max <= 3 << 20, "{stats:?}");
}

/// Waits until the policy's own thread has made groups of all pages of a device.
fn groups_by_itself(settings: &Settings) -> policy::PolicyStats {
    const PAGES: u64 = 200;
    let patience = Duration::from_secs(600);
    let (store, device) = device(PAGES, Options { patience, ..Options::default() });
    let keeper = Keeper::start(&store).unwrap();
    let mut queue = device.queue().unwrap();
    for index in 0..PAGES {
        queue.write_now(index, &page(index, 1)).unwrap();
    }
    let policy = Policy::start(&store, settings).unwrap();
    println!("pressure is known by: {}", policy.pressure());
    let begun = Instant::now();
    // The policy counts a group's pages after the store does.
    while store.stats().grouped_pages < PAGES || policy.stats().pages_grouped < PAGES {
        assert!(begun.elapsed() < Duration::from_secs(300), "{:?}", policy.stats());
        thread::sleep(Duration::from_millis(20));
    }
    let stats = policy.stats();
    assert!(stats.passes > 0 && stats.pages_grouped >= PAGES, "{stats:?}");
    drop(policy);
    verify(&mut queue, PAGES, |_| Some(1));
    drop(keeper);
    stats
}

/// Regression: a page that was read once during a pass of hours counted as just read until its end.
#[test]
fn pages_grow_older_during_a_pass_that_lasts_longer_than_a_period() {
    const PAGES: u64 = 4096;
    let patience = Duration::from_secs(600);
    let (store, device) = device(PAGES, Options { patience, ..Options::default() });
    let keeper = Keeper::start(&store).unwrap();
    let mut queue = device.queue().unwrap();
    for index in 0..PAGES {
        queue.write_now(index, &page(index, 1)).unwrap();
    }
    // Two groups a second or so.
    let mut slow = Settings { period: 1, cpu: 1, ..settings() };
    slow.pressure.file = "/nonexistent/pressure".into();
    let policy = Policy::start(&store, &slow).unwrap();
    let worker = store.worker().unwrap();
    let begun = Instant::now();
    // The pass has not come to the last page.
    while worker.peek(PAGES - 1).unwrap().1 < 3 {
        assert!(begun.elapsed() < Duration::from_secs(300), "{:?}", policy.stats());
        thread::sleep(Duration::from_millis(20));
    }
    let stats = policy.stats();
    assert_eq!(stats.passes, 1, "{stats:?}");
    drop((policy, worker));
    verify(&mut queue, PAGES, |_| Some(1));
    drop(keeper);
}

#[test]
fn the_thread_runs_on_its_own_and_sooner_under_pressure() {
    groups_by_itself(&Settings { period: 1, cpu: 100, ..settings() });
    // Half of all time some process waits for memory.
    let mut file = tempfile::NamedTempFile::new().unwrap();
    std::io::Write::write_all(&mut file, b"some avg10=50.00 x\n").unwrap();
    let mut pressed = Settings { period: 3600, period_pressed: 1, cpu_pressed: 100, ..settings() };
    pressed.pressure.file = file.path().into();
    // A pass for the pressure's begin, and one after the pages have aged: one for both if the
    // thread gets its CPU late.
    let stats = groups_by_itself(&pressed);
    assert!(stats.pressed_passes >= 1, "{stats:?}");
}
