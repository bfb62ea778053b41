//! The return path of a restore: pieces of any size give the same messages, and the same refusal.
//!
//! Input: one byte, the size of the pieces less one; one byte, the size of the expected bitmap in
//! units of 16 pages; then the return path.
#![no_main]

use libfuzzer_sys::fuzz_target;
use player::{Message, ReturnPath};

fn messages<'a>(
    pieces: impl Iterator<Item = &'a [u8]>,
    pages: u64,
) -> (Vec<Message>, Option<String>) {
    let mut back = ReturnPath::default();
    back.expect_bitmap(pages);
    let mut all = Vec::new();
    for piece in pieces {
        back.push(piece);
        loop {
            match back.message() {
                Ok(Some(message)) => all.push(message),
                Ok(None) => break,
                Err(error) => return (all, Some(error.to_string())),
            }
        }
    }
    (all, None)
}

fuzz_target!(|input: &[u8]| {
    let [size, pages, bytes @ ..] = input else { return };
    let pages = u64::from(*pages) * 16;
    let whole = messages(std::iter::once(bytes), pages);
    assert_eq!(messages(bytes.chunks(usize::from(*size) + 1), pages), whole);
});
