//! An image returns the pages that were written, or names the damage.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use codec::{Codec, Settings};
use image::{
    check_units, verify, Content, Damage, Finished, Image, Options, RamBlock, State, Units,
    WriteError, Writer,
};
use proptest::prelude::*;

const PAGE: usize = 4096;

fn options(codec: Codec) -> Options {
    let settings = Settings::new(codec, None).unwrap();
    Options { settings, unit_bytes: 64 << 10, threads: 2, ..Options::default() }
}

fn state() -> State {
    State {
        configuration: b"QEVM\0\0\0\x03\x07\0\0\0\x06pc-1.0".to_vec(),
        ram_section: 2,
        ram_version: 4,
        early: Vec::new(),
        devices: (0..900_u32).flat_map(u32::to_le_bytes).collect(),
        description: b"{\"devices\": []}".to_vec(),
        facts: b"{}".to_vec(),
    }
}

/// A page that compresses to about an eighth. Different seeds give different pages.
fn page(seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..PAGE / 8)
        .flat_map(|at| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1442);
            let random = (state >> 16).to_le_bytes();
            if at % 8 == 0 {
                random
            } else {
                [b'x'; 8]
            }
        })
        .collect()
}

fn blocks(sizes: &[u64]) -> Vec<RamBlock> {
    let block = |(at, &pages): (usize, &u64)| RamBlock {
        name: format!("ram{at}"),
        len: pages * PAGE as u64,
        host_page: 0,
    };
    sizes.iter().enumerate().map(block).collect()
}

/// The last version of each page, by block and page.
type Oracle = HashMap<(usize, u64), Vec<u8>>;

/// Asserts that every page of the image is the oracle's, or zero where the oracle has none.
fn compare(image: &Image, oracle: &Oracle) {
    let mut units = Units::new();
    let mut plain = vec![0; image.shape().unit_bytes()];
    for (number, block) in image.index().blocks.iter().enumerate() {
        for page in 0..block.pages {
            let bytes = match block.content(page).unwrap() {
                Content::Zero => vec![0; PAGE],
                Content::Filled(word) => word.repeat(PAGE / 8),
                Content::Slot(slot) => {
                    let per = image.shape().unit_pages();
                    units.read(image, slot / per, &mut plain).unwrap();
                    let at = usize::try_from(slot % per).unwrap() * PAGE;
                    plain[at..at + PAGE].to_vec()
                }
            };
            let expected = oracle.get(&(number, page));
            let same = expected.map_or(bytes.iter().all(|&b| b == 0), |page| *page == bytes);
            assert!(same, "page {page} of block {number}");
        }
    }
}

/// A small image: two full units and a partial one, zero and same-filled pages, pages written
/// twice.
fn small(path: &Path, codec: Codec) -> Oracle {
    let mut writer = Writer::create(path, options(codec)).unwrap();
    writer.blocks(PAGE, &blocks(&[40, 3])).unwrap();
    let mut oracle = Oracle::new();
    for at in 0..34 {
        oracle.insert((0, at), page(at));
        writer.page(0, at, &oracle[&(0, at)]).unwrap();
    }
    writer.zero(0, 34);
    for (block, at, bytes) in
        [(0, 35, vec![7; PAGE]), (0, 3, page(99)), (0, 4, vec![0; PAGE]), (1, 2, page(5))]
    {
        writer.page(block, at, &bytes).unwrap();
        oracle.insert((block, at), bytes);
    }
    let summary = writer.finish(&state()).unwrap().link().unwrap();
    assert_eq!((summary.slots, summary.superseded), (36, 2));
    assert_eq!((summary.zero, summary.filled, summary.unsent), (2, 1, 4 + 2));
    assert_eq!(summary.file_bytes, path.metadata().unwrap().len());
    oracle
}

/// Units of one image may have levels of their own.
#[test]
fn an_image_with_adapted_levels_has_every_page() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("i");
    let options = Options { adapt: true, ..options(Codec::Zstd) };
    let mut writer = Writer::create(&path, options).unwrap();
    writer.blocks(PAGE, &blocks(&[4000])).unwrap();
    let mut oracle = Oracle::new();
    for at in 0..4000 {
        oracle.insert((0, at), page(at));
        writer.page(0, at, &oracle[&(0, at)]).unwrap();
    }
    writer.finish(&state()).unwrap().link().unwrap();
    assert!(verify(&path).findings.is_empty());
    compare(&Image::open(&path).unwrap(), &oracle);
}

#[test]
fn every_page_and_the_state_come_back_with_every_codec() {
    let folder = tempfile::tempdir().unwrap();
    for codec in [Codec::Raw, Codec::Lz4, Codec::Zlib, Codec::Zstd, Codec::DeflateQz] {
        let path = folder.path().join(codec.name());
        let oracle = small(&path, codec);
        let image = Image::open(&path).unwrap();
        assert_eq!(*image.state(), state());
        assert_eq!(image.ram_bytes(), 43 * PAGE as u64);
        compare(&image, &oracle);
        let report = verify(&path);
        assert_eq!((report.units, report.findings), (3, Vec::new()), "{codec}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(30))]
    #[test]
    fn the_last_version_of_each_page_comes_back(
        writes in prop::collection::vec((0_usize..3, 0_u64..70, 0_u64..4, any::<u64>()), 0..400)
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("i");
        let mut writer = Writer::create(&path, options(Codec::Lz4)).unwrap();
        writer.blocks(PAGE, &blocks(&[70, 70, 70])).unwrap();
        let mut oracle = Oracle::new();
        for (block, at, kind, seed) in writes {
            let bytes = match kind {
                0 => vec![0; PAGE],
                1 => (seed % 3).to_le_bytes().repeat(PAGE / 8),
                _ => page(seed),
            };
            if kind == 0 { writer.zero(block, at) } else { writer.page(block, at, &bytes).unwrap() }
            oracle.insert((block, at), bytes);
        }
        writer.finish(&state()).unwrap().link().unwrap();
        compare(&Image::open(&path).unwrap(), &oracle);
        prop_assert_eq!(verify(&path).findings, Vec::new());
    }
}

#[test]
fn a_flipped_byte_anywhere_is_found_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("i");
    small(&path, Codec::Zstd);
    let whole = fs::read(&path).unwrap();
    let image = Image::open(&path).unwrap();
    let units: Vec<_> =
        image.index().units.iter().map(|u| u.offset..u.offset + u64::from(u.len)).collect();
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    let mut named = HashMap::new();
    for at in 0..whole.len() {
        file.write_all_at(&[whole[at] ^ 1 << (at % 8)], at as u64).unwrap();
        let findings = verify(&path).findings;
        file.write_all_at(&whole[at..=at], at as u64).unwrap();
        assert!(!findings.is_empty(), "byte {at} is wrong, and nothing is found");
        let hit = units.iter().position(|unit| unit.contains(&(at as u64)));
        match (&findings[0].damage, hit) {
            (Damage::Unit { unit, .. }, Some(number)) => {
                assert_eq!(*unit, number as u64);
                assert!(findings[0].to_string().contains("of ram"), "{}", findings[0]);
                *named.entry("unit").or_insert(0) += 1;
            }
            (damage, Some(number)) => panic!("byte {at} of unit {number}: {damage}"),
            (Damage::State { .. }, None) => *named.entry("state").or_insert(0) += 1,
            (Damage::Index { .. }, None) => *named.entry("index").or_insert(0) += 1,
            (_, None) => *named.entry("other").or_insert(0) += 1,
        }
    }
    // The rest are the bytes of header and trailer.
    assert_eq!(named["other"], 64 + 96);
    assert_eq!(named["unit"] + named["state"] + named["index"] + named["other"], whole.len());
}

#[test]
fn cut_foreign_and_future_files_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("i");
    small(&path, Codec::Lz4);
    let whole = fs::read(&path).unwrap();
    let bent = folder.path().join("bent");
    let said = |bytes: &[u8]| {
        fs::write(&bent, bytes).unwrap();
        Image::open(&bent).unwrap_err().to_string()
    };
    let cut = fs::OpenOptions::new().write(true).open(&path).unwrap();
    for len in (0..whole.len()).rev() {
        cut.set_len(len as u64).unwrap();
        let said = Image::open(&path).unwrap_err().to_string();
        let names = ["not an image", "cut off", "length", "trailer"];
        assert!(names.iter().any(|name| said.contains(name)), "cut at {len}: {said}");
    }
    assert!(said(&[&whole[..], &[0]].concat()).contains("trailer"));
    assert!(said(b"QEVM\0\0\0\x03").contains("not an image"));
    assert!(said(&vec![0; 4096]).contains("not an image"));
    let mut future = whole.clone();
    future[11] = 3;
    assert!(said(&future).contains("version 3"));
    assert!(Image::open(folder.path()).is_err());
    assert!(matches!(Image::open(&folder.path().join("none")), Err(Damage::Io { .. })));
}

/// Two units change places: each is intact, but where the other belongs.
#[test]
fn a_unit_in_the_place_of_another_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("i");
    let mut writer = Writer::create(&path, options(Codec::Raw)).unwrap();
    writer.blocks(PAGE, &blocks(&[32])).unwrap();
    for at in 0..32 {
        writer.page(0, at, &page(at)).unwrap();
    }
    writer.finish(&state()).unwrap().link().unwrap();
    let mut bytes = fs::read(&path).unwrap();
    let len = (64 << 10) + 20;
    let (first, second) = bytes[64..64 + 2 * len].split_at_mut(len);
    first.swap_with_slice(second);
    fs::write(&path, &bytes).unwrap();
    let image = Image::open(&path).unwrap();
    let mut plain = vec![0; 64 << 10];
    for unit in 0..2 {
        let damage = Units::new().read(&image, unit, &mut plain).unwrap_err();
        assert!(matches!(damage, Damage::Unit { unit: hit, .. } if hit == unit), "{damage}");
    }
}

/// Each unit is damaged in turn, and any number of threads finds it.
#[test]
fn one_damaged_unit_is_found_without_decoding() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("i");
    let mut writer = Writer::create(&path, options(Codec::Zstd)).unwrap();
    writer.blocks(PAGE, &blocks(&[100])).unwrap();
    for at in 0..100 {
        writer.page(0, at, &page(at)).unwrap();
    }
    writer.finish(&state()).unwrap().link().unwrap();
    let image = Image::open(&path).unwrap();
    for threads in [1, 2, 20] {
        assert_eq!(check_units(&image, threads), Ok(()));
    }
    let file = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    for (at, unit) in image.index().units.iter().enumerate() {
        let last = unit.offset + u64::from(unit.len) - 1;
        let mut byte = [0];
        file.read_exact_at(&mut byte, last).unwrap();
        file.write_all_at(&[byte[0] ^ 1], last).unwrap();
        for threads in [1, 2, 20] {
            let damage = check_units(&image, threads).unwrap_err();
            let is_it = matches!(damage, Damage::Unit { unit: hit, .. } if hit == at as u64);
            assert!(is_it, "unit {at}, {threads} threads: {damage}");
        }
        file.write_all_at(&byte, last).unwrap();
    }
}

#[test]
fn a_file_that_exists_is_not_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("i");
    let finished = |path: &Path| -> Finished {
        let mut writer = Writer::create(path, options(Codec::Lz4)).unwrap();
        writer.blocks(PAGE, &blocks(&[1])).unwrap();
        writer.finish(&state()).unwrap()
    };
    let late = finished(&path);
    fs::write(&path, "somebody else's").unwrap();
    assert!(matches!(late.link(), Err(WriteError::Io { what: "name", .. })));
    let refused = Writer::create(&path, options(Codec::Lz4)).unwrap_err().to_string();
    assert!(refused.contains("create") && refused.contains("/i"), "{refused}");
    assert_eq!(fs::read(&path).unwrap(), b"somebody else's");
}

#[test]
fn an_image_without_ram_is_an_image() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("i");
    let writer = Writer::create(&path, options(Codec::Lz4)).unwrap();
    writer.finish(&state()).unwrap().link().unwrap();
    assert_eq!(verify(&path).findings, Vec::new());
    assert_eq!(Image::open(&path).unwrap().ram_bytes(), 0);
}

#[test]
fn block_tables_that_no_image_has_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let said = |blocks: &[RamBlock]| {
        let path = folder.path().join("i");
        let mut writer = Writer::create(&path, options(Codec::Lz4)).unwrap();
        writer.blocks(PAGE, blocks).unwrap_err().to_string()
    };
    let block = |name: &str, len| RamBlock { name: name.into(), len, host_page: 0 };
    assert!(said(&[block("a", 100)]).contains("multiple"));
    assert!(said(&[block("a", 1 << 62), block("b", 1 << 62)]).contains("16 TiB"));
    assert!(said(&[block("a", 4096), block("a", 4096)]).contains("another block"));
    assert!(said(&[block(&"x".repeat(256), 4096)]).contains("too long"));
}

/// Runs of [`the_writer`]: one that ends at each of its 45 steps, and one that completes.
const STEPS: u32 = 46;

/// The child process of the tests below: it writes an image in steps and ends at one of them. Run
/// as a test of its own, it does nothing.
#[test]
fn the_writer() {
    let Ok(step) = std::env::var("KILLED_AT") else { return };
    let path = std::env::var("IMAGE").unwrap();
    let mut left: u32 = step.parse().unwrap();
    let mut next = || {
        left -= 1;
        if left == 0 {
            std::process::abort();
        }
    };
    next();
    let mut writer = Writer::create(Path::new(&path), options(Codec::Zstd)).unwrap();
    next();
    writer.blocks(PAGE, &blocks(&[40])).unwrap();
    for at in 0..40 {
        next();
        writer.page(0, at, &page(at)).unwrap();
    }
    next();
    let finished = writer.finish(&state()).unwrap();
    next();
    finished.link().unwrap();
    next();
}

#[test]
fn a_writer_killed_at_any_step_leaves_no_image() {
    let me = std::env::current_exe().unwrap();
    for step in 1..=STEPS {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("i");
        let status = Command::new(&me)
            .args(["the_writer", "--exact"])
            .env("KILLED_AT", step.to_string())
            .env("IMAGE", &path)
            .stderr(std::process::Stdio::null())
            .stdout(std::process::Stdio::null())
            .status()
            .unwrap();
        let killed = std::os::unix::process::ExitStatusExt::signal(&status).is_some();
        // After the last step the writer has ended by itself.
        assert_eq!(killed, step < STEPS, "step {step}: {status}");
        if step < STEPS - 1 {
            assert!(!path.exists(), "killed at step {step}, it left an image");
        } else {
            assert_eq!(verify(&path).findings, Vec::new(), "step {step}");
        }
    }
}

#[test]
fn a_disk_that_is_full_ends_the_writer_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("i");
    let me = std::env::current_exe().unwrap();
    // A limit on file length simulates a full disk. The shell ignores its signal.
    let script = "trap '' XFSZ; ulimit -f 12; exec \"$0\" the_writer --exact";
    let output = Command::new("sh")
        .args(["-c", script])
        .arg(&me)
        .env("KILLED_AT", "1000")
        .env("IMAGE", &path)
        .output()
        .unwrap();
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("write") && said.contains("/i"), "{said}");
    assert!(!path.exists());
}
