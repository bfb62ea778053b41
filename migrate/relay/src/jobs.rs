//! What the codec threads do with a chunk: pack and encode it on the way out, decode and unpack it on the way in.

use crate::counters::Counters;
use codec::{Codec, Decoder, Encoded, Encoder, Settings, UnitHeader};
use offload::{Carry, Done, Offload, Streams};
use pages::Slot;
use pipeline::{Job, Ticket};
use qat::{Direction, Engine, EngineOptions, Qat};
use ring::Ring;
use session::{Header, Outgoing, SessionError, FLAG_PACKED};
use std::sync::Arc;
use stream::Token;

/// Chunks that a codec thread keeps in flight on its QAT instance: with a latency of 100 us for nine pieces of 64 KiB,
/// four would do for 20 Gbit/s; twice that covers the thread's absences.
const CHUNKS_ON_DEVICE: u16 = 8;
/// Pieces that the driver keeps in flight: those of all these chunks.
const PIECES_ON_DEVICE: usize = 72;

/// A codec thread of the source.
pub(crate) struct EncodeContext {
    encoder: Encoder,
    packed: Box<[u8]>,
    offload: Option<Offload<Encoding>>,
}

impl EncodeContext {
    /// With `qat`, and a codec that it has, the thread looks for an instance.
    pub(crate) fn new(
        settings: Settings,
        chunk_bytes: usize,
        qat: Option<&Arc<Qat>>,
    ) -> Result<Self, codec::SettingsError> {
        let packed = vec![0; chunk_bytes].into_boxed_slice();
        let offload = qat.filter(|_| settings.codec() == Codec::DeflateQz).map(|qat| {
            let options = EngineOptions {
                level: settings.level().unsigned_abs(),
                depth: PIECES_ON_DEVICE,
                direction: Direction::Compress,
                ..EngineOptions::default()
            };
            Offload::new(Engine::new(Some(qat), options), CHUNKS_ON_DEVICE, chunk_bytes)
        });
        Ok(Self { encoder: Encoder::new(settings)?, packed, offload })
    }

    /// What the accelerator's engine counts, if there is one.
    pub(crate) fn accelerator(&self) -> Option<Arc<qat::Counters>> {
        self.offload.as_ref().map(|offload| offload.engine().counters().clone())
    }
}

/// A chunk whose pieces are with the device.
pub(crate) struct Encoding {
    job: EncodeJob,
    ticket: Ticket<Outgoing>,
    /// Of the plain bytes of the unit, which are the chunk or its packed form.
    plain_len: usize,
    checksum: u64,
    packed: bool,
}

impl Carry for Encoding {
    fn input(&self) -> Option<&[u8]> {
        (!self.packed).then(|| &self.job.chunk[..self.job.len])
    }
}

impl Encoding {
    /// Makes the frame of what the device made of the chunk.
    fn finish(self, streams: Option<&Streams<'_>>) -> (Ticket<Outgoing>, Outgoing) {
        let Self { mut job, ticket, plain_len, checksum, packed } = self;
        let written = streams
            .filter(|streams| streams.payload_len() < plain_len)
            .and_then(|streams| streams.write(&mut job.payload));
        let outgoing = match written {
            Some(payload_len) => {
                let length = |len| u32::try_from(len).unwrap_or(u32::MAX);
                let unit = UnitHeader {
                    codec: Codec::DeflateQz,
                    plain_len: length(plain_len),
                    payload_len: length(payload_len),
                    checksum,
                };
                job.into_unit(unit, if packed { FLAG_PACKED } else { 0 })
            }
            None if packed => job.into_packed(),
            None => job.into_raw(),
        };
        (ticket, outgoing)
    }
}

/// A chunk to compress. Owns both buffers, so that nothing is allocated per chunk.
pub(crate) struct EncodeJob {
    pub(crate) header: Header,
    pub(crate) chunk: Slot,
    pub(crate) len: usize,
    /// xxh3-64 of the chunk, computed by the reader.
    pub(crate) checksum: u64,
    pub(crate) tokens: Vec<Token>,
    pub(crate) page_size: usize,
    /// Guest pages in the chunk, for the counters.
    pub(crate) pages: u64,
    pub(crate) payload: Slot,
    pub(crate) counters: Arc<Counters>,
    /// Where `tokens` goes to be used again.
    pub(crate) spare: Arc<Ring<Vec<Token>>>,
}

impl EncodeJob {
    /// The chunk as it is.
    pub(crate) fn into_raw(self) -> Outgoing {
        self.counters.raw(self.len);
        let Self { header, chunk, len, checksum, tokens, spare, .. } = self;
        let _ = spare.push(tokens);
        raw(header, chunk, len, checksum)
    }

    /// The payload, which holds the unit's.
    fn into_unit(mut self, unit: UnitHeader, flags: u8) -> Outgoing {
        let payload_len = unit.payload_len as usize;
        if payload_len >= self.len {
            return self.into_raw();
        }
        self.counters.compressed(self.pages, self.len, payload_len);
        self.header.flags = flags;
        let _ = self.spare.push(self.tokens);
        Outgoing::Unit { header: self.header, unit, body: self.payload }
    }

    /// The packed chunk, not compressed: zero pages are gone, and the rest does not shrink.
    fn into_packed(mut self) -> Outgoing {
        let chunk = &self.chunk[..self.len];
        match stream::pack(chunk, &self.tokens, self.page_size, &mut self.payload) {
            Some(len) => {
                let unit = UnitHeader::of(&self.payload[..len], Encoded { codec: Codec::Raw, len });
                self.into_unit(unit, FLAG_PACKED)
            }
            None => self.into_raw(),
        }
    }

    /// Whether packing may make the chunk smaller.
    fn is_structured(&self) -> bool {
        self.tokens.iter().any(|token| !matches!(token, Token::Raw { .. }))
    }
}

/// A DATA frame whose unit is the chunk itself.
pub(crate) fn raw(header: Header, chunk: Slot, len: usize, checksum: u64) -> Outgoing {
    let length = u32::try_from(len).unwrap_or(u32::MAX);
    let unit = UnitHeader { codec: Codec::Raw, plain_len: length, payload_len: length, checksum };
    Outgoing::Unit { header, unit, body: chunk }
}

impl Job for EncodeJob {
    type Output = Outgoing;
    type Context = EncodeContext;

    fn run(mut self, context: &mut EncodeContext) -> Outgoing {
        let EncodeContext { encoder, packed, .. } = context;
        let chunk = &self.chunk[..self.len];
        let packed_len = if self.is_structured() {
            stream::pack(chunk, &self.tokens, self.page_size, packed)
        } else {
            None
        };
        let (unit, flags) = match packed_len {
            Some(packed_len) => {
                let plain = &packed[..packed_len];
                let mut encoded = encoder.encode(plain, &mut self.payload);
                if encoded.codec == Codec::Raw {
                    self.payload[..packed_len].copy_from_slice(plain);
                    encoded = Encoded { codec: Codec::Raw, len: packed_len };
                }
                (UnitHeader::of(plain, encoded), FLAG_PACKED)
            }
            None => {
                let encoded = encoder.encode(chunk, &mut self.payload);
                let plain_len = u32::try_from(self.len).unwrap_or(u32::MAX);
                let payload_len = u32::try_from(encoded.len).unwrap_or(u32::MAX);
                let codec = encoded.codec;
                (UnitHeader { codec, plain_len, payload_len, checksum: self.checksum }, 0)
            }
        };
        self.into_unit(unit, flags)
    }

    fn start(
        self,
        context: &mut EncodeContext,
        ticket: Ticket<Outgoing>,
    ) -> Option<(Ticket<Outgoing>, Outgoing)> {
        let Some(offload) = &mut context.offload else {
            return Some((ticket, self.run(context)));
        };
        if let Some(buffer) = offload.buffer().filter(|_| self.is_structured()) {
            let chunk = &self.chunk[..self.len];
            if let Some(plain_len) = stream::pack(chunk, &self.tokens, self.page_size, buffer) {
                let checksum = codec::checksum(&buffer[..plain_len]);
                let encoding = Encoding { job: self, ticket, plain_len, checksum, packed: true };
                offload.compress(encoding, plain_len);
                return None;
            }
        }
        let (plain_len, checksum) = (self.len, self.checksum);
        offload.compress(Encoding { job: self, ticket, plain_len, checksum, packed: false }, 0);
        None
    }

    fn kept(context: &EncodeContext) -> usize {
        context.offload.as_ref().map_or(0, Offload::kept)
    }

    fn has_room(context: &EncodeContext) -> bool {
        context.offload.as_ref().is_none_or(Offload::has_room)
    }

    fn poll(
        context: &mut EncodeContext,
        idle: bool,
        done: &mut dyn FnMut(Ticket<Outgoing>, Outgoing),
    ) {
        let Some(offload) = &mut context.offload else { return };
        offload.poll(idle, &mut |encoding: Encoding, what| {
            let streams = match &what {
                Done::Streams(streams) => Some(streams),
                Done::Plain(_) | Done::Bad => None,
            };
            let (ticket, outgoing) = encoding.finish(streams);
            done(ticket, outgoing);
        });
    }
}

/// A codec thread of the destination.
pub(crate) struct DecodeContext {
    decoder: Decoder,
    packed: Box<[u8]>,
}

impl DecodeContext {
    pub(crate) fn new() -> Self {
        Self { decoder: Decoder::new(), packed: vec![0; codec::MAX_PLAIN].into_boxed_slice() }
    }
}

/// A unit to turn back into its chunk.
pub(crate) struct DecodeJob {
    pub(crate) header: Header,
    pub(crate) unit: UnitHeader,
    pub(crate) payload: Slot,
    pub(crate) chunk: Slot,
}

/// A sequenced frame on its way to the writer of its stream.
pub(crate) struct Arrived {
    pub(crate) header: Header,
    /// DATA: the chunk in the first `plain_len` bytes, or why it cannot be decoded.
    pub(crate) chunk: Option<Result<Slot, SessionError>>,
}

impl Job for DecodeJob {
    type Output = Arrived;
    type Context = DecodeContext;

    fn run(self, context: &mut DecodeContext) -> Arrived {
        let Self { header, unit, payload, mut chunk } = self;
        let bad =
            |detail: String| SessionError::Unit { stream: header.stream, seq: header.seq, detail };
        let payload_bytes = &payload[..unit.payload_len as usize];
        let out = &mut chunk[..header.plain_len as usize];
        let result = if header.flags & FLAG_PACKED != 0 {
            let packed = &mut context.packed[..unit.plain_len as usize];
            match context.decoder.decode(&unit, payload_bytes, packed) {
                Ok(()) => stream::unpack(packed, out).map_err(|error| bad(error.to_string())),
                Err(error) => Err(bad(error.to_string())),
            }
        } else {
            context
                .decoder
                .decode(&unit, payload_bytes, out)
                .map_err(|error| bad(error.to_string()))
        };
        Arrived { header, chunk: Some(result.map(|()| chunk)) }
    }
}
