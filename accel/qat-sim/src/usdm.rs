//! Pinned memory: the allocator of `libusdm.so.0`, and the device's access.
//!
//! All of it is in one reserved address range. One table by page gives the IOVA without a lock, a
//! second one the address; device accesses are checked against both, byte for byte. IOVAs have 39
//! bits, are contiguous within an allocation, descend as addresses of allocations ascend, and never
//! equal an address.
//!
//! Device accesses copy: the caller's memory is never borrowed, and a free waits for a copy in
//! progress.

#![expect(unsafe_code, reason = "maps memory and copies to and from what callers own")]

mod region;

use self::region::{Region, MAX_ALIGN, PAGE, PAGES, SPAN};
use crate::script::MemoryMode;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::atomic::Ordering;
use std::sync::{OnceLock, PoisonError, RwLock};

/// The first IOVA: no address of a process is near it, and with the span it is within 39 bits.
const IOVA_BASE: u64 = 0x41_0000_0000;
const SLAB: usize = 2 << 20;
/// Largest allocation of the real library.
const MAX_BYTES: usize = 64 << 20;

const _: () = assert!(IOVA_BASE + SPAN as u64 <= 1 << 39);

/// The pinned memory of a process.
#[derive(Debug, Default)]
pub struct Usdm {
    region: OnceLock<Option<Region>>,
    /// Locked for writing to allocate and free, for reading by each device access.
    heap: RwLock<Heap>,
}

#[derive(Debug, Default)]
struct Heap {
    mode: Option<MemoryMode>,
    limit: Option<u64>,
    /// Mapped runs: offset and bytes.
    runs: BTreeMap<usize, usize>,
    /// Where the search for free addresses starts: an address is reused as late as possible.
    cursor: usize,
    used: u64,
    /// Allocations inside slabs: offset, and (bytes, slab).
    parts: BTreeMap<usize, (usize, usize)>,
    violations: u64,
}

impl Usdm {
    /// Sets layout and limit of later allocations. Earlier ones do not count against the limit.
    pub fn configure(&self, mode: MemoryMode, limit: Option<u64>) {
        let mut heap = self.heap.write().unwrap_or_else(PoisonError::into_inner);
        heap.mode = Some(mode);
        heap.limit = limit.map(|limit| limit + heap.used);
    }

    /// `qaeMemAllocNUMA`: null if the sizes are out of bounds or the memory is exhausted.
    pub fn allocate(&self, bytes: usize, align: usize) -> *mut c_void {
        if bytes == 0 || bytes > MAX_BYTES || !align.is_power_of_two() || align > MAX_ALIGN {
            return ptr::null_mut();
        }
        let Some(region) = self.region() else { return ptr::null_mut() };
        let mut heap = self.heap.write().unwrap_or_else(PoisonError::into_inner);
        let offset = match heap.mode.unwrap_or(MemoryMode::Guard) {
            MemoryMode::Guard => heap.map(region, bytes, align),
            MemoryMode::Slab => heap.part(region, bytes, align),
        };
        match offset {
            // SAFETY: the offset lies in the reserved range.
            Some(offset) => unsafe { region.base.add(offset) }.as_ptr().cast(),
            None => ptr::null_mut(),
        }
    }

    /// `qaeMemFreeNUMA`; false if the address was not allocated.
    pub fn free(&self, address: *mut c_void) -> bool {
        let Some(region) = self.region() else { return false };
        let offset = (address as usize).wrapping_sub(region.base.as_ptr() as usize);
        let mut heap = self.heap.write().unwrap_or_else(PoisonError::into_inner);
        let freed = match heap.parts.remove(&offset) {
            Some((_, slab)) => {
                if !heap.parts.values().any(|(_, of)| *of == slab) {
                    heap.unmap(region, slab);
                }
                true
            }
            None => heap.unmap(region, offset),
        };
        if !freed {
            heap.violations += 1;
        }
        freed
    }

    /// `qaeVirtToPhysNUMA`: the IOVA of an address, 0 for one that is not pinned.
    pub fn physical(&self, address: *const c_void) -> u64 {
        let Some(Some(region)) = self.region.get() else { return 0 };
        let offset = (address as usize).wrapping_sub(region.base.as_ptr() as usize);
        let Some(entry) = region.forward.get(offset / PAGE) else { return 0 };
        // Pairs with the Release in `map`; an entry is complete in itself.
        let entry = entry.load(Ordering::Acquire);
        let within = (offset % PAGE) as u64;
        if within >= entry & 0xffff_ffff {
            return 0;
        }
        IOVA_BASE + (((entry >> 32) - 1) << 12) + within
    }

    /// `qaePhysToVirtNUMA`: null for an IOVA that is not mapped.
    pub fn address(&self, iova: u64) -> *mut c_void {
        let _heap = self.heap.read().unwrap_or_else(PoisonError::into_inner);
        self.resolve(iova, 1).map_or(ptr::null_mut(), |address| address.as_ptr().cast())
    }

    /// A device read; returns false and reads nothing unless all of it is mapped.
    pub fn read(&self, iova: u64, into: &mut [u8]) -> bool {
        let _heap = self.heap.read().unwrap_or_else(PoisonError::into_inner);
        let Some(source) = self.resolve(iova, into.len()) else { return false };
        // SAFETY: `resolve` found the whole range mapped, and the lock prevents a change; the
        // destination is ours.
        unsafe { ptr::copy_nonoverlapping(source.as_ptr(), into.as_mut_ptr(), into.len()) };
        true
    }

    /// A device write; returns false and writes nothing unless all of it is mapped.
    pub fn write(&self, iova: u64, from: &[u8]) -> bool {
        let _heap = self.heap.read().unwrap_or_else(PoisonError::into_inner);
        let Some(target) = self.resolve(iova, from.len()) else { return false };
        // SAFETY: as in `read`; during a request pinned memory belongs to the device.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), target.as_ptr(), from.len()) };
        true
    }

    /// Frees of addresses that were not allocated.
    pub fn violations(&self) -> u64 {
        self.heap.read().unwrap_or_else(PoisonError::into_inner).violations
    }

    /// The address of a run of IOVAs. The caller holds the heap's lock.
    fn resolve(&self, iova: u64, bytes: usize) -> Option<NonNull<u8>> {
        let region = self.region.get()?.as_ref()?;
        let start = usize::try_from(iova.checked_sub(IOVA_BASE)?).ok()?;
        let end = start.checked_add(bytes.max(1))?;
        let first = region.reverse.get(start / PAGE)?.load(Ordering::Relaxed);
        let base = usize::try_from(first.checked_sub(1)?).ok()?;
        let pages = start / PAGE..=(end - 1) / PAGE;
        for (index, page) in pages.enumerate() {
            // The lock is held, so a mapped page stays mapped.
            let mapped = region.reverse.get(page)?.load(Ordering::Relaxed) as usize;
            if mapped != base + index + 1 {
                return None;
            }
            let valid = region.forward[base + index].load(Ordering::Relaxed) & 0xffff_ffff;
            if end.min((page + 1) * PAGE) - page * PAGE > valid as usize {
                return None;
            }
        }
        // SAFETY: the page is in the table, so the offset lies in the range.
        Some(unsafe { region.base.add(base * PAGE + start % PAGE) })
    }

    fn region(&self) -> Option<&Region> {
        self.region.get_or_init(Region::reserve).as_ref()
    }
}

impl Heap {
    /// Maps whole pages with unmapped ones around them.
    fn map(&mut self, region: &Region, bytes: usize, align: usize) -> Option<usize> {
        let pages = bytes.div_ceil(PAGE);
        let used = self.used + (pages * PAGE) as u64;
        if self.limit.is_some_and(|limit| used > limit) {
            return None;
        }
        let align = align.max(PAGE);
        let offset = self
            .gap(self.cursor, pages * PAGE, align)
            .or_else(|| self.gap(0, pages * PAGE, align))?;
        if !region.open(offset, pages * PAGE) {
            return None;
        }
        let iova_page = PAGES - offset / PAGE - pages;
        for index in 0..pages {
            let valid = (bytes - index * PAGE).min(PAGE) as u64;
            let page = offset / PAGE + index;
            // PAGES is below 2^32.
            #[expect(clippy::cast_possible_truncation, reason = "below 2^22")]
            region.reverse[iova_page + index].store(page as u32 + 1, Ordering::Relaxed);
            let entry = ((iova_page + index) as u64 + 1) << 32 | valid;
            // Pairs with the Acquire in `physical`.
            region.forward[page].store(entry, Ordering::Release);
        }
        self.used = used;
        self.cursor = offset + pages * PAGE;
        self.runs.insert(offset, bytes);
        Some(offset)
    }

    /// A free, aligned offset from `from` on, with a free page on both sides.
    fn gap(&self, from: usize, bytes: usize, align: usize) -> Option<usize> {
        let mut offset = (from + PAGE).next_multiple_of(align);
        let before = self.runs.range(..offset).next_back();
        let occupied = before.into_iter().chain(self.runs.range(offset..));
        for (start, length) in occupied {
            let end = start + length.next_multiple_of(PAGE);
            if offset + bytes + PAGE <= *start {
                break;
            }
            if offset < end + PAGE {
                offset = (end + PAGE).next_multiple_of(align);
            }
        }
        (offset + bytes + PAGE <= SPAN).then_some(offset)
    }

    fn unmap(&mut self, region: &Region, offset: usize) -> bool {
        let Some(bytes) = self.runs.remove(&offset) else { return false };
        let pages = bytes.div_ceil(PAGE);
        let iova_page = PAGES - offset / PAGE - pages;
        for index in 0..pages {
            region.forward[offset / PAGE + index].store(0, Ordering::Release);
            region.reverse[iova_page + index].store(0, Ordering::Relaxed);
        }
        region.close(offset, pages * PAGE);
        self.used -= (pages * PAGE) as u64;
        true
    }

    /// A part of a slab, or a slab of its own for a large allocation.
    fn part(&mut self, region: &Region, bytes: usize, align: usize) -> Option<usize> {
        let rounded = bytes.next_multiple_of(64);
        let mut slabs: Vec<usize> = self.parts.values().map(|(_, slab)| *slab).collect();
        slabs.dedup();
        for slab in slabs {
            let size = self.runs.get(&slab).copied().unwrap_or(0);
            let mut offset = slab;
            for (start, (length, _)) in self.parts.range(slab..slab + size) {
                if offset.next_multiple_of(align) + rounded <= *start {
                    break;
                }
                offset = start + length;
            }
            let offset = offset.next_multiple_of(align);
            if offset + rounded <= slab + size {
                self.parts.insert(offset, (rounded, slab));
                return Some(offset);
            }
        }
        let slab = self.map(region, rounded.next_multiple_of(SLAB), align.max(SLAB))?;
        self.parts.insert(slab, (rounded, slab));
        Some(slab)
    }
}

#[cfg(test)]
mod tests;
