//! Encodes and decodes chunks as the relays' codec threads do, and measures the time.

use codec::{Codec, Decoder, Deflate, Encoded, Encoder, Settings, UnitHeader};
use rustix::time::{clock_gettime, ClockId};
use stream::Token;

/// A chunk of a stream.
#[derive(Clone, Copy)]
pub(crate) struct Chunk<'a> {
    pub(crate) bytes: &'a [u8],
    pub(crate) tokens: &'a [Token],
    pub(crate) page_size: usize,
}

/// The unit of a chunk, in the bench's buffers.
#[derive(Clone, Copy)]
pub(crate) struct Unit {
    /// Bytes of the unit.
    pub(crate) len: u64,
    /// CPU time of packing and encoding, ns.
    pub(crate) cpu_ns: u64,
    encoded: Encoded,
    /// Bytes of the packed chunk; `None` if it was not packed.
    packed: Option<usize>,
}

/// Encoder, decoder and buffers.
pub(crate) struct Bench {
    encoder: Encoder,
    decoder: Decoder,
    packed: Vec<u8>,
    payload: Vec<u8>,
    decoded: Vec<u8>,
    plain: Vec<u8>,
}

impl Bench {
    /// Creates a bench for chunks of at most `largest` bytes.
    pub(crate) fn new(largest: usize) -> Result<Self, String> {
        let encoder = Encoder::new(Settings::default()).map_err(|error| error.to_string())?;
        Ok(Self {
            encoder,
            decoder: Decoder::new(),
            packed: vec![0; largest],
            payload: vec![0; largest],
            decoded: vec![0; largest],
            plain: vec![0; largest],
        })
    }

    /// Returns this bench with a maker of [`Settings::qpl`]'s streams.
    pub(crate) fn with_deflate(mut self, other: Box<dyn Deflate>) -> Self {
        self.encoder = self.encoder.with_deflate(other);
        self
    }

    /// Packs and encodes a chunk, as a relay's codec thread does.
    pub(crate) fn encode(&mut self, settings: Settings, chunk: Chunk<'_>) -> Option<Unit> {
        self.encoder.set(settings).ok()?;
        let begun = thread_cpu_ns();
        let packed = stream::pack(chunk.bytes, chunk.tokens, chunk.page_size, &mut self.packed);
        let plain = packed.map_or(chunk.bytes, |len| &self.packed[..len]);
        let encoded = self.encoder.encode(plain, &mut self.payload);
        let len = if encoded.codec == Codec::Raw { plain.len() } else { encoded.len };
        let cpu_ns = thread_cpu_ns().saturating_sub(begun);
        Some(Unit { len: len as u64, cpu_ns, encoded, packed })
    }

    /// CPU ns of decoding, checking and unpacking the unit just encoded; `None` if it is wrong.
    pub(crate) fn decode(&mut self, unit: Unit, chunk: Chunk<'_>) -> Option<u64> {
        let plain = unit.packed.map_or(chunk.bytes, |len| &self.packed[..len]);
        let header = UnitHeader::of(plain, unit.encoded);
        let is_raw = unit.encoded.codec == Codec::Raw;
        let payload = if is_raw { plain } else { self.payload.get(..unit.encoded.len)? };
        let begun = thread_cpu_ns();
        let decoded = self.decoded.get_mut(..plain.len())?;
        self.decoder.decode(&header, payload, decoded).ok()?;
        let found = match unit.packed {
            None => &*decoded,
            Some(_) => {
                let plain = self.plain.get_mut(..chunk.bytes.len())?;
                stream::unpack(decoded, plain).ok()?;
                plain
            }
        };
        let taken = thread_cpu_ns().saturating_sub(begun);
        (found == chunk.bytes).then_some(taken)
    }
}

/// CPU time of this thread, ns.
pub(crate) fn thread_cpu_ns() -> u64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    u64::try_from(now.tv_sec * 1_000_000_000 + now.tv_nsec).unwrap_or(0)
}
