//! The thread of the discarding end: accepts the connection, reads, counts and samples.

use super::shared::{Shared, State};
use crate::sampler::{Sample, Sampler};
use forecast::to_u64;
use relay::{take_differences, Listening};
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::net::{recv, RecvFlags};
use std::os::unix::net::UnixStream;
use std::sync::PoisonError;
use std::time::{Duration, Instant};
use stream::{Kind, Token, Tokeniser};

/// The most bytes of a chunk: a relay's, by the grants of a receiver with default settings.
pub(super) const CHUNK: usize = 557_056 - delta::TABLE_ROOM;
/// How often the thread checks whether it has to end.
const LOOK: Duration = Duration::from_millis(100);
/// How long a chunk that is not full waits for more bytes, as in a relay.
const LINGER: Duration = Duration::from_millis(1);
/// How long the stream is read as fast as QEMU writes it: shorter times would measure buffers.
const UNPACED: Duration = Duration::from_millis(40);
/// Seconds between two samples of the first pass, where all pages have data.
const SAMPLED_EVERY: f64 = 0.04;
/// Pages between two samples of pages sent again: every third chunk.
const SAMPLED_AGAIN: u64 = 400;
/// The time over which QEMU's rate is measured: a fill of the socket's buffer is much shorter.
const LONG_ENOUGH: Duration = Duration::from_millis(15);
/// Bytes of a record with a page of 4 KiB; larger pages come in more pieces.
const RECORD: u64 = 8 + 4096;
/// The longest sleep of the thread for its pace without another check.
const NAP: Duration = Duration::from_millis(10);

/// The first connection; `None` if the end comes before it.
pub(super) fn accept(listening: &Listening, shared: &Shared) -> Option<UnixStream> {
    loop {
        if shared.lock().stop {
            return None;
        }
        if is_readable(&listening.listener, LOOK) {
            if let Ok((socket, _)) = listening.listener.accept() {
                return Some(socket);
            }
        }
    }
}

fn is_readable(socket: &impl rustix::fd::AsFd, wait: Duration) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::IN)];
    let wait = Timespec::try_from(wait).ok();
    matches!(poll(&mut fds, wait.as_ref()), Ok(1..))
}

/// The thread that reads.
pub(super) struct Intake<'a> {
    shared: &'a Shared,
    sampler: &'a Sampler,
    socket: &'a UnixStream,
    tokeniser: Tokeniser,
    deltas: delta::Sender,
    page_size: usize,
    /// The chunk, with room for the table of its differences.
    chunk: Vec<u8>,
    tokens: Vec<Token>,
    /// When the first chunk was read, and when the pace began.
    began: Option<Instant>,
    paced: Option<Instant>,
    /// Since when nothing has made QEMU wait, and the pages with data until then.
    free_since: Option<(Instant, u64)>,
    /// The pages with data behind which the next sample is taken.
    next_sample: u64,
    /// Whether the last sample was of pages sent again.
    sampled_again: bool,
}

impl<'a> Intake<'a> {
    pub(super) fn new(
        shared: &'a Shared,
        sampler: &'a Sampler,
        socket: &'a UnixStream,
        (page_size, deltas): (usize, delta::Sender),
    ) -> Self {
        Self {
            shared,
            sampler,
            socket,
            tokeniser: Tokeniser::new(Kind::Main, page_size),
            deltas,
            page_size,
            chunk: vec![0; CHUNK + delta::TABLE_ROOM],
            tokens: Vec::new(),
            began: None,
            paced: None,
            free_since: None,
            next_sample: 0,
            sampled_again: false,
        }
    }

    /// Reads until the connection ends, or has to end.
    pub(super) fn run(&mut self) {
        loop {
            let len = match self.may_read() {
                0 => 0,
                most => self.read(most),
            };
            if len == 0 {
                break;
            }
            let is_again = self.count(len);
            let facts = self.tokeniser.facts();
            // QEMU has stopped the VM and hands it over, or would complete without an answer: this
            // is past the point where a rehearsal has to end. The end of the connection makes QEMU
            // resume the VM.
            let has_pages = facts.normal + facts.duplicate > 0;
            if facts.vm_stopped_hint || facts.postcopy_running || (has_pages && !facts.return_path)
            {
                break;
            }
            self.measure(len, is_again);
        }
    }

    /// Waits until the thread may read. Returns the number of bytes that it may read; 0 when it has
    /// to end.
    fn may_read(&mut self) -> usize {
        let mut state = self.shared.lock();
        loop {
            if state.stop {
                return 0;
            }
            let (pages, allowed) = (state.totals.pages, state.allowed);
            let wait = match self.early(pages, &state) {
                _ if pages >= allowed => LOOK,
                Duration::ZERO => {
                    // At most the pages that are allowed, if all of them have data.
                    let most = allowed.saturating_sub(pages).saturating_mul(RECORD);
                    return usize::try_from(most).unwrap_or(CHUNK).min(CHUNK);
                }
                early => early.min(NAP),
            };
            // QEMU waits too as soon as the socket is full.
            self.free_since = None;
            let waited = self.shared.changed.wait_timeout(state, wait);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The time until the next page is due.
    #[expect(clippy::cast_precision_loss, reason = "pages of RAM, far below 2^53")]
    fn early(&mut self, pages: u64, state: &State) -> Duration {
        let Some(unpaced) = state.totals.unpaced.filter(|_| pages < state.first) else {
            return Duration::ZERO;
        };
        let began = *self.paced.get_or_insert_with(Instant::now);
        let due = pages.saturating_sub(unpaced) as f64 / state.rate;
        Duration::from_secs_f64(due.clamp(0.0, 1e6)).saturating_sub(began.elapsed())
    }

    /// Reads until `most` bytes have come or QEMU has written no more; 0 at the end of the
    /// connection.
    fn read(&mut self, most: usize) -> usize {
        let mut done = 0;
        while done < most {
            match recv(self.socket, &mut self.chunk[done..most], RecvFlags::DONTWAIT) {
                Ok((_, 0)) => break,
                Ok((_, got)) => done += got,
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) if done == 0 => {
                    if !is_readable(self.socket, LOOK) && self.shared.lock().stop {
                        return 0;
                    }
                }
                Err(rustix::io::Errno::AGAIN) => {
                    if !is_readable(self.socket, LINGER) {
                        break;
                    }
                }
                Err(_) => break,
            }
        }
        done
    }

    /// Tokenises the chunk and counts its pages. Returns whether they were sent before.
    fn count(&mut self, len: usize) -> bool {
        let now = Instant::now();
        let began = *self.began.get_or_insert(now);
        self.tokens.clear();
        self.tokeniser.feed(&self.chunk[..len], &mut self.tokens);
        let facts = self.tokeniser.facts();
        let mut state = self.shared.lock();
        let first = state.first;
        let totals = &mut state.totals;
        // QEMU skips pages that it does not have to send.
        let is_again = totals.pages >= first - first / 50;
        totals.page_size = facts.page_size as u64;
        totals.data_pages = facts.normal;
        totals.pages = facts.normal + facts.duplicate;
        if !is_again {
            (totals.first_data_pages, totals.first_pages) = (totals.data_pages, totals.pages);
        }
        let time = now.duration_since(began);
        let is_enough = time >= UNPACED || totals.pages >= first / 4 * 3;
        if totals.unpaced.is_none() && totals.pages >= first / 8 && is_enough {
            totals.unpaced = Some(totals.pages);
        }
        let (since, data) = *self.free_since.get_or_insert((now, totals.data_pages));
        let time = now.duration_since(since);
        if time >= LONG_ENOUGH {
            #[expect(clippy::cast_precision_loss, reason = "pages of RAM, far below 2^53")]
            let rate = (totals.data_pages - data) as f64 / time.as_secs_f64();
            totals.fastest =
                Some(totals.fastest.unwrap_or(0.0).max(rate)).filter(|rate| *rate > 0.0);
            self.free_since = Some((now, totals.data_pages));
        }
        is_again
    }

    /// Whether the chunk is to be sampled.
    fn is_turn(&mut self, is_again: bool) -> bool {
        let state = self.shared.lock();
        let (data, rate) = (state.totals.data_pages, state.rate);
        drop(state);
        let is_due = data >= self.next_sample || is_again != self.sampled_again;
        if !is_due {
            return false;
        }
        self.sampled_again = is_again;
        let step = if is_again { SAMPLED_AGAIN } else { to_u64(rate * SAMPLED_EVERY) };
        self.next_sample = data.saturating_add(step.max(1));
        true
    }

    /// Makes differences of pages that were sent before, and passes the chunk to the sampler if it
    /// is its turn. Each page with data has the same chance: chunks that are encoded faster, or
    /// contain zeros, are no more likely to be sampled.
    fn measure(&mut self, len: usize, is_again: bool) {
        let page_size = self.tokeniser.facts().page_size;
        if page_size != self.page_size {
            return;
        }
        let is_turn = self.is_turn(is_again);
        let whole = (is_turn && is_again).then(|| self.chunk[..len].to_vec());
        let known = (&self.tokens[..], self.tokeniser.blocks());
        take_differences(&mut self.deltas, &mut self.chunk, len, known, (page_size, None));
        if is_turn {
            let (chunk, tokens) = (self.chunk[..len].to_vec(), self.tokens.clone());
            self.sampler.take(Sample { chunk, tokens, page_size, whole });
        }
    }
}
