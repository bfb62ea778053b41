//! The memory of a channel's slots: lists, operation, results, source and destination.

#![expect(unsafe_code, reason = "structures in pinned memory")]

use super::{Channel, DEST_FLAT, DEST_LIST, OP_DATA, RESULTS, SOURCE_FLAT, SOURCE_LIST};
use qat_abi as abi;
use qat_abi::{CpaBufferList, CpaDcOpData, CpaDcRqResults, CpaFlatBuffer};

impl Channel {
    /// The source of a slot, to be filled. The device must not have the slot.
    pub(crate) fn source_mut(&mut self, slot: u16) -> &mut [u8] {
        let start = self.at(slot, self.layout.source);
        // SAFETY: `room` initialised bytes of the slot; the device does not have the slot, and
        // cannot get it while `self` is borrowed.
        unsafe { std::slice::from_raw_parts_mut(start, self.room) }
    }

    /// The first `len` bytes of a slot's source; also while the device reads them.
    pub(crate) fn source(&self, slot: u16, len: usize) -> &[u8] {
        assert!(len <= self.room, "{len} bytes of source, the slot has {}", self.room);
        // SAFETY: `len` initialised bytes, written by this thread only and not while borrowed.
        unsafe { std::slice::from_raw_parts(self.at(slot, self.layout.source), len) }
    }

    /// The first `len` bytes of a slot's destination, after its callback.
    pub(crate) fn output(&self, slot: u16, len: usize) -> &[u8] {
        assert!(len <= self.room, "{len} bytes of output, the slot has {}", self.room);
        // SAFETY: `len` initialised bytes (zeroed when allocated); the callback has come, so
        // nothing writes to them.
        unsafe { std::slice::from_raw_parts(self.at(slot, self.layout.dest), len) }
    }

    /// The library's results of the request in `slot`, after its callback.
    pub(crate) fn results(&self, slot: u16) -> CpaDcRqResults {
        // SAFETY: aligned, initialised; the callback has come. Volatile because a device wrote it.
        unsafe { self.at(slot, RESULTS).cast::<CpaDcRqResults>().read_volatile() }
    }

    /// The part of a slot that changes with each request: the source's length, and empty results
    /// (`checksum` is the seed).
    pub(super) fn prepare(&mut self, slot: u16, len: usize) {
        let len = u32::try_from(len).expect("a slot is far below 4 GiB");
        let flat = CpaFlatBuffer { dataLenInBytes: len, pData: self.at(slot, self.layout.source) };
        // SAFETY: aligned, within the slot, and the slot is the driver's.
        unsafe { self.at(slot, SOURCE_FLAT).cast::<CpaFlatBuffer>().write(flat) };
        // SAFETY: as above.
        unsafe { self.at(slot, RESULTS).cast::<CpaDcRqResults>().write(CpaDcRqResults::default()) };
    }

    /// The part of a slot that is the same for all requests.
    pub(super) fn describe(&self, slot: usize) {
        let slot = u16::try_from(slot).expect("at most MAX_SLOTS slots");
        let list = |flat, meta| CpaBufferList {
            numBuffers: 1,
            pBuffers: self.at(slot, flat).cast(),
            pUserData: std::ptr::null_mut(),
            pPrivateMetaData: self.at(slot, meta).cast(),
        };
        let room = u32::try_from(self.room).expect("a slot is far below 4 GiB");
        let dest = CpaFlatBuffer { dataLenInBytes: room, pData: self.at(slot, self.layout.dest) };
        let operation = CpaDcOpData {
            flushFlag: abi::CPA_DC_FLUSH_FINAL,
            compressAndVerify: abi::CPA_TRUE,
            compressAndVerifyAndRecover: u32::from(self.instance.info.recovers),
            integrityCrcCheck: abi::CPA_FALSE,
            verifyHwIntegrityCrcs: abi::CPA_FALSE,
            integrityCrcSize: 0,
            inputSkipData: abi::CpaDcSkipData::default(),
            outputSkipData: abi::CpaDcSkipData::default(),
            pCrcData: std::ptr::null_mut(),
        };
        // SAFETY: all four are aligned, within the slot, do not overlap, and the slot is the
        // driver's.
        #[expect(clippy::multiple_unsafe_ops_per_block, reason = "four writes of the same kind")]
        unsafe {
            let source_list = list(SOURCE_FLAT, self.layout.source_meta);
            self.at(slot, SOURCE_LIST).cast::<CpaBufferList>().write(source_list);
            let dest_list = list(DEST_FLAT, self.layout.dest_meta);
            self.at(slot, DEST_LIST).cast::<CpaBufferList>().write(dest_list);
            self.at(slot, DEST_FLAT).cast::<CpaFlatBuffer>().write(dest);
            self.at(slot, OP_DATA).cast::<CpaDcOpData>().write(operation);
        }
    }

    pub(super) fn at(&self, slot: u16, offset: usize) -> *mut u8 {
        let slot = &self.slots[usize::from(slot)];
        debug_assert!(offset < slot.len());
        slot.start().wrapping_add(offset)
    }
}
