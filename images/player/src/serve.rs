//! Sends pages to QEMU: requested pages first, then the others of their units, then the rest.

mod background;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use image::{Content, HotPage, HotSet, Image, Units};

use crate::back::Message;
use crate::cache::{Plain, Unit, UnitCache};
use crate::pending::Pending;
use crate::socket::Socket;
use crate::{wire, PlayError};

/// Maximum number of background pages per section. Requests are read between two sections.
const BATCH: usize = 16;
/// Number of decoded units of the last requests in memory.
const MAX_REQUESTED: usize = 32;
/// Maximum number of response times in the report.
const MOST_TIMES: usize = 1 << 16;

/// Counts for the report.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) requests: u64,
    /// Requests for pages that had been sent already.
    pub(crate) crossed: u64,
    pub(crate) pages: u64,
    pub(crate) zeros: u64,
    /// Microseconds from reading a request to having written its page.
    pub(crate) times: Vec<u32>,
    /// The requested pages, in order.
    pub(crate) asked: Vec<HotPage>,
}

/// The pages that are still to be sent, and their places.
pub(crate) struct Server {
    image: Arc<Image>,
    cache: Arc<UnitCache>,
    names: HashMap<String, usize>,
    pub(crate) pending: Pending,
    units: Units,
    /// The units of the last requests, the newest last.
    requested: VecDeque<(u64, Arc<Plain>)>,
    /// Units in `requested` with pages that may still be pending, and how many of these pages come
    /// beside the requested ones: as many as a unit has. One slot may be that of all pages of RAM.
    near: VecDeque<(u64, u64)>,
    /// The block of the last request, for requests without a name.
    last: Option<usize>,
    buffer: Vec<u8>,
    /// Position of the search for same-filled pages: block, extent, page.
    filled: (usize, usize, u64),
    /// For neighbours, and for the background: a unit, and the run and the page in it before which
    /// no page of the unit is pending.
    searched: [(u64, usize, u64); 2],
    /// Pages that were looked at to find pending ones.
    #[cfg(test)]
    looked: u64,
    /// The time from which `Counts::asked` counts.
    pub(crate) since: Instant,
    pub(crate) counts: Counts,
}

impl Server {
    pub(crate) fn new(cache: &Arc<UnitCache>) -> Self {
        let image = cache.image();
        let blocks = &image.index().blocks;
        let names = blocks.iter().enumerate().map(|(at, block)| (block.name.clone(), at)).collect();
        Self {
            cache: Arc::clone(cache),
            names,
            pending: Pending::all(image),
            units: Units::new(),
            requested: VecDeque::new(),
            near: VecDeque::new(),
            last: None,
            buffer: Vec::new(),
            filled: (0, 0, 0),
            searched: [(0, 0, 0); 2],
            #[cfg(test)]
            looked: 0,
            since: Instant::now(),
            counts: Counts::default(),
            image: Arc::clone(image),
        }
    }

    /// Number of the block with this name.
    pub(crate) fn block(&self, name: &str) -> Option<usize> {
        self.names.get(name).copied()
    }

    /// Answers a request; ignores any other message.
    pub(crate) fn answer(
        &mut self,
        message: &Message,
        read: Instant,
        socket: &mut Socket,
    ) -> Result<(), PlayError> {
        let Message::Pages { block, start, len } = message else { return Ok(()) };
        self.counts.requests += 1;
        let bad = |what: String| PlayError::Back(format!("it asks for {what}"));
        if let Some(name) = block {
            let known = self.block(name);
            let unknown = || bad(format!("a page of block '{}'", name.escape_default()));
            self.last = Some(known.ok_or_else(unknown)?);
        }
        let block = self.last.ok_or_else(|| bad("a page of no block".into()))?;
        let described = &self.image.index().blocks[block];
        let size = self.image.shape().page_size() as u64;
        let bytes = described.pages * size;
        let end = start.checked_add(u64::from(*len)).filter(|&end| end <= bytes);
        let (Some(end), true) = (end, start % size == 0 && u64::from(*len) % size == 0) else {
            let name = described.name.escape_default();
            return Err(bad(format!("{len} bytes at {start:#x} of block '{name}' of {bytes}")));
        };
        let mut sent = false;
        let at = read.saturating_duration_since(self.since).as_millis();
        let at = u32::try_from(at).unwrap_or(u32::MAX);
        for page in start / size..end / size {
            if self.counts.asked.len() < HotSet::MAX {
                self.counts.asked.push(HotPage { at, block, page });
            }
            sent |= self.send_one(block, page, socket)?;
        }
        if !sent {
            self.counts.crossed += 1;
        } else if self.counts.times.len() < MOST_TIMES {
            let time = u32::try_from(read.elapsed().as_micros()).unwrap_or(u32::MAX);
            self.counts.times.push(time);
        }
        Ok(())
    }

    /// Sends a requested page; false if it was sent before.
    fn send_one(
        &mut self,
        block: usize,
        page: u64,
        socket: &mut Socket,
    ) -> Result<bool, PlayError> {
        if !self.pending.is_set(block, page) {
            return Ok(false);
        }
        let content = self.image.index().blocks[block].content(page).expect("in its block");
        let unit = match content {
            Content::Slot(slot) => Some(slot / self.image.shape().unit_pages()),
            Content::Zero | Content::Filled(_) => None,
        };
        if let Some(unit) = unit {
            self.hold(unit)?;
            let most = self.image.shape().unit_pages();
            match self.near.iter_mut().find(|(near, _)| *near == unit) {
                Some((_, left)) => *left = most,
                None => self.near.push_back((unit, most)),
            }
        }
        self.pending.take(block, page);
        self.begin();
        self.record(block, page, content, true);
        self.end(socket)?;
        Ok(true)
    }

    /// Gets `unit` from the cache, or decodes it, and holds it in `requested`.
    fn hold(&mut self, unit: u64) -> Result<(), PlayError> {
        if self.requested.iter().any(|(held, _)| *held == unit) {
            return Ok(());
        }
        if self.requested.len() == MAX_REQUESTED {
            let (old, _) = self.requested.pop_front().expect("MAX_REQUESTED is not 0");
            // The unit's other pages are sent in the background.
            self.near.retain(|(near, _)| *near != old);
        }
        self.requested.push_back((unit, self.cache.get(unit, &mut self.units)?));
        Ok(())
    }

    /// The unit that holds a page, which must exist; `None` for a page without a slot.
    pub(crate) fn unit_of(&self, block: usize, page: u64) -> Option<u64> {
        match self.image.index().blocks[block].content(page)? {
            Content::Slot(slot) => Some(slot / self.image.shape().unit_pages()),
            Content::Zero | Content::Filled(_) => None,
        }
    }

    /// Appends a section with the pending pages of a decoded unit for which `is_hot` is true.
    pub(crate) fn put_hot(
        &mut self,
        unit: &Unit,
        is_hot: impl Fn(usize, u64) -> bool,
        out: &mut Vec<u8>,
    ) {
        let size = self.image.shape().page_size() as u64;
        wire::part(out, self.image.state().ram_section);
        let mut last = None;
        for run in self.cache.runs().of(unit.number) {
            for nth in 0..run.pages {
                let page = run.page + nth;
                if is_hot(run.block, page) && self.pending.take(run.block, page) {
                    let name = &self.image.index().blocks[run.block].name;
                    let name = (last != Some(run.block)).then_some(name.as_str());
                    let bytes = page_of(&self.image, run.slot + nth, unit.bytes());
                    wire::page(out, page * size, name, bytes);
                    last = Some(run.block);
                    self.counts.pages += 1;
                }
            }
        }
        wire::end_of_section(out, self.image.state().ram_section);
    }

    /// Appends a section with a pending page that has no slot.
    pub(crate) fn put_filled(&mut self, block: usize, page: u64, out: &mut Vec<u8>) {
        let content = self.image.index().blocks[block].content(page).expect("in its block");
        if self.pending.take(block, page) {
            self.begin();
            self.record(block, page, content, true);
            wire::end_of_section(&mut self.buffer, self.image.state().ram_section);
            out.extend_from_slice(&self.buffer);
        }
    }

    fn begin(&mut self) {
        self.buffer.clear();
        wire::part(&mut self.buffer, self.image.state().ram_section);
    }

    /// Appends a page of a unit in `requested`, or one without a slot.
    fn record(&mut self, block: usize, page: u64, content: Content, named: bool) {
        let size = self.image.shape().page_size();
        let name = &self.image.index().blocks[block].name;
        let (address, name) = (page * size as u64, named.then_some(name.as_str()));
        match content {
            Content::Zero => {
                wire::zero(&mut self.buffer, address, name);
                self.counts.zeros += 1;
                return;
            }
            Content::Filled(word) => {
                wire::page(&mut self.buffer, address, name, &word.repeat(size / word.len()));
            }
            Content::Slot(slot) => {
                let unit = slot / self.image.shape().unit_pages();
                let held = self.requested.iter().find(|(held, _)| *held == unit);
                let (_, plain) = held.expect("held before its pages are sent");
                let bytes = page_of(&self.image, slot, plain.bytes());
                wire::page(&mut self.buffer, address, name, bytes);
            }
        }
        self.counts.pages += 1;
    }

    fn end(&mut self, socket: &mut Socket) -> Result<(), PlayError> {
        wire::end_of_section(&mut self.buffer, self.image.state().ram_section);
        socket.send(&self.buffer)
    }
}

/// The bytes of a slot within the plain bytes of its unit.
fn page_of<'a>(image: &Image, slot: u64, plain: &'a [u8]) -> &'a [u8] {
    let size = image.shape().page_size();
    let nth = usize::try_from(slot % image.shape().unit_pages()).expect("below a unit's pages");
    &plain[nth * size..(nth + 1) * size]
}

#[cfg(test)]
mod tests;
