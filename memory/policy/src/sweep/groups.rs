//! Groups that a sweep makes of idle pages, and pages that it takes out of their group.

use codec::Codec;
use device::{ALONE, PAGE, RECOMPRESSED};
use store::{GroupError, Page, Seen, MAX_MEMBERS, MAX_PAYLOAD};

use super::{Sweep, FEWEST};
use crate::stats::add as count;

impl Sweep {
    /// Makes a group of the candidates; `false` if there is no room. The pass continues at `next`,
    /// which moves back if not all candidates fit.
    pub(super) fn join(&mut self, next: &mut u64) -> bool {
        self.read_found();
        if self.count < FEWEST {
            return self.alone();
        }
        let encoded = loop {
            let plain = &self.plain.as_flattened()[..self.count * PAGE];
            let encoded = self.encoder.encode(plain, &mut self.coded);
            if encoded.len <= MAX_PAYLOAD || self.count == FEWEST {
                break encoded;
            }
            self.count = (self.count * MAX_PAYLOAD / encoded.len).clamp(FEWEST, self.count - 1);
            *next = self.found[self.count].index;
        };
        let before: usize = self.found[..self.count].iter().map(|idle| idle.len).sum();
        let codec = encoded.codec;
        // The cost of the smallest place of an object, and of the group's record.
        let pays = (encoded.len + 64) * 100 <= before * (100 - self.gain);
        if matches!(codec, Codec::Raw | Codec::SameFilled) || encoded.len > MAX_PAYLOAD || !pays {
            return (0..self.count).all(|at| self.recompress(at, ALONE));
        }
        self.group.room()[..encoded.len].copy_from_slice(&self.coded[..encoded.len]);
        let mut seen = [Seen::default(); MAX_MEMBERS];
        for ((seen, idle), object) in seen.iter_mut().zip(&self.found).zip(self.objects.iter()) {
            *seen = Seen { index: idle.index, tag: idle.tag, bytes: &object[..idle.len] };
        }
        let tag = RECOMPRESSED | codec.to_wire();
        let Self { worker, group, .. } = self;
        match worker.put_group(&seen[..self.count], tag, encoded.len, group) {
            Ok(joined) => {
                let joined = u64::from(joined.count_ones());
                count(&self.counters.groups_made, 1);
                count(&self.counters.pages_grouped, joined);
                count(&self.counters.pages_changed, self.count as u64 - joined);
                count(&self.counters.bytes_saved, before.saturating_sub(encoded.len) as u64);
                true
            }
            Err(GroupError::Full { .. }) => false,
            // Our arguments are valid, so the error is no reason to retry.
            Err(_) => true,
        }
    }

    /// Takes a page out of its group if the page is `warm`, or if most other pages of the group are
    /// gone.
    pub(super) fn tend_group(&mut self, index: u64, warm: bool) {
        let Some(members) = self.worker.members(index) else { return };
        if !warm && members as usize >= self.most / 2 {
            return;
        }
        match self.reader.read(&self.worker, index, false, &mut self.plain[0]) {
            Ok(Page::Grouped) => {}
            Ok(_) => return,
            Err(_) => return count(&self.counters.damaged, 1),
        }
        if !warm && (members as usize) * 2 >= self.reader.members() {
            return;
        }
        let encoded = self.encoder.encode(&self.plain[0], &mut self.coded);
        let form = match encoded.codec {
            Codec::Raw | Codec::SameFilled => (Codec::Raw.to_wire(), &self.plain[0][..]),
            codec => (RECOMPRESSED | codec.to_wire(), &self.coded[..encoded.len]),
        };
        match self.worker.ungroup(index, self.reader.group(), form, true) {
            Ok(true) if warm => count(&self.counters.pages_warm, 1),
            Ok(true) => count(&self.counters.pages_spread, 1),
            Ok(false) => count(&self.counters.pages_changed, 1),
            Err(_) => count(&self.counters.no_room, 1),
        }
    }
}
