//! The work of a compression thread: encodes a unit, and proves that the stored bytes decode to it.

use std::sync::Arc;

use codec::{
    checksum, Codec, DecodeError, Decoder, Encoded as Payload, Encoder, Settings, SettingsError,
    UnitHeader,
};
use offload::{Carry, Done, Offload, Streams};
use pages::Slot;
use pipeline::{Job, Ticket};
use qat::{Direction, Engine, EngineOptions, Qat};

/// Units that a thread has in flight on its device. A unit of 128 KiB is two pieces, and the device
/// needs some 100 us for one.
const UNITS_ON_DEVICE: u16 = 8;

/// One unit to encode.
pub(crate) struct Encode {
    pub(crate) number: u64,
    pub(crate) pages: u32,
    /// The pages: the first `plain_len` bytes.
    pub(crate) plain: Slot,
    pub(crate) plain_len: usize,
    /// Buffer for the stored bytes.
    pub(crate) stored: Slot,
    /// Codec and level: those of the threads, except for the level of zstd.
    pub(crate) settings: Settings,
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
    check: Check,
    offload: Option<Offload<InFlight>>,
}

impl Context {
    /// Creates the state of a thread. With a device and codec qatzip, the thread claims an
    /// instance.
    pub(crate) fn new(
        settings: Settings,
        unit_bytes: usize,
        device: Option<&Arc<Qat>>,
    ) -> Result<Self, SettingsError> {
        let device = device.filter(|_| settings.codec() == Codec::DeflateQz);
        let offload = device.map(|qat| {
            let options = EngineOptions {
                level: settings.level().unsigned_abs(),
                depth: usize::from(UNITS_ON_DEVICE) * unit_bytes.div_ceil(codec::qz::MEMBER_PLAIN),
                direction: Direction::Compress,
                ..EngineOptions::default()
            };
            Offload::new(Engine::new(Some(qat), options), UNITS_ON_DEVICE, unit_bytes)
        });
        let again = vec![0; unit_bytes].into_boxed_slice();
        let check = Check { decoder: Decoder::new(), again };
        Ok(Self { encoder: Encoder::new(settings)?, check, offload })
    }

    /// Whether a device compresses this thread's units; `None` for a codec without one.
    pub(crate) fn on_device(&self) -> Option<bool> {
        self.offload.as_ref().map(|offload| offload.engine().on_device())
    }

    /// The device's counters, if there is one.
    pub(crate) fn accelerator(&self) -> Option<Arc<qat::Counters>> {
        self.offload.as_ref().map(|offload| offload.engine().counters().clone())
    }
}

/// Buffer size for the stored bytes of a unit of `unit_bytes` plain bytes.
pub(crate) fn room(unit_bytes: usize) -> usize {
    UnitHeader::LEN + unit_bytes
}

/// Decodes what was encoded.
struct Check {
    decoder: Decoder,
    /// Output of the decoder.
    again: Box<[u8]>,
}

impl Check {
    /// Completes the stored bytes of a unit whose payload is in its buffer, and decodes them.
    fn prove(&mut self, job: &mut Encode, encoded: Payload) -> Result<(), DecodeError> {
        let plain = &job.plain[..job.plain_len];
        let (head, payload) = job.stored.split_at_mut(UnitHeader::LEN);
        if encoded.codec == Codec::Raw {
            payload[..plain.len()].copy_from_slice(plain);
        }
        let header = UnitHeader::of(plain, encoded);
        head.copy_from_slice(&header.to_bytes());
        let again = &mut self.again[..plain.len()];
        self.decoder
            .decode(&header, &payload[..encoded.len], again)
            .and_then(|()| header.verify(plain))
    }
}

impl Encode {
    fn encode(&mut self, encoder: &mut Encoder) -> Payload {
        encoder.encode(&self.plain[..self.plain_len], &mut self.stored[UnitHeader::LEN..])
    }

    fn finish(self, encoded: Payload, verdict: Result<(), DecodeError>) -> Encoded {
        let Self { number, pages, stored, .. } = self;
        let len = UnitHeader::LEN + encoded.len;
        let checksum = checksum(&stored[..len]);
        Encoded { number, pages, stored, len, checksum, verdict }
    }
}

/// A unit whose pieces are in flight on the device.
struct InFlight {
    job: Encode,
    ticket: Ticket<Encoded>,
}

impl Carry for InFlight {
    fn input(&self) -> Option<&[u8]> {
        Some(&self.job.plain[..self.job.plain_len])
    }
}

impl InFlight {
    /// Stores the device's streams if they are shorter than the pages. If they do not decode to the
    /// pages, `encoder` encodes the unit in software.
    fn finish(
        self,
        streams: Option<&Streams<'_>>,
        encoder: &mut Encoder,
        check: &mut Check,
    ) -> (Ticket<Encoded>, Encoded) {
        let Self { mut job, ticket } = self;
        let plain_len = job.plain_len;
        let payload = &mut job.stored[UnitHeader::LEN..];
        let written = streams
            .filter(|streams| streams.payload_len() < plain_len)
            .and_then(|streams| streams.write(payload));
        let mut encoded = match written {
            Some(len) => Payload { codec: Codec::DeflateQz, len },
            None => Payload { codec: Codec::Raw, len: plain_len },
        };
        let mut verdict = check.prove(&mut job, encoded);
        if verdict.is_err() {
            encoded = job.encode(encoder);
            verdict = check.prove(&mut job, encoded);
        }
        (ticket, job.finish(encoded, verdict))
    }
}

impl Job for Encode {
    type Output = Encoded;
    type Context = Context;

    fn run(mut self, context: &mut Context) -> Encoded {
        let Context { encoder, check, .. } = context;
        if encoder.settings() != self.settings {
            // Without memory for a context the unit is stored raw.
            let _ = encoder.set(self.settings);
        }
        let encoded = self.encode(encoder);
        let verdict = check.prove(&mut self, encoded);
        self.finish(encoded, verdict)
    }

    fn start(
        self,
        context: &mut Context,
        ticket: Ticket<Encoded>,
    ) -> Option<(Ticket<Encoded>, Encoded)> {
        let Some(offload) = &mut context.offload else { return Some((ticket, self.run(context))) };
        offload.compress(InFlight { job: self, ticket }, 0);
        None
    }

    fn in_flight(context: &Context) -> usize {
        context.offload.as_ref().map_or(0, Offload::in_flight)
    }

    fn has_room(context: &Context) -> bool {
        context.offload.as_ref().is_none_or(Offload::has_room)
    }

    fn poll(context: &mut Context, idle: bool, done: &mut dyn FnMut(Ticket<Encoded>, Encoded)) {
        let Context { encoder, check, offload: Some(offload) } = context else { return };
        offload.poll(idle, &mut |unit: InFlight, what| {
            let streams = match &what {
                Done::Streams(streams) => Some(streams),
                Done::Plain(_) | Done::Bad => None,
            };
            let (ticket, encoded) = unit.finish(streams, encoder, check);
            done(ticket, encoded);
        });
    }
}
