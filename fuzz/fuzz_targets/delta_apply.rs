//! Hostile delta tables: refused, or applied within chunk and cache. The table of an honest sender
//! restores its bytes.
//!
//! Input: slots (one byte), the chunk's pages (one byte, of 64 bytes each), length of the table
//! (u16), the table, and the chunk's bytes, which are repeated.
#![no_main]

use delta::{
    fill, ChannelCache, ChannelSender, Layout, PageReader, Receiver, Sender, Table, RECORD_HEAD,
    TABLE_ROOM,
};
use libfuzzer_sys::fuzz_target;
use std::sync::Arc;

const PAGE: usize = 64;
/// Pages of the seed.
const SEED: u32 = 9;

struct Reader;

impl PageReader for Reader {
    fn read(&mut self, number: u32) -> Result<&[u8], String> {
        assert!(number < SEED);
        Ok(&[3; PAGE])
    }
}

fuzz_target!(|input: &[u8]| {
    let [slots, pages, a, b, rest @ ..] = input else { return };
    let (table, bytes) = rest.split_at(rest.len().min(usize::from(u16::from_le_bytes([*a, *b]))));
    let len = usize::from(*pages) * (RECORD_HEAD + PAGE);
    let plain: Vec<u8> = bytes.iter().chain(&[0]).copied().cycle().take(len).collect();
    let cache = u64::from(*slots) * PAGE as u64;

    let mut receiver = Receiver::new(cache, PAGE);
    for (seed, layout) in
        [(0, Layout::Records), (SEED, Layout::Records), (0, Layout::Bodies), (SEED, Layout::Bodies)]
    {
        let table = Table { bytes: table, layout };
        let mut chunk = plain.clone();
        // As many pages of the seed are put into the chunk as the receiver then leaves alone.
        let slots = (u32::from(*slots), seed);
        let filled = fill(&mut chunk, table, PAGE, slots, &mut Reader);
        match receiver.apply(&mut chunk, table, seed) {
            Err(error) => assert!(!error.to_string().is_empty()),
            Ok(counts) if seed > 0 => assert_eq!(filled, Ok(counts.seeded)),
            Ok(counts) => assert_eq!(counts.seeded, 0),
        }
    }

    let (mut sender, mut receiver) = (Sender::new(cache, PAGE), Receiver::new(cache, PAGE));
    for address in bytes.iter().take(8).map(|byte| u64::from(*byte) * PAGE as u64) {
        let mut chunk = plain.clone();
        chunk.resize(len + TABLE_ROOM, 0);
        let mut pass = sender.begin(&mut chunk, len, None);
        pass.records(0, address, usize::from(*pages));
        let (table_len, sent) = pass.finish();
        let (chunk, table) = chunk.split_at_mut(len);
        assert_eq!(receiver.apply(chunk, (&table[..table_len]).into(), 0), Ok(sent));
        assert!(chunk == &plain[..]);
    }

    // The same pages on a multifd channel, with a SYNC after every other chunk.
    let shared = Arc::new(ChannelCache::new(cache, PAGE));
    let mut sender = ChannelSender::new(u32::from(*slots), PAGE);
    sender.set_cache(Some(shared));
    let mut receiver = Receiver::of_channel(Arc::new(ChannelCache::new(cache, PAGE)));
    for (nth, byte) in (0..).zip(bytes.iter().take(8)) {
        let mut chunk = plain.clone();
        chunk.resize(len + TABLE_ROOM, 0);
        let mut pass = sender.begin((&mut chunk, len), None, (nth / 2, true));
        let places: Vec<_> =
            (u64::from(*byte)..).map(|number| number * PAGE as u64).take(len / PAGE).collect();
        pass.bodies(0, len / PAGE, &places);
        let (table_len, sent) = pass.finish();
        let (chunk, table) = chunk.split_at_mut(len);
        let table = Table { bytes: &table[..table_len], layout: Layout::Bodies };
        assert_eq!(receiver.apply(chunk, table, 0), Ok(sent));
        assert!(chunk == &plain[..]);
    }
});
