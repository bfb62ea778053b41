//! An application of the device, in process: an instance, a session, slots of pinned memory.

use qat_abi::*;
use qat_sim::script::Settings;
use qat_sim::{Counters, Device, Dma, Usdm};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// Pinned memory of the test process; devices of all tests share it, as devices of a process do.
pub(crate) static USDM: LazyLock<Usdm> = LazyLock::new(Usdm::default);

struct Shared;

impl Dma for Shared {
    fn read(&self, iova: u64, into: &mut [u8]) -> bool {
        USDM.read(iova, into)
    }
    fn write(&self, iova: u64, from: &[u8]) -> bool {
        USDM.write(iova, from)
    }
    fn configure(&self, _settings: &Settings) {}
    fn violations(&self) -> u64 {
        0
    }
}

pub(crate) unsafe extern "C" fn translate(address: *mut c_void) -> u64 {
    USDM.physical(address)
}

/// The arguments of a slot's callback.
#[derive(Default)]
pub(crate) struct Told {
    pub(crate) times: AtomicU32,
    pub(crate) status: AtomicI32,
}

unsafe extern "C" fn told(tag: *mut c_void, status: CpaStatus) {
    // SAFETY: every tag of these tests is a slot's `Told`.
    let told = unsafe { &*tag.cast::<Told>() };
    told.times.fetch_add(1, Ordering::Relaxed);
    told.status.store(status, Ordering::Relaxed);
}

/// One request's memory. Everything that the device reads or writes is pinned; the results need not
/// be.
pub(crate) struct Slot {
    pub(crate) source: *mut u8,
    pub(crate) target: *mut u8,
    pub(crate) lists: Box<[CpaBufferList; 2]>,
    pub(crate) flats: Box<[CpaFlatBuffer; 2]>,
    pub(crate) results: Box<CpaDcRqResults>,
    pub(crate) told: Box<Told>,
}

pub(crate) const ROOM: usize = 80_000;

pub(crate) fn pinned(bytes: usize) -> *mut u8 {
    let memory = USDM.allocate(bytes, 64);
    assert!(!memory.is_null());
    memory.cast()
}

impl Slot {
    pub(crate) fn new() -> Self {
        let (source, target) = (pinned(ROOM), pinned(ROOM));
        let flat = |data: *mut u8| CpaFlatBuffer { dataLenInBytes: 0, pData: data };
        let mut flats = Box::new([flat(source), flat(target)]);
        let list = |flats: *mut CpaFlatBuffer| CpaBufferList {
            numBuffers: 1,
            pBuffers: flats,
            pUserData: null_mut(),
            pPrivateMetaData: pinned(256).cast(),
        };
        let [first, second] = &mut *flats;
        let lists = Box::new([list(first), list(second)]);
        let results = Box::default();
        Self { source, target, lists, flats, results, told: Box::default() }
    }

    /// Lays out a request: `input`, and `room` bytes of rubbish for the output.
    pub(crate) fn fill(&mut self, input: &[u8], room: usize) {
        assert!(input.len() <= ROOM && room <= ROOM);
        // SAFETY: the buffer has ROOM bytes, and no request is in flight.
        unsafe { self.source.copy_from_nonoverlapping(input.as_ptr(), input.len()) };
        // SAFETY: as above.
        unsafe { self.target.write_bytes(0xee, ROOM) };
        self.flats[0].dataLenInBytes = u32::try_from(input.len()).expect("small");
        self.flats[1].dataLenInBytes = u32::try_from(room).expect("small");
        *self.results = CpaDcRqResults { status: 77, produced: 77, ..CpaDcRqResults::default() };
    }

    /// The device's output.
    pub(crate) fn output(&self) -> Vec<u8> {
        self.memory()[..self.results.produced as usize].to_vec()
    }

    /// All of the destination.
    pub(crate) fn memory(&self) -> Vec<u8> {
        let mut bytes = vec![0; ROOM];
        // SAFETY: the buffer has ROOM bytes.
        unsafe { self.target.copy_to_nonoverlapping(bytes.as_mut_ptr(), ROOM) };
        bytes
    }

    pub(crate) fn times(&self) -> u32 {
        self.told.times.load(Ordering::Relaxed)
    }

    pub(crate) fn status(&self) -> CpaStatus {
        self.told.status.load(Ordering::Relaxed)
    }
}

/// A started device with one session on each instance.
pub(crate) struct Rig {
    pub(crate) device: Device,
    pub(crate) handles: Vec<CpaInstanceHandle>,
    pub(crate) sessions: Vec<CpaDcSessionHandle>,
}

pub(crate) fn setup() -> CpaDcSessionSetupData {
    CpaDcSessionSetupData {
        compLevel: 1,
        compType: CPA_DC_DEFLATE,
        huffType: CPA_DC_HT_FULL_DYNAMIC,
        autoSelectBestHuffmanTree: CPA_DC_ASB_UNCOMP_STATIC_DYNAMIC_WITH_STORED_HDRS,
        sessDirection: CPA_DC_DIR_COMBINED,
        sessState: CPA_DC_STATELESS,
        windowSize: 7,
        checksum: CPA_DC_CRC32,
        ..CpaDcSessionSetupData::default()
    }
}

pub(crate) fn operation(flush: u32) -> CpaDcOpData {
    CpaDcOpData {
        flushFlag: flush,
        compressAndVerify: CPA_TRUE,
        compressAndVerifyAndRecover: CPA_FALSE,
        integrityCrcCheck: 0,
        verifyHwIntegrityCrcs: 0,
        integrityCrcSize: 0,
        inputSkipData: CpaDcSkipData::default(),
        outputSkipData: CpaDcSkipData::default(),
        pCrcData: null_mut(),
    }
}

impl Rig {
    pub(crate) fn new(script: &str) -> Self {
        Self::with(script, setup())
    }

    pub(crate) fn with(script: &str, mut setup: CpaDcSessionSetupData) -> Self {
        let device = Device::new(&Shared);
        device.control(script).expect("the script is good");
        assert_eq!(device.start(), CPA_STATUS_SUCCESS);
        let mut count = 0;
        // SAFETY: a local.
        unsafe { device.num_instances(&raw mut count) };
        let mut handles = vec![null_mut(); count.into()];
        // SAFETY: so many entries.
        let status = unsafe { device.instances(count, handles.as_mut_ptr()) };
        assert_eq!(status, CPA_STATUS_SUCCESS);
        let mut sessions = Vec::new();
        for handle in &handles {
            assert_eq!(device.set_translation(*handle, Some(translate)), CPA_STATUS_SUCCESS);
            let mut bytes = 0;
            // SAFETY: no buffers.
            let status = unsafe { device.start_instance(*handle, 0, null_mut()) };
            assert_eq!(status, CPA_STATUS_SUCCESS);
            // SAFETY: locals.
            unsafe { device.session_size(*handle, &raw mut setup, &raw mut bytes, null_mut()) };
            let session = pinned(bytes as usize).cast();
            // SAFETY: pinned memory of the size that was asked for.
            let status =
                unsafe { device.init_session(*handle, session, &raw mut setup, Some(told)) };
            assert_eq!(status, CPA_STATUS_SUCCESS);
            sessions.push(session);
        }
        Self { device, handles, sessions }
    }

    pub(crate) fn compress(&self, slot: &mut Slot) -> CpaStatus {
        self.compress_as(0, slot, &mut operation(CPA_DC_FLUSH_FINAL))
    }

    pub(crate) fn compress_as(
        &self,
        instance: usize,
        slot: &mut Slot,
        operation: &mut CpaDcOpData,
    ) -> CpaStatus {
        let [source, target] = &mut *slot.lists;
        // SAFETY: a slot's pointers stay valid while it lives, and tests keep slots until their
        // answers came.
        unsafe {
            self.device.compress(
                self.handles[instance],
                self.sessions[instance],
                source,
                target,
                operation,
                &raw mut *slot.results,
                (&raw mut *slot.told).cast(),
            )
        }
    }

    pub(crate) fn decompress(&self, slot: &mut Slot) -> CpaStatus {
        let [source, target] = &mut *slot.lists;
        // SAFETY: as above.
        unsafe {
            self.device.decompress(
                self.handles[0],
                self.sessions[0],
                source,
                target,
                &raw mut *slot.results,
                CPA_DC_FLUSH_FINAL,
                (&raw mut *slot.told).cast(),
            )
        }
    }

    pub(crate) fn poll(&self) -> CpaStatus {
        self.device.poll(self.handles[0], 0)
    }

    /// Polls until the slots have had as many answers in all. A minute without is a hang.
    pub(crate) fn wait(&self, slots: &[Slot], answers: u32) {
        let start = Instant::now();
        while slots.iter().map(Slot::times).sum::<u32>() < answers {
            for handle in &self.handles {
                self.device.poll(*handle, 0);
            }
            assert!(start.elapsed() < Duration::from_secs(300), "no answer");
            std::thread::yield_now();
        }
    }

    /// One request and its answer.
    pub(crate) fn compress_one(&self, input: &[u8], room: usize) -> Slot {
        let mut slot = Slot::new();
        slot.fill(input, room);
        assert_eq!(self.compress(&mut slot), CPA_STATUS_SUCCESS);
        self.wait(std::slice::from_ref(&slot), 1);
        slot
    }

    pub(crate) fn decompress_one(&self, input: &[u8], room: usize) -> Slot {
        let mut slot = Slot::new();
        slot.fill(input, room);
        assert_eq!(self.decompress(&mut slot), CPA_STATUS_SUCCESS);
        self.wait(std::slice::from_ref(&slot), 1);
        slot
    }

    pub(crate) fn counters(&self) -> Counters {
        self.device.counters()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        assert_eq!(self.device.stop(), CPA_STATUS_SUCCESS);
        if !std::thread::panicking() {
            assert_eq!(self.counters().violations, 0);
        }
    }
}

/// Bytes that compress somewhat.
pub(crate) fn text(len: usize) -> Vec<u8> {
    (0..len).map(|at| b"the quick brown fox, "[at * at / 7 % 21]).collect()
}

/// Bytes that do not compress.
pub(crate) fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_u32;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state.to_le_bytes()[1]
    };
    (0..len).map(|_| next()).collect()
}
