//! Reading one connection of the source QEMU: chunks of whatever is there, never holding anything
//! back.

use crate::auto::Assigned;
use crate::jobs::{raw, EncodeJob};
use crate::source::{Event, Shared, SourceStream};
use codec::Codec;
use pipeline::Submitted;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::net::{recv, RecvFlags};
use session::{FrameType, SessionError};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};
use stream::{Kind, Token, Tokeniser};

/// How long a chunk that is not full waits for more bytes. Long enough for QEMU to come round again
/// (it writes about 130 KB at a time), short enough not to matter for a handshake.
const LINGER: Duration = Duration::from_millis(1);
/// The most a chunk waits in all, when bytes keep trickling in.
const LINGER_TOTAL: Duration = Duration::from_millis(5);
/// How often a reader that has no credit looks whether QEMU is still there.
const GONE: Duration = Duration::from_millis(200);
/// The PING behind the packaged state, and the first byte behind that, which shows that the source
/// is in postcopy.
pub(crate) const PING: u64 = 10;
/// Chunks below this are sent as they are: a codec thread's wake-up costs more than it saves.
const LEAST_COMPRESSED: usize = 512;
/// A multifd channel's init packet, which QEMU writes at once (section 1.5 of the stream's
/// description).
const FIRST_BYTES: usize = 64;

/// A connection that has no byte for this long, when the main one has announced postcopy, is its
/// preempt channel: every other kind begins to write at once.
const SILENT: Duration = Duration::from_millis(100);

/// What a connection is, by its first bytes; `None` while they are not there.
pub(crate) fn classify(shared: &Shared, stream: &SourceStream) -> Option<Kind> {
    if let Some(kind) = stream.kind.get() {
        return Some(*kind);
    }
    let mut first = [0; FIRST_BYTES];
    let (_, got) =
        recv(&stream.socket, &mut first[..], RecvFlags::PEEK | RecvFlags::DONTWAIT).ok()?;
    let kind = match stream::classify(&first[..got])? {
        // Records of RAM have no magic, and there is one main connection.
        Kind::Other | Kind::Recovery if shared.postcopy.load(Ordering::Acquire) => Kind::Preempt,
        kind => kind,
    };
    Some(*stream.kind.get_or_init(|| kind))
}

/// Reads `stream` to its end.
pub(crate) fn run(shared: &Arc<Shared>, stream: &Arc<SourceStream>) {
    let Some(kind) = first_bytes(shared, stream) else {
        // It ended without a word: a migration that was cancelled before it began, or somebody who
        // looked whether this is a live socket. The relay still waits for its migration.
        return;
    };
    let is_main = kind.is_main();
    if kind == Kind::Recovery {
        shared.postcopy.store(true, Ordering::Release);
        shared.has_gone_over();
    }
    if kind == Kind::Preempt {
        shared.session.prioritise(stream.id);
    }
    if shared.open(stream, kind) {
        let result = read_all(shared, stream, kind);
        if let Err(error) = result {
            shared.session.fail(error);
        }
    }
    if shared.session.failure().is_some() {
        // The session ended, not QEMU; whoever ended it has said why.
        return;
    }
    let _ = shared.events.send(Event::SourceEof { is_main });
}

/// Waits for the bytes that tell what this is.
fn first_bytes(shared: &Shared, stream: &SourceStream) -> Option<Kind> {
    loop {
        let readable = wait_readable(&stream.socket, Some(SILENT));
        if let Some(kind) = classify(shared, stream) {
            return Some(kind);
        }
        if !readable {
            if shared.over.load(Ordering::Acquire) {
                return None;
            }
            if shared.postcopy.load(Ordering::Acquire) {
                return Some(*stream.kind.get_or_init(|| Kind::Preempt));
            }
            continue;
        }
        let mut byte = [0; 1];
        match recv(&stream.socket, &mut byte[..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((_, 0)) => return None,
            Err(errno) if errno != rustix::io::Errno::AGAIN && errno != rustix::io::Errno::INTR => {
                return None
            }
            _ if shared.over.load(Ordering::Acquire) => return None,
            // One to three bytes: readable, but not enough. Rare enough to just look again.
            _ => std::thread::sleep(LINGER),
        }
    }
}

fn read_all(shared: &Arc<Shared>, stream: &SourceStream, kind: Kind) -> Result<(), SessionError> {
    let session = &shared.session;
    let counters = &shared.counters;
    let mut tokeniser = Tokeniser::new(kind, shared.page_size);
    let mut deltas = shared.deltas(kind);
    let most = session.grants().chunk_bytes - deltas.as_ref().map_or(0, |_| delta::TABLE_ROOM);
    let mut seen = (0, 0);
    let mut patient = true;
    loop {
        wait_readable(&stream.socket, None);
        let waiting = shared.auto.as_ref().map(|auto| auto.waiting());
        let permit = loop {
            let deadline = Some(Instant::now() + GONE);
            match session.credits().permit_by(stream.id, deadline) {
                Some(Some(permit)) => break Some(permit),
                Some(None) => return Ok(()),
                // Cancelled while nothing moves, perhaps for as long as a link is away (W21).
                None if kind.is_main()
                    && shared.return_path.load(Ordering::Acquire)
                    && !is_open(&stream.socket) =>
                {
                    break None
                }
                None => {}
            }
        };
        let Some(permit) = permit else { break };
        drop(waiting);
        let stop = || session.failure().is_some();
        let Some(mut chunk) = session.plain().take_until(None, stop) else { return Ok(()) };
        let len = read_chunk(&stream.socket, &mut chunk[..permit.bytes.min(most)], patient);
        if len == 0 {
            session.credits().give_back(permit);
            break;
        }
        let mut tokens = shared.spare.pop().unwrap_or_default();
        tokens.clear();
        tokeniser.feed(&chunk[..len], &mut tokens);
        let checksum = codec::checksum(&chunk[..len]);
        let facts = tokeniser.facts();
        if facts.colo {
            let reason = "the source QEMU has x-colo on, which platen does not carry: turn the capability off".into();
            return Err(SessionError::Local { reason });
        }
        counters.plain.fetch_add(len as u64, Ordering::Relaxed);
        counters.normal.fetch_add(facts.normal - seen.0, Ordering::Relaxed);
        counters.duplicate.fetch_add(facts.duplicate - seen.1, Ordering::Relaxed);
        shared.submitter.pass_by(facts.duplicate - seen.1);
        seen = (facts.normal, facts.duplicate);
        if facts.return_path {
            shared.return_path.store(true, Ordering::Release);
        }
        if facts.postcopy {
            shared.postcopy.store(true, Ordering::Release);
        }
        // What is not understood at all may hold the tag anywhere.
        let tail = kind == Kind::Other || (kind == Kind::Main && facts.tail);
        let before_switch = (facts.switch_end > 0 && !facts.switched)
            .then(|| facts.switch_end.saturating_sub(facts.fed));
        if facts.switched && kind.is_main() {
            shared.has_gone_over();
        }
        // The VM has stopped: from here on every millisecond is downtime.
        patient = !(tail || facts.vm_stopped_hint || kind == Kind::Preempt);
        if let Some(auto) = shared.auto.as_ref().filter(|_| facts.vm_stopped_hint) {
            auto.stopped();
        }
        let has_barrier = tokens.iter().any(|token| matches!(token, Token::Barrier { .. }));
        let channels = if has_barrier { shared.multifd_channels() } else { 0 };
        let (page_size, postcopy) = (facts.page_size, facts.postcopy_running);
        // QEMU's own multifd compression: what it has compressed does not shrink a second time.
        let as_it_is = kind == Kind::Multifd && facts.multifd_method != 0;
        // A page that a stopped vCPU waits for does not queue behind others, neither for a codec
        // thread nor for a link.
        let urgent = kind == Kind::Preempt;
        let mut header = session.credits().issue_data(permit, len, checksum, channels);
        let mut checksum = checksum;
        if postcopy {
            // No page is sent twice.
            release(deltas.take());
        }
        let wanted = page_size == shared.page_size && shared.wants_deltas();
        if let Some(sender) = deltas.as_mut().filter(|_| wanted) {
            let blocks = tokeniser.blocks();
            let (table_len, counts) =
                take_differences(sender, &mut chunk, len, (&tokens, blocks), page_size);
            header.table_len = u32::try_from(table_len).unwrap_or(u32::MAX);
            counters.deltas(counts);
            if counts.deltas > 0 {
                checksum = codec::checksum(&chunk[..len]);
            }
        }
        send_chunk(
            shared,
            EncodeInput { header, chunk, len, checksum, tokens, page_size, as_it_is, urgent },
        );
        if tail {
            // Before the word is queued: a link may say it at once.
            shared
                .before_switch
                .store(before_switch.map_or(0, |left| left + PING), Ordering::Release);
            shared.tail_read.store(true, Ordering::Release);
            shared.guard(stream, before_switch);
            if is_open(&stream.socket) {
                session.send_bare(stream.id, FrameType::StillOpen, 0);
            } else if shared.return_path.load(Ordering::Acquire) {
                // Cancelled (W21): no word can follow any more, and what the peer holds may be all
                // the credit there is.
                break;
            }
        }
    }
    // Cut off before the destination confirmed: the decision whether this is a cancel is the
    // relay's (W21). The frame itself is only true for a stream that may end like this.
    let ends_well = !kind.is_main()
        || !shared.return_path.load(Ordering::Acquire)
        || shared.over.load(Ordering::Acquire);
    if ends_well {
        session.send_bare(stream.id, FrameType::Eof, 0);
    }
    Ok(())
}

/// Has the pages of a chunk that were sent before stand as differences, and the table of them
/// behind it (W29).
fn take_differences(
    sender: &mut delta::Sender,
    chunk: &mut [u8],
    len: usize,
    (tokens, blocks): (&[Token], &[(usize, u64)]),
    page_size: usize,
) -> (usize, delta::Counts) {
    let mut pass = sender.begin(chunk, len);
    let mut blocks = blocks.iter().copied().peekable();
    let (mut at, mut block) = (0, 0);
    for token in tokens {
        while let Some((_, place)) = blocks.next_if(|(from, _)| *from <= at) {
            block = place;
        }
        if let Token::Pages { first, count } = *token {
            pass.records(at, first.wrapping_add(block), count as usize);
        }
        at += token.len(page_size);
    }
    pass.finish()
}

/// Gives a cache's memory back, which takes the kernel milliseconds, while a VM may be stopped.
pub(crate) fn release(cache: Option<impl Send + 'static>) {
    if let Some(cache) = cache {
        // Where no thread can be had it is done here, as the closure is dropped.
        let _ = crate::source::thread("release", move || drop(cache));
    }
}

struct EncodeInput {
    header: session::Header,
    chunk: pages::Slot,
    len: usize,
    checksum: u64,
    tokens: Vec<Token>,
    page_size: usize,
    /// Compressing it is not worth it.
    as_it_is: bool,
    /// A stopped vCPU waits for it.
    urgent: bool,
}

/// To the codec threads, or straight to the links when there is nothing to gain.
fn send_chunk(shared: &Shared, input: EncodeInput) {
    let EncodeInput { header, chunk, len, checksum, tokens, page_size, as_it_is, urgent } = input;
    let session = &shared.session;
    if urgent {
        let _ = shared.spare.push(tokens);
        shared.counters.raw(len);
        if let Some(auto) = &shared.auto {
            auto.as_it_was(len);
        }
        return session.send_first(raw(header, chunk, len, checksum));
    }
    let packable = stream::worth_packing_without_codec(&tokens);
    let assigned = shared
        .auto
        .as_ref()
        .filter(|_| len >= LEAST_COMPRESSED && (packable || !as_it_is))
        .map(|auto| auto.choose(&chunk[..len]));
    let settings = assigned.as_ref().map_or(shared.settings, Assigned::settings);
    let worthwhile =
        len >= LEAST_COMPRESSED && ((settings.codec() != Codec::Raw && !as_it_is) || packable);
    let payload = if worthwhile {
        session.payload().take_until(None, || session.failure().is_some())
    } else {
        None
    };
    let Some(payload) = payload else {
        let _ = shared.spare.push(tokens);
        shared.counters.raw(len);
        let outgoing = raw(header, chunk, len, checksum);
        match (&assigned, &shared.auto) {
            (Some(assigned), _) => assigned.past(len, &outgoing),
            (None, Some(auto)) => auto.as_it_was(len),
            (None, None) => {}
        }
        return session.send(outgoing);
    };
    let pages = tokens.iter().map(|token| match token {
        Token::Pages { count, .. } | Token::Bodies { count } => u64::from(*count),
        _ => 0,
    });
    let pages = pages.sum();
    let job = EncodeJob {
        header,
        chunk,
        len,
        checksum,
        tokens,
        page_size,
        pages,
        payload,
        counters: shared.counters.clone(),
        spare: shared.spare.clone(),
        assigned,
    };
    match shared.submitter.submit(job, pages) {
        Submitted::Queued => {}
        Submitted::Busy(job) | Submitted::Closed(job) => {
            if let Some(auto) = &shared.auto {
                auto.as_it_was(len);
            }
            session.send(job.into_raw());
        }
    }
}

/// Reads until `out` is full or the socket has no more; 0 only at its end.
fn read_chunk(socket: &UnixStream, out: &mut [u8], patient: bool) -> usize {
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
                if !patient || left.is_zero() || !wait_readable(socket, Some(left)) {
                    break;
                }
            }
            // Reset: QEMU has closed with our return path unread. The end all the same.
            Err(_) => break,
        }
    }
    done
}

fn wait_readable(socket: &UnixStream, timeout: Option<Duration>) -> bool {
    let timeout = timeout.map(|left| Timespec {
        tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(left.subsec_nanos()),
    });
    let mut fds = [PollFd::new(socket, PollFlags::IN)];
    matches!(poll(&mut fds, timeout.as_ref()), Ok(n) if n > 0)
}

/// Whether QEMU still has its end open, now, with everything it wrote read or readable.
pub(crate) fn is_open(socket: &UnixStream) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::IN | PollFlags::RDHUP)];
    let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    !fds[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auto::{Auto, AutoConfig};
    use controller::Bottleneck;
    use std::io::Write;
    use stream::synth::{Configuration, MainStream, Section};

    /// A stream whose bottleneck turns, chunk by chunk as `read_all` has them go, and a receiver
    /// that knows of none of it.
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
            // What ends it is more than what does not begin it.
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
            // The chunk of this turn, and one that is the same but for a byte a page.
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
        // All but what was never seen: what went while there were none is older than it was, and
        // known all the same.
        assert_eq!(differences, [&[0][..], &[19; 7]].concat());
    }

    #[test]
    fn a_chunk_is_what_is_there() {
        let (mut qemu, ours) = UnixStream::pair().unwrap();
        qemu.write_all(&[7; 1000]).unwrap();
        let mut out = vec![0; 600];
        assert_eq!(read_chunk(&ours, &mut out, true), 600);
        assert_eq!(read_chunk(&ours, &mut out, true), 400);
        assert!(is_open(&ours));
        qemu.write_all(&[8; 10]).unwrap();
        drop(qemu);
        assert!(!is_open(&ours));
        assert_eq!(read_chunk(&ours, &mut out, true), 10);
        assert_eq!(read_chunk(&ours, &mut out, true), 0);
    }
}
