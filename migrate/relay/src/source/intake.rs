//! Reads one stream of the source QEMU in chunks of the bytes available, and delays no byte for
//! long.

mod looks;
mod read;
mod waits;

use super::chunk::{self, ReadChunk};
use super::deltas::Deltas;
use super::end_of_stream::EndOfStream;
use super::shared::{Shared, SourceStream, UNACCEPTED};
use crate::packaged::PackagedEnd;
use crate::settle::{LastBytes, Sections};
use pages::Slot;
use session::{FrameType, Permit, SessionError};
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};
use stream::{Kind, Token, Tokeniser};

pub(super) use read::read_chunk;

/// How often a reader without credit checks whether QEMU still has its socket open.
const GONE: Duration = Duration::from_millis(200);

/// Reads a stream to its end.
///
/// # Errors
/// The reason why the session cannot continue.
pub(super) fn run(shared: &Arc<Shared>, stream: &SourceStream) -> Result<(), SessionError> {
    let mut intake = Intake::new(shared, stream);
    let result = intake.run();
    let _ = stream.read_by.set(intake.tokeniser);
    result
}

/// Whether to read on.
#[derive(PartialEq, Eq)]
enum Next {
    Chunk,
    End,
    /// The session has ended.
    Over,
}

/// The reader of one connection.
struct Intake<'a> {
    shared: &'a Arc<Shared>,
    stream: &'a SourceStream,
    kind: Kind,
    tokeniser: Tokeniser,
    deltas: Deltas,
    /// Multifd: the SYNCs before the present chunk.
    epoch: u64,
    /// The most plain bytes of a chunk.
    most: usize,
    /// Pages already counted: normal, duplicate.
    counted: (u64, u64),
    /// A chunk that is not full waits for more bytes.
    patient: bool,
    /// Main stream: fed from the first possible end-of-stream tag on.
    end: EndOfStream,
    /// Main stream: fed once the packaged state of postcopy begins.
    packaged: PackagedEnd,
    /// Main stream: the packaged state was read, and its source waits for a PONG (W20c).
    acknowledged: bool,
    /// Main stream: what has come since that PONG was given to the source.
    sections: Sections,
    /// Main stream: sections that had begun before the present chunk.
    begun: u64,
    /// Main stream in postcopy: its last bytes.
    last: LastBytes,
    /// Main stream: when QEMU's socket was first found closed while this reader had no credit.
    closed: Option<Instant>,
}

impl<'a> Intake<'a> {
    fn new(shared: &'a Arc<Shared>, stream: &'a SourceStream) -> Self {
        let kind = stream.kind;
        let deltas = Deltas::new(shared, kind);
        let room = deltas.room();
        Self {
            shared,
            stream,
            kind,
            tokeniser: Tokeniser::new(kind, shared.page_size),
            deltas,
            epoch: 0,
            most: shared.session.grants().chunk_bytes - room,
            counted: (0, 0),
            patient: true,
            end: EndOfStream::default(),
            packaged: PackagedEnd::default(),
            acknowledged: false,
            sections: Sections::default(),
            begun: 0,
            last: LastBytes::default(),
            closed: None,
        }
    }

    fn run(&mut self) -> Result<(), SessionError> {
        loop {
            match self.chunk()? {
                Next::Chunk => {}
                Next::End => break,
                Next::Over => return Ok(()),
            }
        }
        // QEMU closed before the destination confirmed: the deciding thread determines whether this
        // is a cancel (W21). An EOF frame would be true only of a stream that may end like this.
        let shared = self.shared;
        let facts = self.tokeniser.facts();
        if facts.switched && facts.ram_end && !self.last.end_stream() {
            // Set before the event that this stream has ended.
            shared.cut_short.store(true, Ordering::Release);
        }
        if self.kind.is_main() && !shared.return_path.load(Ordering::Acquire) {
            if !self.end.is_whole() {
                return Ok(());
            }
            // Set before EOF is sent, which lets the destination QEMU have the rest and end.
            shared.ended_whole.store(true, Ordering::Release);
        } else if self.kind.is_main() && !shared.over.load(Ordering::Acquire) {
            return Ok(());
        }
        shared.session.send_bare(self.stream.id, FrameType::Eof, 0);
        Ok(())
    }

    /// Reads one chunk and sends it.
    fn chunk(&mut self) -> Result<Next, SessionError> {
        let session = &self.shared.session;
        if !self.wait()? {
            return Ok(Next::Over);
        }
        let permit = match self.permit() {
            Ok(permit) => permit,
            Err(next) => return Ok(next),
        };
        let stop = || session.failure().is_some();
        let Some(mut chunk) = session.plain().take_until(None, stop) else { return Ok(Next::Over) };
        let most = permit.bytes.min(self.most);
        let len = read_chunk(self.stream.socket(), &mut chunk[..most], |_| self.patient);
        if len == 0 {
            session.credits().give_back(permit);
            return Ok(Next::End);
        }
        let mut tokens = self.shared.spare.pop().unwrap_or_default();
        tokens.clear();
        self.epoch = self.tokeniser.facts().syncs;
        self.tokeniser.feed(&chunk[..len], &mut tokens);
        let checksum = codec::checksum(&chunk[..len]);
        self.count(len);
        self.look(&chunk[..len])?;
        self.send(permit, chunk, len, checksum, tokens)?;
        Ok(self.tail(len))
    }

    fn count(&mut self, len: usize) {
        let (facts, counters) = (self.tokeniser.facts(), &self.shared.counters);
        let (normal, duplicate) = self.counted;
        counters.plain.fetch_add(len as u64, Ordering::Relaxed);
        counters.ram_is(facts.ram);
        counters.normal.fetch_add(facts.normal - normal, Ordering::Relaxed);
        counters.duplicate.fetch_add(facts.duplicate - duplicate, Ordering::Relaxed);
        self.shared.submitter.pass_by(facts.duplicate - duplicate);
        self.counted = (facts.normal, facts.duplicate);
    }

    fn send(
        &mut self,
        permit: Permit,
        mut chunk: Slot,
        len: usize,
        mut checksum: u64,
        tokens: Vec<Token>,
    ) -> Result<(), SessionError> {
        let (shared, facts) = (self.shared, self.tokeniser.facts());
        if let Some(pages) = &shared.pages {
            let ram = shared.counters.ram.load(Ordering::Relaxed);
            pages.chunk(&chunk[..len], &tokens, facts.page_size, ram);
        }
        let has_barrier = tokens.iter().any(|token| matches!(token, Token::Barrier { .. }));
        let channels = if has_barrier { self.channels()? } else { 0 };
        let (page_size, postcopy) = (facts.page_size, facts.postcopy_running);
        // QEMU's own multifd compression is on: compressed bytes do not shrink a second time.
        let as_it_is = self.kind == Kind::Multifd && facts.multifd_method != 0;
        // A page that a stopped vCPU waits for does not queue behind others, neither for a codec
        // thread nor for a link.
        let urgent = self.kind == Kind::Preempt;
        let mut header = shared.session.credits().issue_data(permit, len, checksum, channels);
        if postcopy {
            // In postcopy no page is sent twice.
            self.deltas.free(shared);
        } else if has_barrier {
            self.deltas.pass_to_channels(shared, channels, &self.tokeniser);
        }
        let mut is_seeded = false;
        if page_size == shared.page_size {
            let stream = (&mut self.tokeniser, &tokens[..], self.epoch);
            let taken = self.deltas.take(shared, &mut header, (&mut chunk, len), stream);
            if let Some(counts) = taken {
                shared.counters.deltas(counts);
                is_seeded = counts.seeded > 0;
                if counts.deltas + counts.seeded > 0 {
                    checksum = codec::checksum(&chunk[..len]);
                }
            }
        }
        chunk::send(
            shared,
            ReadChunk {
                header,
                chunk,
                len,
                checksum,
                tokens,
                page_size,
                is_seeded,
                as_it_is,
                urgent,
            },
        );
        Ok(())
    }

    /// Multifd channels that QEMU has opened (W18). Waits for those that cannot be accepted yet: a
    /// marker must not be sent before them.
    fn channels(&self) -> Result<u32, SessionError> {
        let until = Instant::now() + UNACCEPTED;
        loop {
            match self.shared.multifd_channels() {
                Ok(channels) => return Ok(channels),
                Err(error) if Instant::now() >= until => {
                    let reason = format!("cannot accept a connection of the source QEMU: {error}");
                    return Err(SessionError::Local { reason });
                }
                Err(_) => std::thread::sleep(GONE),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::differences::{take_differences, Differences};
    use super::*;
    use crate::auto::{Auto, AutoConfig};
    use crate::sockets::is_open;
    use codec::Codec;
    use controller::Bottleneck;
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use stream::synth::{Configuration, MainStream, Section};

    /// A stream whose bottleneck changes, chunk by chunk as `read_all` sends them, and a receiver
    /// that knows nothing of that.
    #[test]
    fn deltas_that_auto_turns_on_and_off_and_on_again_are_followed() {
        const PAGE: usize = 4096;
        let config = AutoConfig::default();
        let candidates = vec![codec::Settings::new(Codec::Zstd, None).unwrap()];
        let auto = Auto::new(&config, candidates, 2);
        let (mut sender, mut receiver) =
            (delta::Sender::new(1 << 20, PAGE), delta::Receiver::new(1 << 20, PAGE));
        let mut tokeniser = Tokeniser::new(Kind::Main, PAGE);
        let mut main = MainStream::new(PAGE);
        main.file_header();
        main.configuration(&Configuration { machine: "pc", ..Configuration::default() });
        main.section(Section::Start).block_table(&[("pc.ram", 20 * PAGE as u64)]);
        main.page("pc.ram", 0, &[1; PAGE]).end_of_section();
        let turns = [
            (Bottleneck::Unknown, 9.0, 1.0, false),
            (Bottleneck::Link, 1.4, 1.0, false),
            (Bottleneck::Link, 1.6, 1.0, true),
            // The threshold to stop is lower than the one to start.
            (Bottleneck::Source, 1.0, 1.4, true),
            (Bottleneck::Source, 1.0, 1.6, false),
            (Bottleneck::Destination, 9.0, 1.0, false),
            (Bottleneck::Link, 2.0, 1.0, true),
            (Bottleneck::Workers, 2.0, 1.0, false),
            (Bottleneck::Link, 2.0, 1.0, true),
        ];
        let (mut wanted, mut differences) = (Vec::new(), Vec::new());
        for (changed, (bottleneck, link, cpu, _)) in (2..).zip(turns) {
            auto.judge_deltas(bottleneck, link, cpu);
            wanted.push(auto.wants_deltas());
            // The chunk of this step, and a second one that differs in one byte a page.
            for again in 0..2 {
                main.section(Section::Part);
                for number in 1..20_u8 {
                    let mut page = [number; PAGE];
                    (page[100], page[200]) = (changed, again);
                    main.page("pc.ram", u64::from(number) * PAGE as u64, &page);
                }
                main.end_of_section();
                let plain = main.take();
                let mut tokens = Vec::new();
                tokeniser.feed(&plain, &mut tokens);
                let mut chunk = plain.clone();
                chunk.resize(plain.len() + delta::TABLE_ROOM, 0);
                if auto.wants_deltas() {
                    let known = (&tokens[..], tokeniser.blocks());
                    let taken =
                        take_differences(&mut sender, &mut chunk, plain.len(), known, (PAGE, None));
                    let Differences { table_len, counts, .. } = taken;
                    let (bytes, tables) = chunk.split_at_mut(plain.len());
                    assert_eq!(
                        receiver.apply(bytes, tables[..table_len].as_ref().into(), 0),
                        Ok(counts)
                    );
                    differences.push(counts.deltas);
                }
                assert!(chunk[..plain.len()] == plain, "turn {changed}");
            }
        }
        assert_eq!(wanted, turns.map(|turn| turn.3));
        // All pages but those never seen before: pages sent while deltas were off are only older in
        // the cache, but still known.
        assert_eq!(differences, [&[0][..], &[19; 7]].concat());
    }

    #[test]
    fn a_chunk_is_what_is_there() {
        let (mut qemu, ours) = UnixStream::pair().unwrap();
        qemu.write_all(&[7; 1000]).unwrap();
        let mut out = vec![0; 600];
        assert_eq!(read_chunk(&ours, &mut out, |_| true), 600);
        assert_eq!(read_chunk(&ours, &mut out, |_| true), 400);
        assert!(is_open(&ours));
        qemu.write_all(&[8; 10]).unwrap();
        drop(qemu);
        assert!(!is_open(&ours));
        assert_eq!(read_chunk(&ours, &mut out, |_| true), 10);
        assert_eq!(read_chunk(&ours, &mut out, |_| true), 0);
    }
}
