//! Generated and recorded streams against an oracle, and malformed streams.

use std::collections::HashMap;
use std::io::Read;
use std::path::Path;

use image::{Content, Image, Options, RamBlock, Units, Writer};
use proptest::prelude::*;
use recorder::{record, Ending, RecordError, Recorded, Sink};
use stream::synth::{main_stream, Configuration, MainStream, Section, Style};

const PAGE: usize = 4096;

/// A sink that stores the last version of every page.
#[derive(Default)]
struct Memory {
    blocks: Vec<RamBlock>,
    pages: HashMap<(usize, u64), Vec<u8>>,
    page_size: usize,
}

impl Sink for Memory {
    type Error = std::convert::Infallible;

    fn blocks(&mut self, page_size: usize, blocks: &[RamBlock]) -> Result<(), Self::Error> {
        (self.page_size, self.blocks) = (page_size, blocks.to_vec());
        Ok(())
    }

    fn page(&mut self, block: usize, page: u64, bytes: &[u8]) -> Result<(), Self::Error> {
        self.pages.insert((block, page), bytes.to_vec());
        Ok(())
    }

    fn zero(&mut self, block: usize, page: u64) -> Result<(), Self::Error> {
        self.pages.insert((block, page), vec![0; self.page_size]);
        Ok(())
    }
}

/// A reader that returns few bytes at a time.
struct Pieces<'a>(&'a [u8], usize);

impl Read for Pieces<'_> {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        let len = self.1.min(out.len()).min(self.0.len());
        out[..len].copy_from_slice(&self.0[..len]);
        self.0 = &self.0[len..];
        Ok(len)
    }
}

type Outcome = Result<Recorded, RecordError<std::convert::Infallible>>;

fn recorded(bytes: &[u8], ending: Ending) -> (Outcome, Memory) {
    let mut memory = Memory::default();
    (record(bytes, &mut memory, ending), memory)
}

fn pages(count: u64) -> Vec<Vec<u8>> {
    (0..count)
        .map(|at| if at % 5 == 0 { vec![0; PAGE] } else { (at << 8 | 7).to_le_bytes().repeat(512) })
        .collect()
}

#[test]
fn every_page_and_byte_of_a_made_stream_arrives_however_it_comes() {
    let pages = pages(30);
    for style in [Style::Qemu72, Style::Qemu90, Style::Qemu92] {
        let bytes = main_stream(style, PAGE, &pages);
        for (size, ending) in [
            (1, Ending::Described),
            (7, Ending::Closed),
            (4103, Ending::Described),
            (1 << 20, Ending::Closed),
        ] {
            let mut memory = Memory::default();
            let recorded = record(Pieces(&bytes, size), &mut memory, ending).unwrap();
            assert_eq!((recorded.pages, recorded.zeros), (24, 6));
            assert_eq!(recorded.bytes, bytes.len() as u64);
            assert!(recorded.return_path);
            assert!(!recorded.flushes);
            assert_eq!(recorded.state.machine(), Some(style.machine()));
            assert_eq!((recorded.state.ram_section, recorded.state.ram_version), (2, 4));
            assert_eq!(memory.blocks.len(), 1);
            for (at, page) in pages.iter().enumerate() {
                assert!(memory.pages[&(0, at as u64)] == *page, "page {at}");
            }
            // The bytes after the RAM sections, to the last one.
            let state = recorded.state;
            let end = [&[0, 6][..], &u32::try_from(state.description.len()).unwrap().to_be_bytes()]
                .concat();
            let tail = [&state.devices[..], &end, &state.description].concat();
            assert!(bytes.ends_with(&tail) && state.devices.starts_with(b"\x04\0\0\0\0\x05timer"));
        }
    }
}

#[test]
fn a_stream_that_is_cut_anywhere_is_refused() {
    let bytes = main_stream(Style::Qemu92, PAGE, pages(3));
    for len in 0..bytes.len() {
        let (outcome, _) = recorded(&bytes[..len], Ending::Closed);
        let error = outcome.expect_err("a cut stream is whole");
        assert!(
            matches!(error, RecordError::Ends { at, .. } if at == len as u64),
            "{len}: {error}"
        );
    }
}

/// The golden streams have the structure of real QEMUs' streams and are cut in their device state.
/// Everything before is understood, and counted as crate `stream` counts it.
#[test]
fn streams_of_real_qemus_are_understood_up_to_where_they_were_cut() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../migrate/stream/tests/golden");
    let cut = "in its device state";
    for (name, expected) in [
        ("q72-0", cut),
        ("q10-0", cut),
        ("q10vm-0", cut),
        ("q72mfrp-0", cut),
        ("q10mf72-0", cut),
        ("q10mfrp-0", cut),
        ("q72comp-0", "compress is on"),
        ("pc72-0", "command 6"),
        ("pcp10-0", "command 6"),
        ("q72mfrp-1", "does not begin"),
        ("q10zstd-2", "does not begin"),
    ] {
        let mut bytes = Vec::new();
        let file = std::fs::File::open(folder.join(format!("{name}.z"))).unwrap();
        flate2::read::ZlibDecoder::new(file).read_to_end(&mut bytes).unwrap();
        let (outcome, memory) = recorded(&bytes, Ending::Closed);
        let said = outcome.expect_err("no golden stream is whole").to_string();
        assert!(said.contains(expected), "{name}: {said}");
        if expected == cut {
            assert!(memory.blocks.iter().any(|block| block.name == "pc.ram"), "{name}");
        }
    }
}

fn begun() -> MainStream {
    let mut main = MainStream::new(PAGE);
    main.file_header();
    main.configuration(&Configuration { machine: "pc-q35-7.2", ..Configuration::default() });
    main
}

#[test]
fn blocks_early_sections_and_pages_that_come_again_are_kept() {
    let mut main = begun();
    main.advise_postcopy(4096 | 2 << 20);
    main.section(Section::Start).block_table_with(&[
        ("pc.ram", 16 * 4096, None, None),
        ("huge", 2 << 20, Some(2 << 20), None),
    ]);
    main.end_of_section();
    main.virtio_mem_early(9, 2 << 20, 4096);
    let (old, new) = (vec![1; PAGE], vec![2; PAGE]);
    main.section(Section::Part).page("pc.ram", 4096, &old).page("huge", 8192, &old);
    main.end_of_section();
    main.section(Section::Part).page("pc.ram", 4096, &new).zero("huge", 8192).end_of_section();
    main.section(Section::End).end_of_section().device_tail(4000);
    let bytes = main.take();
    let (outcome, memory) = recorded(&bytes, Ending::Described);
    let state = outcome.unwrap().state;
    let block = |name: &str, len, host_page| RamBlock { name: name.into(), len, host_page };
    assert_eq!(memory.blocks, [block("pc.ram", 65536, 0), block("huge", 2 << 20, 2 << 20)]);
    assert!(memory.pages[&(0, 1)] == new && memory.pages[&(1, 2)] == vec![0; PAGE]);
    let at = bytes.windows(state.early.len()).position(|window| window == state.early);
    assert!(at.is_some() && state.early.starts_with(b"\x04\0\0\0\x09"));
}

/// QEMU's background-snapshot sends each page once, and no end of RAM.
#[test]
fn a_background_snapshot_is_whole_once_each_page_has_come() {
    let stream = |pages: u64| {
        let mut main = begun();
        main.section(Section::Start).block_table(&[("pc.ram", 4 * 4096)]).end_of_section();
        main.section(Section::Part);
        for page in 0..pages {
            let bytes = vec![u8::try_from(page).unwrap(); PAGE];
            main.zero_or_page("pc.ram", page * 4096, &bytes);
        }
        main.end_of_section().device_tail(400);
        main.take()
    };
    let (outcome, memory) = recorded(&stream(4), Ending::Closed);
    let recorded_all = outcome.unwrap();
    assert_eq!((recorded_all.pages, recorded_all.zeros, memory.pages.len()), (3, 1, 4));
    assert!(!recorded_all.return_path);
    let error = recorded(&stream(3), Ending::Closed).0.unwrap_err().to_string();
    assert!(error.contains("before the end of RAM"), "{error}");
}

#[test]
fn capabilities_that_a_save_must_not_have_are_refused_with_a_remedy() {
    let said = |change: fn(&mut MainStream) -> &mut MainStream| {
        let mut main = begun();
        change(&mut main);
        recorded(&main.take(), Ending::Closed).0.unwrap_err().to_string()
    };
    fn start(main: &mut MainStream) -> &mut MainStream {
        main.section(Section::Start).block_table(&[("pc.ram", 65536)])
    }
    assert!(said(|m| m.command(8, &[])).contains("x-colo"));
    assert!(said(|m| m.command(4, &[])).contains("command 4"));
    assert!(said(|m| m.named_section(1, 5, "dirty-bitmap", 0, 1)).contains("dirty-bitmap"));
    assert!(said(|m| start(m).xbzrle("pc.ram", 0, &[1])).contains("turn it off"));
    assert!(said(|m| start(m).compressed("pc.ram", 0, &[1])).contains("turn it off"));
    assert!(said(|m| start(m).page("pc.ram", 65536, &[1; PAGE])).contains("0x10000"));
    assert!(said(|m| start(m).page("vga", 0, &[1; PAGE])).contains("'vga'"));
    assert!(said(|m| start(m).raw(&[0; 8])).contains("flags 0x0"));
    assert!(said(|m| start(m).end_of_section().device_tail(400)).contains("end of RAM"));
    assert!(said(|m| {
        m.section(Section::Start).end_of_section();
        m.section(Section::End).end_of_section().device_tail(400)
    })
    .contains("without a block table"));
    let mut main = MainStream::new(PAGE);
    main.file_header().configuration(&Configuration {
        machine: "pc",
        capabilities: &["x-ignore-shared"],
        ..Configuration::default()
    });
    let error = recorded(&main.take(), Ending::Closed).0.unwrap_err().to_string();
    assert!(error.contains("x-ignore-shared"), "{error}");
    let error = recorded(b"\x11\x22\x33\x44\0\0\0\x01", Ending::Closed).0.unwrap_err();
    assert!(error.to_string().contains("does not begin"), "{error}");
}

#[test]
fn a_stream_becomes_an_image_with_the_same_pages() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("i");
    let pages = pages(100);
    let bytes = main_stream(Style::Qemu72, PAGE, &pages);
    let mut writer = Writer::create(&path, Options::default()).unwrap();
    let recorded = record(&bytes[..], &mut writer, Ending::Described).unwrap();
    writer.finish(&recorded.state).unwrap().link().unwrap();
    let image = Image::open(&path).unwrap();
    assert_eq!(*image.state(), recorded.state);
    let mut plain = vec![0; image.shape().unit_bytes()];
    for (at, page) in pages.iter().enumerate() {
        let found = match image.index().blocks[0].content(at as u64).unwrap() {
            Content::Zero => vec![0; PAGE],
            Content::Filled(word) => word.repeat(PAGE / 8),
            Content::Slot(slot) => {
                let per = image.shape().unit_pages();
                Units::new().read(&image, slot / per, &mut plain).unwrap();
                plain[usize::try_from(slot % per).unwrap() * PAGE..][..PAGE].to_vec()
            }
        };
        assert!(found == *page, "page {at}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    /// A corrupted stream is recorded or refused; it never causes a panic.
    #[test]
    fn bent_streams_are_recorded_or_refused(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)
    ) {
        let mut bytes = main_stream(Style::Qemu92, PAGE, pages(4));
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let _ = recorded(&bytes, Ending::Closed);
    }
}
