//! The heap memory of a policy with writeback: as much as `memory` and `writeback_memory` say, and
//! not much less. In a file of its own, because the C library counts for the whole process.
#![expect(unsafe_code, reason = "asks the C library")]

use policy::{Policy, Settings};
use store::{format_backing, FileDisk, Options, Store};

fn heap() -> usize {
    // SAFETY: takes no pointer.
    let info = unsafe { libc::mallinfo2() };
    info.uordblks + info.hblkhd
}

/// Regression: a stand-by server had 3 MiB for writeback, whatever the size of a batch.
#[test]
fn writeback_uses_between_half_and_all_of_its_stated_heap() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let started = |settings: &Settings, has_backing: bool| {
        let store = Store::create(4096, Options { reserve: 0, ..Options::default() }).unwrap();
        if has_backing {
            let disk = FileDisk::open(&folder.path().join("backing"), 64 << 20).unwrap();
            format_backing(&disk, "backing", &store).unwrap();
            store.set_backing(Box::new(disk), "backing").unwrap();
        }
        let before = heap();
        let policy = Policy::start_with(&store, settings, None).unwrap();
        let took = heap() - before;
        drop(policy);
        took
    };
    for (codec, level) in [("zstd", 1), ("zstd", 9), ("zstd", 19), ("lz4", 1), ("zlib", 9)] {
        for writeback_batch_size in [1, 64, 1024] {
            let codec = codec.to_owned();
            let settings = Settings { codec, level, writeback_batch_size, ..Settings::default() };
            let took = started(&settings, true) - started(&settings, false);
            let said = policy::writeback_memory(&settings);
            let what = format!("{} {level}, batches of {writeback_batch_size}", settings.codec);
            println!("{what}: {took} of {said}");
            assert!(took <= said && took >= said / 2, "{what}: {took}, not {said}");
        }
    }
    let off = Settings { enabled: false, ..Settings::default() };
    assert_eq!(policy::writeback_memory(&off), 0);
}
