//! Elements of QEMU's migration stream, as bytes.

use image::Image;

// Tags.
const START: u8 = 0x01;
const PART: u8 = 0x02;
const END: u8 = 0x03;
const COMMAND: u8 = 0x08;
const FOOTER: u8 = 0x7e;
const DESCRIPTION: u8 = 0x06;
const END_OF_STREAM: u8 = 0x00;

// Commands.
pub(crate) const OPEN_RETURN_PATH: u16 = 1;
pub(crate) const PING: u16 = 2;
pub(crate) const ADVISE: u16 = 3;
pub(crate) const LISTEN: u16 = 4;
pub(crate) const RUN: u16 = 5;
const RAM_DISCARD: u16 = 6;
const PACKAGED: u16 = 7;
pub(crate) const RESUME: u16 = 9;
const RECV_BITMAP: u16 = 10;

// Flags in the low bits of a record's first word.
const ZERO: u64 = 0x02;
const MEM_SIZE: u64 = 0x04;
const PAGE: u64 = 0x08;
const EOS: u64 = 0x10;
const CONTINUE: u64 = 0x20;

/// A command with its body.
pub(crate) fn command(out: &mut Vec<u8>, command: u16, body: &[u8]) {
    out.push(COMMAND);
    out.extend(command.to_be_bytes());
    out.extend(u16::try_from(body.len()).expect("bodies are short").to_be_bytes());
    out.extend_from_slice(body);
}

/// PING with a number that comes back.
pub(crate) fn ping(out: &mut Vec<u8>, number: u32) {
    command(out, PING, &number.to_be_bytes());
}

/// Throws away what the destination has in `len` bytes of a block.
pub(crate) fn discard(out: &mut Vec<u8>, name: &str, len: u64) {
    let mut body = vec![0];
    put_name(&mut body, name);
    body.push(0);
    body.extend(0_u64.to_be_bytes());
    body.extend(len.to_be_bytes());
    command(out, RAM_DISCARD, &body);
}

/// Elements that QEMU takes as a whole.
pub(crate) fn packaged(out: &mut Vec<u8>, elements: &[u8]) {
    let len = u32::try_from(elements.len()).expect("a state has at most 512 MiB");
    command(out, PACKAGED, &len.to_be_bytes());
    out.extend_from_slice(elements);
}

/// Asks which pages of a block have arrived.
pub(crate) fn ask_received(out: &mut Vec<u8>, name: &str) {
    let mut body = Vec::new();
    put_name(&mut body, name);
    command(out, RECV_BITMAP, &body);
}

/// The section of RAM that has the block table. `host_pages`: with page sizes of blocks, which
/// stand there in postcopy alone.
pub(crate) fn start_of_ram(out: &mut Vec<u8>, image: &Image, host_pages: bool) {
    let state = image.state();
    out.push(START);
    out.extend(state.ram_section.to_be_bytes());
    put_name(out, "ram");
    out.extend(0_u32.to_be_bytes());
    out.extend(state.ram_version.to_be_bytes());
    out.extend((image.ram_bytes() | MEM_SIZE).to_be_bytes());
    for block in &image.index().blocks {
        put_name(out, &block.name);
        out.extend((block.pages * image.shape().page_size() as u64).to_be_bytes());
        if host_pages && block.host_page != 0 {
            out.extend(block.host_page.to_be_bytes());
        }
    }
    end_of_section(out, state.ram_section);
}

/// The head of a section with pages. [`end_of_section`] ends it.
pub(crate) fn part(out: &mut Vec<u8>, section: u32) {
    out.push(PART);
    out.extend(section.to_be_bytes());
}

/// The last section of RAM, without pages.
pub(crate) fn end_of_ram(out: &mut Vec<u8>, section: u32) {
    out.push(END);
    out.extend(section.to_be_bytes());
    end_of_section(out, section);
}

/// End mark and footer.
pub(crate) fn end_of_section(out: &mut Vec<u8>, section: u32) {
    out.extend(EOS.to_be_bytes());
    out.push(FOOTER);
    out.extend(section.to_be_bytes());
}

/// The end of the stream, and the description if there is one.
pub(crate) fn end_of_stream(out: &mut Vec<u8>, description: &[u8]) {
    out.push(END_OF_STREAM);
    if !description.is_empty() {
        out.push(DESCRIPTION);
        out.extend(u32::try_from(description.len()).expect("at most 512 MiB").to_be_bytes());
        out.extend_from_slice(description);
    }
}

/// A page with its bytes. `name`: of its block, unless the record before in this section is of the
/// same.
pub(crate) fn page(out: &mut Vec<u8>, address: u64, name: Option<&str>, bytes: &[u8]) {
    record(out, address | PAGE, name);
    out.extend_from_slice(bytes);
}

/// A page that is zero.
pub(crate) fn zero(out: &mut Vec<u8>, address: u64, name: Option<&str>) {
    record(out, address | ZERO, name);
    out.push(0);
}

fn record(out: &mut Vec<u8>, word: u64, name: Option<&str>) {
    match name {
        None => out.extend((word | CONTINUE).to_be_bytes()),
        Some(name) => {
            out.extend(word.to_be_bytes());
            put_name(out, name);
        }
    }
}

fn put_name(out: &mut Vec<u8>, name: &str) {
    out.push(u8::try_from(name.len()).expect("read from one byte"));
    out.extend_from_slice(name.as_bytes());
}
