//! A monitor's memory map (`info mtree -f`): ascending ranges without overlap, whatever the text
//! is.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let text = String::from_utf8_lossy(input);
    let found = advise::vm::ram_ranges(&text);
    assert!(found.len() <= 4096);
    assert!(found.iter().all(|range| range.start < range.end));
    assert!(found.windows(2).all(|pair| pair[0].end <= pair[1].start));
});
