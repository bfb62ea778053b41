//! The mapped-ram file of an image carries the VM that was saved.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};

use image::RamBlock;
use player::{mapped_ram, PlayError};
use recorder::{record, record_file, Ending, Sink};
use stream::synth::{Configuration, MainStream, Section};

mod common;

use common::{page, saved};

const PAGE: usize = 4096;
/// Pages of the large block: more than a block with zero pages in the file has, and than a piece of
/// a bitmap has bits.
const LARGE: u64 = 600_000;

/// A sink that stores each page that is not zero.
#[derive(Default)]
struct Memory {
    blocks: Vec<RamBlock>,
    pages: HashMap<(usize, u64), Vec<u8>>,
    zeros: Vec<(usize, u64)>,
}

impl Sink for Memory {
    type Error = std::convert::Infallible;

    fn blocks(&mut self, _: usize, blocks: &[RamBlock]) -> Result<(), Self::Error> {
        self.blocks = blocks.to_vec();
        Ok(())
    }

    fn page(&mut self, block: usize, page: u64, bytes: &[u8]) -> Result<(), Self::Error> {
        if bytes.iter().all(|&byte| byte == 0) {
            return self.zero(block, page);
        }
        self.pages.insert((block, page), bytes.to_vec());
        Ok(())
    }

    fn zero(&mut self, block: usize, page: u64) -> Result<(), Self::Error> {
        self.pages.remove(&(block, page));
        self.zeros.push((block, page));
        Ok(())
    }
}

/// The stream of a save of two blocks: pages of every kind, in runs, some sent twice.
fn save() -> Vec<u8> {
    let mut main = MainStream::new(PAGE);
    main.file_header();
    main.configuration(&Configuration { machine: "pc-q35-9.0", ..Configuration::default() });
    main.section(Section::Start)
        .block_table(&[("pc.ram", LARGE * PAGE as u64), ("pc.rom", 41 * PAGE as u64)]);
    main.end_of_section();
    main.virtio_mem_early(9, 2 << 20, 4096);
    main.section(Section::Part);
    // Around the end of a piece of a bitmap, and at both ends of the block.
    for at in (0..60).chain(524_200..524_400).chain([LARGE - 1]) {
        match at % 7 {
            0 => main.zero("pc.ram", at * 4096),
            1 | 2 => main.page("pc.ram", at * 4096, &[at.to_le_bytes()[0] | 1; PAGE]),
            _ => main.page("pc.ram", at * 4096, &page(at)),
        };
    }
    for at in 300_000..300_040 {
        main.page("pc.ram", at * 4096, &[3; PAGE]);
    }
    for at in 0..41 {
        main.page("pc.rom", at * 4096, &page(1000 + at));
    }
    main.end_of_section().section(Section::Part);
    main.page("pc.ram", 4096 * 10, &page(7)).zero("pc.ram", 4096 * 11).zero("pc.rom", 4096 * 3);
    main.end_of_section();
    main.section(Section::End).end_of_section().device_tail(9000);
    main.take()
}

#[test]
fn a_mapped_ram_file_has_every_page_and_byte_of_the_image() {
    let folder = tempfile::tempdir().unwrap();
    let stream = save();
    let image = saved(&folder.path().join("image"), &stream);
    let mut expected = Memory::default();
    record(&stream[..], &mut expected, Ending::Closed).unwrap();
    let path = folder.path().join("file");
    let file = File::create(&path).unwrap();
    let len = mapped_ram(&image, &file, 2).unwrap();
    let meta = path.metadata().unwrap();
    assert_eq!(meta.len(), len);
    assert!(LARGE * PAGE as u64 <= len && meta.blocks() * 512 < 4 << 20, "{meta:?}");
    let mut found = Memory::default();
    let recorded = record_file(File::open(&path).unwrap(), &mut found).unwrap();
    assert!(recorded.mapped_ram && recorded.state == *image.state());
    assert_eq!(found.blocks, expected.blocks);
    assert!(found.pages == expected.pages);
    // Only the small block's zero page is in the file.
    assert_eq!(found.zeros, [(1, 3)]);
}

#[test]
fn a_damaged_unit_ends_the_file_before_its_device_state() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    let image = saved(&path, &save());
    let on_disk = File::options().read(true).write(true).open(&path).unwrap();
    let at = image.index().units[1].offset + 100;
    let mut byte = [0];
    on_disk.read_exact_at(&mut byte, at).unwrap();
    on_disk.write_all_at(&[byte[0] ^ 1], at).unwrap();
    let path = folder.path().join("file");
    let error = mapped_ram(&image, &File::create(&path).unwrap(), 2).unwrap_err();
    assert!(matches!(error, PlayError::Image(_)), "{error}");
    let file = File::open(&path).unwrap();
    assert!(record_file(file, &mut Memory::default()).is_err());
}

#[test]
fn a_full_disk_is_an_error_of_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let image = saved(&folder.path().join("image"), &save());
    // No write beyond its beginning succeeds.
    let full = File::options().write(true).open("/dev/full").unwrap();
    let error = mapped_ram(&image, &full, 2).unwrap_err();
    assert!(error.to_string().contains("cannot write the file"), "{error}");
}
