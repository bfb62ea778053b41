//! A destination QEMU's bytes: the position of SHUT does not depend on how they are split, and the
//! parser's memory is bounded.
//!
//! Input: one byte, the size of the pieces less one; then the return path.
#![no_main]

use libfuzzer_sys::fuzz_target;
use relay::ReturnPath;

/// Value of the first SHUT.
fn first(pieces: impl Iterator<Item = impl AsRef<[u8]>>) -> Option<u32> {
    let mut path = ReturnPath::default();
    let mut pieces = pieces;
    pieces.find_map(|piece| {
        let piece = piece.as_ref();
        let (value, before) = path.feed(piece)?;
        assert!(before < piece.len());
        Some(value)
    })
}

fuzz_target!(|input: &[u8]| {
    let Some((size, bytes)) = input.split_first() else { return };
    let whole = first(std::iter::once(bytes));
    assert_eq!(first(bytes.chunks(usize::from(*size) + 1)), whole);
    // A SHUT that is found is somewhere in the bytes.
    if let Some(value) = whole {
        let value = value.to_be_bytes();
        assert!(
            bytes.windows(6).any(|at| at[..2] == [0, 1]) && bytes.windows(4).any(|at| at == value)
        );
    }
});
