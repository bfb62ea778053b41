//! The plain stream of an image carries the VM that was saved.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use image::{Image, Options, RamBlock, Store, Writer};
use player::{plain, PlainOptions, PlayError, Reader};
use recorder::{record, Ending, Sink};
use stream::synth::{Configuration, MainStream, Section};

mod common;

use common::{page, saved};

const PAGE: usize = 4096;
const HOW: PlainOptions = PlainOptions { threads: 2, reader: Reader::Qemu, runs: false };

#[derive(Default)]
struct Memory {
    blocks: Vec<RamBlock>,
    pages: HashMap<(usize, u64), Vec<u8>>,
}

impl Sink for Memory {
    type Error = std::convert::Infallible;

    fn blocks(&mut self, _: usize, blocks: &[RamBlock]) -> Result<(), Self::Error> {
        self.blocks = blocks.to_vec();
        Ok(())
    }

    fn page(&mut self, block: usize, page: u64, bytes: &[u8]) -> Result<(), Self::Error> {
        self.pages.insert((block, page), bytes.to_vec());
        Ok(())
    }

    fn zero(&mut self, block: usize, page: u64) -> Result<(), Self::Error> {
        self.pages.insert((block, page), vec![0; PAGE]);
        Ok(())
    }
}

/// The stream of a live save of two blocks: pages of every kind, some of them sent twice.
fn save() -> Vec<u8> {
    let mut main = MainStream::new(PAGE);
    main.file_header();
    main.configuration(&Configuration { machine: "pc-q35-7.2", ..Configuration::default() });
    main.section(Section::Start).block_table(&[("pc.ram", 100 * 4096), ("pc.rom", 40 * 4096)]);
    main.end_of_section();
    main.virtio_mem_early(9, 2 << 20, 4096);
    main.section(Section::Part);
    for at in 0..100 {
        match at % 7 {
            0 => main.zero("pc.ram", at * 4096),
            1 => main.page("pc.ram", at * 4096, &[at.to_le_bytes()[0]; PAGE]),
            _ => main.page("pc.ram", at * 4096, &page(at)),
        };
    }
    for at in 0..40 {
        main.page("pc.rom", at * 4096, &page(1000 + at));
    }
    main.end_of_section().section(Section::Part);
    for at in (0..100).step_by(9) {
        main.page("pc.ram", at * 4096, &page(2000 + at));
    }
    main.zero("pc.rom", 3 * 4096).end_of_section();
    main.section(Section::End).end_of_section().device_tail(9000);
    main.take()
}

#[test]
fn every_page_and_the_state_come_out_again() {
    let folder = tempfile::tempdir().unwrap();
    let stream = save();
    let image = saved(&folder.path().join("i"), &stream);
    let (mut before, mut after) = (Memory::default(), Memory::default());
    let saved = record(&stream[..], &mut before, Ending::Closed).unwrap();
    let mut out = Vec::new();
    let bytes = plain(&image, &mut out, HOW).unwrap();
    assert_eq!(bytes, out.len() as u64);
    let restored = record(&out[..], &mut after, Ending::Closed).unwrap();
    assert_eq!(restored.state, saved.state);
    assert!(restored.return_path);
    assert_eq!((restored.pages, restored.zeros), (140 - 1 - 13, 1 + 13));
    assert_eq!(after.blocks, before.blocks);
    assert_eq!(after.pages.len(), before.pages.len());
    for (place, bytes) in &before.pages {
        assert!(after.pages[place] == *bytes, "page {place:?}");
    }
}

/// A QEMU that has discarded its RAM first reads every page as from the stream with zero pages.
#[test]
fn zero_pages_are_left_out_only_after_the_order_to_discard() {
    let folder = tempfile::tempdir().unwrap();
    let image = saved(&folder.path().join("i"), &save());
    let stream = |reader| {
        let (mut out, mut memory) = (Vec::new(), Memory::default());
        plain(&image, &mut out, PlainOptions { reader, ..HOW }).unwrap();
        let recorded = record(&out[..], &mut memory, Ending::Closed).unwrap();
        // ADVISE with two page sizes of 4096, before the RAM section begins.
        let advise = b"\x08\0\x03\0\x10\0\0\0\0\0\0\x10\0\0\0\0\0\0\0\x10\0\x01";
        let advised = out.windows(advise.len()).any(|bytes| bytes == advise);
        (memory, recorded, advised)
    };
    let (all, of_all, advised) = stream(Reader::Qemu);
    assert!(!advised && of_all.zeros == 14);
    let (some, of_some, advised) = stream(Reader::EmptyQemu);
    assert!(advised && of_some.zeros == 0);
    assert_eq!((of_some.pages, of_some.state), (of_all.pages, of_all.state));
    assert_eq!(some.blocks, all.blocks);
    for (place, bytes) in &all.pages {
        let zero = vec![0; PAGE];
        assert!(some.pages.get(place).unwrap_or(&zero) == bytes, "page {place:?}");
    }
    let (any, ..) = stream(Reader::Any);
    assert!(any.pages == all.pages);
}

#[test]
fn a_damaged_unit_is_named_and_no_byte_of_it_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("i");
    let image = saved(&path, &save());
    let unit = image.index().units[1];
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&[0xa5; 4], unit.offset + 40).unwrap();
    let mut out = Vec::new();
    let error = plain(&image, &mut out, HOW).unwrap_err();
    assert!(matches!(error, PlayError::Image(_)), "{error}");
    assert!(error.to_string().contains("unit 1"), "{error}");
    // The written part does not end as a stream does, so QEMU cannot run an incomplete VM.
    let error = record(&out[..], &mut Memory::default(), Ending::Closed).unwrap_err();
    assert!(error.to_string().contains("ends at byte"), "{error}");
}

#[test]
fn a_reader_that_goes_away_ends_it() {
    struct Full(usize);
    impl std::io::Write for Full {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 = self.0.checked_sub(1).ok_or(std::io::ErrorKind::BrokenPipe)?;
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let image = saved(&folder.path().join("i"), &save());
    for writes in 0..5 {
        assert!(matches!(plain(&image, &mut Full(writes), HOW), Err(PlayError::Closed)));
    }
}

/// A guest may fill its RAM with one page, which a store keeps once.
#[test]
fn one_page_that_is_all_of_ram_is_written_in_pieces() {
    struct Longest(usize, Vec<u8>);

    impl std::io::Write for Longest {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 = self.0.max(bytes.len());
            self.1.extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    const PAGES: u64 = 5000;
    let folder = tempfile::tempdir().unwrap();
    let saved = saved(&folder.path().join("image"), &save());
    let store = Store::create(&folder.path().join("store")).unwrap();
    let mut writer = Writer::create_in(&store, "i", None, Options::default()).unwrap();
    let block = |name: &str| RamBlock { name: name.into(), len: PAGES * 4096, host_page: 0 };
    let blocks = [block("one"), block("two")];
    writer.blocks(PAGE, &blocks).unwrap();
    for number in 0..2 {
        (0..PAGES).for_each(|at| writer.page(number, at, &page(3)).unwrap());
    }
    writer.finish(saved.state()).unwrap().link().unwrap();
    let image = Arc::new(Image::open(&folder.path().join("store/i")).unwrap());
    assert_eq!(image.index().units.len(), 1);
    let mut written = Longest(0, Vec::new());
    plain(&image, &mut written, HOW).unwrap();
    assert!(written.0 <= 2 << 20, "{} bytes at once", written.0);
    let mut memory = Memory::default();
    record(&written.1[..], &mut memory, Ending::Closed).unwrap();
    assert_eq!(memory.blocks, blocks);
    assert_eq!(memory.pages.len() as u64, 2 * PAGES);
    assert!(memory.pages.values().all(|bytes| *bytes == page(3)));
}
