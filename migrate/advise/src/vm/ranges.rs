//! The guest's RAM in its physical address space, from QEMU's memory map (`info mtree -f`).

use std::ops::Range;

/// The most ranges: hundreds of hot-plugged modules.
const MOST: usize = 4096;
/// The most lines read.
const LINES: usize = 65_536;

/// Returns the address ranges of RAM in the text of `info mtree -f`, ascending and without overlap.
/// Lines that are not understood are ignored.
///
/// ```text
/// FlatView #2
///  AS "memory", root: system
///   0000000000100000-0000000007ffffff (prio 0, ram): pc.ram @0000000000100000
/// ```
pub fn ram_ranges(text: &str) -> Vec<Range<u64>> {
    let mut found: Vec<Range<u64>> = Vec::new();
    let mut is_memory = false;
    for line in text.lines().take(LINES).map(str::trim) {
        if line.starts_with("FlatView") {
            is_memory = false;
        } else if line.starts_with("AS \"memory\"") {
            is_memory = true;
        } else if is_memory && found.len() < MOST {
            found.extend(range(line));
        }
    }
    found.sort_by_key(|range| range.start);
    let mut end = 0;
    for range in &mut found {
        range.start = range.start.max(end);
        end = end.max(range.end);
    }
    found.retain(|range| range.start < range.end);
    found
}

fn range(line: &str) -> Option<Range<u64>> {
    let (addresses, rest) = line.split_once(' ')?;
    // The name of the kind stands behind the priority: ram, rom, i/o, romd, nv-ram.
    let (_, kind) = rest.strip_prefix("(prio ")?.split_once("): ")?.0.split_once(", ")?;
    if kind != "ram" {
        return None;
    }
    let (first, last) = addresses.split_once('-')?;
    let hex = |digits: &str| u64::from_str_radix(digits, 16).ok();
    let (first, last) = (hex(first)?, hex(last)?);
    Some(first..last.checked_add(1)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MAP: &str = "\
FlatView #0
 AS \"I/O\", root: io
  0000000000000000-0000000000000007 (prio 0, ram): not this
FlatView #2
 AS \"memory\", root: system
 AS \"cpu-memory-0\", root: system
 Root memory region: system
  0000000000000000-000000000009ffff (prio 0, ram): pc.ram KVM
  00000000000a0000-00000000000bffff (prio 1, i/o): vga-lowmem
  00000000000c0000-00000000000c0fff (prio 0, rom): pc.ram @00000000000c0000
  0000000000100000-0000000007ffffff (prio 0, ram): pc.ram @0000000000100000
  0000000100000000-00000001ffffffff (prio 0, ram): pc.ram @0000000080000000
";

    #[test]
    fn ram_of_the_system_counts() {
        let found = ram_ranges(MAP);
        assert_eq!(found, [0..0xa0000, 0x10_0000..0x800_0000, 0x1_0000_0000..0x2_0000_0000]);
    }

    proptest! {
        /// Whatever a monitor answers: ascending ranges, and not too many.
        #[test]
        fn any_text_gives_ascending_ranges(
            lines in prop::collection::vec("[0-9a-f]{0,17}-[0-9a-f]{0,17} \\(prio [0-9]{1,3}, ram\\): .{0,9}", 0..40),
            noise in ".{0,200}",
        ) {
            let text = format!("{noise}\nFlatView #1\n AS \"memory\"\n{}\n{noise}", lines.join("\n"));
            let found = ram_ranges(&text);
            prop_assert!(found.len() <= MOST);
            prop_assert!(found.iter().all(|range| range.start < range.end));
            prop_assert!(found.windows(2).all(|pair| pair[0].end <= pair[1].start));
        }
    }
}
