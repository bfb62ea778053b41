//! Pages that QEMU has not requested: the others of a requested page's unit, and those of the
//! background.

use std::sync::Arc;

use image::Content;

use super::{page_of, Server, BATCH};
use crate::cache::Unit;
use crate::socket::Socket;
use crate::{wire, PlayError};

impl Server {
    /// Sends some other pages of a unit that was decoded for a request; false if there is no such
    /// unit.
    pub(crate) fn neighbours(&mut self, socket: &mut Socket) -> Result<bool, PlayError> {
        let Some(&(unit, left)) = self.near.front() else { return Ok(false) };
        let sent = self.send_some(unit, None, left, socket)?;
        match self.near.front_mut() {
            // The background sends the others of a unit with more pages.
            Some(_) if sent == 0 || sent >= left => drop(self.near.pop_front()),
            Some((_, still)) => *still = left - sent,
            None => {}
        }
        Ok(true)
    }

    /// Whether a page of `unit` is pending.
    pub(crate) fn wants(&self, unit: u64) -> bool {
        let mut pages = self
            .cache
            .runs()
            .of(unit)
            .iter()
            .flat_map(|run| (run.page..run.page + run.pages).map(|page| (run.block, page)));
        pages.any(|(block, page)| self.pending.is_set(block, page))
    }

    /// Sends up to `most` pending pages of a decoded unit; returns their number, 0 if none is
    /// pending.
    pub(crate) fn push(
        &mut self,
        unit: &Unit,
        most: u64,
        socket: &mut Socket,
    ) -> Result<u64, PlayError> {
        self.send_some(unit.number, Some(unit.bytes()), most, socket)
    }

    /// Sends the next pending pages of `unit`, from `plain` or from `requested`, `most` or fewer;
    /// returns their number, 0 if none is pending.
    fn send_some(
        &mut self,
        unit: u64,
        plain: Option<&[u8]>,
        most: u64,
        socket: &mut Socket,
    ) -> Result<u64, PlayError> {
        let mut chosen = [(0, 0, 0); BATCH];
        let mut count = 0;
        // One slot may be that of all pages of RAM: a search from the first one for each batch
        // would take hours.
        let searched = usize::from(plain.is_some());
        let (mut at, mut nth) = match self.searched[searched] {
            (of, at, nth) if of == unit => (at, nth),
            _ => (0, 0),
        };
        let most = usize::try_from(most).unwrap_or(BATCH).min(BATCH);
        while let (Some(run), true) = (self.cache.runs().of(unit).get(at), count < most) {
            if nth == run.pages {
                (at, nth) = (at + 1, 0);
                continue;
            }
            #[cfg(test)]
            {
                self.looked += 1;
            }
            if self.pending.is_set(run.block, run.page + nth) {
                chosen[count] = (run.block, run.page + nth, run.slot + nth);
                count += 1;
            }
            nth += 1;
        }
        self.searched[searched] = (unit, at, nth);
        if count == 0 {
            return Ok(0);
        }
        self.begin();
        let mut last = None;
        for &(block, page, slot) in &chosen[..count] {
            // The index may give one slot to two pages, but lists each page once: `chosen` has no
            // duplicates.
            self.pending.take(block, page);
            let named = last != Some(block);
            match plain {
                Some(plain) => {
                    let bytes = page_of(&self.image, slot, plain);
                    let address = page * self.image.shape().page_size() as u64;
                    let name = &self.image.index().blocks[block].name;
                    wire::page(&mut self.buffer, address, named.then_some(name), bytes);
                    self.counts.pages += 1;
                }
                None => self.record(block, page, Content::Slot(slot), named),
            }
            last = Some(block);
        }
        self.end(socket)?;
        Ok(count as u64)
    }

    /// Sends some same-filled pages other than zero; returns their number, 0 if none is pending.
    pub(crate) fn push_filled(&mut self, socket: &mut Socket) -> Result<u64, PlayError> {
        let image = Arc::clone(&self.image);
        let (mut block, mut extent, mut page) = self.filled;
        self.begin();
        let mut count = 0;
        while let Some(described) = image.index().blocks.get(block) {
            let Some(run) = described.extents.get(extent) else {
                (block, extent) = (block + 1, 0);
                continue;
            };
            let end = run.first + run.pages;
            page = page.max(run.first);
            while matches!(run.content, Content::Filled(_)) && page < end && count < BATCH {
                if self.pending.take(block, page) {
                    self.record(block, page, run.content, true);
                    count += 1;
                }
                page += 1;
            }
            if count == BATCH {
                break;
            }
            (extent, page) = (extent + 1, 0);
        }
        self.filled = (block, extent, page);
        if count > 0 {
            self.end(socket)?;
        }
        Ok(count as u64)
    }
}
