//! Synthetic streams of every variant that QEMU writes, for tests and benches of this and other
//! crates.
//!
//! [`MainStream`] and [`ChannelStream`] write one connection each, element by element, as QEMU does
//! (names only when the block changes, stale bytes where a version leaves them). [`main_stream`]
//! and [`multifd_streams`] assemble whole migrations from an iterator of pages.
//!
//! Nothing is checked: the caller can write nonsense, and tests do.

mod channel;
mod main;

mod style;

pub use channel::ChannelStream;
pub use main::{Configuration, MainStream, Section};
pub use style::Style;

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
