//! The source end of a postcopy migration, served from an image.

mod resume;

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use image::{HotPage, HotSet, Image};

use crate::ahead::Ahead;
use crate::back::Message;
use crate::cache::{Unit, UnitCache};
use crate::hot::{prepare, HotLimits};
use crate::opening::{beginning, can_play, put_devices, DEVICES_LOADED};
use crate::serve::Server;
use crate::socket::{Socket, Wait};
use crate::{wire, PlayError};

/// Longest wait for a decoded unit before the return path is read again.
const LOOK: Duration = Duration::from_micros(300);
/// Size of the log of decoded units of a player that does not share it, bytes.
const ALONE: usize = 4 << 20;
/// Once the guest has begun to run, and the units of the hot set are sent, the background waits
/// until the guest has requested nothing for this time, but not longer than [`BEGINS`]. QEMU would
/// have to read other pages before the next one that the guest waits for.
const CALM: Duration = Duration::from_millis(20);
const BEGINS: Duration = Duration::from_millis(300);
/// The message that ends the wait for the devices.
const DEVICES: &str = "PONG 3, which follows its devices,";
/// Longest single wait for a message while QEMU loads devices.
const QUIET: Duration = Duration::from_secs(1);
/// Longest time in which QEMU neither requests a page nor answers while it loads devices, after it
/// has read them. QEMU 11.1 under libvirt 12 (`exit-on-error` off) does not end when it cannot load
/// them, and sends nothing any more.
const SILENCE: Duration = Duration::from_secs(120);

/// Progress of a restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// RESUME is sent, and no page yet: QEMU pauses again if the connection ends.
    Resuming,
    /// The devices are loaded, and QEMU starts the guest.
    Running,
    /// QEMU has all pages: the image is no longer needed.
    Loaded,
}

/// Options of a [`Player`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlayOptions {
    /// Threads that decode units in the background.
    pub threads: usize,
    /// Limit of the background pages, bytes per second; `None`: no limit.
    pub rate: Option<u64>,
}

/// Figures of a completed restore.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Played {
    /// Time from the first byte to [`Event::Running`].
    pub running: Duration,
    /// Time from the first byte to [`Event::Loaded`].
    pub loaded: Duration,
    /// Page requests from QEMU.
    pub requests: u64,
    /// Requests for pages that had been sent already.
    pub crossed: u64,
    /// Pages sent with their bytes.
    pub pages: u64,
    /// Zero pages sent on request.
    pub zeros: u64,
    /// Bytes written to QEMU.
    pub bytes: u64,
    /// Median time from reading a request to having written its page.
    pub served_median: Duration,
    /// 99th percentile of that time.
    pub served_p99: Duration,
    /// Pages that were sent before the guest ran.
    pub hot: u64,
    /// The pages that QEMU requested, in order; the first [`HotSet::MAX`](image::HotSet::MAX).
    pub asked: Vec<HotPage>,
}

/// An image that is ready to be sent.
pub struct Player {
    image: Arc<Image>,
    server: Server,
    ahead: Ahead,
    rate: Option<u64>,
    /// Sections with the pages that are sent before the guest runs, and their number.
    hot: Vec<u8>,
    hot_pages: u64,
}

impl Player {
    /// Starts the threads that read `image`.
    ///
    /// # Errors
    ///
    /// The image cannot be played, or threads or memory cannot be allocated.
    pub fn new(image: &Arc<Image>, options: PlayOptions) -> Result<Self, PlayError> {
        can_play(image)?;
        Self::sharing(&UnitCache::new(image, options.threads, ALONE)?, options.rate)
    }

    /// Creates a player that shares the decoded units, and the threads that decode them, with
    /// others. `rate` is that of [`PlayOptions`].
    ///
    /// # Errors
    ///
    /// The image cannot be played.
    pub fn sharing(cache: &Arc<UnitCache>, rate: Option<u64>) -> Result<Self, PlayError> {
        can_play(cache.image())?;
        Ok(Self {
            image: Arc::clone(cache.image()),
            server: Server::new(cache),
            ahead: Ahead::new(cache),
            rate,
            hot: Vec::new(),
            hot_pages: 0,
        })
    }

    /// Reads the pages of `set`, so that [`Player::play`] sends them before the guest runs. The
    /// pages beyond `limits` are sent after it runs, before all others that are not requested.
    ///
    /// # Errors
    ///
    /// A unit is damaged.
    pub fn prepare(&mut self, set: &HotSet, limits: HotLimits) -> Result<(), PlayError> {
        (self.hot, self.hot_pages) = prepare(&mut self.server, &mut self.ahead, set, limits)?;
        Ok(())
    }

    /// Serves the image to the QEMU at the other end of `socket`, which waits for a postcopy
    /// migration, until it has all pages.
    ///
    /// # Errors
    ///
    /// An error ends the restore: QEMU then pauses in postcopy if the guest runs, and exits if it
    /// does not.
    pub fn play(self, socket: UnixStream, on: &mut dyn FnMut(Event)) -> Result<Played, PlayError> {
        let mut playing = Playing::new(self, socket)?;
        let mut out = beginning(&playing.player.image);
        out.append(&mut playing.player.hot);
        put_devices(&mut out, &playing.player.image);
        let devices = Wait::begin(DEVICES);
        // Until the guest runs, nothing is lost by an end, and a QEMU that hangs shows by it.
        playing.socket.send_within(&out, &devices)?;
        playing.player.server.since = Instant::now();
        playing.run(&devices, on)
    }

    /// Continues a restore whose player has died. The QEMU at the other end of `socket` is in
    /// `postcopy-paused` and has received `migrate-recover`.
    ///
    /// # Errors
    ///
    /// The errors of [`Player::play`].
    pub fn resume(
        self,
        socket: UnixStream,
        on: &mut dyn FnMut(Event),
    ) -> Result<Played, PlayError> {
        let mut playing = Playing::new(self, socket)?;
        playing.ask_received()?;
        for request in playing.ask_resume(on)? {
            playing.player.server.answer(&request, Instant::now(), &mut playing.socket)?;
        }
        on(Event::Running);
        playing.running = Some(playing.begin.elapsed());
        playing.run(&Wait::begin(DEVICES), on)
    }
}

struct Playing {
    player: Player,
    socket: Socket,
    begin: Instant,
    /// Time from `begin` to the start of the guest.
    running: Option<Duration>,
    /// The unit of which the background may have more pages to send.
    pushed: Option<Unit>,
    /// The time from which the next background pages may be sent.
    due: Instant,
    /// The same, once the units of the hot set are sent.
    calm: Instant,
    /// The time of QEMU's last message, or of the answer to it, and [`SILENCE`].
    heard: Instant,
    silence: Duration,
}

impl Playing {
    fn new(player: Player, socket: UnixStream) -> Result<Self, PlayError> {
        let socket = Socket::new(socket)?;
        let begin = Instant::now();
        let (due, calm, heard) = (begin, begin, begin);
        let (running, pushed) = (None, None);
        let silence = SILENCE;
        Ok(Self { player, socket, begin, running, pushed, due, calm, heard, silence })
    }

    /// Sends the pages. `devices` is the wait for the devices, if they are not loaded yet.
    fn run(mut self, devices: &Wait, on: &mut dyn FnMut(Event)) -> Result<Played, PlayError> {
        self.heard = Instant::now();
        loop {
            self.socket.read()?;
            if self.messages(on)? || self.player.server.neighbours(&mut self.socket)? {
                continue;
            }
            // The devices first: background pages would compete with them.
            if self.running.is_none() {
                devices.check()?;
                if self.heard.elapsed() >= self.silence {
                    let seconds = self.silence.as_secs();
                    return Err(PlayError::Silent { what: DEVICES, seconds });
                }
                self.socket.wait(QUIET.min(self.silence))?;
                continue;
            }
            let wait = self.due_in();
            if !wait.is_zero() {
                self.socket.wait(wait)?;
                continue;
            }
            let Player { server, ahead, .. } = &mut self.player;
            let next = match self.pushed.take() {
                Some(unit) => Some(unit),
                None => ahead.next(Some(Instant::now() + LOOK), |unit| server.wants(unit))?,
            };
            match next {
                Some(unit) => self.push(unit, on)?,
                None if !self.player.ahead.is_over() => {}
                // Same-filled pages come last: they are few, and a wait for one costs the guest
                // least.
                None => match self.player.server.push_filled(&mut self.socket)? {
                    0 => break,
                    sent => self.pause(Instant::now(), sent),
                },
            }
        }
        self.finish(on)
    }

    /// Sends the pending pages of a unit. With a limit these are at most as many as a unit has: one
    /// slot may be that of many pages.
    fn push(&mut self, unit: Unit, on: &mut dyn FnMut(Event)) -> Result<(), PlayError> {
        let begin = Instant::now();
        let most = self.player.rate.map_or(u64::MAX, |_| self.player.image.shape().unit_pages());
        let mut sent = 0;
        while sent < most {
            match self.player.server.push(&unit, most - sent, &mut self.socket)? {
                0 => break,
                some => sent += some,
            }
            self.socket.read()?;
            while self.messages(on)? {}
        }
        if sent == most {
            self.pushed = Some(unit);
        }
        self.pause(begin, sent);
        Ok(())
    }

    /// Holds the background back until the limit permits what it has sent since `begin`.
    fn pause(&mut self, begin: Instant, pages: u64) {
        let Some(rate) = self.player.rate else { return };
        let bytes = pages as f64 * self.player.image.shape().page_size() as f64;
        self.due = begin + Duration::from_secs_f64(bytes / rate.max(1) as f64);
    }

    /// Holds the background back while the guest begins.
    fn hold_back(&mut self) {
        let Some(running) = self.running else { return };
        let until = self.begin + running + BEGINS;
        self.calm = until.min(Instant::now() + CALM);
    }

    /// The time until the next background pages may be sent.
    fn due_in(&mut self) -> Duration {
        let now = Instant::now();
        let Player { server, ahead, .. } = &mut self.player;
        let is_calm = self.calm <= now || ahead.leads(|unit| server.wants(unit));
        let due = if is_calm { self.due } else { self.due.max(self.calm) };
        due.saturating_duration_since(now)
    }

    /// Handles QEMU's messages; returns whether a page was requested.
    fn messages(&mut self, on: &mut dyn FnMut(Event)) -> Result<bool, PlayError> {
        let mut asked = false;
        while let Some((message, read)) = self.socket.message() {
            self.heard = read;
            match message {
                Message::Pages { .. } => {
                    self.player.server.answer(&message, read, &mut self.socket)?;
                    // The image's disk, or its host, may have taken minutes: QEMU was not silent.
                    self.heard = Instant::now();
                    self.hold_back();
                    asked = true;
                }
                Message::Pong(DEVICES_LOADED) if self.running.is_none() => {
                    self.running = Some(self.begin.elapsed());
                    self.hold_back();
                    on(Event::Running);
                }
                Message::Shut(0) => {
                    let text = "it says that it has everything, and has not".into();
                    return Err(PlayError::Back(text));
                }
                Message::Shut(value) => return Err(PlayError::Refused(value)),
                _ => {}
            }
        }
        Ok(asked)
    }

    /// Ends the stream and waits for SHUT.
    fn finish(mut self, on: &mut dyn FnMut(Event)) -> Result<Played, PlayError> {
        let mut out = Vec::new();
        wire::end_of_ram(&mut out, self.player.image.state().ram_section);
        wire::end_of_stream(&mut out, &[]);
        self.socket.send(&out)?;
        let wait = Wait::begin("its SHUT at the end");
        loop {
            match self.socket.next(&wait)? {
                Message::Shut(0) => break,
                Message::Shut(value) => return Err(PlayError::Refused(value)),
                // The request crossed with the last page, or is for a zero page, which QEMU has
                // once it has read the end.
                _ => {}
            }
        }
        on(Event::Loaded);
        let mut counts = std::mem::take(&mut self.player.server.counts);
        counts.times.sort_unstable();
        let time = |share: usize| {
            let at = counts.times.len() * share / 100;
            let time = counts.times.get(at.min(counts.times.len().saturating_sub(1)));
            Duration::from_micros(time.copied().unwrap_or(0).into())
        };
        Ok(Played {
            running: self.running.unwrap_or_default(),
            loaded: self.begin.elapsed(),
            requests: counts.requests,
            crossed: counts.crossed,
            pages: counts.pages,
            zeros: counts.zeros,
            bytes: self.socket.written,
            served_median: time(50),
            served_p99: time(99),
            hot: self.player.hot_pages,
            asked: counts.asked,
        })
    }
}

#[cfg(test)]
mod tests;
