//! The device behind libqat's functions: start and stop, handles, events, the script.
//!
//! Every method is one exported function, with its C types; `Device` makes them testable in
//! process. A started machine is never freed, because a thread may poll events while another stops
//! the library. Starts are few, and a machine is some hundred kilobytes.

#![expect(unsafe_code, reason = "takes the pointers of a C interface")]

mod instances;
mod requests;

use crate::counters::{add, Counters, Tallies};
use crate::engine;
use crate::faults::{Broken, Deed};
use crate::instance::Instance;
use crate::machine::{lock, now_ns, Dma, Machine, HANDLES, HANDLE_STEP};
use crate::script::{Action, Engine, Entry, Order, Script, Settings};
use qat_abi::*;
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
    /// Creates a stopped device with default settings. Its counters live as long as the process.
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
    /// The script is invalid, or the device runs. Then nothing was changed.
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
        // A start that never returns keeps nobody from changing the script.
        drop(control);
        machine.may_hang_at(Entry::Process, 0);
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
            let broken = machine.faults.poll(instance.index, now_ns(), &mut deeds);
            deeds.into_iter().for_each(|deed| machine.act(deed));
            add(&machine.tallies.faults, u64::from(broken.is_some()));
            match broken {
                Some(Broken::Fails) => return CPA_STATUS_FAIL,
                Some(Broken::Hangs(stuck)) => stuck.for_ever(),
                None => {}
            }
        }
        instance.poll(quota, &mut now_ns, tally)
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
