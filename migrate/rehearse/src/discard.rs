//! The end of the stream that reads all bytes and discards them.

mod intake;
mod shared;

use crate::sampler::Sampler;
use crate::schedule::Allowed;
use forecast::Sampled;
use intake::{accept, Intake, CHUNK};
use relay::UnixAddress;
pub use shared::Totals;
use shared::{Shared, State};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// Why no stream could be accepted.
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

/// The discarding end of one migration. It only reads, and reads nothing at first.
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
    /// Listens at `address` for one connection. `delta_cache` is the number of bytes for pages that
    /// were sent before. `page_size` is the guest's, unless the stream states another.
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

    /// Begins to read the first pass, which has `pages` pages: some of them as fast as QEMU writes,
    /// the others at a rate with which the pass takes `time`.
    #[expect(clippy::cast_precision_loss, reason = "pages of RAM, far below 2^53")]
    pub fn begin(&self, pages: u64, time: Duration) {
        let rate = pages as f64 / time.as_secs_f64().max(0.001);
        self.shared.set(|state| {
            (state.first, state.allowed) = (pages, pages);
            state.rate = rate;
        });
    }

    /// Reads on. Behind the first pass it reads as fast as QEMU writes.
    pub fn allow(&self, allowed: Allowed) {
        self.shared.set(|state| {
            let pages = match allowed {
                Allowed::Nothing => 0,
                Allowed::Until(bytes) => bytes / state.totals.page_size.max(1),
                Allowed::All => u64::MAX,
            };
            state.allowed = match state.allowed {
                // Everything was allowed until now.
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
    /// Closes the connection: a QEMU that is still migrating fails, and its VM continues.
    fn drop(&mut self) {
        self.shared.set(|state| state.stop = true);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::time::Instant;
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
        // A sample that no thread takes in time is left out.
        discard.allow(Allowed::All);
        while discard.sampled().again.is_empty() {
            assert!(Instant::now() < limit);
            pages(&mut main, 22);
            qemu.write_all(&main.take()).unwrap();
            std::thread::sleep(Duration::from_millis(2));
        }
        let sampled = discard.sampled();
        let zstd_1 = sampled.first.zstd_1().unwrap();
        assert!(zstd_1.pages == 32 * PAGE as u64 && zstd_1.size() < 0.5, "{zstd_1:?}");
        assert!(sampled.again_whole.is_some());
        // It closes, and has never written.
        drop(discard);
        assert_eq!(std::io::Read::read_to_end(&mut qemu, &mut Vec::new()).unwrap(), 0);
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
        let end = std::io::Read::read_to_end(&mut qemu, &mut Vec::new());
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
