//! What a QEMU says to a restore: the same messages however the bytes are cut, or the same refusal.
//!
//! Input: the size of the pieces less one, the pages of the bitmap that is asked for; then the
//! return path.
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
