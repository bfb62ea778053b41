//! Synthetic streams of every variant that QEMU writes, for tests and benches of this and other
//! crates.
//!
//! [`MainStream`] and [`ChannelStream`] write one connection each, element by element, as QEMU does
//! (names only when the block changes, stale bytes where a version leaves them). [`main_stream`]
//! and [`multifd_streams`] assemble whole migrations from an iterator of pages, [`mapped_ram_file`]
//! a whole file.
//!
//! Nothing is checked: the caller can write nonsense, and tests do.

mod channel;
mod main;
mod style;

pub use channel::ChannelStream;
pub use main::{Configuration, MainStream, Section};
pub use style::Style;

use crate::token::FLAG_MEM_SIZE;

/// Pages per PART section: about as many as QEMU sends between two reads of the clock.
const PART_PAGES: usize = 4096;
/// The only block of the synthetic VM.
const BLOCK: &str = "pc.ram";

/// A whole single-stream migration with return path: block table, one pass over `pages` (each of
/// `page_size` bytes; zero pages become zero records), END, device state, end tag, description.
pub fn main_stream<P: AsRef<[u8]>>(
    style: Style,
    page_size: usize,
    pages: impl IntoIterator<Item = P>,
) -> Vec<u8> {
    let pages: Vec<P> = pages.into_iter().collect();
    let mut main = MainStream::new(page_size);
    begin(&mut main, style, pages.len());
    main.section(Section::Start).block_table(&[(BLOCK, size(pages.len(), page_size))]);
    main.end_of_section();
    for (part, of_part) in pages.chunks(PART_PAGES).enumerate() {
        main.section(Section::Part);
        for (page, i) in of_part.iter().zip(0..) {
            let address = size(part * PART_PAGES + i, page_size);
            main.zero_or_page(BLOCK, address, page.as_ref());
        }
        main.end_of_section();
    }
    main.section(Section::End).end_of_section();
    main.device_tail(20_000);
    main.take()
}

/// A whole mapped-ram file, as QEMU writes it: zero pages have a clear bit, and their places are
/// holes. Pages begin at multiples of `align` bytes; QEMU's alignment is 1 MiB. The stream begins
/// at offset `first` of the file, with zeros before.
pub fn mapped_ram_file<P: AsRef<[u8]>>(
    machine: &str,
    blocks: &[(&str, &[P])],
    page_size: usize,
    align: usize,
    first: usize,
) -> Vec<u8> {
    let mut main = MainStream::new(page_size);
    main.raw(&vec![0; first]).file_header().configuration(&Configuration {
        machine,
        capabilities: &["mapped-ram"],
        ..Configuration::default()
    });
    let total: usize = blocks.iter().map(|(_, pages)| pages.len() * page_size).sum();
    main.section(Section::Start).block_table(&[]);
    // The table's only record, with its total.
    let mut file = main.take();
    let total_at = file.len() - 8;
    file[total_at..].copy_from_slice(&(total as u64 | FLAG_MEM_SIZE).to_be_bytes());
    for (name, pages) in blocks {
        let len = (pages.len() * page_size) as u64;
        let name_len = u8::try_from(name.len()).expect("a short name");
        file.extend([&[name_len], name.as_bytes(), &len.to_be_bytes()].concat());
        let bitmap_at = file.len() + 28;
        let pages_at = (bitmap_at + pages.len().div_ceil(64) * 8).next_multiple_of(align);
        file.extend(1_u32.to_be_bytes());
        for number in [page_size, bitmap_at, pages_at] {
            file.extend((number as u64).to_be_bytes());
        }
        file.resize(pages_at, 0);
        for (nth, page) in pages.iter().enumerate() {
            if page.as_ref().iter().any(|&byte| byte != 0) {
                file[bitmap_at + nth / 8] |= 1 << (nth % 8);
            }
            file.extend(page.as_ref());
        }
    }
    main.end_of_section();
    main.section(Section::Part).end_of_section();
    main.section(Section::End).end_of_section().device_tail(2000);
    file.extend(main.take());
    file
}

/// A whole multifd migration: the main stream and one stream per channel, packets round robin.
///
/// There is one barrier after the block table, one after each part of 16 MiB of 4 KiB pages, one
/// in END; each channel has as many SYNCs.
pub fn multifd_streams<P: AsRef<[u8]>>(
    style: Style,
    page_size: usize,
    channels: u8,
    pages: impl IntoIterator<Item = P>,
) -> (Vec<u8>, Vec<Vec<u8>>) {
    let pages: Vec<P> = pages.into_iter().collect();
    let mut main = MainStream::new(page_size);
    let mut lanes: Vec<ChannelStream> =
        (0..channels).map(|id| ChannelStream::new(style, page_size, id)).collect();
    let mut number = 0;
    begin(&mut main, style, pages.len());
    main.section(Section::Start).block_table(&[(BLOCK, size(pages.len(), page_size))]);
    barrier(style, &mut main, &mut lanes, &mut number);
    main.end_of_section();
    let capacity = crate::layout::MULTIFD_PACKET_SIZE / page_size;
    let mut next = 0;
    for (part, of_part) in pages.chunks(PART_PAGES).enumerate() {
        main.section(Section::Part);
        let mut queue: Vec<(u64, Option<&[u8]>)> = Vec::new();
        for (page, i) in of_part.iter().zip(0..) {
            let offset = size(part * PART_PAGES + i, page_size);
            let zero = page.as_ref().iter().all(|&b| b == 0);
            if zero && style == Style::Qemu72 {
                main.zero(BLOCK, offset);
            } else {
                queue.push((offset, (!zero).then_some(page.as_ref())));
            }
            if queue.len() == capacity {
                number += 1;
                lanes[next].packet(number, BLOCK, &queue, false);
                next = (next + 1) % lanes.len();
                queue.clear();
            }
        }
        if !queue.is_empty() {
            number += 1;
            lanes[next].packet(number, BLOCK, &queue, false);
            next = (next + 1) % lanes.len();
        }
        barrier(style, &mut main, &mut lanes, &mut number);
        main.end_of_section();
    }
    main.section(Section::End);
    barrier(style, &mut main, &mut lanes, &mut number);
    main.end_of_section();
    main.device_tail(20_000);
    (main.take(), lanes.into_iter().map(|mut lane| lane.take()).collect())
}

fn size(pages: usize, page_size: usize) -> u64 {
    pages as u64 * page_size as u64
}

fn begin(main: &mut MainStream, style: Style, pages: usize) {
    main.file_header();
    main.configuration(&Configuration { machine: style.machine(), ..Configuration::default() });
    main.command(1, &[]);
    main.command(2, &1u32.to_be_bytes());
    debug_assert!(pages > 0, "a RAM of no pages has no block table");
}

fn barrier(style: Style, main: &mut MainStream, lanes: &mut [ChannelStream], number: &mut u64) {
    for lane in lanes {
        *number += 1;
        lane.sync(*number);
    }
    if style.flushes() {
        main.flush_marker();
    }
}
