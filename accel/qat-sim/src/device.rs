//! The device behind libqat's functions: start and stop, handles, events, the script.
//!
//! Every method is one exported function, with its C types; `Device` is what makes them testable in process. A
//! started machine is never freed: a thread that polls events while another stops the library must find memory.
//! Starts are few, and a machine is some hundred kilobytes.

#![expect(unsafe_code, reason = "takes the pointers of a C interface")]

use crate::counters::{add, Counters, Tallies};
use crate::engine::{clock_ns, Clocks, Doorbell, Service};
use crate::faults::{Deed, Effect, Faults, Verdict};
use crate::instance::{Call, Instance, Notify, State, Task};
use crate::script::{Action, Direction, Engine, Order, Script, Settings};
use crate::{engine, sgl};
use qat_abi::*;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// How the device reaches pinned memory, and the settings of it.
pub trait Dma: Sync {
    /// Reads all of `into` from a bus address, or nothing.
    fn read(&self, iova: u64, into: &mut [u8]) -> bool;
    /// Writes all of `from`, or nothing.
    fn write(&self, iova: u64, from: &[u8]) -> bool;
    /// Takes layout and limit for allocations from now on.
    fn configure(&self, settings: &Settings);
    /// Frees of what was no allocation.
    fn violations(&self) -> u64;
}

/// The simulated library with its devices.
pub struct Device {
    dma: &'static dyn Dma,
    tallies: &'static Tallies,
    control: Mutex<Control>,
    /// Null while stopped.
    machine: AtomicPtr<Machine>,
}

struct Control {
    settings: Settings,
    script: Script,
    threads: Vec<JoinHandle<()>>,
}

/// A started library.
pub(crate) struct Machine {
    pub(crate) settings: Settings,
    pub(crate) instances: Vec<Instance>,
    /// By package.
    pub(crate) services: Vec<Service>,
    pub(crate) tallies: &'static Tallies,
    pub(crate) dma: &'static dyn Dma,
    pub(crate) clocks: Clocks,
    pub(crate) doorbell: Doorbell,
    pub(crate) stopping: AtomicBool,
    faults: Faults,
    events: Mutex<VecDeque<Event>>,
    events_count: AtomicU64,
    late: Mutex<Vec<Late>>,
    late_count: AtomicU64,
    timed: bool,
}

#[derive(Debug, Clone, Copy)]
struct Late {
    due_ns: u64,
    instance: usize,
    task: Task,
}

/// Something for the notification callbacks of one device.
#[derive(Debug, Clone, Copy)]
struct Event {
    package: usize,
    kind: u32,
    not_before_ns: u64,
    /// RESTARTING: when the application was told. It has 10 s to poll its rings empty.
    told_ns: Option<u64>,
}

const DRAIN_NS: u64 = 10_000_000_000;
/// Handles are no addresses: whoever follows one faults.
const HANDLES: usize = 0x5141_5400_0000;
const HANDLE_STEP: usize = 0x100;
/// `cpaDcGetSessionSize`.
const SESSION_BYTES: usize = 1024;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn now_ns() -> u64 {
    clock_ns(libc::CLOCK_MONOTONIC)
}

impl Device {
    /// A stopped device with default settings. Its counters live as long as the process.
    pub fn new(dma: &'static dyn Dma) -> Self {
        Self {
            dma,
            tallies: Box::leak(Box::new(Tallies::new())),
            control: Mutex::new(Control {
                settings: Settings::default(),
                script: Script::default(),
                threads: Vec::new(),
            }),
            machine: AtomicPtr::new(std::ptr::null_mut()),
        }
    }

    fn machine(&self) -> Option<&'static Machine> {
        // SAFETY: null, or a machine that `start` leaked: machines are never freed.
        unsafe { self.machine.load(Ordering::Acquire).as_ref() }
    }

    fn instance(&self, handle: CpaInstanceHandle) -> Option<(&'static Machine, &'static Instance)> {
        let machine = self.machine()?;
        let index = match handle as usize {
            // CPA_INSTANCE_HANDLE_SINGLE: the first one.
            0 => 0,
            address => {
                let offset = address.checked_sub(HANDLES)?;
                if offset % HANDLE_STEP != 0 {
                    return None;
                }
                offset / HANDLE_STEP
            }
        };
        Some((machine, machine.instances.get(index)?))
    }

    /// `platen_qat_sim_control`: replaces the faults; set-up lines only while stopped.
    ///
    /// # Errors
    /// What is wrong with the script, or that the device runs; nothing was changed then.
    pub fn control(&self, text: &str) -> Result<(), String> {
        let script = Script::parse(text).map_err(|error| error.to_string())?;
        let mut control = lock(&self.control);
        let machine = self.machine();
        if machine.is_some() && script.has_setup() {
            return Err("set-up lines need a stopped device".into());
        }
        if script.resets() {
            control.settings = Settings::default();
            self.tallies.clear();
        }
        script.apply(&mut control.settings);
        if machine.is_none() {
            self.dma.configure(&control.settings);
        }
        if let Some(machine) = machine {
            machine.faults.set(script.rules());
            if script.resets() {
                machine.act(Deed { instance: None, action: Action::Revive });
            }
            machine.tick();
        }
        control.script = script;
        Ok(())
    }

    /// What was counted so far.
    pub fn counters(&self) -> Counters {
        let mut counters = self.tallies.sum();
        counters.violations += self.dma.violations();
        if let Some(machine) = self.machine() {
            counters.device_cpu_ns += machine.clocks.read();
            counters.in_flight = machine.instances.iter().map(Instance::in_flight).sum();
            counters.sessions = machine.instances.iter().map(Instance::session_count).sum();
        }
        counters
    }

    /// `icp_sal_userIsQatAvailable`.
    pub fn is_available(&self) -> CpaBoolean {
        CpaBoolean::from(!lock(&self.control).settings.absent)
    }

    /// `icp_sal_userStartMultiProcess`; a second start changes nothing.
    pub fn start(&self) -> CpaStatus {
        let mut control = lock(&self.control);
        if self.machine().is_some() {
            return CPA_STATUS_SUCCESS;
        }
        if control.settings.absent {
            return CPA_STATUS_FAIL;
        }
        let machine = Machine::new(&control.settings, &control.script, self.tallies, self.dma);
        let machine: &'static Machine = Box::leak(Box::new(machine));
        let stored = control.settings.engine == Engine::Stored;
        let threads = match control.settings.order {
            // One thread keeps the order, and is more than stored blocks need.
            Order::Fifo => 1,
            Order::Shuffled if stored => 1,
            Order::Shuffled => {
                let cores = std::thread::available_parallelism().map_or(1, usize::from);
                control.settings.engines.min(cores).min(4)
            }
        };
        for index in 0..threads {
            let seed = control.settings.seed.wrapping_add(index as u64 * 0x1_0000);
            let name = format!("qat-sim-{index}");
            let thread = std::thread::Builder::new().name(name);
            match thread.spawn(move || engine::run(machine, seed)) {
                Ok(handle) => control.threads.push(handle),
                Err(_) if index > 0 => break,
                Err(_) => return CPA_STATUS_RESOURCE,
            }
        }
        self.machine.store(std::ptr::from_ref(machine).cast_mut(), Ordering::Release);
        machine.tick();
        CPA_STATUS_SUCCESS
    }

    /// `icp_sal_userStop`.
    pub fn stop(&self) -> CpaStatus {
        let mut control = lock(&self.control);
        let Some(machine) = self.machine() else { return CPA_STATUS_SUCCESS };
        self.machine.store(std::ptr::null_mut(), Ordering::Release);
        machine.stopping.store(true, Ordering::Release);
        machine.doorbell.ring();
        for thread in control.threads.drain(..) {
            // A device thread that panicked has said so; there is nobody to tell it to here.
            let _ = thread.join();
        }
        CPA_STATUS_SUCCESS
    }

    /// `icp_sal_poll_device_events`. No cancellation point: locks are futexes, and nothing sleeps or prints.
    pub fn poll_events(&self) -> CpaStatus {
        let Some(machine) = self.machine() else { return CPA_STATUS_FAIL };
        machine.tick();
        if machine.events_count.load(Ordering::Acquire) > 0 {
            machine.deliver_events();
        }
        CPA_STATUS_SUCCESS
    }

    /// `icp_sal_DcPollInstance`.
    pub fn poll(&self, handle: CpaInstanceHandle, quota: u32) -> CpaStatus {
        let Some((machine, instance)) = self.instance(handle) else {
            return CPA_STATUS_INVALID_PARAM;
        };
        let tally = &machine.tallies.instances[instance.index];
        add(&tally.polls, 1);
        if machine.faults.is_armed() {
            let mut deeds = Vec::new();
            let failing = machine.faults.poll(instance.index, now_ns(), &mut deeds);
            deeds.into_iter().for_each(|deed| machine.act(deed));
            if failing {
                add(&machine.tallies.faults, 1);
                return CPA_STATUS_FAIL;
            }
        }
        instance.poll(quota, &mut now_ns, tally)
    }

    /// `cpaDcGetNumInstances`.
    ///
    /// # Safety
    /// `count` is null or valid for a write.
    pub unsafe fn num_instances(&self, count: *mut u16) -> CpaStatus {
        let Some(machine) = self.machine() else { return CPA_STATUS_FAIL };
        let instances = u16::try_from(machine.instances.len()).unwrap_or(u16::MAX);
        // SAFETY: the caller's promise.
        unsafe { put(count, instances) }
    }

    /// `cpaDcGetInstances`.
    ///
    /// # Safety
    /// `handles` is null or valid for so many writes.
    pub unsafe fn instances(&self, count: u16, handles: *mut CpaInstanceHandle) -> CpaStatus {
        let Some(machine) = self.machine() else { return CPA_STATUS_FAIL };
        if handles.is_null() || count == 0 {
            return CPA_STATUS_INVALID_PARAM;
        }
        if usize::from(count) > machine.instances.len() {
            return CPA_STATUS_RESOURCE;
        }
        for index in 0..usize::from(count) {
            // SAFETY: the caller's promise.
            let slot = unsafe { handles.add(index) };
            // SAFETY: the caller's promise.
            unsafe { slot.write(handle_of(index)) };
        }
        CPA_STATUS_SUCCESS
    }

    /// `cpaDcInstanceGetInfo2`.
    ///
    /// # Safety
    /// `info` is null or valid for a write.
    pub unsafe fn info(&self, handle: CpaInstanceHandle, info: *mut CpaInstanceInfo2) -> CpaStatus {
        let Some((machine, instance)) = self.instance(handle) else {
            return CPA_STATUS_INVALID_PARAM;
        };
        let mut filled = CpaInstanceInfo2 {
            accelerationServiceType: CPA_ACC_SVC_TYPE_DATA_COMPRESSION,
            physInstId: CpaPhysicalInstanceId {
                packageId: u16::try_from(instance.package).unwrap_or(0),
                acceleratorId: u16::try_from(instance.index).unwrap_or(0),
                ..CpaPhysicalInstanceId::default()
            },
            operState: u32::from(instance.is_started() && instance.state() == State::Running),
            requiresPhysicallyContiguousMemory: CpaBoolean::from(machine.settings.contiguous),
            isPolled: CPA_TRUE,
            // The truth about everything but the name: software that asks is to see a 4xxx.
            isOffloaded: CPA_TRUE,
            ..CpaInstanceInfo2::ZERO
        };
        text(&mut filled.vendorName, "platen (simulated)");
        text(&mut filled.partName, "qat_4xxx_simulated");
        text(&mut filled.swVersion, concat!("Version ", env!("CARGO_PKG_VERSION")));
        text(&mut filled.instName, &format!("Dc{}", instance.index));
        text(&mut filled.instID, &format!("SIM_Dc{}", instance.index));
        // SAFETY: the caller's promise.
        unsafe { put(info, filled) }
    }

    /// `cpaDcQueryCapabilities`.
    ///
    /// # Safety
    /// `capabilities` is null or valid for a write.
    pub unsafe fn capabilities(
        &self,
        handle: CpaInstanceHandle,
        capabilities: *mut CpaDcInstanceCapabilities,
    ) -> CpaStatus {
        let Some((machine, _)) = self.instance(handle) else { return CPA_STATUS_INVALID_PARAM };
        let filled = CpaDcInstanceCapabilities {
            statelessDeflateCompression: CPA_TRUE,
            statelessDeflateDecompression: CPA_TRUE,
            checksumCRC32: CPA_TRUE,
            checksumAdler32: CPA_TRUE,
            dynamicHuffman: CPA_TRUE,
            dynamicHuffmanBufferReq: CpaBoolean::from(machine.settings.intermediate > 0),
            autoSelectBestHuffmanTree: CPA_TRUE,
            validWindowSizeMaskCompression: 1 << CPA_DC_WINSIZE_32K,
            validWindowSizeMaskDecompression: 1 << CPA_DC_WINSIZE_32K,
            endOfLastBlock: CPA_TRUE,
            compressAndVerify: CPA_TRUE,
            compressAndVerifyStrict: CPA_TRUE,
            compressAndVerifyAndRecover: CPA_TRUE,
            ..CpaDcInstanceCapabilities::default()
        };
        // SAFETY: the caller's promise.
        unsafe { put(capabilities, filled) }
    }

    /// `cpaDcInstanceSetNotificationCb`.
    pub fn set_notification(
        &self,
        handle: CpaInstanceHandle,
        callback: CpaDcInstanceNotificationCbFunc,
        tag: *mut c_void,
    ) -> CpaStatus {
        let Some((_, instance)) = self.instance(handle) else { return CPA_STATUS_INVALID_PARAM };
        *lock(&instance.notify) = Notify(callback, tag);
        CPA_STATUS_SUCCESS
    }

    /// `cpaDcSetAddressTranslation`.
    pub fn set_translation(
        &self,
        handle: CpaInstanceHandle,
        translation: CpaVirtualToPhysical,
    ) -> CpaStatus {
        let Some((_, instance)) = self.instance(handle) else { return CPA_STATUS_INVALID_PARAM };
        if translation.is_none() {
            return CPA_STATUS_INVALID_PARAM;
        }
        instance.set_translation(translation);
        CPA_STATUS_SUCCESS
    }

    /// `cpaDcGetNumIntermediateBuffers`.
    ///
    /// # Safety
    /// `count` is null or valid for a write.
    pub unsafe fn num_intermediate(&self, handle: CpaInstanceHandle, count: *mut u16) -> CpaStatus {
        let Some((machine, _)) = self.instance(handle) else { return CPA_STATUS_INVALID_PARAM };
        // SAFETY: the caller's promise.
        unsafe { put(count, machine.settings.intermediate) }
    }

    /// `cpaDcStartInstance`.
    ///
    /// # Safety
    /// `buffers` is null or has `count` entries, each null or a valid list.
    pub unsafe fn start_instance(
        &self,
        handle: CpaInstanceHandle,
        count: u16,
        buffers: *mut *mut CpaBufferList,
    ) -> CpaStatus {
        let Some((machine, instance)) = self.instance(handle) else {
            return CPA_STATUS_INVALID_PARAM;
        };
        if count != machine.settings.intermediate {
            return CPA_STATUS_INVALID_PARAM;
        }
        if count > 0 {
            let Some(translation) = instance.translation() else { return CPA_STATUS_FAIL };
            if buffers.is_null() {
                return CPA_STATUS_INVALID_PARAM;
            }
            for index in 0..usize::from(count) {
                // SAFETY: the caller's promise.
                let slot = unsafe { buffers.add(index) };
                // SAFETY: the caller's promise.
                let list = unsafe { slot.read() };
                // SAFETY: the caller's promise.
                if let Err(status) = unsafe { sgl::pinned(list, translation) } {
                    return status;
                }
            }
        }
        instance.start();
        CPA_STATUS_SUCCESS
    }

    /// `cpaDcStopInstance`: what is in flight is never answered. FAIL from within a callback.
    pub fn stop_instance(&self, handle: CpaInstanceHandle) -> CpaStatus {
        let Some((_, instance)) = self.instance(handle) else { return CPA_STATUS_INVALID_PARAM };
        match instance.stop() {
            true => CPA_STATUS_SUCCESS,
            false => CPA_STATUS_FAIL,
        }
    }

    /// `cpaDcBufferListGetMetaSize`.
    ///
    /// # Safety
    /// `bytes` is null or valid for a write.
    pub unsafe fn meta_size(
        &self,
        handle: CpaInstanceHandle,
        flats: u32,
        bytes: *mut u32,
    ) -> CpaStatus {
        match (self.instance(handle), sgl::meta_bytes(flats)) {
            // SAFETY: the caller's promise.
            (Some(_), Some(size)) if flats > 0 => unsafe { put(bytes, size) },
            _ => CPA_STATUS_INVALID_PARAM,
        }
    }

    /// `cpaDcGetSessionSize`.
    ///
    /// # Safety
    /// The pointers are null or valid.
    pub unsafe fn session_size(
        &self,
        handle: CpaInstanceHandle,
        setup: *mut CpaDcSessionSetupData,
        session: *mut u32,
        context: *mut u32,
    ) -> CpaStatus {
        if self.instance(handle).is_none() || setup.is_null() {
            return CPA_STATUS_INVALID_PARAM;
        }
        // SAFETY: not null, and the caller's promise.
        if let Err(status) = check_setup(&unsafe { setup.read() }) {
            return status;
        }
        if !context.is_null() {
            // SAFETY: the caller's promise. Stateless sessions need none.
            unsafe { context.write(0) };
        }
        // SAFETY: the caller's promise.
        unsafe { put(session, u32::try_from(SESSION_BYTES).unwrap_or(0)) }
    }

    /// `cpaDcInitSession`. The session's memory must be pinned; all of its size is written.
    ///
    /// # Safety
    /// The pointers are null or valid; `session` has the size that `session_size` gave.
    pub unsafe fn init_session(
        &self,
        handle: CpaInstanceHandle,
        session: CpaDcSessionHandle,
        setup: *mut CpaDcSessionSetupData,
        callback: CpaDcCallbackFn,
    ) -> CpaStatus {
        let Some((machine, instance)) = self.instance(handle) else {
            return CPA_STATUS_INVALID_PARAM;
        };
        if let Some(status) = instance.objection() {
            return status;
        }
        if session.is_null() || setup.is_null() {
            return CPA_STATUS_INVALID_PARAM;
        }
        let Some(translation) = instance.translation() else { return CPA_STATUS_FAIL };
        // SAFETY: not null, and the caller's promise.
        let setup = unsafe { setup.read() };
        if let Err(status) = check_setup(&setup) {
            return status;
        }
        // SAFETY: the caller's own function, which takes any address.
        if unsafe { translation(session) } == 0 {
            return CPA_STATUS_FAIL;
        }
        // SAFETY: the caller's promise.
        unsafe { session.cast::<u8>().write_bytes(0, SESSION_BYTES) };
        instance.open_session(session, setup, callback);
        add(&machine.tallies.instances[instance.index].sessions_made, 1);
        CPA_STATUS_SUCCESS
    }

    /// `cpaDcRemoveSession`: RETRY while requests are pending, FAIL of a dead device.
    pub fn remove_session(
        &self,
        handle: CpaInstanceHandle,
        session: CpaDcSessionHandle,
    ) -> CpaStatus {
        let Some((_, instance)) = self.instance(handle) else { return CPA_STATUS_INVALID_PARAM };
        match instance.state() {
            State::Restarting => CPA_STATUS_RESTARTING,
            State::Error => CPA_STATUS_FAIL,
            _ => instance.close_session(session),
        }
    }

    /// `cpaDcDeflateCompressBound` of Gen4; the handle does not matter.
    ///
    /// # Safety
    /// `bound` is null or valid for a write.
    pub unsafe fn deflate_bound(&self, huffman: u32, bytes: u32, bound: *mut u32) -> CpaStatus {
        let size = u64::from(bytes);
        // The formulas that dc_header_footer.c states for Gen4.
        let most = match huffman {
            CPA_DC_HT_STATIC => (9 * size).div_ceil(8) + 5 + MIN_DEST_STATIC as u64,
            CPA_DC_HT_FULL_DYNAMIC => {
                (9 * size).div_ceil(8) + 8 * size * 155 / 7 / 16_384 + MIN_DEST_DYNAMIC as u64
            }
            _ => return CPA_STATUS_INVALID_PARAM,
        };
        match u32::try_from(most) {
            // SAFETY: the caller's promise.
            Ok(most) if bytes > 0 => unsafe { put(bound, most) },
            _ => CPA_STATUS_INVALID_PARAM,
        }
    }

    /// `cpaDcCompressData2`.
    ///
    /// # Safety
    /// The pointers are null or valid; what they point to stays so until the callback.
    #[expect(clippy::too_many_arguments, reason = "the C function has them")]
    pub unsafe fn compress(
        &self,
        handle: CpaInstanceHandle,
        session: CpaDcSessionHandle,
        source: *mut CpaBufferList,
        target: *mut CpaBufferList,
        operation: *mut CpaDcOpData,
        results: *mut CpaDcRqResults,
        tag: *mut c_void,
    ) -> CpaStatus {
        // SAFETY: the caller's promise.
        let operation = unsafe { operation.as_ref() };
        let (flush, recover, wrong) = match operation {
            None => (0, false, Some(CPA_STATUS_INVALID_PARAM)),
            Some(operation) => (
                operation.flushFlag,
                operation.compressAndVerifyAndRecover == CPA_TRUE,
                check_operation(operation),
            ),
        };
        let direction = Direction::Compress;
        let call = Call { direction, session, source, target, results, flush, recover, tag };
        // SAFETY: the caller's promise.
        unsafe { self.submit(handle, &call, wrong) }
    }

    /// `cpaDcDecompressData`.
    ///
    /// # Safety
    /// As `compress`.
    #[expect(clippy::too_many_arguments, reason = "the C function has them")]
    pub unsafe fn decompress(
        &self,
        handle: CpaInstanceHandle,
        session: CpaDcSessionHandle,
        source: *mut CpaBufferList,
        target: *mut CpaBufferList,
        results: *mut CpaDcRqResults,
        flush: u32,
        tag: *mut c_void,
    ) -> CpaStatus {
        let direction = Direction::Decompress;
        let call = Call { direction, session, source, target, results, flush, recover: false, tag };
        // SAFETY: the caller's promise.
        unsafe { self.submit(handle, &call, None) }
    }

    /// # Safety
    /// The pointers of `call` are as `compress` wants them.
    unsafe fn submit(
        &self,
        handle: CpaInstanceHandle,
        call: &Call,
        wrong: Option<CpaStatus>,
    ) -> CpaStatus {
        let Some((machine, instance)) = self.instance(handle) else {
            return CPA_STATUS_INVALID_PARAM;
        };
        let tally = &machine.tallies.instances[instance.index];
        add(&tally.submissions, 1);
        let mut effect = Effect::None;
        let mut rule = None;
        let armed = machine.faults.is_armed();
        let now = if armed || machine.timed { now_ns() } else { 0 };
        if armed {
            let mut deeds = Vec::new();
            let verdict =
                machine.faults.submission(instance.index, call.direction, now, &mut deeds);
            deeds.into_iter().for_each(|deed| machine.act(deed));
            match verdict {
                Verdict::Refuse(status) => {
                    add(&machine.tallies.faults, 1);
                    add(&tally.retries, u64::from(status == CPA_STATUS_RETRY));
                    return status;
                }
                Verdict::Accept { effect: some, rule: index } => {
                    effect = some;
                    rule = (some != Effect::None).then_some(index);
                }
            }
        }
        let status = match instance.objection().or(wrong) {
            Some(status) => status,
            // SAFETY: the caller's promise.
            None => unsafe { instance.submit(call, effect, now, tally) },
        };
        match (status, call.direction) {
            (CPA_STATUS_SUCCESS, direction) => {
                add(&machine.tallies.faults, u64::from(rule.is_some()));
                match direction {
                    Direction::Compress => add(&tally.compress, 1),
                    Direction::Decompress => add(&tally.decompress, 1),
                }
                machine.doorbell.ring();
            }
            (refused, _) => {
                add(&tally.retries, u64::from(refused == CPA_STATUS_RETRY));
                if let Some(rule) = rule {
                    machine.faults.give_back(rule);
                }
            }
        }
        status
    }
}

impl Machine {
    fn new(
        settings: &Settings,
        script: &Script,
        tallies: &'static Tallies,
        dma: &'static dyn Dma,
    ) -> Self {
        let (latency_ns, gbps) = match settings.engine {
            Engine::Deflate => (10_000, 45),
            Engine::Stored => (0, 0),
        };
        let latency_ns = settings.latency_ns.unwrap_or(latency_ns);
        let gbps = settings.gbps.unwrap_or(gbps);
        let service = |_| Service::new(settings.engines, latency_ns, gbps);
        let instance =
            |index| Instance::new(index, index % settings.packages, settings.ring, settings.order);
        let services: Vec<_> = (0..settings.packages).map(service).collect();
        Self {
            timed: services.iter().any(Service::is_timed),
            instances: (0..settings.instances).map(instance).collect(),
            services,
            settings: settings.clone(),
            tallies,
            dma,
            clocks: Clocks::default(),
            doorbell: Doorbell::default(),
            stopping: AtomicBool::new(false),
            faults: Faults::new(script.rules()),
            events: Mutex::new(VecDeque::new()),
            events_count: AtomicU64::new(0),
            late: Mutex::new(Vec::new()),
            late_count: AtomicU64::new(0),
        }
    }

    /// Does what the script says by time alone.
    fn tick(&self) {
        if self.faults.is_armed() {
            let mut deeds = Vec::new();
            self.faults.tick(now_ns(), &mut deeds);
            deeds.into_iter().for_each(|deed| self.act(deed));
        }
    }

    fn act(&self, deed: Deed) {
        add(&self.tallies.faults, 1);
        // Silence is of an instance, death and reset of a whole device.
        let named = deed.instance.and_then(|index| self.instances.get(index));
        let package = named.map(|instance| instance.package);
        for instance in &self.instances {
            let here = deed.instance.is_none_or(|index| index == instance.index);
            let device = package.map_or(deed.instance.is_none(), |of| of == instance.package);
            match deed.action {
                Action::Silence if here => instance.silent.store(true, Ordering::Release),
                Action::Revive if here => instance.silent.store(false, Ordering::Release),
                Action::Fatal | Action::Reset(_) if device => {
                    instance.silent.store(true, Ordering::Release);
                    instance.end_epoch(true);
                }
                _ => {}
            }
        }
        for index in 0..self.services.len() {
            if !package.map_or(deed.instance.is_none(), |of| of == index) {
                continue;
            }
            match deed.action {
                Action::Fatal => self.announce(index, CPA_INSTANCE_EVENT_FATAL_ERROR, 0),
                Action::Restarting => self.announce(index, CPA_INSTANCE_EVENT_RESTARTING, 0),
                Action::Restarted => self.announce(index, CPA_INSTANCE_EVENT_RESTARTED, 0),
                Action::Reset(ms) => {
                    self.announce(index, CPA_INSTANCE_EVENT_FATAL_ERROR, 0);
                    self.announce(index, CPA_INSTANCE_EVENT_RESTARTING, 0);
                    let back = now_ns() + ms * 1_000_000;
                    self.announce(index, CPA_INSTANCE_EVENT_RESTARTED, back);
                }
                _ => {}
            }
        }
        self.doorbell.ring();
    }

    fn announce(&self, package: usize, kind: u32, not_before_ns: u64) {
        let mut events = lock(&self.events);
        events.push_back(Event { package, kind, not_before_ns, told_ns: None });
        self.events_count.store(events.len() as u64, Ordering::Release);
    }

    /// Delivers what is due, in order for each device.
    fn deliver_events(&self) {
        let mut waiting = Vec::new();
        for _ in 0..self.events_count.load(Ordering::Acquire) {
            let Some(event) = lock(&self.events).pop_front() else { break };
            let blocked = waiting.iter().any(|earlier: &Event| earlier.package == event.package);
            let left = match blocked {
                true => Some(event),
                false => self.deliver(event),
            };
            waiting.extend(left);
        }
        let mut events = lock(&self.events);
        for event in waiting.into_iter().rev() {
            events.push_front(event);
        }
        self.events_count.store(events.len() as u64, Ordering::Release);
    }

    /// Delivers one event; gives it back when it is not over.
    fn deliver(&self, mut event: Event) -> Option<Event> {
        let now = now_ns();
        if now < event.not_before_ns {
            return Some(event);
        }
        let mine = || self.instances.iter().filter(|instance| instance.package == event.package);
        match event.kind {
            CPA_INSTANCE_EVENT_FATAL_ERROR => {
                for instance in mine() {
                    instance.silent.store(true, Ordering::Release);
                    instance.set_state(State::Error);
                    // Again: what came in since the device died is dead as well.
                    instance.end_epoch(true);
                    self.notify(instance, event.kind);
                }
                None
            }
            CPA_INSTANCE_EVENT_RESTARTING => {
                let told = event.told_ns.unwrap_or_else(|| {
                    mine().for_each(|instance| self.notify(instance, event.kind));
                    now
                });
                let busy = mine().any(|instance| instance.in_flight() > 0);
                if busy && now - told < DRAIN_NS {
                    event.told_ns = Some(told);
                    return Some(event);
                }
                mine().for_each(|instance| instance.set_state(State::Restarting));
                None
            }
            _ => {
                for instance in mine() {
                    instance.silent.store(false, Ordering::Release);
                    instance.set_state(State::Running);
                    self.notify(instance, event.kind);
                }
                self.doorbell.ring();
                None
            }
        }
    }

    fn notify(&self, instance: &Instance, kind: u32) {
        let Notify(callback, tag) = *lock(&instance.notify);
        if let Some(callback) = callback {
            // SAFETY: the caller's callback with its own tag.
            unsafe { callback(handle_of(instance.index), tag, kind) };
            add(&self.tallies.instances[instance.index].events, 1);
        }
    }

    /// Puts a task off.
    pub(crate) fn delay(&self, instance: usize, task: Task, ms: u64) {
        let mut late = lock(&self.late);
        late.push(Late { due_ns: now_ns() + ms * 1_000_000, instance, task });
        self.late_count.store(late.len() as u64, Ordering::Release);
    }

    /// Takes the instance's late tasks that are due.
    pub(crate) fn take_late(&self, instance: &Instance, into: &mut Vec<Task>) {
        if self.late_count.load(Ordering::Acquire) == 0 {
            return;
        }
        let now = now_ns();
        let mut late = lock(&self.late);
        late.retain(|entry| {
            let due = entry.instance == instance.index && entry.due_ns <= now;
            if due {
                into.push(entry.task);
            }
            !due
        });
        self.late_count.store(late.len() as u64, Ordering::Release);
    }

    /// How long until a late task is due.
    pub(crate) fn until_late(&self) -> Option<Duration> {
        let due = lock(&self.late).iter().map(|entry| entry.due_ns).min()?;
        Some(Duration::from_nanos(due.saturating_sub(now_ns())))
    }

    /// An engine thread has something to do.
    pub(crate) fn has_work(&self) -> bool {
        let ready = |instance: &Instance| {
            !instance.silent.load(Ordering::Acquire) && instance.queued.load(Ordering::Acquire) > 0
        };
        self.stopping.load(Ordering::Acquire) || self.instances.iter().any(ready)
    }
}

fn handle_of(index: usize) -> CpaInstanceHandle {
    (HANDLES + index * HANDLE_STEP) as CpaInstanceHandle
}

fn check_setup(setup: &CpaDcSessionSetupData) -> Result<(), CpaStatus> {
    match setup.compType {
        CPA_DC_DEFLATE => {}
        CPA_DC_LZ4 | CPA_DC_LZ4S => return Err(CPA_STATUS_UNSUPPORTED),
        _ => return Err(CPA_STATUS_INVALID_PARAM),
    }
    // The window size is not looked at: QATzip passes 7, which is none.
    let good = matches!(setup.huffType, CPA_DC_HT_STATIC | CPA_DC_HT_FULL_DYNAMIC)
        && (1..=12).contains(&setup.compLevel)
        && setup.autoSelectBestHuffmanTree <= CPA_DC_ASB_ENABLED
        && setup.sessDirection <= CPA_DC_DIR_COMBINED
        && setup.sessState <= CPA_DC_STATELESS
        && setup.checksum <= CPA_DC_CRC32_ADLER32;
    match good {
        true => Ok(()),
        false => Err(CPA_STATUS_INVALID_PARAM),
    }
}

fn check_operation(operation: &CpaDcOpData) -> Option<CpaStatus> {
    let verify = operation.compressAndVerify;
    let recover = operation.compressAndVerifyAndRecover;
    if verify > 1 || recover > 1 || operation.integrityCrcCheck != 0 {
        return Some(CPA_STATUS_INVALID_PARAM);
    }
    if operation.inputSkipData.skipMode != 0 || operation.outputSkipData.skipMode != 0 {
        return Some(CPA_STATUS_UNSUPPORTED);
    }
    match (verify, recover) {
        (CPA_FALSE, CPA_TRUE) => Some(CPA_STATUS_INVALID_PARAM),
        (CPA_FALSE, _) => Some(CPA_STATUS_UNSUPPORTED),
        _ => None,
    }
}

/// # Safety
/// `target` is null or valid for a write.
unsafe fn put<T>(target: *mut T, value: T) -> CpaStatus {
    if target.is_null() {
        return CPA_STATUS_INVALID_PARAM;
    }
    // SAFETY: not null, and the caller's promise.
    unsafe { target.write(value) };
    CPA_STATUS_SUCCESS
}

/// Writes a text that ends with a 0 byte.
fn text(field: &mut [u8], value: &str) {
    let length = value.len().min(field.len() - 1);
    field[..length].copy_from_slice(&value.as_bytes()[..length]);
}
