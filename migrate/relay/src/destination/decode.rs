//! The work of the destination's codec threads: decoding and unpacking units.

use super::histories::{Histories, Turn};
use super::seed::{Filled, SessionSeed};
use crate::inbox::Arrived;
use crate::units::{CHUNKS_ON_DEVICE, PIECES_ON_DEVICE};
use codec::{Codec, Decoder, PartHeader, UnitHeader};
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
    /// The next part of a history that this thread decodes.
    turn: Option<(Turn<Part>, Arc<Parts>)>,
}

/// A part of a history, with the place of its chunk.
pub(crate) type Part = (DecodeJob, Ticket<Arrived>);
/// The histories of a session.
pub(crate) type Parts = Histories<Part>;

impl DecodeContext {
    /// With `qat`, a device decodes units of deflate-qz if it has an instance for the thread.
    pub(crate) fn new(qat: Option<&Arc<Qat>>) -> Self {
        let offload = qat.map(|qat| {
            let options = EngineOptions {
                depth: PIECES_ON_DEVICE,
                direction: Direction::Decompress,
                // The unit's checksum is compared with the chunk in any case.
                verify_every: 0,
                ..EngineOptions::default()
            };
            Offload::new(Engine::new(Some(qat), options), CHUNKS_ON_DEVICE, codec::MAX_PLAIN)
        });
        let packed = vec![0; codec::MAX_PLAIN].into_boxed_slice();
        Self { decoder: Decoder::new(), packed, offload, turn: None }
    }

    /// Decodes a part of a history, and takes the next part if it has arrived.
    fn decode_part(
        &mut self,
        turn: Turn<Part>,
        histories: Arc<Parts>,
    ) -> (Ticket<Arrived>, Arrived) {
        let ((job, ticket), begins, mut taken) = turn.split();
        let packed = &mut self.packed;
        let arrived = job.decode_by(packed, |_, payload, out| {
            let decoder = taken.decoder.as_mut().map_err(|reason| reason.clone())?;
            let part = &payload[PartHeader::LEN..];
            decoder.decode(begins, part, out).map_err(|error| error.to_string())
        });
        if let (Some(Err(error)), true) = (&arrived.chunk, taken.decoder.is_ok()) {
            taken.decoder = Err(format!("the history has ended: {error}"));
        }
        self.turn = histories.end(taken).map(|turn| (turn, histories));
        (ticket, arrived)
    }

    /// Whether a device decompresses this thread's chunks; `None` without a library.
    pub(crate) fn on_device(&self) -> Option<bool> {
        self.offload.as_ref().map(|offload| offload.engine().on_device())
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
    /// The unit's place in a history of the session, if it is a part of one (W29a).
    pub(crate) history: Option<(PartHeader, Arc<Parts>)>,
    /// The pages that this host has already (W29b).
    pub(crate) seed: Arc<SessionSeed>,
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
    fn decode(self, decoder: &mut Decoder, packed: &mut [u8]) -> Arrived {
        self.decode_by(packed, |unit, payload, out| {
            decoder.decode_unverified(unit, payload, out).map_err(|error| error.to_string())
        })
    }

    /// Decodes the chunk by `decode`, which gets the unit's header and payload, and fills the
    /// unit's plain bytes.
    fn decode_by(
        mut self,
        packed: &mut [u8],
        decode: impl FnOnce(&UnitHeader, &[u8], &mut [u8]) -> Result<(), String>,
    ) -> Arrived {
        self.move_table();
        let Self { header, unit, payload, chunk, .. } = &mut self;
        let payload = &payload[..unit.payload_len as usize];
        let bad =
            |detail: String| SessionError::Unit { stream: header.stream, seq: header.seq, detail };
        let out = &mut chunk[..header.plain_len as usize];
        let result = if header.flags & FLAG_PACKED != 0 {
            let packed = &mut packed[..unit.plain_len as usize];
            decode(unit, payload, packed)
                .and_then(|()| stream::unpack(packed, out).map_err(|error| error.to_string()))
        } else {
            decode(unit, payload, out)
        };
        let result = result
            .and_then(|()| unit.verify_checksum(out).map_err(|error| error.to_string()))
            .map_err(bad);
        self.arrived(result)
    }

    /// Makes the arrived frame, whose checksum is that of the unit.
    fn arrived(self, result: Result<(), SessionError>) -> Arrived {
        let Self { header, unit, chunk, seed, .. } = self;
        let checksum = Some(unit.checksum);
        let (chunk, filling) = match result.and_then(|()| seed.begin(&header, chunk)) {
            Ok(Filled::Later(filling)) => (None, Some(filling)),
            Ok(Filled::Already(chunk)) => (Some(Ok(chunk)), None),
            Err(error) => (Some(Err(error)), None),
        };
        Arrived { header, chunk, filling, checksum }
    }

    /// Makes the chunk from the device's output; returns the job if that output is wrong.
    fn accept(mut self, plain: &[u8]) -> Result<Arrived, Box<Self>> {
        if plain.len() != self.unit.plain_len as usize {
            return Err(Box::new(self));
        }
        let out = &mut self.chunk[..self.header.plain_len as usize];
        if self.header.flags & FLAG_PACKED != 0 {
            if stream::unpack(plain, out).is_err() {
                return Err(Box::new(self));
            }
        } else if out.len() == plain.len() {
            out.copy_from_slice(plain);
        } else {
            return Err(Box::new(self));
        }
        if self.unit.verify_checksum(out).is_err() {
            return Err(Box::new(self));
        }
        self.move_table();
        Ok(self.arrived(Ok(())))
    }
}

impl Job for DecodeJob {
    type Output = Arrived;
    type Context = DecodeContext;

    fn run(self, context: &mut DecodeContext) -> Arrived {
        self.decode(&mut context.decoder, &mut context.packed)
    }

    fn start(
        mut self,
        context: &mut DecodeContext,
        ticket: Ticket<Arrived>,
    ) -> Option<(Ticket<Arrived>, Arrived)> {
        if let Some((part, histories)) = self.history.take() {
            // Without a turn the part waits with the histories.
            let turn = histories.begin(part, (self, ticket))?;
            return Some(context.decode_part(turn, histories));
        }
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
        let on_device = context.offload.as_ref().map_or(0, Offload::in_flight);
        on_device + usize::from(context.turn.is_some())
    }

    fn has_room(context: &DecodeContext) -> bool {
        context.turn.is_none() && context.offload.as_ref().is_none_or(Offload::has_room)
    }

    fn poll(
        context: &mut DecodeContext,
        idle: bool,
        done: &mut dyn FnMut(Ticket<Arrived>, Arrived),
    ) {
        if let Some((turn, histories)) = context.turn.take() {
            let (ticket, arrived) = context.decode_part(turn, histories);
            done(ticket, arrived);
        }
        let idle = idle && context.turn.is_none();
        let DecodeContext { decoder, packed, offload, .. } = context;
        let Some(offload) = offload else { return };
        offload.poll(idle, &mut |Decoding { job, ticket }, what| {
            // Software repeats a decoding that failed on the device, and finds the error's text if
            // the unit is wrong.
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

#[cfg(test)]
mod tests {
    use super::*;
    use codec::{Encoder, Settings};
    use pages::Arena;
    use session::FrameType;
    use stream::synth::{Configuration, MainStream, Section};
    use stream::{Kind, Tokeniser};

    const PAGE: usize = 4096;

    /// A chunk of pages in the stream of a QEMU, and its packed form.
    fn chunk() -> (Vec<u8>, Vec<u8>) {
        let mut main = MainStream::new(PAGE);
        main.file_header();
        main.configuration(&Configuration { machine: "pc", ..Configuration::default() });
        main.section(Section::Start).block_table(&[("pc.ram", 20 * PAGE as u64)]);
        for number in 0..20_u8 {
            main.page("pc.ram", u64::from(number) * PAGE as u64, &[number; PAGE]);
        }
        let plain = main.end_of_section().take();
        let mut tokens = Vec::new();
        Tokeniser::new(Kind::Main, PAGE).feed(&plain, &mut tokens);
        let mut packed = vec![0; plain.len()];
        let len = stream::pack(&plain, &tokens, PAGE, &mut packed).expect("it has pages");
        packed.truncate(len);
        (plain, packed)
    }

    /// Result of a codec thread for the packed chunk, sent with this checksum.
    fn decoded(plain_len: usize, packed: &[u8], checksum: u64) -> Arrived {
        let arena = Arena::new(2, 1 << 18).unwrap();
        let (mut payload, chunk) = (arena.take().unwrap(), arena.take().unwrap());
        let mut encoder = Encoder::new(Settings::new(Codec::Zstd, None).unwrap()).unwrap();
        let encoded = encoder.encode(packed, &mut payload);
        let unit = UnitHeader { checksum, ..UnitHeader::of(packed, encoded) };
        let mut header = Header::free(FrameType::Data, 0);
        (header.flags, header.plain_len) = (FLAG_PACKED, u32::try_from(plain_len).unwrap());
        let seed = Arc::new(SessionSeed::new(0, PAGE));
        let job = DecodeJob { header, unit, payload, chunk, history: None, seed };
        job.run(&mut DecodeContext::new(None))
    }

    #[test]
    fn the_checksum_of_a_packed_chunk_is_that_of_the_chunk() {
        let (plain, packed) = chunk();
        let checksum = codec::checksum(&plain);
        let arrived = decoded(plain.len(), &packed, checksum);
        let chunk = arrived.chunk.unwrap().unwrap();
        assert!(chunk[..plain.len()] == plain);
        assert_eq!(arrived.checksum, Some(checksum));
        // A chunk that unpacks to other bytes is refused, whatever its own checksum.
        let mut other = packed.clone();
        *other.last_mut().unwrap() ^= 1;
        for (packed, checksum) in
            [(&packed, codec::checksum(&packed)), (&other, checksum), (&other, 0)]
        {
            let error = decoded(plain.len(), packed, checksum).chunk.unwrap().unwrap_err();
            assert!(error.to_string().contains("has checksum"), "{error}");
        }
    }
}
