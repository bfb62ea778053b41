//! One session on one instance, with the pinned slots of its requests. This module only talks to
//! the C interface; `device` decides what to submit and handles the answers.
//!
//! A slot is one pinned allocation: two buffer lists with their flat buffers and the library's
//! private data, the operation, the results, the source bytes, the destination bytes. From a
//! successful submission until its callback a slot belongs to the device. Meanwhile the driver may
//! read the source, which the device only reads too, and touches nothing else of the slot.

#![expect(unsafe_code, reason = "the C interface of libqat, and structures in pinned memory")]

mod closing;
mod slots;

use crate::calls::{Call, Calls};
use crate::instance::{Instance, InstanceError};
use crate::load::Api;
use crate::mailbox::{on_completion, MAX_SLOTS};
use crate::memory::{Pinned, ALIGN};
use crate::piece::Op;
use qat_abi as abi;
use qat_abi::CpaStatus;
use std::sync::Arc;
use std::time::Duration;

/// The parameters of a session.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setup {
    /// Compression level, 1 to 12.
    pub(crate) level: u32,
    /// `CpaDcSessionDir`.
    pub(crate) direction: u32,
    /// The number of slots, at most `MAX_SLOTS`.
    pub(crate) slots: usize,
    /// The most plain bytes of a request.
    pub(crate) max_plain: usize,
    /// The least bytes of a slot's source, and of its destination.
    pub(crate) room: usize,
}

/// Offsets within a slot, bytes.
#[derive(Debug, Clone, Copy)]
struct Layout {
    source_meta: usize,
    dest_meta: usize,
    source: usize,
    dest: usize,
    end: usize,
}

/// The longest wait for the event thread's poll.
const LONGEST_POLL: Duration = Duration::from_millis(20);

/// A larger bound in bytes is not trusted: twice the largest piece.
const MAX_BOUND: u32 = 128 << 10;
const SOURCE_LIST: usize = 0;
const DEST_LIST: usize = 32;
const SOURCE_FLAT: usize = 64;
const DEST_FLAT: usize = 80;
const OP_DATA: usize = 128;
const RESULTS: usize = 192;
const CONTROL_END: usize = 256;

impl Layout {
    fn new(meta: usize, room: usize) -> Self {
        let round = |len: usize| len.next_multiple_of(ALIGN);
        let source_meta = CONTROL_END;
        let dest_meta = source_meta + round(meta);
        let source = dest_meta + round(meta);
        // The destination is last: a device that writes beyond it leaves the allocation and does
        // not hit a list.
        let dest = source + round(room);
        Self { source_meta, dest_meta, source, dest, end: dest + room }
    }
}

/// The device's half of an engine.
#[derive(Debug)]
pub(crate) struct Channel {
    api: &'static Api,
    instance: Arc<Instance>,
    session: Pinned,
    slots: Vec<Pinned>,
    layout: Layout,
    room: usize,
    /// Requests that the device has accepted and not called back for.
    owned: usize,
    /// Whether this channel has the instance's turn.
    turn: bool,
    /// Whether the last wait for the turn was in vain.
    gave_up: bool,
    /// The engine's record of the library's calls.
    calls: Arc<Calls>,
}

impl Channel {
    /// Starts the instance if necessary, and a session on it. The caller has claimed the instance.
    pub(crate) fn new(
        api: &'static Api,
        instance: Arc<Instance>,
        setup: &Setup,
        calls: &Arc<Calls>,
    ) -> Result<Self, InstanceError> {
        let _inside = calls.enter(Call::Open);
        let name = || instance.info.name.clone();
        let call = |call: &'static str, status: CpaStatus| match status {
            abi::CPA_STATUS_SUCCESS => Ok(()),
            status => Err(InstanceError::Call { instance: name(), call, status }),
        };
        let pinned = |len: usize| {
            Pinned::new(api, len, instance.info.node)
                .ok_or_else(|| InstanceError::Memory { instance: name(), len })
        };
        instance.start(api)?;
        let handle = instance.handle();
        let mut meta = 0;
        // SAFETY: the handle came from the library and is not stopped while a channel exists.
        let status = unsafe { (api.meta_size)(handle, 1, &raw mut meta) };
        call("cpaDcBufferListGetMetaSize", status)?;
        let mut data = abi::CpaDcSessionSetupData {
            compLevel: setup.level,
            compType: abi::CPA_DC_DEFLATE,
            huffType: abi::CPA_DC_HT_FULL_DYNAMIC,
            // Incompressible bytes come back as stored blocks, which every inflater reads.
            autoSelectBestHuffmanTree: abi::CPA_DC_ASB_UNCOMP_STATIC_DYNAMIC_WITH_STORED_HDRS,
            sessDirection: setup.direction,
            sessState: abi::CPA_DC_STATELESS,
            windowSize: abi::CPA_DC_WINSIZE_32K,
            checksum: abi::CPA_DC_CRC32,
            ..Default::default()
        };
        let (mut session_len, mut context_len) = (0, 0);
        // SAFETY: as above; the three pointers are to live locals.
        let status = unsafe {
            (api.session_size)(handle, &raw mut data, &raw mut session_len, &raw mut context_len)
        };
        call("cpaDcGetSessionSize", status)?;
        let session = pinned((session_len as usize).max(ALIGN))?;
        let mut bound = 0;
        if let (Some(compress_bound), Ok(plain)) =
            (api.compress_bound, u32::try_from(setup.max_plain))
        {
            // SAFETY: as above.
            let status = unsafe {
                compress_bound(handle, abi::CPA_DC_HT_FULL_DYNAMIC, plain, &raw mut bound)
            };
            // If the library does not know the bound, `setup.room` applies, and an output that does
            // not fit is an error.
            bound = if status == abi::CPA_STATUS_SUCCESS { bound.min(MAX_BOUND) } else { 0 };
        }
        let room = setup.room.max(bound as usize);
        let layout = Layout::new(meta as usize, room);
        assert!(setup.slots <= MAX_SLOTS, "{} slots, {MAX_SLOTS} at most", setup.slots);
        let slots = (0..setup.slots)
            .map(|_| pinned(layout.end))
            .collect::<Result<Vec<_>, InstanceError>>()?;
        // SAFETY: the session's memory is of the size asked for and lives until the session has
        // been removed; stateless sessions have no context; the callback does not unwind.
        let status = unsafe {
            (api.init_session)(
                handle,
                session.start().cast(),
                &raw mut data,
                std::ptr::null_mut(),
                Some(on_completion),
            )
        };
        call("cpaDcInitSession", status)?;
        let calls = Arc::clone(calls);
        let channel = Self {
            api,
            instance,
            session,
            slots,
            layout,
            room,
            owned: 0,
            turn: false,
            gave_up: false,
            calls,
        };
        // The claim makes this channel the only owner.
        channel.instance.mailbox.clear();
        for slot in 0..channel.slots.len() {
            channel.describe(slot);
        }
        Ok(channel)
    }

    pub(crate) fn instance(&self) -> &Arc<Instance> {
        &self.instance
    }

    /// Requests for which the device has not called back.
    pub(crate) fn owned(&self) -> usize {
        self.owned
    }

    /// Words of the mailbox with bits of this channel's slots.
    pub(crate) fn words(&self) -> usize {
        self.slots.len().div_ceil(64)
    }

    /// Submits `len` bytes of the slot's source. After SUCCESS the slot belongs to the device.
    pub(crate) fn submit(&mut self, slot: u16, len: usize, op: Op) -> CpaStatus {
        if !self.take_turn() {
            return abi::CPA_STATUS_FAIL;
        }
        self.prepare(slot, len);
        let tag = self.expect(slot);
        let (instance, session) = (self.instance.handle(), self.session.start().cast());
        let [source, dest] = [SOURCE_LIST, DEST_LIST].map(|list| self.at(slot, list).cast());
        let (operation, results) = (self.at(slot, OP_DATA).cast(), self.at(slot, RESULTS).cast());
        // SAFETY, for both: all of it is pinned memory of this slot, described by `describe` and
        // `prepare`, and stays untouched until the callback; `owned` keeps it from being freed
        // before.
        let inside = self.calls.enter(match op {
            Op::Compress => Call::Compress,
            Op::Decompress { .. } => Call::Decompress,
        });
        let status = match op {
            // SAFETY: see above.
            Op::Compress => unsafe {
                (self.api.compress)(instance, session, source, dest, operation, results, tag)
            },
            // SAFETY: see above.
            Op::Decompress { .. } => unsafe {
                let flush = abi::CPA_DC_FLUSH_FINAL;
                (self.api.decompress)(instance, session, source, dest, results, flush, tag)
            },
        };
        drop(inside);
        // If a callback came despite the refusal, it counts: it is taken back like any other.
        if status == abi::CPA_STATUS_SUCCESS || !self.instance.mailbox.give_up(slot) {
            self.owned += 1;
            return abi::CPA_STATUS_SUCCESS;
        }
        status
    }

    /// Runs the callbacks of finished requests. Returns FAIL without the instance's turn.
    pub(crate) fn poll(&mut self) -> CpaStatus {
        if !self.take_turn() {
            return abi::CPA_STATUS_FAIL;
        }
        let _inside = self.calls.enter(Call::Poll);
        self.instance.poll(self.api)
    }

    /// Takes the instance's turn until `rest`, so that no other thread submits to the instance or
    /// polls it. Returns `false` if the event thread does not end its poll. A poll takes
    /// microseconds: a longer one has no CPU, or is stuck in the library. The engine then works in
    /// software, as after any failure. It does not wait again until it has had the turn: with a
    /// wait in each of its polls it would do next to no work.
    fn take_turn(&mut self) -> bool {
        let longest = if self.gave_up { Duration::ZERO } else { LONGEST_POLL };
        self.turn = self.turn || self.instance.turn.take_within(longest);
        self.gave_up = !self.turn;
        self.turn
    }

    /// Lets the event thread poll the instance again.
    pub(crate) fn rest(&mut self) {
        if std::mem::take(&mut self.turn) {
            self.instance.turn.end();
        }
    }

    /// Takes the callback of `slot`, which belongs to the driver again. Returns the callback's
    /// status.
    pub(crate) fn take_back(&mut self, slot: u16) -> CpaStatus {
        self.owned -= 1;
        self.instance.mailbox.status(slot)
    }

    fn expect(&self, slot: u16) -> *mut std::ffi::c_void {
        self.instance.mailbox.expect(self.instance.ordinal, slot)
    }
}

/// The slot of the lowest bit set in `bits` of word `word`.
pub(crate) fn slot_of(word: usize, bits: u64) -> u16 {
    u16::try_from(word * 64 + bits.trailing_zeros() as usize).expect("at most MAX_SLOTS slots")
}
