//! Bytes that do not repeat.

/// `len` bytes, others for each seed.
pub(crate) fn bytes(seed: usize, len: usize) -> Vec<u8> {
    let mut state = seed as u64 + 1;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state.to_le_bytes()[7]
        })
        .collect()
}
