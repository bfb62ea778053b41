//! A started library: faults by time, and events for the application.

#![expect(unsafe_code, reason = "calls the application's callbacks")]

use crate::counters::{add, Tallies};
use crate::faults::{Deed, Faults};
use crate::instance::{Instance, Notify, State, Task};
use crate::script::{Action, Engine, Entry, Script, Settings};
use crate::service::{clock_ns, Clocks, Doorbell, Service};
use qat_abi::*;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The device's access to pinned memory.
pub trait Dma: Sync {
    /// Reads all of `into` from a bus address, or nothing.
    fn read(&self, iova: u64, into: &mut [u8]) -> bool;
    /// Writes all of `from`, or nothing.
    fn write(&self, iova: u64, from: &[u8]) -> bool;
    /// Sets layout and limit of later allocations.
    fn configure(&self, settings: &Settings);
    /// Frees of addresses that were not allocated.
    fn violations(&self) -> u64;
}

/// A started library.
pub(crate) struct Machine {
    pub(crate) settings: Settings,
    pub(crate) instances: Vec<Instance>,
    /// The devices, by package.
    pub(crate) services: Vec<Service>,
    pub(crate) tallies: &'static Tallies,
    pub(crate) dma: &'static dyn Dma,
    pub(crate) clocks: Clocks,
    pub(crate) doorbell: Doorbell,
    pub(crate) stopping: AtomicBool,
    pub(crate) faults: Faults,
    pub(crate) events: Mutex<VecDeque<Event>>,
    pub(crate) events_count: AtomicU64,
    pub(crate) late: Mutex<Vec<Late>>,
    pub(crate) late_count: AtomicU64,
    pub(crate) timed: bool,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Late {
    pub(crate) due_ns: u64,
    pub(crate) instance: usize,
    pub(crate) task: Task,
}

/// An event for the notification callbacks of one device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Event {
    pub(crate) package: usize,
    pub(crate) kind: u32,
    pub(crate) not_before_ns: u64,
    /// For RESTARTING: when the application was notified. It has 10 s to poll its rings empty.
    pub(crate) told_ns: Option<u64>,
}

pub(crate) const DRAIN_NS: u64 = 10_000_000_000;
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn now_ns() -> u64 {
    clock_ns(libc::CLOCK_MONOTONIC)
}

/// Handles are not addresses: dereferencing one faults.
pub(crate) const HANDLES: usize = 0x5141_5400_0000;
pub(crate) const HANDLE_STEP: usize = 0x100;
pub(crate) fn handle_of(index: usize) -> CpaInstanceHandle {
    (HANDLES + index * HANDLE_STEP) as CpaInstanceHandle
}

impl Machine {
    pub(crate) fn new(
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

    /// Executes the faults due by time.
    pub(crate) fn tick(&self) {
        if self.faults.is_armed() {
            let mut deeds = Vec::new();
            self.faults.tick(now_ns(), &mut deeds);
            deeds.into_iter().for_each(|deed| self.act(deed));
        }
    }

    /// Keeps the calling thread if the script wants this call to hang.
    pub(crate) fn may_hang(&self, entry: Entry, instance: &Instance) {
        self.may_hang_at(entry, instance.index);
    }

    /// As [`may_hang`](Self::may_hang), with the number of the instance.
    pub(crate) fn may_hang_at(&self, entry: Entry, instance: usize) {
        if !self.faults.is_armed() {
            return;
        }
        if let Some(stuck) = self.faults.hangs(entry, instance) {
            add(&self.tallies.faults, 1);
            stuck.for_ever();
        }
    }

    pub(crate) fn act(&self, deed: Deed) {
        add(&self.tallies.faults, 1);
        // Silence is per instance, death and reset per device.
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

    /// Delivers the due events of each device in order.
    pub(crate) fn deliver_events(&self) {
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

    /// Delivers one event; returns it if it is not finished.
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
                    // Again: requests that came in since the device died are dead as well.
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

    /// Delays a task.
    pub(crate) fn delay(&self, instance: usize, task: Task, ms: u64) {
        let mut late = lock(&self.late);
        late.push(Late { due_ns: now_ns() + ms * 1_000_000, instance, task });
        self.late_count.store(late.len() as u64, Ordering::Release);
    }

    /// Takes the instance's delayed tasks that are due.
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

    /// The time until a delayed task is due.
    pub(crate) fn until_late(&self) -> Option<Duration> {
        let due = lock(&self.late).iter().map(|entry| entry.due_ns).min()?;
        Some(Duration::from_nanos(due.saturating_sub(now_ns())))
    }

    /// Whether an engine thread has something to do.
    pub(crate) fn has_work(&self) -> bool {
        let ready = |instance: &Instance| {
            !instance.silent.load(Ordering::Acquire) && instance.queued.load(Ordering::Acquire) > 0
        };
        self.stopping.load(Ordering::Acquire) || self.instances.iter().any(ready)
    }
}
