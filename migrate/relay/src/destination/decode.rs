//! The work of the destination's codec threads: decoding and unpacking units.

use crate::inbox::Arrived;
use crate::units::{CHUNKS_ON_DEVICE, PIECES_ON_DEVICE};
use codec::{Codec, Decoder, UnitHeader};
use offload::{Carry, Done, Offload};
use pages::Slot;
use pipeline::{Job, Ticket};
use qat::{Direction, Engine, EngineOptions, Qat};
use session::{Header, SessionError, FLAG_PACKED};
use std::sync::Arc;

/// A codec thread of the destination.
pub(crate) struct DecodeContext {
    decoder: Decoder,
    packed: Box<[u8]>,
    offload: Option<Offload<Decoding>>,
}

impl DecodeContext {
    /// With `qat`, a device decodes units of deflate-qz if it has an instance for the thread.
    pub(crate) fn new(qat: Option<&Arc<Qat>>) -> Self {
        let offload = qat.map(|qat| {
            let options = EngineOptions {
                depth: PIECES_ON_DEVICE,
                direction: Direction::Decompress,
                // The unit's own checksum over its plain bytes is compared in any case.
                verify_every: 0,
                ..EngineOptions::default()
            };
            Offload::new(Engine::new(Some(qat), options), CHUNKS_ON_DEVICE, codec::MAX_PLAIN)
        });
        let packed = vec![0; codec::MAX_PLAIN].into_boxed_slice();
        Self { decoder: Decoder::new(), packed, offload }
    }

    /// The accelerator's counters, if there is one.
    pub(crate) fn accelerator(&self) -> Option<Arc<qat::Counters>> {
        self.offload.as_ref().map(|offload| offload.engine().counters().clone())
    }
}

/// A unit in flight on the device.
pub(crate) struct Decoding {
    job: DecodeJob,
    ticket: Ticket<Arrived>,
}

impl Carry for Decoding {
    fn input(&self) -> Option<&[u8]> {
        Some(self.job.payload())
    }
}

/// A unit to decode to its chunk.
pub(crate) struct DecodeJob {
    pub(crate) header: Header,
    pub(crate) unit: UnitHeader,
    pub(crate) payload: Slot,
    pub(crate) chunk: Slot,
}

impl DecodeJob {
    fn payload(&self) -> &[u8] {
        &self.payload[..self.unit.payload_len as usize]
    }

    /// Moves the delta table from behind the unit to behind the chunk.
    fn move_table(&mut self) {
        let (from, to) = (self.unit.payload_len as usize, self.header.plain_len as usize);
        let len = self.header.table_len as usize;
        // Both have room, as checked by the link (W8, W29).
        self.chunk[to..to + len].copy_from_slice(&self.payload[from..from + len]);
    }

    /// Decodes the chunk in software.
    fn decode(mut self, decoder: &mut Decoder, packed: &mut [u8]) -> Arrived {
        self.move_table();
        let Self { header, unit, payload, chunk } = &mut self;
        let payload = &payload[..unit.payload_len as usize];
        let bad =
            |detail: String| SessionError::Unit { stream: header.stream, seq: header.seq, detail };
        let out = &mut chunk[..header.plain_len as usize];
        let result = if header.flags & FLAG_PACKED != 0 {
            let packed = &mut packed[..unit.plain_len as usize];
            match decoder.decode(unit, payload, packed) {
                Ok(()) => stream::unpack(packed, out).map_err(|error| bad(error.to_string())),
                Err(error) => Err(bad(error.to_string())),
            }
        } else {
            decoder.decode(unit, payload, out).map_err(|error| bad(error.to_string()))
        };
        Arrived { header: self.header, chunk: Some(result.map(|()| self.chunk)) }
    }

    /// Makes the chunk from the device's output; returns the job if that output is wrong.
    fn accept(mut self, plain: &[u8]) -> Result<Arrived, Self> {
        let whole = plain.len() == self.unit.plain_len as usize;
        if !whole || codec::checksum(plain) != self.unit.checksum {
            return Err(self);
        }
        let out = &mut self.chunk[..self.header.plain_len as usize];
        if self.header.flags & FLAG_PACKED != 0 {
            if stream::unpack(plain, out).is_err() {
                return Err(self);
            }
        } else if out.len() == plain.len() {
            out.copy_from_slice(plain);
        } else {
            return Err(self);
        }
        self.move_table();
        Ok(Arrived { header: self.header, chunk: Some(Ok(self.chunk)) })
    }
}

impl Job for DecodeJob {
    type Output = Arrived;
    type Context = DecodeContext;

    fn run(self, context: &mut DecodeContext) -> Arrived {
        self.decode(&mut context.decoder, &mut context.packed)
    }

    fn start(
        self,
        context: &mut DecodeContext,
        ticket: Ticket<Arrived>,
    ) -> Option<(Ticket<Arrived>, Arrived)> {
        let plain_len = self.unit.plain_len as usize;
        match &mut context.offload {
            Some(offload) if self.unit.codec == Codec::DeflateQz && offload.has_room() => {
                match offload.decompress(Decoding { job: self, ticket }, plain_len) {
                    Ok(()) => None,
                    Err(Decoding { job, ticket }) => Some((ticket, job.run(context))),
                }
            }
            _ => Some((ticket, self.run(context))),
        }
    }

    fn in_flight(context: &DecodeContext) -> usize {
        context.offload.as_ref().map_or(0, Offload::in_flight)
    }

    fn has_room(context: &DecodeContext) -> bool {
        context.offload.as_ref().is_none_or(Offload::has_room)
    }

    fn poll(
        context: &mut DecodeContext,
        idle: bool,
        done: &mut dyn FnMut(Ticket<Arrived>, Arrived),
    ) {
        let DecodeContext { decoder, packed, offload } = context;
        let Some(offload) = offload else { return };
        offload.poll(idle, &mut |Decoding { job, ticket }, what| {
            // Software repeats the device's failures, and words the error if the unit is wrong.
            let arrived = match what {
                Done::Plain(plain) => {
                    job.accept(plain).unwrap_or_else(|job| job.decode(decoder, packed))
                }
                Done::Streams(_) | Done::Bad => job.decode(decoder, packed),
            };
            done(ticket, arrived);
        });
    }
}
