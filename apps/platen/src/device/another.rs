//! The memory of a server that starts beside the present one.

use anyhow::ensure;

/// Memory of another program: its text and libraries.
const PROGRAM: u64 = 24 << 20;

/// Private memory of a server beside heap, stacks and the page tables of the store: data of the
/// program and its libraries, other page tables.
const PROCESS: u64 = 4 << 20;

/// Memory of a server's stack.
const STACK: u64 = 64 << 10;

/// A server that starts beside the present one. Sizes in bytes.
pub(super) struct Another {
    pub(super) is_other_program: bool,
    pub(super) heap: u64,
    /// Memory of the heap file, which it uses after the present server.
    pub(super) present_heap: u64,
    pub(super) threads: u64,
    /// Memory of the store, which it maps.
    pub(super) stored: u64,
}

impl Another {
    pub(super) fn memory(&self) -> u64 {
        let program = if self.is_other_program { PROGRAM } else { 0 };
        let heap = self.heap.saturating_sub(self.present_heap);
        // A page table has 8 bytes for each page.
        let tables = self.stored / 512;
        program + PROCESS + heap + self.threads * STACK + tables
    }
}

/// Refuses a second server if starting it could invoke the OOM killer.
pub(super) fn check_memory(meminfo: &str, needed: u64) -> anyhow::Result<()> {
    let of = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_start_matches(':').trim().strip_suffix(" kB")?.parse::<u64>().ok()
    };
    // Swapped-out pages are assumed to compress to half their size.
    let there = of("MemAvailable").zip(of("SwapFree"));
    let Some(there) = there.map(|(available, swap)| (available + swap / 2) << 10) else {
        return Ok(());
    };
    ensure!(
        there >= needed,
        "memory is short: another server takes {needed} bytes while both are there, and the \
         machine has {there} (MemAvailable, and half of SwapFree); try again when it has more"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_of_the_same_program_takes_neither_text_nor_a_second_heap() {
        let same = Another {
            is_other_program: false,
            heap: 7 << 20,
            present_heap: 7 << 20,
            threads: 14,
            stored: 150 << 20,
        };
        assert!(same.memory() < 6 << 20, "{}", same.memory());
        let larger = Another { heap: 9 << 20, ..same };
        assert_eq!(larger.memory(), same.memory() + (2 << 20));
        let smaller = Another { heap: 5 << 20, ..same };
        assert_eq!(smaller.memory(), same.memory());
        let other = Another { is_other_program: true, stored: 1 << 30, ..same };
        assert!(other.memory() > (24 + 4 + 2) << 20, "{}", other.memory());
    }

    #[test]
    fn another_server_needs_memory_or_free_swap() {
        let with = |available: u64, free: u64| {
            let text = format!(
                "MemTotal: 1 kB\nMemAvailable:   {available} kB\nSwapTotal: 9 kB\nSwapFree: {free} kB\n"
            );
            check_memory(&text, 48 << 20).err().map(|error| error.to_string()).unwrap_or_default()
        };
        assert_eq!(with(48 << 10, 0), "");
        assert_eq!(with(8 << 10, 80 << 10), "");
        let said = with(8 << 10, 79 << 10);
        assert!(
            said.contains("takes 50331648 bytes")
                && said.contains(&format!("has {}", (8 + 39) * 1024 * 1024 + 512 * 1024)),
            "{said}"
        );
        assert!(check_memory("", 1).is_ok(), "a kernel that does not say");
    }
}
