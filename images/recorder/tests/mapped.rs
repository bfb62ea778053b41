//! Mapped-ram files: made ones against their pages, cut, bent and forged ones.

use std::collections::HashMap;
use std::io::{Cursor, Seek, SeekFrom};

use image::RamBlock;
use proptest::prelude::*;
use recorder::{record, record_file, Ending, RecordError, Recorded, Sink};
use stream::synth::{main_stream, mapped_ram_file, Style};

const PAGE: usize = 4096;
const MIB: usize = 1 << 20;

/// A sink that stores each page.
#[derive(Default)]
struct Memory {
    blocks: Vec<RamBlock>,
    pages: HashMap<(usize, u64), Vec<u8>>,
}

impl Sink for Memory {
    type Error = std::convert::Infallible;

    fn blocks(&mut self, page_size: usize, blocks: &[RamBlock]) -> Result<(), Self::Error> {
        assert_eq!(page_size, PAGE);
        self.blocks = blocks.to_vec();
        Ok(())
    }

    fn page(&mut self, block: usize, page: u64, bytes: &[u8]) -> Result<(), Self::Error> {
        assert!(bytes.len() == PAGE && page * (PAGE as u64) < self.blocks[block].len);
        self.pages.insert((block, page), bytes.to_vec());
        Ok(())
    }

    fn zero(&mut self, _: usize, _: u64) -> Result<(), Self::Error> {
        Ok(())
    }
}

type Outcome = Result<Recorded, RecordError<std::convert::Infallible>>;

fn recorded(file: &[u8], first: usize) -> (Outcome, Memory) {
    let mut memory = Memory::default();
    let mut cursor = Cursor::new(file);
    cursor.seek(SeekFrom::Start(first as u64)).unwrap();
    (record_file(cursor, &mut memory), memory)
}

#[track_caller]
fn refused(file: &[u8], expected: &str) {
    let said = recorded(file, 0).0.unwrap_err().to_string();
    assert!(said.contains(expected), "{said}");
}

/// Every third page is zero.
fn pages(count: usize) -> Vec<Vec<u8>> {
    let page = |at: usize| (at << 8 | 7).to_le_bytes().repeat(PAGE / 8);
    (0..count).map(|at| if at % 3 == 1 { vec![0; PAGE] } else { page(at) }).collect()
}

#[test]
fn every_page_of_a_mapped_ram_file_arrives_wherever_the_stream_begins() {
    // More pages than a piece has bits or bytes, the last word partly used; one page; none set.
    let (many, one, zeros) = (pages(600), pages(1), vec![vec![0; PAGE]; 70]);
    let blocks = [("pc.ram", &many[..]), ("rom", &one), ("empty", &zeros)];
    for first in [0, 5000] {
        let file = mapped_ram_file("pc-i440fx-10.0", &blocks, PAGE, MIB, first);
        let (outcome, memory) = recorded(&file, first);
        let recorded = outcome.unwrap();
        assert!(recorded.mapped_ram);
        assert_eq!((recorded.pages, recorded.zeros), (401, 0));
        assert_eq!(recorded.bytes, (file.len() - first) as u64);
        assert_eq!(recorded.state.machine(), Some("pc-i440fx-10.0"));
        // The configuration for another stream announces no mapped-ram.
        assert!(!recorded.state.configuration.windows(6).any(|bytes| bytes == b"mapped"));
        assert_eq!(memory.pages.len(), 401);
        for (block, (name, pages)) in blocks.iter().enumerate() {
            assert_eq!(memory.blocks[block].name, *name);
            for (at, page) in pages.iter().enumerate() {
                let found = memory.pages.get(&(block, at as u64));
                assert!(found.unwrap_or(&vec![0; PAGE]) == page, "{name} {at}");
            }
        }
    }
}

#[test]
fn a_page_that_has_become_zero_is_not_read() {
    let file = mapped_ram_file("pc", &[("pc.ram", &pages(3)[..])], PAGE, MIB, 0);
    let bitmap = bitmap_of(&file);
    let mut stale = file.clone();
    stale[bitmap] = 0b100;
    let (outcome, memory) = recorded(&stale, 0);
    assert_eq!(outcome.unwrap().pages, 1);
    assert_eq!(memory.pages.into_keys().collect::<Vec<_>>(), [(0, 2)]);
}

#[test]
fn a_plain_stream_in_a_file_is_recorded_as_from_a_pipe() {
    let stream = main_stream(Style::Qemu92, PAGE, pages(20));
    let mut memory = Memory::default();
    let piped = record(&stream[..], &mut memory, Ending::Closed).unwrap();
    let (outcome, of_file) = recorded(&stream, 0);
    assert_eq!(outcome.unwrap(), piped);
    assert!(of_file.pages == memory.pages && !piped.mapped_ram);
}

#[test]
fn from_a_pipe_the_name_of_the_file_is_asked_for() {
    let file = mapped_ram_file("pc", &[("pc.ram", &pages(3)[..])], PAGE, MIB, 0);
    let error = record(&file[..], &mut Memory::default(), Ending::Closed).unwrap_err();
    assert!(error.to_string().contains("give the name of the file"), "{error}");
}

#[test]
fn a_file_that_is_cut_anywhere_is_refused() {
    let file = mapped_ram_file("pc", &[("pc.ram", &pages(3)[..])], PAGE, PAGE, 0);
    for len in 0..file.len() {
        let error = recorded(&file[..len], 0).0.expect_err("a cut file is whole");
        let RecordError::Ends { at, .. } = error else { panic!("{len}: {error}") };
        assert_eq!(at, len as u64);
    }
}

/// The offset of the first block's bitmap: behind its header.
fn bitmap_of(file: &[u8]) -> usize {
    let name = file.windows(7).position(|bytes| bytes == b"\x06pc.ram").unwrap();
    name + 7 + 8 + 28
}

#[test]
fn a_header_that_is_wrong_is_named_with_its_number() {
    let file = mapped_ram_file("pc", &[("pc.ram", &pages(3)[..])], PAGE, PAGE, 0);
    let bitmap = bitmap_of(&file);
    let (version, size, bits, at) = (bitmap - 28, bitmap - 24, bitmap - 16, bitmap - 8);
    for (place, number, expected) in [
        (version, 2 << 32, "version 2, and platen reads version 1"),
        (size, 8192, "pages of 8192 bytes"),
        (bits, 7, "bitmap at 0x7"),
        (bits, u64::MAX, "pages at 0x1000"),
        (at, 0x1001, "pages at 0x1001"),
        (at, 0, "pages at 0x0"),
        (at, u64::MAX << 12, "pages at 0xfffffffffffff000"),
        (at, 1 << 40, "is cut off"),
        (bitmap - 36, 12_289, "12289 bytes"),
    ] {
        let mut bent = file.clone();
        let field = if place == version { 4 } else { 8 };
        bent[place..place + field].copy_from_slice(&number.to_be_bytes()[..field]);
        if place == bitmap - 36 {
            // The total of the table, before the block's name.
            bent[place - 15..place - 7].copy_from_slice(&0x4004_u64.to_be_bytes());
        }
        refused(&bent, expected);
    }
    let mut beyond = file.clone();
    beyond[bitmap] |= 0b1000;
    refused(&beyond, "page 3 of block 'pc.ram' of 3 pages");
}

#[test]
fn a_save_with_background_snapshot_is_refused_with_a_remedy() {
    let file = mapped_ram_file("pc", &[("pc.ram", &pages(3)[..])], PAGE, PAGE, 0);
    // Without the end of RAM: tag, id, EOS, footer.
    let end = [&[3, 0, 0, 0, 2][..], &16_u64.to_be_bytes(), b"\x7e\0\0\0\x02"].concat();
    let at = file.windows(end.len()).position(|bytes| bytes == end).unwrap();
    refused(&[&file[..at], &file[at + end.len()..]].concat(), "turn background-snapshot off");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    /// A corrupted file is recorded or refused; it never causes a panic.
    #[test]
    fn bent_files_are_recorded_or_refused(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)
    ) {
        let mut file = mapped_ram_file("pc", &[("pc.ram", &pages(3)[..])], PAGE, PAGE, 0);
        // Half of the changes hit what is not a page.
        let head = bitmap_of(&file) + 8;
        for (nth, (at, byte)) in changes.into_iter().enumerate() {
            let at = at.index(if nth % 2 == 0 { head } else { file.len() });
            file[at] = byte;
        }
        let _ = recorded(&file, 0);
    }
}
