//! The end of the stream that takes everything and discards it.

use crate::sampler::{Sample, Sampler};
use crate::schedule::Allowed;
use forecast::Sampled;
use relay::{take_differences, Listening, UnixAddress};
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::net::{recv, RecvFlags};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use stream::{Kind, Token, Tokeniser};

/// The most bytes of a chunk: a relay's, by the grants of a receiver with default settings.
const CHUNK: usize = 557_056 - delta::TABLE_ROOM;
/// How often the thread looks whether it has to end.
const LOOK: Duration = Duration::from_millis(100);
/// How long a chunk that is not full waits for more bytes, as in a relay.
const LINGER: Duration = Duration::from_millis(1);
/// How long the stream is read as fast as QEMU writes it: shorter times are those of buffers.
const UNPACED: Duration = Duration::from_millis(40);
/// Seconds between two samples of the first pass, where all pages have data.
const SAMPLED_EVERY: f64 = 0.04;
/// Pages between two samples of pages sent again: every third chunk.
const SAMPLED_AGAIN: u64 = 400;
/// The time over which QEMU's rate is measured: a fill of the socket's buffer is much shorter.
const LONG_ENOUGH: Duration = Duration::from_millis(15);
/// Bytes of a record with a page of 4 KiB; larger pages come in more pieces.
const RECORD: u64 = 8 + 4096;
/// The longest that the thread sleeps for its pace without another look.
const NAP: Duration = Duration::from_millis(10);

/// Why no stream could be taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiscardError {
    /// The socket for QEMU cannot be made.
    #[error(transparent)]
    Listen(#[from] relay::RelayError),
    /// A thread or an encoder cannot be made.
    #[error("cannot measure: {0}")]
    Resource(String),
}

/// Counts of the stream so far. Pages of zeros are not data.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Totals {
    /// Pages.
    pub pages: u64,
    /// Pages with data.
    pub data_pages: u64,
    /// Of these, pages of the first pass.
    pub first_data_pages: u64,
    /// All pages of the first pass.
    pub first_pages: u64,
    /// Bytes of a page.
    pub page_size: u64,
    /// Pages before the pace of the first pass began.
    pub unpaced: Option<u64>,
    /// Pages with data per second, where nothing made QEMU wait: the highest rate over some time.
    pub fastest: Option<f64>,
    /// The connection has ended.
    pub has_ended: bool,
}

#[derive(Debug)]
struct State {
    /// How many pages are read, since the start.
    allowed: u64,
    /// Pages of the first pass; `u64::MAX` before it.
    first: u64,
    /// Pages of the first pass per second.
    rate: f64,
    stop: bool,
    totals: Totals,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }
}

/// The discarding end of one migration. It reads, and never writes. At first it reads nothing.
pub struct Discard {
    shared: Arc<Shared>,
    sampler: Arc<Sampler>,
    address: UnixAddress,
    thread: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for Discard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Discard").field("totals", &self.totals()).finish_non_exhaustive()
    }
}

impl Discard {
    /// Listens at `address` for one connection. `delta_cache`: bytes for pages that
    /// were sent before; `page_size`: the guest's, unless the stream says otherwise.
    ///
    /// # Errors
    /// The socket cannot be made, or there are no threads or memory.
    pub fn listen(
        address: UnixAddress,
        page_size: usize,
        delta_cache: u64,
    ) -> Result<Self, DiscardError> {
        let listening = address.listen()?;
        let state = State {
            allowed: 0,
            first: u64::MAX,
            rate: 1.0,
            stop: false,
            totals: Totals { page_size: page_size as u64, ..Totals::default() },
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
        let sampler = Arc::new(Sampler::start(CHUNK).map_err(DiscardError::Resource)?);
        let (theirs, samples) = (shared.clone(), sampler.clone());
        let body = move || {
            if let Some(socket) = accept(&listening, &theirs) {
                let deltas = delta::Sender::new(delta_cache, page_size);
                Intake::new(&theirs, &samples, &socket, (page_size, deltas)).run();
            }
            theirs.set(|state| state.totals.has_ended = true);
        };
        let thread = std::thread::Builder::new().name("discard".into()).spawn(body);
        let thread = thread.map_err(|error| DiscardError::Resource(error.to_string()))?;
        Ok(Self { shared, sampler, address, thread: Some(thread) })
    }

    /// The address for QEMU's `migrate`.
    pub fn uri(&self) -> String {
        self.address.to_string()
    }

    /// Begins to read the first pass, which has so many `pages`: some of them as fast as QEMU
    /// writes, the others so that all take `time`.
    #[expect(clippy::cast_precision_loss, reason = "pages of RAM, far below 2^53")]
    pub fn begin(&self, pages: u64, time: Duration) {
        let rate = pages as f64 / time.as_secs_f64().max(0.001);
        self.shared.set(|state| {
            (state.first, state.allowed) = (pages, pages);
            state.rate = rate;
        });
    }

    /// Reads on: behind the first pass as fast as QEMU writes.
    pub fn allow(&self, allowed: Allowed) {
        self.shared.set(|state| {
            let pages = match allowed {
                Allowed::Nothing => 0,
                Allowed::Until(bytes) => bytes / state.totals.page_size.max(1),
                Allowed::All => u64::MAX,
            };
            state.allowed = match state.allowed {
                // All was allowed until now.
                u64::MAX => state.totals.pages.max(pages),
                before => before.max(pages),
            };
        });
    }

    /// Counts of the stream so far.
    pub fn totals(&self) -> Totals {
        self.shared.lock().totals
    }

    /// The results of all samples so far.
    pub fn sampled(&self) -> Sampled {
        self.sampler.results()
    }
}

impl Drop for Discard {
    /// Closes the connection: a QEMU that is still migrating fails, and its VM goes on.
    fn drop(&mut self) {
        self.shared.set(|state| state.stop = true);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The first connection; `None` if the end comes before it.
fn accept(listening: &Listening, shared: &Shared) -> Option<UnixStream> {
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
    let nanos = i64::from(wait.subsec_nanos());
    let wait = Timespec { tv_sec: wait.as_secs().cast_signed(), tv_nsec: nanos };
    matches!(poll(&mut fds, Some(&wait)), Ok(1..))
}

/// The thread that reads.
struct Intake<'a> {
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
    /// The last sample was of pages sent again.
    sampled_again: bool,
}

impl<'a> Intake<'a> {
    fn new(
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
    fn run(&mut self) {
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

    /// Waits until it may read; returns the bytes that it may read, 0 when it has to end.
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
                    // No more than the pages that are allowed, if all of them have data.
                    let most = allowed.saturating_sub(pages).saturating_mul(RECORD);
                    return usize::try_from(most).unwrap_or(CHUNK).min(CHUNK);
                }
                early => early.min(NAP),
            };
            // QEMU waits, too, as soon as the socket is full.
            self.free_since = None;
            let waited = self.shared.changed.wait_timeout(state, wait);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// How long before its time the next page is.
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

    /// Tokenises the chunk and counts its pages; whether they were sent before.
    fn count(&mut self, len: usize) -> bool {
        let now = Instant::now();
        let began = *self.began.get_or_insert(now);
        self.tokens.clear();
        self.tokeniser.feed(&self.chunk[..len], &mut self.tokens);
        let facts = self.tokeniser.facts();
        let mut state = self.shared.lock();
        let first = state.first;
        let totals = &mut state.totals;
        // QEMU skips pages that it need not send.
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
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "`as` saturates, and takes a number that is none as 0"
    )]
    fn is_turn(&mut self, is_again: bool) -> bool {
        let state = self.shared.lock();
        let (data, rate) = (state.totals.data_pages, state.rate);
        drop(state);
        let is_due = data >= self.next_sample || is_again != self.sampled_again;
        if !is_due {
            return false;
        }
        self.sampled_again = is_again;
        let step = if is_again { SAMPLED_AGAIN } else { (rate * SAMPLED_EVERY) as u64 };
        self.next_sample = data.saturating_add(step.max(1));
        true
    }

    /// Makes differences of pages that were sent before, and gives the sampler the chunk if it is
    /// its turn. Each page with data has the same chance: chunks that are encoded faster, or have
    /// zeros, are no more likely to be taken.
    fn measure(&mut self, len: usize, is_again: bool) {
        let page_size = self.tokeniser.facts().page_size;
        if page_size != self.page_size {
            return;
        }
        let is_turn = self.is_turn(is_again);
        let whole = (is_turn && is_again).then(|| self.chunk[..len].to_vec());
        let known = (&self.tokens[..], self.tokeniser.blocks());
        take_differences(&mut self.deltas, &mut self.chunk, len, known, page_size);
        if is_turn {
            let (chunk, tokens) = (self.chunk[..len].to_vec(), self.tokens.clone());
            self.sampler.take(Sample { chunk, tokens, page_size, whole });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use stream::synth::{Configuration, MainStream, Section};

    const PAGE: usize = 4096;
    const PAGES: u64 = 64;
    /// Nothing here takes this long unless it hangs.
    const WATCHDOG: Duration = Duration::from_secs(240);

    /// A folder, an end that listens in it, and a QEMU that has connected.
    fn begin() -> (tempfile::TempDir, Discard, UnixStream) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let discard = Discard::listen(UnixAddress::from(path.clone()), PAGE, 1 << 20).unwrap();
        let qemu = UnixStream::connect(path).unwrap();
        qemu.set_write_timeout(Some(WATCHDOG)).unwrap();
        qemu.set_read_timeout(Some(WATCHDOG)).unwrap();
        (folder, discard, qemu)
    }

    /// The beginning of a stream, and a section that has each page once, every second one of zeros.
    fn opening(return_path: bool) -> MainStream {
        let mut main = MainStream::new(PAGE);
        main.file_header();
        main.configuration(&Configuration { machine: "pc", ..Configuration::default() });
        if return_path {
            main.command(1, &[]);
        }
        main.section(Section::Start).block_table(&[("pc.ram", PAGES * PAGE as u64)]);
        main.end_of_section();
        main
    }

    fn pages(main: &mut MainStream, seed: u8) {
        let ram = main.section(Section::Part);
        for page in 0..PAGES {
            let body: Vec<u8> =
                (0..PAGE).map(|at| ((at / 64) as u64 ^ page).to_le_bytes()[0] ^ seed).collect();
            if page % 2 == 0 {
                ram.page("pc.ram", page * PAGE as u64, &body);
            } else {
                ram.zero("pc.ram", page * PAGE as u64);
            }
        }
        ram.end_of_section();
    }

    fn until(discard: &Discard, what: impl Fn(&Totals) -> bool) -> Totals {
        let limit = Instant::now() + WATCHDOG;
        loop {
            let totals = discard.totals();
            if what(&totals) {
                return totals;
            }
            assert!(Instant::now() < limit, "{totals:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    #[test]
    fn pages_of_both_passes_are_counted_and_sampled() {
        let (_folder, discard, mut qemu) = begin();
        let mut main = opening(true);
        pages(&mut main, 1);
        qemu.write_all(&main.take()).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(discard.totals().pages, 0, "it holds QEMU until it is told");
        discard.begin(PAGES, Duration::from_millis(1));
        let seen = until(&discard, |totals| totals.pages == PAGES);
        assert_eq!((seen.data_pages, seen.first_pages, seen.first_data_pages), (32, PAGES, 32));
        assert!(seen.unpaced.is_some());
        let limit = Instant::now() + WATCHDOG;
        while discard.sampled().first.is_empty() {
            assert!(Instant::now() < limit);
            std::thread::sleep(Duration::from_millis(2));
        }
        // Some more, since not every chunk of pages sent again is sampled.
        discard.allow(Allowed::Until(21 * PAGES * PAGE as u64));
        for pass in 2..=21 {
            pages(&mut main, pass);
            qemu.write_all(&main.take()).unwrap();
        }
        let seen = until(&discard, |totals| totals.pages == 21 * PAGES);
        assert_eq!((seen.first_pages, seen.data_pages), (PAGES, 21 * 32));
        while discard.sampled().again.is_empty() {
            assert!(Instant::now() < limit);
            std::thread::sleep(Duration::from_millis(2));
        }
        let sampled = discard.sampled();
        let zstd_1 = sampled.first.zstd_1().unwrap();
        assert!(zstd_1.pages == 32 * PAGE as u64 && zstd_1.size() < 0.5, "{zstd_1:?}");
        assert!(sampled.again_whole.is_some());
        // It closes, and has never written.
        drop(discard);
        assert_eq!(std::io::Read::read(&mut qemu, &mut [0; 8]).unwrap(), 0);
    }

    #[test]
    fn a_held_qemu_waits_in_its_write() {
        let (_folder, discard, qemu) = begin();
        let mut main = opening(true);
        (0..200).for_each(|seed| pages(&mut main, seed));
        let bytes = main.take();
        let all = bytes.len() as u64;
        let written = std::thread::spawn(move || (&qemu).write_all(&bytes));
        std::thread::sleep(Duration::from_millis(100));
        assert!(!written.is_finished(), "{all} bytes fit into a socket");
        discard.begin(PAGES, Duration::from_millis(1));
        discard.allow(Allowed::All);
        written.join().unwrap().unwrap();
    }

    /// QEMU would complete such a migration as soon as it has written it.
    #[test]
    fn a_stream_without_a_return_path_is_cut_off() {
        let (_folder, discard, mut qemu) = begin();
        let mut main = opening(false);
        pages(&mut main, 1);
        qemu.write_all(&main.take()).unwrap();
        discard.begin(PAGES, Duration::from_millis(1));
        assert!(until(&discard, |totals| totals.has_ended).has_ended);
        // The end of a socket with bytes unread is a reset.
        let end = std::io::Read::read(&mut qemu, &mut [0; 8]);
        assert!(matches!(end, Ok(0) | Err(_)), "{end:?}");
    }

    #[test]
    fn a_qemu_that_hands_the_vm_over_is_cut_off() {
        let (_folder, discard, mut qemu) = begin();
        let mut main = opening(true);
        pages(&mut main, 1);
        main.section(Section::End).end_of_section();
        qemu.write_all(&main.take()).unwrap();
        discard.begin(PAGES, Duration::from_millis(1));
        assert!(until(&discard, |totals| totals.has_ended).has_ended);
    }
}
