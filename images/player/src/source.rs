//! The source end of a postcopy migration, served from an image.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use image::Image;

use crate::back::Message;
use crate::lanes::Ahead;
use crate::serve::Server;
use crate::socket::Socket;
use crate::{wire, PlayError};

/// The only page size that is supported.
const PAGE: u64 = 4096;
/// Number of the PING in the package. Its PONG means that the devices are loaded.
const DEVICES_LOADED: u32 = 3;
/// Longest wait for a decoded unit before the return path is read again.
const LOOK: Duration = Duration::from_micros(300);
/// Longest single wait for a message while QEMU loads devices.
const QUIET: Duration = Duration::from_secs(1);

/// Progress of a restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// The devices are loaded, and QEMU starts the guest.
    Running,
    /// QEMU has all pages: the image is no longer needed.
    Loaded,
}

/// Options of [`play`] and [`resume`].
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
}

/// Serves `image` to the QEMU at the other end of `socket`, which waits for a postcopy migration,
/// until it has all pages.
///
/// # Errors
///
/// An image that cannot be played is refused before anything is sent. A later error ends the
/// restore: QEMU then pauses in postcopy if the guest runs, and exits if it does not.
pub fn play(
    image: &Arc<Image>,
    socket: UnixStream,
    options: PlayOptions,
    on: &mut dyn FnMut(Event),
) -> Result<Played, PlayError> {
    can_play(image)?;
    let begin = Instant::now();
    let mut socket = Socket::new(socket)?;
    let (server, ahead) = (Server::new(image), Ahead::new(image, options.threads)?);
    socket.send(&opening(image))?;
    Playing { image, server, ahead, socket, begin, running: None, rate: options.rate }.run(on)
}

/// Continues a restore whose player has died. The QEMU at the other end of `socket` is in
/// `postcopy-paused` and has received `migrate-recover`.
///
/// # Errors
///
/// As [`play`].
pub fn resume(
    image: &Arc<Image>,
    socket: UnixStream,
    options: PlayOptions,
    on: &mut dyn FnMut(Event),
) -> Result<Played, PlayError> {
    can_play(image)?;
    let begin = Instant::now();
    let mut socket = Socket::new(socket)?;
    let mut server = Server::new(image);
    let ahead = Ahead::new(image, options.threads)?;
    let mut out = Vec::new();
    for (number, block) in image.index().blocks.iter().enumerate() {
        socket.back.expect_bitmap(block.pages);
        out.clear();
        wire::ask_received(&mut out, &block.name);
        socket.send(&out)?;
        let bits = loop {
            match socket.next()? {
                Message::Received { block: of, bits } if of == block.name => break bits,
                Message::Received { block: of, .. } => {
                    let text =
                        format!("bitmap of '{}', asked for '{}'", of.escape_default(), block.name);
                    return Err(PlayError::Back(text));
                }
                // QEMU requests its missing pages again after RESUME.
                _ => {}
            }
        };
        server.pending.take_all(number, &bits);
    }
    out.clear();
    wire::command(&mut out, wire::RESUME, &[]);
    socket.send(&out)?;
    let mut early = Vec::new();
    loop {
        match socket.next()? {
            Message::Resumed(1) => break,
            Message::Resumed(value) => {
                return Err(PlayError::Back(format!("it does not go on (RESUME_ACK {value})")));
            }
            request @ Message::Pages { .. } => early.push(request),
            _ => {}
        }
    }
    for request in early {
        server.answer(&request, Instant::now(), &mut socket)?;
    }
    on(Event::Running);
    let running = Some(begin.elapsed());
    Playing { image, server, ahead, socket, begin, running, rate: options.rate }.run(on)
}

/// Refuses an image that cannot be played, with the reason.
fn can_play(image: &Image) -> Result<(), PlayError> {
    let size = image.shape().page_size() as u64;
    if size != PAGE {
        return Err(PlayError::Unfit(format!(
            "the guest has pages of {size} bytes, and only those of {PAGE} can be sent on demand"
        )));
    }
    match image.index().blocks.iter().find(|block| block.host_page > PAGE) {
        Some(block) => Err(PlayError::Unfit(format!(
            "RAM block '{}' was saved from huge pages of {} bytes, which cannot be sent on demand",
            block.name.escape_default(),
            block.host_page
        ))),
        None => Ok(()),
    }
}

/// The stream up to the point from which QEMU requests pages: steps 1 to 3 of the crate's list.
fn opening(image: &Image) -> Vec<u8> {
    let state = image.state();
    let mut out = state.configuration.clone();
    wire::command(&mut out, wire::OPEN_RETURN_PATH, &[]);
    wire::ping(&mut out, 1);
    let sizes = [PAGE.to_be_bytes(), PAGE.to_be_bytes()].concat();
    wire::command(&mut out, wire::ADVISE, &sizes);
    wire::start_of_ram(&mut out, image, true);
    out.extend_from_slice(&state.early);
    for block in image.index().blocks.iter().filter(|block| block.pages > 0) {
        wire::discard(&mut out, &block.name, block.pages * PAGE);
    }
    wire::ping(&mut out, 2);
    let mut elements = Vec::new();
    wire::command(&mut elements, wire::LISTEN, &[]);
    elements.extend_from_slice(&state.devices);
    wire::ping(&mut elements, DEVICES_LOADED);
    wire::command(&mut elements, wire::RUN, &[]);
    wire::packaged(&mut out, &elements);
    wire::ping(&mut out, 4);
    out
}

struct Playing<'a> {
    image: &'a Arc<Image>,
    server: Server,
    ahead: Ahead,
    socket: Socket,
    begin: Instant,
    /// Time from `begin` to the start of the guest.
    running: Option<Duration>,
    rate: Option<u64>,
}

impl Playing<'_> {
    fn run(mut self, on: &mut dyn FnMut(Event)) -> Result<Played, PlayError> {
        // The time from which the next background unit may be sent.
        let mut due = Instant::now();
        loop {
            self.socket.read()?;
            if self.messages(on)? || self.server.neighbours(&mut self.socket)? {
                continue;
            }
            // The devices first: background pages would compete with them.
            if self.running.is_none() {
                self.socket.wait(QUIET)?;
                continue;
            }
            let wait = due.saturating_duration_since(Instant::now());
            if !wait.is_zero() {
                self.socket.wait(wait)?;
                continue;
            }
            let (server, deadline) = (&self.server, Instant::now() + LOOK);
            match self.ahead.next(Some(deadline), |unit| server.wants(unit))? {
                Some(unit) => {
                    if let Some(rate) = self.rate {
                        let bytes = unit.bytes().len() as f64;
                        due = Instant::now() + Duration::from_secs_f64(bytes / rate.max(1) as f64);
                    }
                    while self.server.push(&unit, &mut self.socket)? {
                        self.socket.read()?;
                        while self.messages(on)? {}
                    }
                }
                None if !self.ahead.is_over() => {}
                // Same-filled pages come last: they are few, and waiting for one costs the guest
                // least.
                None if self.server.push_filled(&mut self.socket)? => {}
                None => break,
            }
        }
        self.finish(on)
    }

    /// Handles QEMU's messages; returns whether a page was requested.
    fn messages(&mut self, on: &mut dyn FnMut(Event)) -> Result<bool, PlayError> {
        let mut asked = false;
        while let Some((message, read)) = self.socket.message() {
            match message {
                Message::Pages { .. } => {
                    self.server.answer(&message, read, &mut self.socket)?;
                    asked = true;
                }
                Message::Pong(DEVICES_LOADED) if self.running.is_none() => {
                    self.running = Some(self.begin.elapsed());
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
        wire::end_of_ram(&mut out, self.image.state().ram_section);
        wire::end_of_stream(&mut out, &[]);
        self.socket.send(&out)?;
        loop {
            match self.socket.next()? {
                Message::Shut(0) => break,
                Message::Shut(value) => return Err(PlayError::Refused(value)),
                // A request that crossed with the last page, or one for a zero page, which QEMU has
                // once it has read the end.
                _ => {}
            }
        }
        on(Event::Loaded);
        let mut counts = std::mem::take(&mut self.server.counts);
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
        })
    }
}
