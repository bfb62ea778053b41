//! The device behind libqat's functions: start and stop, handles, events, the script.
//!
//! Every method is one exported function, with its C types; `Device` makes them testable in
//! process. A started machine is never freed, because a thread may poll events while another stops
//! the library. Starts are few, and a machine is some hundred kilobytes.

#![expect(unsafe_code, reason = "takes the pointers of a C interface")]

mod requests;

use crate::counters::{add, Counters, Tallies};
use crate::faults::Deed;
use crate::instance::{Instance, Notify, State};
use crate::machine::{handle_of, lock, now_ns, Dma, Machine, HANDLES, HANDLE_STEP};
use crate::script::{Action, Engine, Order, Script, Settings};
use crate::{engine, sgl};
use qat_abi::*;
use std::ffi::c_void;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::Mutex;
use std::thread::JoinHandle;

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

/// `cpaDcGetSessionSize`.
const SESSION_BYTES: usize = 1024;

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
            // CPA_INSTANCE_HANDLE_SINGLE: the first instance.
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
    /// The script's error, or that the device runs; then nothing was changed.
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

    /// The counters.
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

    /// `icp_sal_userStartMultiProcess`; a second start has no effect.
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
            // One thread, to preserve the order; also more than enough for stored blocks.
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
            // A device thread that panicked has printed its panic.
            let _ = thread.join();
        }
        CPA_STATUS_SUCCESS
    }

    /// `icp_sal_poll_device_events`. Contains no cancellation point: locks are futexes, and nothing
    /// sleeps or prints.
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
        let armed = machine.faults.is_armed();
        let _inside = armed.then(|| instance.enter(tally));
        if armed {
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
    /// `handles` is null or valid for `count` writes.
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
            // All true except the name: software that asks has to see a 4xxx.
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

    /// `cpaDcStopInstance`: requests in flight are never answered. FAIL from within a callback.
    pub fn stop_instance(&self, handle: CpaInstanceHandle) -> CpaStatus {
        let Some((_, instance)) = self.instance(handle) else { return CPA_STATUS_INVALID_PARAM };
        match instance.stop() {
            true => CPA_STATUS_SUCCESS,
            false => CPA_STATUS_FAIL,
        }
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

/// Writes a NUL-terminated text.
fn text(field: &mut [u8], value: &str) {
    let length = value.len().min(field.len() - 1);
    field[..length].copy_from_slice(&value.as_bytes()[..length]);
}
