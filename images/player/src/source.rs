//! The source of a postcopy migration, played from an image.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use image::Image;

use crate::back::Message;
use crate::lanes::Ahead;
use crate::serve::Server;
use crate::socket::Socket;
use crate::{wire, PlayError};

/// The only page size that is served.
const PAGE: u64 = 4096;
/// The PING inside the package: its answer says that the devices are loaded.
const DEVICES_LOADED: u32 = 3;
/// How long to wait for a decoded unit before requests are looked for again.
const LOOK: Duration = Duration::from_micros(300);
/// How long to wait for QEMU at once while it loads devices.
const QUIET: Duration = Duration::from_secs(1);

/// What a restore has reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// The devices are loaded, and QEMU starts the guest.
    Running,
    /// QEMU has all pages: the image is not needed any more.
    Loaded,
}

/// How an image is played.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlayOptions {
    /// Threads that decode units ahead of need.
    pub threads: usize,
    /// Bytes a second of pages that nobody has asked for; `None` for no limit.
    pub rate: Option<u64>,
}

/// A restore that is over.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Played {
    /// From the first byte to [`Event::Running`].
    pub running: Duration,
    /// From the first byte to [`Event::Loaded`].
    pub loaded: Duration,
    /// Requests for pages.
    pub requests: u64,
    /// Requests for pages that were under way already.
    pub crossed: u64,
    /// Pages sent with their bytes.
    pub pages: u64,
    /// Zero pages that were asked for.
    pub zeros: u64,
    /// Bytes written to QEMU.
    pub bytes: u64,
    /// Median of the time from reading a request to having written its page.
    pub served_median: Duration,
    /// 99th percentile of the same.
    pub served_p99: Duration,
}

/// Plays `image` to a QEMU that waits for a postcopy migration at the other end of `socket`, until
/// it has everything.
///
/// # Errors
///
/// An image that cannot be played, before anything is sent. Later whatever ends the restore: QEMU
/// then pauses in postcopy if the guest runs, and ends if it does not.
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

/// Goes on with a guest whose player has died: the QEMU at the other end of `socket` is in
/// `postcopy-paused` and was told `migrate-recover`.
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
                // What it waits for is asked for again after RESUME.
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

/// Refuses what cannot be played, by name.
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

/// Everything up to the moment from which pages are asked for.
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
    /// When the guest was started.
    running: Option<Duration>,
    rate: Option<u64>,
}

impl Playing<'_> {
    fn run(mut self, on: &mut dyn FnMut(Event)) -> Result<Played, PlayError> {
        // The rest may go on from here.
        let mut due = Instant::now();
        loop {
            self.socket.read()?;
            if self.messages(on)? || self.server.neighbours(&mut self.socket)? {
                continue;
            }
            // The devices first: pages that nobody has asked for would compete with them.
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
                // Few pages are filled with a word, and they cost the guest least.
                None if self.server.push_filled(&mut self.socket)? => {}
                None => break,
            }
        }
        self.finish(on)
    }

    /// Deals with what QEMU has said; whether a page was asked for.
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

    /// The end of the stream, and QEMU's word that it has everything.
    fn finish(mut self, on: &mut dyn FnMut(Event)) -> Result<Played, PlayError> {
        let mut out = Vec::new();
        wire::end_of_ram(&mut out, self.image.state().ram_section);
        wire::end_of_stream(&mut out, &[]);
        self.socket.send(&out)?;
        loop {
            match self.socket.next()? {
                Message::Shut(0) => break,
                Message::Shut(value) => return Err(PlayError::Refused(value)),
                // A request that has crossed with the last page, or one for a page that is zero:
                // that is there when QEMU has read the end.
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
