//! The work of a compression thread: encodes a unit, and proves that the stored bytes decode to it.

use codec::{checksum, Codec, DecodeError, Decoder, Encoder, Settings, SettingsError, UnitHeader};
use pages::Slot;
use pipeline::Job;

/// One unit to encode.
pub(crate) struct Encode {
    pub(crate) number: u64,
    pub(crate) pages: u32,
    /// The pages: the first `plain_len` bytes.
    pub(crate) plain: Slot,
    pub(crate) plain_len: usize,
    /// Buffer for the stored bytes.
    pub(crate) stored: Slot,
}

/// A unit as it will be stored.
pub(crate) struct Encoded {
    pub(crate) number: u64,
    pub(crate) pages: u32,
    pub(crate) stored: Slot,
    pub(crate) len: usize,
    pub(crate) checksum: u64,
    /// Whether the stored bytes decode to the pages; rule I2.
    pub(crate) verdict: Result<(), DecodeError>,
}

/// State of one thread.
pub(crate) struct Context {
    encoder: Encoder,
    decoder: Decoder,
    /// Output of the check's decoder.
    again: Box<[u8]>,
}

impl Context {
    pub(crate) fn new(settings: Settings, unit_bytes: usize) -> Result<Self, SettingsError> {
        let again = vec![0; unit_bytes].into_boxed_slice();
        Ok(Self { encoder: Encoder::new(settings)?, decoder: Decoder::new(), again })
    }
}

/// Buffer size for the stored bytes of a unit of `unit_bytes` plain bytes.
pub(crate) fn room(unit_bytes: usize) -> usize {
    UnitHeader::LEN + Encoder::roomy(unit_bytes)
}

impl Job for Encode {
    type Output = Encoded;
    type Context = Context;

    fn run(self, context: &mut Context) -> Encoded {
        let Self { number, pages, plain, plain_len, mut stored } = self;
        let plain = &plain[..plain_len];
        let (head, payload) = stored.split_at_mut(UnitHeader::LEN);
        let encoded = context.encoder.encode(plain, payload);
        if encoded.codec == Codec::Raw {
            payload[..plain_len].copy_from_slice(plain);
        }
        let header = UnitHeader::of(plain, encoded);
        head.copy_from_slice(&header.to_bytes());
        let again = &mut context.again[..plain_len];
        let verdict = context
            .decoder
            .decode(&header, &payload[..encoded.len], again)
            .and_then(|()| header.verify(plain));
        let len = UnitHeader::LEN + encoded.len;
        let checksum = checksum(&stored[..len]);
        Encoded { number, pages, stored, len, checksum, verdict }
    }
}
