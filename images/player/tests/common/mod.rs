//! Saved VMs of streams that tests make.

use std::path::Path;
use std::sync::Arc;

use image::{Image, Options, Writer};
use recorder::{record, Ending};

/// A page of 8-byte words that differ, and differ for each odd seed.
pub(crate) fn page(seed: u64) -> Vec<u8> {
    (0..512_u64).flat_map(|at| (at * at * (seed | 1)).to_le_bytes()).collect()
}

/// The image of a VM that was saved with this stream.
pub(crate) fn saved(path: &Path, stream: &[u8]) -> Arc<Image> {
    let mut writer = Writer::create(path, Options::default()).unwrap();
    let recorded = record(stream, &mut writer, Ending::Closed).unwrap();
    writer.finish(&recorded.state).unwrap().link().unwrap();
    Arc::new(Image::open(path).unwrap())
}
