//! Accesses to pinned memory: lists and sources are read, destinations written.

use super::Worker;
use crate::counters::add;
use crate::instance::{Instance, Task};
use crate::sgl::{ENTRY, HEADER, MAX_BYTES, MAX_FLATS};
use std::sync::PoisonError;

impl Worker<'_> {
    /// Reads a list from its metadata: runs, and their sum.
    pub(super) fn read_list(
        &mut self,
        instance: &Instance,
        address: u64,
    ) -> Option<(Vec<(u64, usize)>, usize)> {
        let machine = self.machine;
        let mut list = std::mem::take(&mut self.list);
        list.resize(HEADER, 0);
        let header = machine.dma.read(address, &mut list);
        let flats = u32_at(&list, 0) as usize;
        let entries = header && flats <= MAX_FLATS && {
            list.resize(HEADER + flats * ENTRY, 0);
            machine.dma.read(address, &mut list)
        };
        let mut runs = Vec::with_capacity(if entries { flats } else { 0 });
        let mut sum = 0_u64;
        if entries {
            for entry in list[HEADER..].chunks_exact(ENTRY) {
                let length = u32_at(entry, 0);
                let address = u64::from(u32_at(entry, 8)) | u64::from(u32_at(entry, 12)) << 32;
                sum += u64::from(length);
                runs.push((address, length as usize));
            }
        }
        self.list = list;
        // Metadata that its owner reuses too early can have any contents.
        if !entries || sum > MAX_BYTES {
            self.violation(instance, "a buffer list", address);
            return None;
        }
        Some((runs, usize::try_from(sum).ok()?))
    }

    pub(super) fn read_data(
        &self,
        instance: &Instance,
        runs: &[(u64, usize)],
        into: &mut [u8],
    ) -> bool {
        let mut rest = into;
        for (address, length) in runs {
            let (part, after) = rest.split_at_mut(*length);
            if !self.machine.dma.read(*address, part) {
                self.violation(instance, "a source", *address);
                return false;
            }
            rest = after;
        }
        true
    }

    /// Writes the output, unless its request has died meanwhile.
    pub(super) fn write_data(
        &self,
        instance: &Instance,
        task: &Task,
        runs: &[(u64, usize)],
        from: &[u8],
    ) -> bool {
        let _gate = instance.gate.read().unwrap_or_else(PoisonError::into_inner);
        if instance.epoch() != task.epoch {
            return true;
        }
        let mut rest = from;
        for (address, length) in runs {
            let (part, after) = rest.split_at(rest.len().min(*length));
            if part.is_empty() {
                break;
            }
            if !self.machine.dma.write(*address, part) {
                self.violation(instance, "a destination", *address);
                return false;
            }
            rest = after;
        }
        true
    }

    fn violation(&self, instance: &Instance, what: &str, address: u64) {
        add(&self.machine.tallies.instances[instance.index].violations, 1);
        let index = instance.index;
        eprintln!("qat-sim: instance {index}: {what} at IOVA {address:#x} is not pinned memory");
    }
}

fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(bytes[offset..offset + 4].try_into().expect("four bytes"))
}
