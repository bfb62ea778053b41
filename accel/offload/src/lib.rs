//! Compresses and decompresses deflate-qz units on a QAT engine, with many pieces in flight.
//!
//! A unit is up to a megabyte; a device works on pieces of 64 KiB. An [`Offload`] belongs to one
//! worker thread. It cuts a unit into pieces, has several units in flight on its [`Engine`], and
//! returns each when its last piece is done:
//!
//! ```text
//! compress(carry)   ─► pieces of 64 KiB ─► engine ─► streams, any order ─► poll: carry, Done::Streams ─► members
//! decompress(carry) ─► one per member   ─► engine ─► plain, any order   ─► poll: carry, Done::Plain
//! ```
//!
//! The *carry* is a value of the caller. It is returned with its unit, exactly once. If the device
//! refuses, fails or is late, the engine does the piece in software, and this crate does not
//! notice.
//!
//! Errors: a payload whose members do not fit a device (above 64 KiB plain, or too many) is refused
//! at once, and one that does not decode is returned as [`Done::Bad`]. In both cases the caller
//! decodes it in software, which produces the error message. Nothing else fails.
//!
//! Limits: `units` in flight, each of at most `max_plain` bytes. All memory is allocated at the
//! start.

mod unit;

use codec::qz;
use qat::{Engine, Op};

pub use unit::Streams;
use unit::{Piece, Unit};

/// The caller's value, returned with its unit.
pub trait Carry {
    /// The input bytes, if the carry holds them; `None` if they are in the unit's buffer
    /// ([`Offload::buffer`]). Every call must return the same.
    fn input(&self) -> Option<&[u8]>;
}

/// The result of a unit.
#[derive(Debug)]
pub enum Done<'a> {
    /// The unit was compressed.
    Streams(Streams<'a>),
    /// The unit was decompressed, and each member's CRC-32 was checked.
    Plain(&'a [u8]),
    /// A member does not decode to its stated bytes.
    Bad,
}

/// One worker's units in flight on its engine.
#[derive(Debug)]
pub struct Offload<C> {
    engine: Engine,
    units: Vec<Unit<C>>,
    free: Vec<u16>,
    /// Units with pieces that found no slot, oldest first.
    waiting: Vec<u16>,
    /// Units without a byte, of which the engine returns nothing.
    empty: Vec<u16>,
    stride: usize,
    max_pieces: usize,
}

impl<C: Carry> Offload<C> {
    /// Creates an offload that has up to `units` units of at most `max_plain` bytes in flight on
    /// `engine`. The pieces of `engine` must hold [`qz::MEMBER_PLAIN`] bytes.
    pub fn new(engine: Engine, units: u16, max_plain: usize) -> Self {
        let stride = engine.capacity();
        // A peer may cut a unit into smaller pieces than we do.
        let max_pieces = max_plain.div_ceil(qz::MEMBER_PLAIN) * 2;
        let unit = |_| Unit {
            carry: None,
            decompress: false,
            input: vec![0; max_plain].into(),
            output: vec![0; stride * max_plain.div_ceil(qz::MEMBER_PLAIN)].into(),
            pieces: Vec::with_capacity(max_pieces),
            submitted: 0,
            done: 0,
            bad: false,
        };
        Self {
            engine,
            units: (0..units).map(unit).collect(),
            free: (0..units).rev().collect(),
            waiting: Vec::with_capacity(usize::from(units)),
            empty: Vec::with_capacity(usize::from(units)),
            stride,
            max_pieces,
        }
    }

    /// Whether another unit can be started. Without a device there is one unit at a time, since
    /// more units in flight only help with a device.
    pub fn has_room(&self) -> bool {
        !self.free.is_empty() && (self.engine.on_device() || self.in_flight() == 0)
    }

    /// Units started and not returned.
    pub fn in_flight(&self) -> usize {
        self.units.len() - self.free.len()
    }

    /// The engine, for its counters.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The next unit's buffer of `max_plain` bytes; `None` if there is no room.
    pub fn buffer(&mut self) -> Option<&mut [u8]> {
        self.free.last().map(|&unit| &mut *self.units[usize::from(unit)].input)
    }

    /// Starts to compress `carry.input()`, or the first `len` bytes of the buffer. A unit without a
    /// byte has no streams.
    ///
    /// # Panics
    ///
    /// If there is no room, or more than `max_plain` bytes.
    pub fn compress(&mut self, carry: C, len: usize) {
        let number = self.free.pop().expect("the caller asks has_room first");
        let unit = &mut self.units[usize::from(number)];
        let len = carry.input().map_or(len, <[u8]>::len);
        assert!(len <= unit.input.len(), "a unit of {len} bytes, {} at most", unit.input.len());
        unit.pieces.clear();
        for (piece, at) in (0..len).step_by(qz::MEMBER_PLAIN).enumerate() {
            let plain_len = qz::MEMBER_PLAIN.min(len - at);
            let to = piece * self.stride;
            unit.pieces.push(Piece { at, input_len: plain_len, plain_len, to, ..Piece::default() });
        }
        unit.begin(carry, false);
        if unit.pieces.is_empty() {
            return self.empty.push(number);
        }
        self.submit(number);
    }

    /// Starts to decompress the members in `carry.input()` to `plain_len` bytes.
    ///
    /// # Errors
    ///
    /// Returns the carry if a device cannot take these members, or they are malformed.
    ///
    /// # Panics
    ///
    /// If there is no room, or the carry has no input.
    pub fn decompress(&mut self, carry: C, plain_len: usize) -> Result<(), C> {
        let number = *self.free.last().expect("the caller asks has_room first");
        if self.in_flight() == 0 && !self.engine.on_device() {
            // The caller does not poll while nothing is in flight, so let the engine check here
            // whether its device is back.
            self.engine.poll(|_, _| {});
        }
        let unit = &mut self.units[usize::from(number)];
        if plain_len > unit.output.len() || !self.engine.on_device() {
            return Err(carry);
        }
        let payload = carry.input().expect("the payload is the carry's");
        unit.pieces.clear();
        let Ok(members) = qz::members(payload, plain_len) else { return Err(carry) };
        let mut to = 0;
        for member in members {
            let fits = member.plain_len <= qz::MEMBER_PLAIN
                && member.deflate.len() <= self.stride
                && unit.pieces.len() < self.max_pieces;
            if !fits {
                return Err(carry);
            }
            unit.pieces.push(Piece {
                at: member.at + qz::HEADER_LEN,
                input_len: member.deflate.len(),
                plain_len: member.plain_len,
                to,
                done_len: 0,
                crc32: member.crc32,
            });
            to += member.plain_len;
        }
        if unit.pieces.is_empty() {
            return Err(carry);
        }
        self.free.pop();
        unit.begin(carry, true);
        self.submit(number);
        Ok(())
    }

    /// Returns finished units. With `idle` the caller has no other work, so the call may sleep for
    /// about 50 us.
    pub fn poll(&mut self, idle: bool, done: &mut dyn FnMut(C, Done<'_>)) {
        let Self { engine, units, free, empty, stride, .. } = self;
        let mut delivered = empty.len();
        for number in empty.drain(..) {
            let carry = units[usize::from(number)].carry.take();
            let streams = Streams { pieces: &[], output: &[], stride: *stride };
            done(carry.expect("a unit in flight has its carry"), Done::Streams(streams));
            free.push(number);
        }
        delivered += engine.poll(|tag, finished| {
            let (number, piece) = untag(tag);
            let unit = &mut units[number];
            unit.take(piece, finished.map(|finished| (finished.bytes, finished.crc32)).ok());
            if unit.done < unit.pieces.len() {
                return;
            }
            let carry = unit.carry.take().expect("a unit in flight has its carry");
            let len = unit.pieces.last().map_or(0, |last| last.to + last.done_len);
            done(
                carry,
                match (unit.bad, unit.decompress) {
                    (true, _) => Done::Bad,
                    (false, true) => Done::Plain(&unit.output[..len]),
                    (false, false) => Done::Streams(Streams {
                        pieces: &unit.pieces,
                        output: &unit.output,
                        stride: *stride,
                    }),
                },
            );
            // Below `units.len()`, which is a u16.
            free.push(u16::try_from(number).unwrap_or(u16::MAX));
        });
        for _ in 0..self.waiting.len() {
            let number = self.waiting.remove(0);
            self.submit(number);
        }
        if idle && delivered == 0 {
            self.engine.wait();
        }
    }

    /// Submits as many pieces of a unit as the engine has room for.
    fn submit(&mut self, number: u16) {
        let unit = &mut self.units[usize::from(number)];
        while let Some(piece) = unit.pieces.get(unit.submitted) {
            let Some(lease) = self.engine.take(piece.plain_len) else {
                self.waiting.push(number);
                return;
            };
            let own = unit.carry.as_ref().and_then(Carry::input);
            let input = &own.unwrap_or(&unit.input)[piece.at..][..piece.input_len];
            self.engine.source(&lease)[..input.len()].copy_from_slice(input);
            let op = if unit.decompress {
                Op::Decompress { plain_len: piece.plain_len }
            } else {
                Op::Compress
            };
            self.engine.submit(lease, piece.input_len, op, tag(number, unit.submitted));
            unit.submitted += 1;
        }
    }
}

fn tag(unit: u16, piece: usize) -> u64 {
    (u64::from(unit) << 32) | piece as u64
}

fn untag(tag: u64) -> (usize, usize) {
    let [_, _, b0, b1, p0, p1, p2, p3] = tag.to_be_bytes();
    (usize::from(u16::from_be_bytes([b0, b1])), u32::from_be_bytes([p0, p1, p2, p3]) as usize)
}
