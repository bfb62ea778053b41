//! Measures a second save into a store: bytes and CPU time against the first, and the time that a
//! page fault waits for its unit.
//!
//! ```text
//! cargo run --release -p image --example second_save -- BEFORE AFTER
//! ```
//!
//! Two files of 4096-byte pages: the same pages of a guest at two times. Both are saved into a new
//! store, and BEFORE also as an image in one file. Reading times are the thread's CPU time for a
//! unit with all of its checksums, base pages included, in random order.

use std::path::Path;
use std::time::Duration;

use image::{verify, Content, Image, Options, RamBlock, State, Store, Summary, Units, Writer};
use rustix::time::{clock_gettime, ClockId};

const PAGE: usize = 4096;

fn cpu(clock: ClockId) -> Duration {
    Duration::try_from(clock_gettime(clock)).expect("CPU time is positive")
}

fn save(mut writer: Writer, pages: &[u8]) -> (Summary, Duration) {
    let begin = cpu(ClockId::ProcessCPUTime);
    let block = RamBlock { name: "pc.ram".into(), len: pages.len() as u64, host_page: 0 };
    writer.blocks(PAGE, &[block]).expect("a block table");
    for (page, bytes) in (0..).zip(pages.chunks_exact(PAGE)) {
        writer.page(0, page, bytes).expect("a page");
    }
    let summary = writer.finish(&State::default()).expect("a save").link().expect("a name");
    (summary, cpu(ClockId::ProcessCPUTime) - begin)
}

/// Times of reading the units that the save at `path` uses, in random order: those that the save at
/// `base` uses too, and its own.
fn reads(path: &Path, base: &Path) -> [Vec<Duration>; 2] {
    let image = Image::open(path).expect("a save");
    let refs: Vec<u128> =
        Image::open(base).expect("a save").pack_refs().iter().map(|pack| pack.id).collect();
    let mut used: Vec<u64> = Vec::new();
    for extent in image.index().blocks.iter().flat_map(|block| &block.extents) {
        if let Content::Slot(slot) = extent.content {
            let per = image.shape().unit_pages();
            used.extend(slot / per..=(slot + extent.pages - 1) / per);
        }
    }
    used.sort_unstable();
    used.dedup();
    let mut plain = vec![0; image.shape().unit_bytes()];
    let (mut old, mut new) = (Vec::new(), Vec::new());
    let mut at = 0;
    for _ in 0..3 * used.len() {
        at = (at + 7919) % used.len();
        let mut units = Units::new();
        let begin = cpu(ClockId::ThreadCPUTime);
        units.read(&image, used[at], &mut plain).expect("a sound unit");
        let time = cpu(ClockId::ThreadCPUTime) - begin;
        let entry = image.index().units[usize::try_from(used[at]).expect("in memory")];
        let is_old = refs.contains(&image.pack_refs()[entry.file as usize].id);
        if is_old { &mut old } else { &mut new }.push(time);
    }
    old.sort();
    new.sort();
    [old, new]
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [before, after] = &args[..] else { panic!("BEFORE AFTER") };
    let before = std::fs::read(before).expect("BEFORE can be read");
    let after = std::fs::read(after).expect("AFTER can be read");
    let folder = tempfile::tempdir().expect("a folder");
    let options = Options::default;
    let store = Store::create(&folder.path().join("store")).expect("a store");
    let alone = folder.path().join("image");
    let (alone, alone_cpu) = save(Writer::create(&alone, options()).expect("a writer"), &before);
    let one = Writer::create_in(&store, "one", None, options()).expect("a writer");
    let (one, one_cpu) = save(one, &before);
    let begin = cpu(ClockId::ProcessCPUTime);
    let two = Writer::create_in(&store, "two", Some("one"), options()).expect("a writer");
    let opening = cpu(ClockId::ProcessCPUTime) - begin;
    let (two, two_cpu) = save(two, &after);
    println!("| | bytes | of the first | pages | shared | differences | CPU, s |");
    println!("|---|--:|--:|--:|--:|--:|--:|");
    let row = |name: &str, summary: Summary, time: Duration| {
        println!(
            "| {name} | {} | {:.4} | {} | {} | {} | {:.3} |",
            summary.file_bytes,
            summary.file_bytes as f64 / one.file_bytes as f64,
            summary.slots,
            summary.shared,
            summary.differences,
            time.as_secs_f64(),
        );
    };
    row("image in one file", alone, alone_cpu);
    row("first save", one, one_cpu);
    row("second save", two, two_cpu + opening);
    let path = |name: &str| store.path(name).expect("a name");
    assert!(verify(&path("two")).findings.is_empty());
    for (name, times) in ["old", "new"].iter().zip(reads(&path("two"), &path("one"))) {
        let Some(last) = times.len().checked_sub(1) else { continue };
        println!(
            "reading a unit of the {name} pack: p50 {} us, p99 {} us ({} reads)",
            times[last / 2].as_micros(),
            times[last * 99 / 100].as_micros(),
            times.len()
        );
    }
}
