//! Encodes elements of QEMU's migration stream.

use image::Image;

/// The only page size of guest and host that postcopy is supported with, bytes.
pub(crate) const PAGE_SIZE: u64 = 4096;

// Section types (`QEMU_VM_*`).
const START: u8 = 0x01;
const PART: u8 = 0x02;
const END: u8 = 0x03;
const COMMAND: u8 = 0x08;
const SUBSECTION: u8 = 0x05;
const FOOTER: u8 = 0x7e;
const DESCRIPTION: u8 = 0x06;
const END_OF_STREAM: u8 = 0x00;

// Commands (`MIG_CMD_*`).
pub(crate) const OPEN_RETURN_PATH: u16 = 1;
pub(crate) const PING: u16 = 2;
const ADVISE: u16 = 3;
pub(crate) const LISTEN: u16 = 4;
pub(crate) const RUN: u16 = 5;
const RAM_DISCARD: u16 = 6;
const PACKAGED: u16 = 7;
pub(crate) const RESUME: u16 = 9;
const RECV_BITMAP: u16 = 10;

// Flags in the low bits of a record's address word (`RAM_SAVE_FLAG_*`).
const ZERO: u64 = 0x02;
const MEM_SIZE: u64 = 0x04;
const PAGE: u64 = 0x08;
const EOS: u64 = 0x10;
const CONTINUE: u64 = 0x20;

/// Appends to the configuration the subsection that names the capability on which the stream
/// depends. QEMU refuses a stream if its own setting of the capability differs.
pub(crate) fn capability(out: &mut Vec<u8>, name: &str) {
    out.push(SUBSECTION);
    put_name(out, "configuration/capabilities");
    for number in [1_u32, 1] {
        // The version, and the number of capabilities.
        out.extend(number.to_be_bytes());
    }
    put_name(out, name);
}

/// Appends a command with its body.
pub(crate) fn command(out: &mut Vec<u8>, command: u16, body: &[u8]) {
    out.push(COMMAND);
    out.extend(command.to_be_bytes());
    out.extend(u16::try_from(body.len()).expect("bodies are short").to_be_bytes());
    out.extend_from_slice(body);
}

/// Appends a PING; QEMU returns its number in a PONG.
pub(crate) fn ping(out: &mut Vec<u8>, number: u32) {
    command(out, PING, &number.to_be_bytes());
}

/// Appends ADVISE with the page sizes of all blocks (their bitwise OR) and of the guest: QEMU
/// prepares for postcopy, and discards all of its RAM.
pub(crate) fn advise(out: &mut Vec<u8>) {
    command(out, ADVISE, &[PAGE_SIZE.to_be_bytes(), PAGE_SIZE.to_be_bytes()].concat());
}

/// Appends RAM_DISCARD: the destination discards the first `len` bytes of a block.
pub(crate) fn discard(out: &mut Vec<u8>, name: &str, len: u64) {
    let mut body = vec![0];
    put_name(&mut body, name);
    body.push(0);
    body.extend(0_u64.to_be_bytes());
    body.extend(len.to_be_bytes());
    command(out, RAM_DISCARD, &body);
}

/// Appends PACKAGED: QEMU reads all of `elements` before it loads any of them.
pub(crate) fn packaged(out: &mut Vec<u8>, elements: &[u8]) {
    let len = u32::try_from(elements.len()).expect("shorter than MAX_STATE");
    command(out, PACKAGED, &len.to_be_bytes());
    out.extend_from_slice(elements);
}

/// Appends RECV_BITMAP: QEMU returns the received bitmap of a block.
pub(crate) fn ask_received(out: &mut Vec<u8>, name: &str) {
    let mut body = Vec::new();
    put_name(&mut body, name);
    command(out, RECV_BITMAP, &body);
}

/// Appends the RAM section with the block table. `host_pages`: with the blocks' page sizes, which
/// QEMU expects only in postcopy.
pub(crate) fn start_of_ram(out: &mut Vec<u8>, image: &Image, host_pages: bool) {
    begin_ram(out, image);
    for described in &image.index().blocks {
        block(out, &described.name, described.pages * image.shape().page_size() as u64);
        if host_pages && described.host_page != 0 {
            out.extend(described.host_page.to_be_bytes());
        }
    }
    end_of_section(out, image.state().ram_section);
}

/// Appends the beginning of the RAM section, up to the block table's first entry.
pub(crate) fn begin_ram(out: &mut Vec<u8>, image: &Image) {
    let state = image.state();
    out.push(START);
    out.extend(state.ram_section.to_be_bytes());
    put_name(out, "ram");
    out.extend(0_u32.to_be_bytes());
    out.extend(state.ram_version.to_be_bytes());
    out.extend((image.ram_bytes() | MEM_SIZE).to_be_bytes());
}

/// Appends name and length of a block.
pub(crate) fn block(out: &mut Vec<u8>, name: &str, len: u64) {
    put_name(out, name);
    out.extend(len.to_be_bytes());
}

/// Appends the head of a section with pages. [`end_of_section`] ends it.
pub(crate) fn part(out: &mut Vec<u8>, section: u32) {
    out.push(PART);
    out.extend(section.to_be_bytes());
}

/// Appends the last RAM section, without pages.
pub(crate) fn end_of_ram(out: &mut Vec<u8>, section: u32) {
    out.push(END);
    out.extend(section.to_be_bytes());
    end_of_section(out, section);
}

/// Appends EOS and the section footer.
pub(crate) fn end_of_section(out: &mut Vec<u8>, section: u32) {
    out.extend(EOS.to_be_bytes());
    out.push(FOOTER);
    out.extend(section.to_be_bytes());
}

/// Appends the end of the stream, and the vmdescription if there is one.
pub(crate) fn end_of_stream(out: &mut Vec<u8>, description: &[u8]) {
    out.push(END_OF_STREAM);
    if !description.is_empty() {
        out.push(DESCRIPTION);
        out.extend(u32::try_from(description.len()).expect("shorter than MAX_STATE").to_be_bytes());
        out.extend_from_slice(description);
    }
}

/// Appends a page with its bytes. `name`: the name of its block; `None` if the previous record in
/// this section has the same block.
pub(crate) fn page(out: &mut Vec<u8>, address: u64, name: Option<&str>, bytes: &[u8]) {
    record(out, address | PAGE, name);
    out.extend_from_slice(bytes);
}

/// Appends a zero page; `name` as in [`page`].
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
