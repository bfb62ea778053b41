//! Records one channel of a multifd migration.

use std::io::{self, Read};
use std::sync::{Arc, PoisonError};

use crate::multifd::{ChannelRecord, Leaving, Multifd, Phase};
use crate::packet::{Init, Packet, Table, INIT_LEN};
use crate::source::{unknown, Source};
use crate::{RecordError, Sink};

type Outcome<E, T = ()> = Result<T, RecordError<E>>;

/// Whether a channel goes on.
#[derive(PartialEq, Eq)]
enum Next {
    Packet,
    End,
}

impl<S: Sink> Multifd<S> {
    /// Records a multifd channel, to its end. [`Multifd::main`] returns its error.
    pub fn channel<R: Read>(&self, reader: R) {
        let mut number = None;
        let leaving = Leaving::new(self);
        let result = self.read(reader, &mut number);
        leaving.without_panic();
        if let Err(error) = result {
            // QEMU closes its sockets once the migration is recorded.
            if !matches!(error, RecordError::Io { .. }) {
                self.note_late();
            }
            self.fail(match number {
                Some(channel) => error.of_channel(channel),
                None => error,
            });
        }
    }

    fn read<R: Read>(&self, mut reader: R, channel: &mut Option<u8>) -> Outcome<S::Error> {
        let mut init = [0; INIT_LEN];
        if let Err(source) = reader.read_exact(&mut init) {
            if source.kind() == io::ErrorKind::UnexpectedEof {
                return Err(RecordError::Ends {
                    at: 0,
                    during: "before the first packet of a channel",
                });
            }
            return Err(RecordError::Io { at: 0, source });
        }
        let number = self.enter(Init::parse(&init)?)?;
        *channel = Some(number);
        let Some(table) = self.table() else { return Ok(()) };
        let mut source = Source::of_channel(reader, &init, table.page_size);
        let mut packet = Packet::default();
        loop {
            source.during = "between the packets of a channel";
            if self.has_failed() {
                return Ok(());
            }
            if source.has_ended()? {
                self.record(number, |record| (record.ended, record.bytes) = (true, source.at()));
                return Ok(());
            }
            source.during = "in a packet";
            packet.read(&mut source, &table)?;
            if self.packet(number, &packet, &table, &mut source)? == Next::End {
                return Ok(());
            }
        }
    }

    /// Notes a channel by its first packet; returns its number.
    fn enter(&self, init: Init) -> Outcome<S::Error, u8> {
        let mut state = self.state();
        let Init { uuid, channel } = init;
        if *state.uuid.get_or_insert(uuid) != uuid {
            return Err(unknown(8, format!("channel {channel} is of another VM")));
        }
        let channels = state.records.len();
        let what = match state.records.get_mut(usize::from(channel)) {
            Some(record @ None) => {
                *record = Some(ChannelRecord::default());
                return Ok(channel);
            }
            Some(_) => format!("channel {channel} is there already"),
            None => format!("channel {channel}, where the migration has {channels} of them"),
        };
        Err(unknown(24, what))
    }

    /// Waits until the main channel has announced the RAM; `None` if it will not.
    fn table(&self) -> Option<Arc<Table>> {
        let mut state = self.state();
        loop {
            if state.phase != Phase::Recording {
                return None;
            }
            if let Some(table) = &state.table {
                return Some(Arc::clone(table));
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn record(&self, number: u8, change: impl FnOnce(&mut ChannelRecord)) {
        if let Some(Some(record)) = self.state().records.get_mut(usize::from(number)) {
            change(record);
        }
        self.changed.notify_all();
    }

    /// Passes on a packet's pages, whose bytes are next in `source`, and waits at its barrier.
    fn packet<R: Read>(
        &self,
        number: u8,
        packet: &Packet,
        table: &Table,
        source: &mut Source<R>,
    ) -> Outcome<S::Error, Next> {
        let bytes = source.take(packet.normal * table.page_size)?;
        let (normal, zeros) = packet.pages.split_at(packet.normal);
        if !packet.pages.is_empty() {
            if self.is_late(number) {
                return Ok(Next::End);
            }
            self.store(|sink| {
                for (&page, bytes) in normal.iter().zip(bytes.chunks_exact(table.page_size)) {
                    sink.page(packet.block, page, bytes)?;
                }
                zeros.iter().try_for_each(|&page| sink.zero(packet.block, page))
            })?;
        }
        let facts = source.judge();
        let judged = (facts.normal, facts.duplicate, facts.opaque);
        self.record(number, |record| {
            record.pages += normal.len() as u64;
            record.zeros += zeros.len() as u64;
            (record.bytes, record.judged) = (source.at(), judged);
            if packet.sync {
                record.syncs += 1;
                record.open = false;
            }
        });
        if packet.sync {
            return Ok(self.wait_for_barrier(number));
        }
        Ok(Next::Packet)
    }

    /// Notes that pages of a channel arrive; whether they arrive too late.
    fn is_late(&self, number: u8) -> bool {
        let mut state = self.state();
        if state.phase == Phase::Recording {
            if let Some(Some(record)) = state.records.get_mut(usize::from(number)) {
                record.open = true;
            }
            return false;
        }
        state.late = true;
        true
    }

    /// Notes bytes behind the end of RAM, if the migration is recorded.
    fn note_late(&self) {
        let mut state = self.state();
        state.late |= state.phase == Phase::Recorded;
    }

    /// Waits until the main channel has passed the barrier of the channel's last SYNC.
    fn wait_for_barrier(&self, number: u8) -> Next {
        let mut state = self.state();
        loop {
            let syncs = state.records[usize::from(number)].map_or(0, |record| record.syncs);
            if syncs <= state.barriers {
                return Next::Packet;
            }
            if state.phase != Phase::Recording {
                state.late = true;
                return Next::End;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
