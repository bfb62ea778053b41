//! Compressed units as received from the link, and the memory for their plain bytes.

use codec::{Settings, UnitHeader};

use super::measure::{payload, Compressor};

/// A unit as received from the link.
pub(super) struct Unit {
    pub(super) header: UnitHeader,
    pub(super) payload: Vec<u8>,
}

pub(super) fn encode_all(pages: &[u8], settings: Settings, batch: usize) -> Vec<Unit> {
    let mut compressor = Compressor::new(settings);
    let mut out = vec![0; batch];
    let unit = |plain: &[u8]| {
        let unit = compressor.encode(plain, &mut out);
        let payload = payload(unit, plain, &out).to_vec();
        Unit { header: UnitHeader::of(plain, unit), payload }
    };
    pages.chunks(batch).map(unit).collect()
}

/// The memory for decompressed batches. A batch is lent to one thread at a time, and returned.
pub(super) struct Dest {
    want: &'static [u8],
    batch: usize,
    batches: Vec<Option<&'static mut [u8]>>,
}

impl Dest {
    pub(super) fn new(want: &'static [u8], batch: usize) -> Self {
        // Not zeros: a page that is never written must not look like a written one.
        let memory = vec![0xa5; want.len()].leak();
        Self { want, batch, batches: memory.chunks_mut(batch).map(Some).collect() }
    }

    pub(super) fn take(&mut self, index: usize) -> &'static mut [u8] {
        self.batches[index].take().expect("each batch is lent once")
    }

    pub(super) fn put_back(&mut self, index: usize, batch: Option<&'static mut [u8]>) {
        if batch.is_some() {
            self.batches[index] = batch;
        }
    }

    /// Checks that every byte is right.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        for (index, (want, got)) in self.want.chunks(self.batch).zip(&self.batches).enumerate() {
            anyhow::ensure!(got.as_deref() == Some(want), "batch {index} came out differently");
        }
        Ok(())
    }
}
