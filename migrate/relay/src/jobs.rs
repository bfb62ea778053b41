//! What the codec threads do with a chunk: pack and encode it on the way out, decode and unpack it on the way in.

use crate::counters::Counters;
use codec::{Codec, Decoder, Encoded, Encoder, Settings, UnitHeader};
use pages::Slot;
use pipeline::Job;
use ring::Ring;
use session::{Header, Outgoing, SessionError, FLAG_PACKED};
use std::sync::Arc;
use stream::Token;

/// A codec thread of the source.
pub(crate) struct EncodeContext {
    encoder: Encoder,
    packed: Box<[u8]>,
}

impl EncodeContext {
    pub(crate) fn new(
        settings: Settings,
        chunk_bytes: usize,
    ) -> Result<Self, codec::SettingsError> {
        let packed = vec![0; chunk_bytes].into_boxed_slice();
        Ok(Self { encoder: Encoder::new(settings)?, packed })
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
        let EncodeContext { encoder, packed } = context;
        let chunk = &self.chunk[..self.len];
        let structured = self.tokens.iter().any(|token| !matches!(token, Token::Raw { .. }));
        let packed_len = if structured {
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
        let payload_len = unit.payload_len as usize;
        if payload_len >= self.len {
            return self.into_raw();
        }
        self.counters.compressed(self.pages, self.len, payload_len);
        self.header.flags = flags;
        let _ = self.spare.push(self.tokens);
        Outgoing::Unit { header: self.header, unit, body: self.payload }
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
