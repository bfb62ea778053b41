//! Reads one stream of the source QEMU in chunks of the bytes available, and delays no byte for
//! long.

use super::chunk::{self, take_differences, ReadChunk};
use super::end_of_stream::EndOfStream;
use super::shared::{Shared, SourceStream, FAREWELL, UNACCEPTED};
use crate::cpu_time::{process_cpu, thread_cpu};
use crate::packaged::PackagedEnd;
use crate::postcopy::Switchover;
use crate::qemu_socket::QemuSocket;
use crate::settle::{buffered, waiting_bytes, waits_with_end, LastBytes, Sections};
use crate::sockets::{is_open, wait_readable};
use crate::threads::drop_aside;
use pages::Slot;
use rustix::fd::AsFd;
use rustix::net::{recv, RecvFlags};
use session::{FrameType, Permit, SessionError};
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};
use stream::{Facts, Kind, Token, Tokeniser};

/// How long a chunk that is not full waits for more bytes: long enough for QEMU's next write (of
/// about 130 KB), short enough not to matter for a handshake.
const LINGER: Duration = Duration::from_millis(1);
/// The most that a chunk waits in all, when bytes arrive slowly.
const LINGER_TOTAL: Duration = Duration::from_millis(5);
/// How often a reader without credit checks whether QEMU still has its socket open.
const GONE: Duration = Duration::from_millis(200);
/// How long a QEMU that has been told to cancel during its setup may keep its socket open.
const OBEYS: Duration = Duration::from_secs(2);
/// How often the reader of the main stream looks for pages of the preempt channel.
const URGENT: Duration = Duration::from_millis(1);
/// How often a reader looks whether QEMU has obeyed a cancel.
const ANSWER: Duration = Duration::from_millis(5);

/// Reads a stream to its end.
///
/// # Errors
/// The reason why the session cannot continue.
pub(super) fn run(shared: &Arc<Shared>, stream: &SourceStream) -> Result<(), SessionError> {
    Intake::new(shared, stream).run()
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
    deltas: Option<delta::Sender>,
    delta_budget: delta::Budget,
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
        let deltas = shared.deltas(kind);
        let room = deltas.as_ref().map_or(0, |_| delta::TABLE_ROOM);
        Self {
            shared,
            stream,
            kind,
            tokeniser: Tokeniser::new(kind, shared.page_size),
            deltas,
            delta_budget: delta::Budget::default(),
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

    fn run(mut self) -> Result<(), SessionError> {
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
        self.wait()?;
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
        self.tokeniser.feed(&chunk[..len], &mut tokens);
        let checksum = codec::checksum(&chunk[..len]);
        self.count(len);
        self.look(&chunk[..len])?;
        self.send(permit, chunk, len, checksum, tokens)?;
        Ok(self.tail(len))
    }

    /// Waits until there is something to read.
    ///
    /// # Errors
    /// QEMU has sent nothing for the longest time that its setup takes, or is cancelled there and
    /// does not close its socket: QEMU 11.1 then waits, with its VM, until this end closes it.
    fn wait(&self) -> Result<(), SessionError> {
        let (socket, shared) = (self.stream.socket(), self.shared);
        let facts = self.tokeniser.facts();
        let is_known = self.kind == Kind::Main && !facts.opaque && facts.resyncs == 0;
        if !is_known || facts.sections > 0 || facts.switched {
            wait_readable(socket, None);
            return Ok(());
        }
        let (begin, mut cancelled) = (Instant::now(), None);
        while !wait_readable(socket, Some(GONE)) {
            if shared.is_cancelling() {
                cancelled.get_or_insert_with(Instant::now);
            }
            let is_ignored = cancelled.is_some_and(|told: Instant| told.elapsed() >= OBEYS);
            if is_ignored || begin.elapsed() >= shared.setup_timeout {
                return Err(SessionError::Local { reason: silent(begin.elapsed()) });
            }
        }
        Ok(())
    }

    /// Waits for a permit to have another chunk in flight.
    fn permit(&mut self) -> Result<Permit, Next> {
        let shared = self.shared;
        let waiting = shared.auto.as_ref().map(|auto| auto.waiting());
        let permit = loop {
            let deadline = Some(Instant::now() + GONE);
            match shared.session.credits().permit_by(self.stream.id, deadline) {
                Some(Some(permit)) => break permit,
                Some(None) => return Err(Next::Over),
                None if self.kind.is_main() && !shared.is_open(self.stream.socket()) => {
                    let closed = *self.closed.get_or_insert_with(Instant::now);
                    if self.is_cancelled(closed) {
                        return Err(Next::End);
                    }
                    // Without a return path the receiver withholds the stream's tail until EOF,
                    // which follows the last byte: the tail must not use up the window before that.
                    let credits = shared.session.credits();
                    if let Some(permit) = credits.permit_beyond_window(self.stream.id) {
                        break permit;
                    }
                }
                None => {}
            }
        };
        drop(waiting);
        Ok(permit)
    }

    /// Whether to drop the bytes that wait in the socket of a QEMU that closed it at `closed`: QEMU
    /// has cancelled while nothing is acknowledged, perhaps during an outage of a link (W21). In
    /// postcopy for good, which these bytes may show, they may be the end of the VM's memory
    /// (W20h): they have [`FAREWELL`] to go out. So have the bytes of a source that has its PONG,
    /// if they end the stream: a source that writes its end has seen the PONG. Without that end it
    /// may have failed, and run its VM (W20c).
    fn is_cancelled(&self, closed: Instant) -> bool {
        let shared = self.shared;
        let in_postcopy = || {
            let socket = self.stream.socket();
            // The end of a TCP connection has not come: bytes before it may still show that.
            is_open(socket)
                || shared.has_switched()
                || (shared.is_only_answered() && waits_with_end(socket))
                || self.waits_in_postcopy()
        };
        shared.return_path.load(Ordering::Acquire)
            && !(closed.elapsed() < FAREWELL && in_postcopy())
    }

    /// Whether the bytes that wait in the socket, which QEMU has closed, show that it was in
    /// postcopy for good: they reach a section behind the packaged state of QEMU up to 10.1. Such a
    /// source does not run its VM any more, and one that cancels or fails has written no such
    /// section (W20).
    fn waits_in_postcopy(&self) -> bool {
        if self.kind != Kind::Main || self.acknowledged || !self.tokeniser.facts().postcopy {
            return false;
        }
        let bytes = waiting_bytes(self.stream.socket());
        let (mut tokeniser, mut packaged) = (self.tokeniser.clone(), self.packaged.clone());
        tokeniser.feed(&bytes, &mut Vec::new());
        let facts = tokeniser.facts();
        facts.switched && !packaged.feed(&bytes, facts.fed, facts.switch_end)
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

    /// Acts on the facts in the chunk just fed.
    fn look(&mut self, bytes: &[u8]) -> Result<(), SessionError> {
        let (facts, shared) = (self.tokeniser.facts(), self.shared);
        let refuse = |reason: &str| Err(SessionError::Local { reason: reason.into() });
        if facts.colo {
            return refuse(
                "the source QEMU has x-colo on, which platen does not carry: turn the capability \
                 off",
            );
        }
        if self.kind == Kind::Main && facts.tail && !facts.return_path {
            self.end.feed(bytes);
        }
        let end = facts.switch_end;
        let is_packaged = end > 0 && self.packaged.feed(bytes, facts.fed, end);
        self.acknowledged |= is_packaged;
        if is_packaged && !shared.peer_awaits_pong {
            return refuse(
                "the source QEMU turns to postcopy as QEMU 10.2 and later do: it may still fail \
                 and run its VM when the destination has begun to run it. The platen at the other \
                 end does not know that yet: upgrade it, or use a precopy migration",
            );
        }
        if facts.return_path {
            shared.return_path.store(true, Ordering::Release);
        }
        if facts.postcopy {
            shared.postcopy.store(true, Ordering::Release);
            shared.only_preempt_is_silent.fetch_or(facts.set_up, Ordering::AcqRel);
        }
        let must_wait = || {
            let shows = facts.switched && !self.acknowledged;
            (is_packaged && shared.is_cancelling()) || (shows && !shared.switch())
        };
        while self.kind.is_main() && must_wait() {
            // QEMU closes its socket when it obeys, and answers when it does not.
            if !shared.is_open(self.stream.socket()) || shared.session.failure().is_some() {
                return refuse(
                    "the source QEMU was told to cancel, and turned to postcopy at that moment: the \
                     destination does not get the VM. If the source says 'postmigrate' \
                     (`virsh qemu-monitor-command VM --hmp info status`, `query-status` at its monitor), \
                     let the VM go on: `virsh qemu-monitor-command VM --hmp cont`, \
                     {\"execute\":\"cont\"} at its monitor",
                );
            }
            std::thread::sleep(ANSWER);
        }
        if self.kind.is_main() && facts.switched {
            self.last.feed(bytes);
            let begun = facts.sections - self.begun;
            let read = (facts.fed - bytes.len() as u64, facts.fed);
            look_in_postcopy(shared, self.stream, facts.ram_end, |socket| {
                self.sections.come(Instant::now(), read, begun, || buffered(socket))
            });
            if facts.ram_end {
                self.await_urgent();
            }
        }
        self.begun = facts.sections;
        // The VM has stopped: from here on every millisecond is downtime.
        self.patient =
            !(self.is_tail(facts) || facts.vm_stopped_hint || self.kind == Kind::Preempt);
        if facts.vm_stopped_hint {
            shared.auto.as_ref().inspect(|auto| auto.stopped());
            shared.session.hurry();
        }
        Ok(())
    }

    /// Waits, before the end of a postcopy is sent, until the destination QEMU's socket has every
    /// page of the preempt channel (W18). The source QEMU wrote them before that end.
    fn await_urgent(&self) {
        let shared = self.shared;
        let goes_on = || is_open(self.stream.socket()) && shared.session.failure().is_none();
        while shared.has_urgent() && goes_on() {
            std::thread::sleep(URGENT);
        }
    }

    /// Whether the chunk just fed may hold the end-of-stream tag. An unknown stream may hold it
    /// anywhere.
    fn is_tail(&self, facts: &Facts) -> bool {
        self.kind == Kind::Other || (self.kind == Kind::Main && facts.tail)
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
            drop_aside(self.deltas.take());
        }
        let wanted = page_size == shared.page_size && shared.wants_deltas();
        if let Some(sender) = self.deltas.as_mut().filter(|_| wanted) {
            sender.store_new(self.delta_budget.allows(process_cpu()));
            let begun = thread_cpu();
            let known = (&tokens[..], self.tokeniser.blocks());
            let (table_len, counts) = take_differences(sender, &mut chunk, len, known, page_size);
            if counts.deltas == 0 {
                self.delta_budget.spend(thread_cpu().saturating_sub(begun));
            }
            header.table_len = u32::try_from(table_len).unwrap_or(u32::MAX);
            shared.counters.deltas(counts);
            if counts.deltas > 0 {
                checksum = codec::checksum(&chunk[..len]);
            }
        }
        chunk::send(
            shared,
            ReadChunk { header, chunk, len, checksum, tokens, page_size, as_it_is, urgent },
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

    /// Announces, behind a chunk that may hold the bytes that start the destination's VM, that
    /// QEMU's socket is still open (W20).
    fn tail(&self, len: usize) -> Next {
        let (facts, shared) = (self.tokeniser.facts(), self.shared);
        // The last bytes of the packaged state, perhaps with a section behind them.
        let ends_package = self.acknowledged && facts.fed - (len as u64) < facts.switch_end;
        if !ends_package && (self.acknowledged || !self.is_tail(facts)) {
            return Next::Chunk;
        }
        let switchover = if ends_package {
            Some(Switchover::Unanswered)
        } else {
            (facts.switch_end > 0 && !facts.switched)
                .then(|| Switchover::after(facts.switch_end.saturating_sub(facts.fed)))
        };
        // Set before STILL_OPEN is queued: a link may send it at once.
        shared.switchover.set(switchover);
        shared.tail_read.store(true, Ordering::Release);
        shared.guard(self.stream, switchover);
        let still_open = || shared.session.send_bare(self.stream.id, FrameType::StillOpen, 0);
        if shared.is_open(self.stream.socket()) {
            still_open();
        } else if shared.return_path.load(Ordering::Acquire) {
            if is_open(self.stream.socket()) {
                // Its end comes behind more bytes, which are read first: they may show that the
                // source is in postcopy for good.
                return Next::Chunk;
            }
            if !self.waits_in_postcopy() {
                // Cancelled (W21): no STILL_OPEN can follow any more, and the bytes that the peer
                // holds back may take up all the credit.
                return Next::End;
            }
            // The next chunk is refused if the relay's user has ordered a cancel.
            if shared.switch() {
                still_open();
            }
        }
        Next::Chunk
    }
}

/// Records, behind a chunk of a source in postcopy, whether the source has seen its PONG, and
/// whether it has sent all its memory. `has_seen`: whether the source has seen the PONG, by its
/// sections.
fn look_in_postcopy(
    shared: &Shared,
    stream: &SourceStream,
    sent: bool,
    has_seen: impl FnOnce(&QemuSocket) -> bool,
) {
    if sent {
        // Without a return path the source waits for nothing, and has completed.
        if shared.return_path.load(Ordering::Acquire) {
            shared.sent_all(stream);
        }
    } else if shared.is_only_answered()
        // Bytes of a source that has closed show no migration thread at work.
        && shared.is_open(stream.socket())
        && has_seen(stream.socket())
    {
        shared.set_switched();
    }
}

/// Reads until `out` is full or the socket has no more bytes; returns 0 only at the socket's end.
/// `patient` tells for a number of bytes whether they wait for more.
pub(super) fn read_chunk(
    socket: &impl AsFd,
    out: &mut [u8],
    patient: impl Fn(usize) -> bool,
) -> usize {
    let mut done = 0;
    let mut until = None;
    while done < out.len() {
        match recv(socket, &mut out[done..], RecvFlags::DONTWAIT) {
            Ok((_, 0)) => break,
            Ok((_, got)) => done += got,
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) if done == 0 => {
                wait_readable(socket, None);
            }
            Err(rustix::io::Errno::AGAIN) => {
                let now = Instant::now();
                let until = *until.get_or_insert(now + LINGER_TOTAL);
                let left = until.saturating_duration_since(now).min(LINGER);
                if !patient(done) || left.is_zero() || !wait_readable(socket, Some(left)) {
                    break;
                }
            }
            // A reset: QEMU has closed with bytes of the return path unread. This is an end too.
            Err(_) => break,
        }
    }
    done
}

/// Why a source that is silent in its setup has its connection closed.
fn silent(waited: Duration) -> String {
    format!(
        "the source QEMU has begun a migration and then sent nothing for {} s: it was probably \
         cancelled at that moment (QEMU 11.1 can then hang, with its VM, until this relay closes \
         its connection). The VM is at the source; start the migration again. If QEMU needs more \
         time for the RAM of this VM: --setup-timeout, or setup_timeout of platen.toml",
        waited.as_secs()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auto::{Auto, AutoConfig};
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
                    let (table, counts) =
                        take_differences(&mut sender, &mut chunk, plain.len(), known, PAGE);
                    let (bytes, tables) = chunk.split_at_mut(plain.len());
                    assert_eq!(receiver.apply(bytes, &tables[..table]), Ok(counts));
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
