//! An instance: its handle, its capabilities, its owner.

#![expect(unsafe_code, reason = "the C interface of libqat")]

use crate::counters::Counters;
use crate::load::Api;
use crate::mailbox::{on_event, Mailbox};
use crate::memory::{Pinned, ALIGN};
use crate::piece::MAX_PIECE;
use qat_abi as abi;
use qat_abi::{CpaBufferList, CpaFlatBuffer, CpaInstanceHandle, CpaStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The library's description of an instance.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct InstanceInfo {
    /// The instance's name.
    pub name: String,
    /// The kind of device.
    pub part: String,
    /// The device (`packageId`).
    pub package: u16,
    /// PCI bus, device and function, as in `bus:device.function`.
    pub address: String,
    /// NUMA node.
    pub node: i32,
    /// Whether a compression that fails the device's own check comes back as stored blocks.
    pub recovers: bool,
    /// Whether decompression reports the end of the final block.
    pub reports_end: bool,
}

/// Why a free instance could not be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InstanceError {
    /// Pinned memory ran out: the memlock limit, or the libraries' own.
    #[error("instance {instance}: no pinned memory ({len} bytes wanted); raise the memlock limit (ulimit -l)")]
    Memory { instance: String, len: usize },
    /// A call failed.
    #[error("instance {instance}: {call} answered {status}")]
    Call { instance: String, call: &'static str, status: CpaStatus },
}

/// The right to submit to an instance and to poll it. Its engine has the turn from its first piece
/// until it has none in flight; the event thread takes it for one poll. libqat lets two threads
/// poll at once, but not while a device dies: that poll walks the requests without the ring's lock,
/// and a request that another thread is about to submit is then returned twice (qatlib 24.02).
#[derive(Debug, Default)]
pub(crate) struct Turn(AtomicBool);

impl Turn {
    /// Takes the turn, unless another thread has it.
    pub(crate) fn try_take(&self) -> bool {
        !self.0.swap(true, Ordering::Acquire)
    }

    /// Takes the turn as soon as it is free, within `longest`; returns whether it was.
    pub(crate) fn take_within(&self, longest: Duration) -> bool {
        let mut since = None;
        while !self.try_take() {
            if since.get_or_insert_with(Instant::now).elapsed() > longest {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }

    /// Ends the turn. Only for the thread that has it.
    pub(crate) fn end(&self) {
        self.0.store(false, Ordering::Release);
    }
}

/// An instance of the process.
#[derive(Debug)]
pub(crate) struct Instance {
    handle: CpaInstanceHandle,
    pub(crate) ordinal: u16,
    pub(crate) mailbox: &'static Mailbox,
    pub(crate) info: InstanceInfo,
    /// Whether the event thread polls the instance, because it is suspect or an engine has left it
    /// with requests in flight.
    pub(crate) neglected: AtomicBool,
    claimed: AtomicBool,
    pub(crate) turn: Turn,
    /// Set after `cpaDcStartInstance` has succeeded. It owns the intermediate buffers.
    started: Mutex<Option<Vec<Pinned>>>,
    counters: Mutex<Option<Arc<Counters>>>,
    problem: Mutex<Option<String>>,
}

// SAFETY: the handle is a token for the library, whose functions are thread-safe.
unsafe impl Send for Instance {}
// SAFETY: as above; all other fields are atomic or behind a lock.
unsafe impl Sync for Instance {}

/// An instance that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Unfit {
    /// The instance's name.
    pub name: String,
    /// The missing capability.
    pub lacks: String,
}

impl Instance {
    /// Queries the library about `handle`. Returns `Err` for an instance that lacks a capability.
    pub(crate) fn probe(api: &Api, handle: CpaInstanceHandle, ordinal: u16) -> Result<Self, Unfit> {
        let nameless = || format!("instance {ordinal}");
        let unfit = |name: String, lacks: &str| Unfit { name, lacks: lacks.to_owned() };
        let mailbox = Mailbox::of(usize::from(ordinal))
            .ok_or_else(|| unfit(nameless(), "a place: more instances than this driver counts"))?;
        let mut info = abi::CpaInstanceInfo2::ZERO;
        // SAFETY: the handle came from the library; the pointer is to a live local.
        if unsafe { (api.info2)(handle, &raw mut info) } != abi::CPA_STATUS_SUCCESS {
            return Err(unfit(nameless(), "an answer to cpaDcInstanceGetInfo2"));
        }
        let mut name = text(&info.instName);
        if name.is_empty() {
            name = nameless();
        }
        let mut can = abi::CpaDcInstanceCapabilities::default();
        // SAFETY: as above.
        if unsafe { (api.capabilities)(handle, &raw mut can) } != abi::CPA_STATUS_SUCCESS {
            return Err(unfit(name, "an answer to cpaDcQueryCapabilities"));
        }
        for (has, what) in [
            (can.statelessDeflateCompression, "stateless deflate compression"),
            (can.statelessDeflateDecompression, "stateless deflate decompression"),
            (can.checksumCRC32, "CRC-32"),
            (can.dynamicHuffman, "dynamic Huffman trees"),
            (can.compressAndVerify, "compress-and-verify"),
            (info.isPolled, "polling"),
        ] {
            if has != abi::CPA_TRUE {
                return Err(unfit(name, what));
            }
        }
        let bus = info.physInstId.busAddress;
        let info = InstanceInfo {
            name,
            part: text(&info.partName),
            package: info.physInstId.packageId,
            address: format!("{:02x}:{:02x}.{}", bus >> 8, bus >> 3 & 0x1f, bus & 7),
            node: i32::try_from(info.nodeAffinity).unwrap_or(0),
            recovers: can.compressAndVerifyAndRecover == abi::CPA_TRUE,
            reports_end: can.endOfLastBlock == abi::CPA_TRUE,
        };
        mailbox.reset();
        let tag = std::ptr::without_provenance_mut(usize::from(ordinal));
        // SAFETY: the callback does not unwind and takes a number for its tag.
        let status = unsafe { (api.set_notification)(handle, Some(on_event), tag) };
        if status != abi::CPA_STATUS_SUCCESS {
            // Without events only deadlines would detect a dead device, and only probes a restarted
            // one.
            return Err(unfit(info.name, "events (cpaDcInstanceSetNotificationCb failed)"));
        }
        Ok(Self {
            handle,
            ordinal,
            mailbox,
            info,
            neglected: AtomicBool::new(false),
            claimed: AtomicBool::new(false),
            turn: Turn::default(),
            started: Mutex::new(None),
            counters: Mutex::new(None),
            problem: Mutex::new(None),
        })
    }

    pub(crate) fn handle(&self) -> CpaInstanceHandle {
        self.handle
    }

    /// Takes the instance for one engine.
    pub(crate) fn claim(&self) -> bool {
        self.claimed.compare_exchange(false, true, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    pub(crate) fn is_claimed(&self) -> bool {
        self.claimed.load(Ordering::Acquire)
    }

    pub(crate) fn release(&self) {
        self.neglected.store(false, Ordering::Relaxed);
        *lock(&self.counters) = None;
        self.claimed.store(false, Ordering::Release);
    }

    /// Records the counters of the instance's engine, and why the last attempt to use it failed.
    pub(crate) fn report(&self, counters: Option<Arc<Counters>>, problem: Option<String>) {
        *lock(&self.counters) = counters;
        *lock(&self.problem) = problem;
    }

    pub(crate) fn reported(&self) -> (Option<Arc<Counters>>, Option<String>) {
        (lock(&self.counters).clone(), lock(&self.problem).clone())
    }

    /// Runs callbacks. The caller must have the turn.
    pub(crate) fn poll(&self, api: &Api) -> CpaStatus {
        // SAFETY: the handle came from the library and is not stopped while this instance is in
        // use.
        unsafe { (api.poll_instance)(self.handle, 0) }
    }

    pub(crate) fn is_started(&self) -> bool {
        lock(&self.started).is_some()
    }

    /// Starts the instance unless an earlier engine has.
    pub(crate) fn start(&self, api: &'static Api) -> Result<(), InstanceError> {
        let mut started = lock(&self.started);
        if started.is_some() {
            return Ok(());
        }
        let call = |call: &'static str, status: CpaStatus| match status {
            abi::CPA_STATUS_SUCCESS => Ok(()),
            status => Err(InstanceError::Call { instance: self.info.name.clone(), call, status }),
        };
        // SAFETY: the handle came from the library; libusdm's function has the type asked for and
        // lives for ever.
        let status = unsafe { (api.set_translation)(self.handle, Some(api.virt_to_phys)) };
        call("cpaDcSetAddressTranslation", status)?;
        let mut count = 0;
        // SAFETY: as above; the pointer is to a live local.
        let status = unsafe { (api.num_intermediate)(self.handle, &raw mut count) };
        call("cpaDcGetNumIntermediateBuffers", status)?;
        let mut meta = 0;
        // SAFETY: as above.
        let status = unsafe { (api.meta_size)(self.handle, 1, &raw mut meta) };
        call("cpaDcBufferListGetMetaSize", status)?;
        let buffers = (0..count)
            .map(|_| self.intermediate(api, meta as usize))
            .collect::<Result<Vec<_>, InstanceError>>()?;
        let mut lists: Vec<*mut CpaBufferList> =
            buffers.iter().map(|buffer| buffer.start().cast()).collect();
        let lists = if lists.is_empty() { std::ptr::null_mut() } else { lists.as_mut_ptr() };
        // SAFETY: `lists` has `count` lists in pinned memory, which lives until the instance has
        // been stopped.
        let status = unsafe { (api.start_instance)(self.handle, count, lists) };
        call("cpaDcStartInstance", status)?;
        *started = Some(buffers);
        Ok(())
    }

    /// Stops the instance if it was started. `leak`: the device may still write to the intermediate
    /// buffers.
    pub(crate) fn stop(&self, api: &Api, leak: bool) {
        let Some(buffers) = lock(&self.started).take() else { return };
        // SAFETY: the handle came from the library, and no engine uses it any more.
        let status = unsafe { (api.stop_instance)(self.handle) };
        if leak || status != abi::CPA_STATUS_SUCCESS {
            std::mem::forget(buffers);
        }
    }

    /// A buffer for the device's first pass with dynamic trees: devices before 4xxx have no memory
    /// for that.
    fn intermediate(&self, api: &'static Api, meta: usize) -> Result<Pinned, InstanceError> {
        // Twice the largest output, as Intel's API document requires.
        let room = 2 * MAX_PIECE.next_multiple_of(4096) + 4096;
        let data = 128 + meta.next_multiple_of(ALIGN);
        let len = data + room;
        let memory = Pinned::new(api, len, self.info.node)
            .ok_or_else(|| InstanceError::Memory { instance: self.info.name.clone(), len })?;
        let at = |offset: usize| memory.start().wrapping_add(offset);
        let flat = CpaFlatBuffer {
            dataLenInBytes: u32::try_from(room).expect("a constant"),
            pData: at(data),
        };
        let list = CpaBufferList {
            numBuffers: 1,
            pBuffers: at(64).cast(),
            pUserData: std::ptr::null_mut(),
            pPrivateMetaData: at(128).cast(),
        };
        // SAFETY: aligned and within the new allocation.
        unsafe { at(64).cast::<CpaFlatBuffer>().write(flat) };
        // SAFETY: as above; the two do not overlap.
        unsafe { at(0).cast::<CpaBufferList>().write(list) };
        Ok(memory)
    }
}

/// A text of the library, which ends at its NUL byte.
fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).trim().to_owned()
}

/// These locks protect plain values that are valid at any time, so a panic elsewhere does not spoil
/// them.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_for_a_turn_that_is_not_given_back_ends() {
        let turn = Turn::default();
        assert!(turn.take_within(Duration::ZERO));
        assert!(!turn.take_within(Duration::from_millis(20)) && !turn.try_take());
        turn.end();
        assert!(turn.take_within(Duration::from_millis(20)));
    }
}
