//! A unit and its pieces, and the streams that they make.

use codec::qz;

/// The deflate streams of a unit, in order.
#[derive(Debug)]
pub struct Streams<'a> {
    pub(crate) pieces: &'a [Piece],
    pub(crate) output: &'a [u8],
    pub(crate) stride: usize,
}

impl Streams<'_> {
    /// Length in bytes of the payload that [`write`](Self::write) makes.
    pub fn payload_len(&self) -> usize {
        self.pieces.iter().map(|piece| piece.done_len + qz::MEMBER_OVERHEAD).sum()
    }

    /// Writes the members to the front of `out`, and returns their length; `None` if they do not
    /// fit.
    pub fn write(&self, out: &mut [u8]) -> Option<usize> {
        let mut at = 0;
        for (number, piece) in self.pieces.iter().enumerate() {
            let stream = &self.output[number * self.stride..][..piece.done_len];
            let plain_len = u32::try_from(piece.plain_len).ok()?;
            at += qz::write_member(out.get_mut(at..)?, stream, piece.crc32, plain_len)?;
        }
        Some(at)
    }
}

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Piece {
    /// Offset of its input.
    pub(crate) at: usize,
    pub(crate) input_len: usize,
    pub(crate) plain_len: usize,
    /// Offset of its output.
    pub(crate) to: usize,
    pub(crate) done_len: usize,
    /// When compressing, the CRC-32 of the plain bytes; when decompressing, the one that the member
    /// states.
    pub(crate) crc32: u32,
}

#[derive(Debug)]
pub(crate) struct Unit<C> {
    pub(crate) carry: Option<C>,
    pub(crate) decompress: bool,
    pub(crate) input: Box<[u8]>,
    pub(crate) output: Box<[u8]>,
    pub(crate) pieces: Vec<Piece>,
    /// Pieces submitted to the engine, and pieces that it has returned.
    pub(crate) submitted: usize,
    pub(crate) done: usize,
    pub(crate) bad: bool,
}

impl<C> Unit<C> {
    pub(crate) fn begin(&mut self, carry: C, decompress: bool) {
        self.carry = Some(carry);
        self.decompress = decompress;
        (self.submitted, self.done, self.bad) = (0, 0, false);
    }

    /// Records a piece's output: its bytes and the CRC-32 of its plain bytes; `None` if it does not
    /// decode.
    pub(crate) fn take(&mut self, piece: usize, output: Option<(&[u8], u32)>) {
        self.done += 1;
        let piece = &mut self.pieces[piece];
        let Some((bytes, crc32)) = output else {
            self.bad = true;
            return;
        };
        if self.decompress {
            self.bad |= crc32 != piece.crc32 || bytes.len() != piece.plain_len;
        }
        // The stride is the size of the engine's buffers, and no stream is longer.
        match self.output.get_mut(piece.to..piece.to + bytes.len()) {
            Some(place) => place.copy_from_slice(bytes),
            None => self.bad = true,
        }
        piece.done_len = bytes.len();
        if !self.decompress {
            piece.crc32 = crc32;
        }
    }
}
