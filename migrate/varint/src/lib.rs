//! The numbers of packed chunks and delta tables: LEB128, seven bits a byte, low ones first, the
//! top bit set on all but the last byte. Signed numbers use zigzag (0, -1, 1, -2, ... are 0, 1, 2,
//! 3, ...).
//!
//! The functions have neither state nor buffers: a number is written to, or read from, the start of
//! a slice.
//!
//! # What fails
//! Writing fails if there is too little room. Reading fails if the bytes end inside a number, or
//! encode more than 64 bits. Encodings longer than necessary are accepted.

/// The most bytes of a 64-bit number.
pub const LONGEST: usize = 10;

/// Why the bytes do not start with a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Broken {
    /// The bytes end inside the number.
    Ends,
    /// The number has more than 64 bits.
    TooLarge,
}

/// Writes `value` to the start of `out`; returns its length, or `None` if it does not fit.
#[inline]
#[allow(clippy::cast_possible_truncation, reason = "masked to seven bits")]
pub fn put(mut value: u64, out: &mut [u8]) -> Option<usize> {
    let mut len = 0;
    while value >= 0x80 {
        *out.get_mut(len)? = value as u8 | 0x80;
        len += 1;
        value >>= 7;
    }
    *out.get_mut(len)? = value as u8;
    Some(len + 1)
}

/// Reads the number at the start of `bytes`; returns it and its length.
///
/// # Errors
/// The bytes do not start with a number.
#[inline]
pub fn get(bytes: &[u8]) -> Result<(u64, usize), Broken> {
    let mut value = 0;
    for (at, shift) in (0..64).step_by(7).enumerate() {
        let byte = *bytes.get(at).ok_or(Broken::Ends)?;
        let bits = u64::from(byte & 0x7f);
        if shift == 63 && bits > 1 {
            break;
        }
        value |= bits << shift;
        if byte < 0x80 {
            return Ok((value, at + 1));
        }
    }
    Err(Broken::TooLarge)
}

/// Maps a signed number to an unsigned one.
#[inline]
pub fn zigzag(value: i64) -> u64 {
    ((value << 1) ^ (value >> 63)).cast_unsigned()
}

/// The inverse of [`zigzag`].
#[inline]
pub fn unzigzag(value: u64) -> i64 {
    (value >> 1).cast_signed() ^ -((value & 1).cast_signed())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn numbers_round_trip_and_need_all_of_their_bytes(value: u64, shift in 0_u32..64, behind: u8) {
            let value = value >> shift;
            let mut out = [behind; LONGEST + 1];
            let len = put(value, &mut out).unwrap();
            prop_assert_eq!(len, (64 - value.leading_zeros()).div_ceil(7).max(1) as usize);
            prop_assert_eq!(get(&out), Ok((value, len)));
            prop_assert_eq!(get(&out[..len - 1]), Err(Broken::Ends));
            prop_assert_eq!(put(value, &mut out[..len - 1]), None);
        }

        #[test]
        fn signed_numbers_round_trip_and_small_ones_stay_short(value: i64, shift in 0_u32..64) {
            let value = value >> shift;
            prop_assert_eq!(unzigzag(zigzag(value)), value);
            prop_assert!(zigzag(value) / 2 <= value.unsigned_abs());
        }
    }

    #[test]
    fn bytes_that_are_no_number_are_refused_and_long_forms_are_not() {
        assert_eq!(get(&[]), Err(Broken::Ends));
        assert_eq!(get(&[0x80; 9]), Err(Broken::Ends));
        assert_eq!(get(&[0x80; 20]), Err(Broken::TooLarge));
        let mut most = [0xff; LONGEST];
        most[9] = 1;
        assert_eq!(get(&most), Ok((u64::MAX, LONGEST)));
        most[9] = 2;
        assert_eq!(get(&most), Err(Broken::TooLarge));
        assert_eq!(get(&[0x85, 0x00, 0x7f]), Ok((5, 2)));
        let small = [0, -1, 1, -2].map(zigzag);
        assert_eq!(small, [0, 1, 2, 3]);
    }
}
