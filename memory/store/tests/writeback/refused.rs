//! Devices and files that are not taken: foreign, in use, no disk at all.

use std::fs;
use std::path::Path;
use std::process::Command;

use store::{format_backing, BackingError, Block, Disk, DiskError, FileDisk, Store, MAX_OBJECT};

use super::shelf::Shelf;
use super::{folder, given, opened, options};

#[test]
fn a_device_of_another_store_is_refused_and_not_modified() {
    let disk = Shelf::new(40);
    let store = given(10, &disk);
    let attach = |disk: &Shelf| store.set_backing(disk.boxed(), "shelf").unwrap_err().to_string();
    let sound = disk.0.blocks.lock().unwrap()[0].clone();
    // A header with another value, and a right checksum.
    let with = |word: usize, value: u64, sum: bool| {
        let changed = Shelf::new(40);
        let mut block = sound.clone();
        block.0[word * 8..][..8].copy_from_slice(&value.to_le_bytes());
        if sum {
            let sum = crc32c_of(&block.0[..48]);
            block.0[48..56].copy_from_slice(&u64::from(sum).to_le_bytes());
        }
        changed.0.blocks.lock().unwrap()[0] = block;
        changed
    };
    for (disk, said) in [
        (
            Shelf::new(1),
            "shelf has 1 blocks of 4096 bytes, a header and one page need 2".to_owned(),
        ),
        (
            Shelf::new(40),
            "shelf is no backing device: its first word is 0000000000000000".to_owned(),
        ),
        (
            with(1, 7, true),
            "shelf: backing device of format version 7, this program has 1".to_owned(),
        ),
        (with(2, 512, true), "shelf: its header says blocks of 512, expected 4096".to_owned()),
        (with(3, 41, true), "shelf has 40 blocks of 4096 bytes, its header says 41".to_owned()),
        (with(3, 1, true), "shelf: its header says blocks: 1, expected 134217728".to_owned()),
        (
            with(3, 1 << 40, true),
            "shelf: its header says blocks: 1099511627776, expected 134217728".to_owned(),
        ),
        (
            with(4, 77, true),
            format!("shelf belongs to the store 000000000000004d, this one is {:016x}", store.id()),
        ),
        (
            with(5, 2, true),
            "shelf was last used by server 2 of its store, this is server 1".to_owned(),
        ),
    ] {
        let before = disk.0.blocks.lock().unwrap().first().map(|block| block.0);
        assert_eq!(attach(&disk), said);
        assert_eq!(disk.0.blocks.lock().unwrap().first().map(|block| block.0), before);
    }
    let said = attach(&with(3, 39, false));
    assert!(said.starts_with("shelf: checksum of its header is "), "{said}");
    // Foreign data, wherever it begins.
    for at in [0, 1, 16, 31, 256, 287, 16_384, 19_968, 19_999] {
        let disk = Shelf::new(20_000);
        disk.0.blocks.lock().unwrap()[at].0[1080] = 0x53;
        let said = format_backing(&disk, "/dev/sdx1", &store).unwrap_err().to_string();
        assert!(
            said.starts_with(&format!(
                "/dev/sdx1 is no backing device and not empty: its block {at} has data"
            )),
            "{said}"
        );
    }
    // A superblock of an array at 4 KiB and the like leave the block before them unchanged.
    let taken_over = with(4, 77, true);
    taken_over.0.blocks.lock().unwrap()[0].0[1080] = 0x53;
    let said = format_backing(&taken_over, "/dev/sdx1", &store).unwrap_err().to_string();
    assert!(said.contains("its block 0 has data"), "{said}");
    // A device of another store is accepted.
    let old = with(4, 77, true);
    format_backing(&old, "shelf", &store).unwrap();
    store.set_backing(old.boxed(), "shelf").unwrap();
    assert!(attach(&old).contains("one only"));
    let folder = folder("not-a-file");
    assert!(FileDisk::open(&folder, 0).is_err());
}

fn crc32c_of(bytes: &[u8]) -> u32 {
    let mut crc = !0_u32;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
        }
    }
    !crc
}

/// One of 1 TiB, empty but for one block.
#[derive(Debug)]
struct Long(u32);

impl Disk for Long {
    fn blocks(&self) -> std::io::Result<u64> {
        Ok(1 << 28)
    }

    fn read(&self, block: u32, out: &mut Block) -> std::io::Result<()> {
        out.0.fill(u8::from(block == self.0));
        Ok(())
    }

    fn write(&self, block: u32, _: &[Block]) -> std::io::Result<()> {
        assert_eq!((block, self.0), (0, 1 << 20), "written to, though it is somebody's");
        Ok(())
    }
}

#[test]
fn marks_at_the_end_of_a_long_disk_and_behind_an_old_header_are_seen() {
    let store = Store::create(10, options()).unwrap();
    for block in [0, 31, 256, 16_384, (1 << 28) - 32, (1 << 28) - 1] {
        let refused = format_backing(&Long(block), "it", &store).unwrap_err();
        assert!(
            matches!(refused, BackingError::Foreign { block: b, .. } if b == block),
            "{refused}"
        );
    }
    // No format has a signature there.
    format_backing(&Long(1 << 20), "it", &store).unwrap();

    // A former backing device is accepted again, unless a new owner has left its header in place.
    let disk = Shelf::new(80);
    format_backing(&disk, "it", &store).unwrap();
    disk.0.blocks.lock().unwrap()[1].0.fill(7);
    format_backing(&disk, "it", &store).unwrap();
    let bcachefs = 0xeff7_3d80_cf60_6ad9_a990_ce66_f673_85c6_u128.to_le_bytes();
    let marks: [(usize, usize, &[u8]); 4] = [
        (1, 0, &[0xfc, 0x4e, 0x2b, 0xa9]),
        (1, 24, &bcachefs),
        (32, 0, &[0x0c, 0xb1, 0xba, 0, 0, 0, 0, 0]),
        (63, 3072, &[0, 0, 0, 0, 0, 0xba, 0xb1, 0x0c]),
    ];
    for (block, byte, mark) in marks {
        let before = disk.0.blocks.lock().unwrap()[block].clone();
        disk.0.blocks.lock().unwrap()[block].0[byte..][..mark.len()].copy_from_slice(mark);
        let refused = format_backing(&disk, "it", &store).unwrap_err();
        assert!(
            matches!(refused, BackingError::Foreign { block: b, .. } if b as usize == block),
            "{refused}"
        );
        disk.0.blocks.lock().unwrap()[block] = before;
    }
    format_backing(&disk, "it", &store).unwrap();
}

#[test]
fn files_with_other_data_are_refused_and_not_modified() {
    let folder = folder("foreign");
    let store = Store::create(10, options()).unwrap();
    let path = folder.join("backing");
    let given = |size| format_backing(&opened(&path, size), "it", &store);
    // Only holes, or empty: ours to write.
    given(1 << 20).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), 1 << 20);
    // It was a backing device, and is taken again.
    given(2 << 20).unwrap();
    fs::remove_file(&path).unwrap();
    fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    given(0).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), 1 << 20);
    fs::write(&path, []).unwrap();
    given(8192).unwrap();
    // Foreign, though all blocks that are checked are zeros; neither written nor extended.
    for (at, what) in [(0, &b"mine"[..]), (100, b"mine"), (3 << 20, b"mine"), (40_000, &[0])] {
        fs::remove_file(&path).unwrap();
        let file = fs::File::create(&path).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, what, at).unwrap();
        let before = fs::read(&path).unwrap();
        let said = given(1 << 30).unwrap_err().to_string();
        assert!(said.starts_with("it is no backing device and not empty: a file with"), "{said}");
        assert!(fs::read(&path).unwrap() == before, "{at}");
    }
}

#[test]
fn a_path_that_is_no_disk_is_refused_and_no_file_is_created() {
    // A mistyped name.
    let wrong = Path::new("/dev/platen-no-such-disk");
    let refused = FileDisk::open(wrong, 1 << 20).unwrap_err();
    assert!(matches!(refused, DiskError::NoDevice), "{refused}");
    assert!(!wrong.exists());
    assert!(matches!(FileDisk::open(Path::new("/dev/null"), 0), Err(DiskError::Kind)));
    // A file system needs memory for a late write.
    let path = folder("for-swap").join("backing");
    let swap = FileDisk::open(&path, 1 << 20).unwrap().check_for_swap().unwrap_err();
    assert!(matches!(swap, DiskError::Swap("a file")), "{swap}");
    // Another run of this test, beside this one, has its own.
    let memory = format!("/dev/shm/platen-test-backing-{}", std::process::id());
    let memory = Path::new(&memory);
    if fs::write(memory, []).is_err() {
        println!("skipped: there is no /dev/shm to write to");
        return;
    }
    let refused = FileDisk::open(memory, 1 << 20);
    fs::remove_file(memory).unwrap();
    assert!(matches!(refused, Err(DiskError::Memory("tmpfs"))), "{refused:?}");
}

/// By a loop device, where one can be made.
#[test]
fn a_block_device_in_exclusive_use_is_refused() {
    let image = folder("claimed").join("image");
    fs::File::create(&image).unwrap().set_len(80 << 20).unwrap();
    let made = Command::new("losetup").args(["--find", "--show"]).arg(&image).output();
    let Some(made) = made.ok().filter(|made| made.status.success()) else {
        println!("skipped: no loop device can be made here");
        return;
    };
    let name = String::from_utf8(made.stdout).unwrap().trim().to_owned();
    let result = std::panic::catch_unwind(|| {
        let path = Path::new(&name);
        let disk = FileDisk::open(path, 0).unwrap();
        assert!(matches!(FileDisk::open(path, 0), Err(DiskError::Claimed)));
        assert!(matches!(disk.check_for_swap(), Err(DiskError::Swap("a loop device"))));
        // Inheriting succeeds, and is no claim of its own.
        let heir = FileDisk::inherit(disk.fd()).unwrap();
        assert_eq!(heir.blocks().unwrap(), 20_480);
        let store = given(10, &heir);
        store.set_backing(Box::new(heir), &name).unwrap();
        // A device of another store is accepted; with data at its end it is not, once its header is
        // gone.
        format_backing(&disk, &name, &given(10, &disk)).unwrap();
        disk.write(0, &[Block::ZERO]).unwrap();
        disk.write(20_470, &[Block([7; MAX_OBJECT])]).unwrap();
        let said = format_backing(&disk, &name, &store).unwrap_err().to_string();
        assert!(said.contains("its block 20470 has data"), "{said}");
    });
    Command::new("losetup").args(["--detach", &name]).status().unwrap();
    result.unwrap();
}
