//! Writing back: the pages that it writes, within which limits, on request and on its own.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use device::guard::Allocator;
use device::{Device, DeviceOptions, DeviceQueue, PAGE};
use policy::{AskError, Asked, Outcome, Passes, Policy, Settings, Step, What};
use store::{format_backing, Disk, FileDisk, Keeper, Options, Page, Store};

/// The policy's thread and the clients' may not allocate: a debug build ends at once.
#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

const PAGES: u64 = 600;

struct Made {
    store: Arc<Store>,
    device: Device,
    folder: tempfile::TempDir,
}

fn made(blocks: u64) -> Made {
    // Not in the folder for such, which may be in memory.
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    // A thread that gets no CPU may hold a lock of the kernel for which the keeper waits.
    let patience = Duration::from_secs(600);
    let store = Store::create(PAGES, Options { patience, ..Options::default() }).unwrap();
    let disk = FileDisk::open(&folder.path().join("backing"), (blocks + 1) * 4096).unwrap();
    format_backing(&disk, "backing", &store).unwrap();
    assert_eq!(disk.blocks().unwrap(), blocks + 1);
    store.set_backing(Box::new(disk), "backing").unwrap();
    let options = DeviceOptions { workers: 0, ..DeviceOptions::default() };
    let device = Device::new(&store, &options).unwrap();
    Made { store, device, folder }
}

/// Every fourth is noise, the others are like their neighbours.
fn page(index: u64) -> [u8; PAGE] {
    let mut page = [0; PAGE];
    let noise = index.is_multiple_of(4);
    let mut state = if noise { index } else { index / 8 } << 20 | 1;
    for chunk in page.chunks_exact_mut(if noise { 4 } else { 16 }) {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        chunk[..4].copy_from_slice(&(state >> 32).to_le_bytes()[..4]);
    }
    page[..8].copy_from_slice(&index.to_le_bytes());
    page
}

fn fill(made: &Made) -> DeviceQueue {
    let mut queue = made.device.queue().unwrap();
    for index in 0..PAGES {
        queue.write_now(index, &page(index)).unwrap();
    }
    queue
}

fn verify(queue: &mut DeviceQueue) {
    let mut out = [0; PAGE];
    for index in 0..PAGES {
        queue.read_now(index, &mut out).unwrap();
        assert!(out == page(index), "page {index} has another content");
    }
}

fn settings() -> Settings {
    Settings { idle: 1, idle_pressed: 1, backing_free: 0, ..Settings::default() }
}

fn back(passes: &mut Passes, what: What) {
    while passes.write_back(what) {}
}

fn recompress(passes: &mut Passes) {
    while passes.step(1) != Step::Done {}
}

#[test]
fn each_name_selects_its_pages() {
    let made = made(2000);
    let mut queue = fill(&made);
    let mut passes = Passes::new(&made.store, &settings()).unwrap();
    let (huge, count) = (PAGES / 4, |passes: &Passes| passes.stats().pages_written_back);
    assert_eq!(made.store.stats().huge_pages, huge);
    // Nothing is idle, and nothing was recompressed.
    for what in [What::Idle, What::HugeIdle, What::Incompressible] {
        back(&mut passes, what);
        assert_eq!(count(&passes), 0, "{what:?}");
    }
    passes.grow_older();
    // These are young again.
    let mut out = [0; PAGE];
    for index in 0..100 {
        queue.read_now(index, &mut out).unwrap();
    }
    back(&mut passes, What::HugeIdle);
    assert_eq!(count(&passes), huge - 25);
    assert_eq!(made.store.stats().huge_pages, 25);
    recompress(&mut passes);
    back(&mut passes, What::Incompressible);
    assert_eq!(count(&passes), huge - 25, "the young ones were not recompressed");
    assert!(made.store.stats().grouped_pages > 300);
    back(&mut passes, What::Idle);
    // All that are in groups, and those that are not.
    assert_eq!(count(&passes), PAGES - 100);
    assert_eq!((made.store.stats().bd_count, made.store.stats().groups), (PAGES - 100, 0));
    // Small ones share blocks.
    let stats = made.store.backing_stats().unwrap();
    let small = PAGES - 100 - (huge - 25);
    assert!(stats.bd_writes < huge - 25 + small / 2, "{stats:?}");
    assert_eq!(stats.bd_writes, made.store.written_today());
    back(&mut passes, What::Huge);
    assert_eq!(made.store.stats().huge_pages, 0);
    verify(&mut queue);
    // Read pages stay where they are; written ones come into memory.
    assert_eq!(made.store.stats().bd_count, PAGES - 100 + 25);
    for index in 0..PAGES {
        queue.write_now(index, &page(index)).unwrap();
    }
    let stats = made.store.backing_stats().unwrap();
    assert_eq!((made.store.stats().bd_count, stats.free), (0, stats.blocks));
    assert_eq!("huge_idle".parse(), Ok(What::HugeIdle));
    assert!("all".parse::<What>().unwrap_err().contains("none of huge, idle"));
}

#[test]
fn limits_end_a_pass_and_are_counted() {
    // A budget of blocks, whatever the batch; for the whole day.
    let made_one = made(2000);
    let mut queue = fill(&made_one);
    let limited = Settings { writeback_limit: 37, writeback_batch_size: 16, ..settings() };
    let mut passes = Passes::new(&made_one.store, &limited).unwrap();
    back(&mut passes, What::Huge);
    assert_eq!((passes.stats().pages_written_back, passes.stats().writeback_limited), (37, 1));
    back(&mut passes, What::Huge);
    assert_eq!((made_one.store.written_today(), passes.stats().writeback_limited), (37, 2));
    // Another server of the same store has what is left.
    drop(passes);
    let more = Settings { writeback_limit: 40, ..limited.clone() };
    let mut passes = Passes::new(&made_one.store, &more).unwrap();
    back(&mut passes, What::Huge);
    assert_eq!(passes.stats().pages_written_back, 3);
    drop(passes);
    let free = Settings { writeback_limit_enable: false, ..limited };
    let mut passes = Passes::new(&made_one.store, &free).unwrap();
    back(&mut passes, What::Huge);
    assert_eq!(passes.stats().pages_written_back, PAGES / 4 - 40);
    assert_eq!(passes.stats().writeback_limited, 0);
    verify(&mut queue);

    // The device has no more blocks.
    let made_two = made(20);
    let mut queue = fill(&made_two);
    let mut passes = Passes::new(&made_two.store, &settings()).unwrap();
    back(&mut passes, What::Huge);
    assert_eq!((passes.stats().pages_written_back, passes.stats().writeback_full), (20, 1));
    verify(&mut queue);

    // Its file system is to keep more than it has.
    let made_three = made(2000);
    let mut queue = fill(&made_three);
    let space = made_three.store.backing_space().expect("it is a file");
    let floor = Settings { backing_free: space * 2, ..settings() };
    let mut passes = Passes::new(&made_three.store, &floor).unwrap();
    back(&mut passes, What::Huge);
    assert_eq!((passes.stats().pages_written_back, passes.stats().writeback_no_space), (0, 1));
    assert_eq!(made_three.store.backing_stats().unwrap().bd_writes, 0);
    verify(&mut queue);
    drop(made_three.folder);
}

#[test]
fn the_thread_writes_back_on_its_own_and_on_request() {
    let made = made(2000);
    let keeper = Keeper::start(&made.store).unwrap();
    let mut queue = fill(&made);
    let nobody = "/nonexistent/pressure";
    let mut by_itself = Settings {
        period: 1,
        cpu: 100,
        writeback_pressed_only: false,
        writeback_huge_idle: 1,
        writeback_idle: 7,
        ..settings()
    };
    by_itself.pressure.file = nobody.into();
    let wait = |policy: &Policy, enough: &dyn Fn() -> bool| {
        let begun = Instant::now();
        while !enough() {
            assert!(begun.elapsed() < Duration::from_secs(300), "{:?}", policy.stats());
            thread::sleep(Duration::from_millis(20));
        }
    };
    let policy = Policy::start(&made.store, &by_itself).unwrap();
    wait(&policy, &|| made.store.stats().bd_count >= PAGES / 4);
    drop(policy);
    verify(&mut queue);
    // Only while memory is short, which it never is here; but when asked.
    let mut asked = Settings { period: 3600, ..by_itself };
    asked.writeback_pressed_only = true;
    let policy = Policy::start(&made.store, &asked).unwrap();
    // Forty that are stored as they are.
    for index in (0..160).step_by(4) {
        queue.write_now(index, &page(index)).unwrap();
    }
    let before = made.store.stats().bd_count;
    assert_eq!(policy.asked(1), Asked::Unknown);
    // Three at once, the first of which leaves nothing for the second: each answer describes its
    // own pass.
    let tickets = [What::Huge, What::Huge, What::Idle].map(|what| policy.write_back(what).unwrap());
    assert_eq!(tickets, [1, 2, 3]);
    wait(&policy, &|| matches!(policy.asked(3), Asked::Done(_)));
    let pages = tickets.map(|ticket| match policy.asked(ticket) {
        Asked::Done(Outcome { pages, limited: false, failed: false, full: false, .. }) => pages,
        other => panic!("{other:?}"),
    });
    let stats = policy.stats();
    assert_eq!((stats.writeback_passes, stats.writeback_asked), (3, 3));
    assert!(pages[0] >= 40 && pages[1] == 0, "{pages:?}");
    assert_eq!(pages.iter().sum::<u64>(), stats.pages_written_back);
    assert_eq!((policy.asked(0), policy.asked(4)), (Asked::Unknown, Asked::Unknown));
    assert_eq!(made.store.stats().bd_count, before + stats.pages_written_back);
    drop(policy);
    verify(&mut queue);
    let worker = made.store.worker().unwrap();
    assert_eq!(worker.peek(0).unwrap().0, Page::Backed);
    drop(keeper);
    // Without a device there is no pass to request.
    let plain = Store::create(PAGES, Options::default()).unwrap();
    let nowhere = Policy::start(&plain, &asked).unwrap().write_back(What::Huge);
    assert_eq!(nowhere, Err(AskError::NoBacking));
}

/// At a hundredth of a CPU recompression takes far longer than writing back does.
#[test]
fn a_request_does_not_wait_for_recompression() {
    // While this thread gets no CPU, a pass may end before the request.
    assert!((0..5).any(|_| is_done_within_a_pass()), "each pass was over first");
}

/// Whether write-back that was asked for in the first pass was done before the end of that pass.
fn is_done_within_a_pass() -> bool {
    let made = made(2000);
    let keeper = Keeper::start(&made.store).unwrap();
    let mut queue = fill(&made);
    let mut slow = Settings { period: 1, cpu: 1, cpu_pressed: 1, level: 19, ..settings() };
    slow.pressure.file = "/nonexistent/pressure".into();
    let policy = Policy::start(&made.store, &slow).unwrap();
    let wait = |enough: &dyn Fn() -> bool| {
        let begun = Instant::now();
        while !enough() {
            assert!(begun.elapsed() < Duration::from_secs(300), "{:?}", policy.stats());
            thread::sleep(Duration::from_millis(2));
        }
    };
    wait(&|| policy.stats().groups_made > 0);
    let ticket = policy.write_back(What::Huge).unwrap();
    wait(&|| policy.asked(ticket) != Asked::Waiting);
    let stats = policy.stats();
    let Asked::Done(outcome) = policy.asked(ticket) else { panic!("{stats:?}") };
    assert_eq!(outcome.pages, stats.pages_written_back, "{stats:?}");
    assert!(outcome.pages > 0, "{stats:?}");
    // The pass goes on from where it was.
    let goes_on = || policy.stats().groups_made > stats.groups_made;
    wait(&|| policy.stats().passes > 1 || goes_on());
    let within = stats.passes == 1 && goes_on();
    drop(policy);
    verify(&mut queue);
    drop(keeper);
    within
}

#[test]
fn settings_are_read_and_have_ranges() {
    let text = "[policy]\nbacking_dev = \"/dev/vdb\"\nwriteback_limit = 5\n";
    let read = Settings::read(text).unwrap();
    assert_eq!((read.backing_dev, read.writeback_limit), (Some("/dev/vdb".into()), 5));
    assert_eq!(Settings::default().backing_dev, None);
    for (wrong, said) in [
        ("backing_dev = \"/dev/vdb\"\nenabled = false", "backing_dev needs enabled = true"),
        ("writeback_idle = 8", "writeback_idle = 8, expected 1 to 7 periods"),
        ("writeback_batch_size = 0", "writeback_batch_size = 0, expected 1 to 1024"),
    ] {
        let error = Settings::read(&format!("[policy]\n{wrong}\n")).unwrap_err();
        assert!(error.to_string().contains(said), "{error}");
    }
    assert!(Settings::read("[policy]\nbacking_device = 1\n").is_err());
}
