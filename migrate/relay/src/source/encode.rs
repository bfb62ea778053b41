//! The work of the source's codec threads: packing and encoding chunks.

use super::history::{Attempt, OwnHistories};
use crate::auto::assigned::{Assigned, Begun};
use crate::counters::Counters;
use crate::units::{raw, CHUNKS_ON_DEVICE, PIECES_ON_DEVICE};
use codec::{Codec, Encoded, Encoder, Settings, UnitHeader, MAX_PLAIN};
use offload::{Carry, Done, Offload, Streams};
use pages::Slot;
use pipeline::{Job, Ticket};
use qat::{Direction, Engine, EngineOptions, Qat};
use qpl::Qpl;
use ring::Ring;
use session::{Header, Outgoing, FLAG_HISTORY, FLAG_PACKED};
use std::sync::atomic::Ordering;
use std::sync::Arc;
use stream::Token;

/// A codec thread of the source.
pub(crate) struct EncodeContext {
    encoder: Encoder,
    histories: Option<OwnHistories>,
    packed: Box<[u8]>,
    offload: Option<Offload<Encoding>>,
    qpl: Option<Arc<qpl::Counters>>,
}

impl EncodeContext {
    /// With a device and codec qatzip, the thread claims an instance; with libqpl and codec qpl, it
    /// has a job of its own.
    pub(crate) fn new(
        settings: Settings,
        chunk_bytes: usize,
        device: Option<&Arc<Qat>>,
        qpl: Option<&Qpl>,
        histories: Option<OwnHistories>,
    ) -> Result<Self, String> {
        let packed = vec![0; chunk_bytes].into_boxed_slice();
        let device = device.filter(|_| settings.codec() == Codec::DeflateQz);
        let offload = device.map(|qat| {
            let options = EngineOptions {
                level: settings.level().unsigned_abs(),
                depth: PIECES_ON_DEVICE,
                direction: Direction::Compress,
                ..EngineOptions::default()
            };
            Offload::new(Engine::new(Some(qat), options), CHUNKS_ON_DEVICE, chunk_bytes)
        });
        let mut encoder = Encoder::new(settings).map_err(|error| error.to_string())?;
        let compressor = qpl.filter(|_| settings.is_qpl()).map(|qpl| qpl.compressor(MAX_PLAIN));
        let compressor = compressor.transpose().map_err(|error| error.to_string())?;
        let qpl = compressor.as_ref().map(|compressor| Arc::clone(compressor.counters()));
        if let Some(compressor) = compressor {
            encoder = encoder.with_deflate(Box::new(compressor));
        }
        Ok(Self { encoder, histories, packed, offload, qpl })
    }

    /// The device's counters, if there is one.
    pub(crate) fn accelerator(&self) -> Option<Arc<qat::Counters>> {
        self.offload.as_ref().map(|offload| offload.engine().counters().clone())
    }

    /// Whether a device compresses this thread's chunks; `None` for a codec without one.
    pub(crate) fn on_device(&self) -> Option<bool> {
        self.offload.as_ref().map(|offload| offload.engine().on_device())
    }

    /// The counters of libqpl, if this thread uses it.
    pub(crate) fn qpl(&self) -> Option<Arc<qpl::Counters>> {
        self.qpl.clone()
    }
}

/// A chunk whose pieces are in flight on the device.
pub(crate) struct Encoding {
    job: EncodeJob,
    ticket: Ticket<Outgoing>,
    /// Length of the unit's plain bytes: the chunk or its packed form.
    plain_len: usize,
    packed: bool,
    /// The thread has a device, with more chunks in flight; else it does this chunk alone.
    by_device: bool,
    begun: Option<Begun>,
}

impl Carry for Encoding {
    fn input(&self) -> Option<&[u8]> {
        (!self.packed).then(|| &self.job.chunk[..self.job.len])
    }
}

impl Encoding {
    /// Makes the frame from the device's output.
    fn finish(self, streams: Option<&Streams<'_>>) -> (Ticket<Outgoing>, Outgoing) {
        let Self { mut job, ticket, plain_len, packed, by_device, begun } = self;
        let (assigned, len) = (job.assigned.take(), job.len);
        let written = streams
            .filter(|streams| streams.payload_len() < plain_len)
            .and_then(|streams| streams.write(&mut job.payload));
        let outgoing = match written {
            Some(len) => {
                let encoded = Encoded { codec: Codec::DeflateQz, len };
                job.into_unit(plain_len, encoded, if packed { FLAG_PACKED } else { 0 })
            }
            None if packed => job.into_packed(),
            None => job.into_raw(),
        };
        if let (Some(assigned), Some(begun)) = (assigned, begun) {
            if by_device {
                assigned.done_by_device(len, &outgoing, &begun, u32::from(CHUNKS_ON_DEVICE));
            } else {
                assigned.done(len, &outgoing, &begun);
            }
        }
        (ticket, outgoing)
    }
}

/// A chunk to compress. Owns both buffers, so that nothing is allocated per chunk. The chunk is
/// followed by its delta table, which has to follow the unit.
pub(crate) struct EncodeJob {
    pub(crate) header: Header,
    pub(crate) chunk: Slot,
    pub(crate) len: usize,
    /// xxh3-64 of the chunk, computed by the reader. The unit states it for both the chunk and its
    /// packed form (W10), so that each end reads each byte once for a checksum.
    pub(crate) checksum: u64,
    pub(crate) tokens: Vec<Token>,
    pub(crate) page_size: usize,
    /// Guest pages in the chunk, for the counters.
    pub(crate) pages: u64,
    pub(crate) payload: Slot,
    pub(crate) counters: Arc<Counters>,
    /// Receives `tokens` for reuse.
    pub(crate) spare: Arc<Ring<Vec<Token>>>,
    /// With `--codec auto`.
    pub(crate) assigned: Option<Assigned>,
}

impl EncodeJob {
    /// Sends the chunk raw.
    pub(crate) fn into_raw(self) -> Outgoing {
        self.counters.raw(self.len);
        let Self { header, chunk, len, checksum, tokens, spare, .. } = self;
        let _ = spare.push(tokens);
        raw(header, chunk, len, checksum)
    }

    /// Makes the frame from `payload`, which holds the unit's bytes. `plain_len`: the length of the
    /// chunk or of its packed form.
    fn into_unit(mut self, plain_len: usize, encoded: Encoded, flags: u8) -> Outgoing {
        let payload_len = encoded.len;
        if payload_len >= self.len {
            return self.into_raw();
        }
        let length = |len| u32::try_from(len).unwrap_or(u32::MAX);
        let unit = UnitHeader {
            codec: encoded.codec,
            plain_len: length(plain_len),
            payload_len: length(payload_len),
            checksum: self.checksum,
        };
        let table = self.header.table_len as usize;
        self.payload[payload_len..payload_len + table]
            .copy_from_slice(&self.chunk[self.len..self.len + table]);
        self.counters.compressed(self.pages, self.len, payload_len);
        self.header.flags |= flags;
        let _ = self.spare.push(self.tokens);
        Outgoing::Unit { header: self.header, unit, body: self.payload }
    }

    /// The packed chunk without compression, for a chunk whose zero pages are removed and whose
    /// other bytes do not shrink.
    pub(crate) fn into_packed(mut self) -> Outgoing {
        let chunk = &self.chunk[..self.len];
        match stream::pack(chunk, &self.tokens, self.page_size, &mut self.payload) {
            Some(len) => self.into_unit(len, Encoded { codec: Codec::Raw, len }, FLAG_PACKED),
            None => self.into_raw(),
        }
    }

    /// Whether packing may make the chunk smaller.
    fn is_structured(&self) -> bool {
        self.tokens.iter().any(|token| !matches!(token, Token::Raw { .. }))
    }
}

impl Job for EncodeJob {
    type Output = Outgoing;
    type Context = EncodeContext;

    fn run(mut self, context: &mut EncodeContext) -> Outgoing {
        let EncodeContext { encoder, histories, packed, .. } = context;
        let mut assigned = self.assigned.take();
        let begun = assigned.as_mut().map(Assigned::begin);
        if let Some(wanted) = assigned.as_ref().map(Assigned::settings) {
            if encoder.settings() != wanted {
                // Without memory for a context the chunk goes raw.
                let _ = encoder.set(wanted);
            }
        }
        let chunk = &self.chunk[..self.len];
        let packed_len = if self.is_structured() {
            stream::pack(chunk, &self.tokens, self.page_size, packed)
        } else {
            None
        };
        let plain = packed_len.map_or(chunk, |packed_len| &packed[..packed_len]);
        let mut flags = packed_len.map_or(0, |_| FLAG_PACKED);
        let settings = encoder.settings();
        let part = match histories {
            // A part that was made has to be sent, and `into_unit` sends no part that is as long as
            // the chunk. The packed form of a chunk may be longer than the chunk.
            Some(histories) => {
                let room = self.len.saturating_sub(1);
                histories.encode(settings, plain, &mut self.payload[..room])
            }
            None => Attempt::Unfit,
        };
        let plain_len = plain.len();
        let encoded = match part {
            Attempt::Part(len) => {
                self.counters.history_parts.fetch_add(1, Ordering::Relaxed);
                flags |= FLAG_HISTORY;
                Encoded { codec: Codec::Zstd, len }
            }
            Attempt::NoGain => Encoded { codec: Codec::Raw, len: plain_len },
            Attempt::Unfit => encoder.encode(plain, &mut self.payload),
        };
        if encoded.codec == Codec::Raw && packed_len.is_some() {
            self.payload[..plain_len].copy_from_slice(plain);
        }
        let len = self.len;
        let outgoing = self.into_unit(plain_len, encoded, flags);
        if let (Some(assigned), Some(begun)) = (assigned, begun) {
            assigned.done(len, &outgoing, &begun);
        }
        outgoing
    }

    fn start(
        mut self,
        context: &mut EncodeContext,
        ticket: Ticket<Outgoing>,
    ) -> Option<(Ticket<Outgoing>, Outgoing)> {
        let begun = self.assigned.as_mut().map(Assigned::begin);
        let chosen = self.assigned.as_ref().map(Assigned::settings);
        let for_device = chosen.is_none_or(|settings| settings.codec() == Codec::DeflateQz);
        let Some(offload) = context.offload.as_mut().filter(|_| for_device) else {
            return Some((ticket, self.run(context)));
        };
        // Without a device (it died, or other threads have its instances) the thread takes no other
        // chunk before it has done this one in software.
        let by_device = offload.engine().on_device();
        if let Some(buffer) = offload.buffer().filter(|_| self.is_structured()) {
            let chunk = &self.chunk[..self.len];
            if let Some(plain_len) = stream::pack(chunk, &self.tokens, self.page_size, buffer) {
                let encoding =
                    Encoding { job: self, ticket, plain_len, packed: true, by_device, begun };
                offload.compress(encoding, plain_len);
                return None;
            }
        }
        let plain_len = self.len;
        let encoding = Encoding { job: self, ticket, plain_len, packed: false, by_device, begun };
        offload.compress(encoding, 0);
        None
    }

    fn in_flight(context: &EncodeContext) -> usize {
        context.offload.as_ref().map_or(0, Offload::in_flight)
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

#[cfg(test)]
mod tests;
