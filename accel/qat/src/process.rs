//! QAT in this process: started once, its instances claimed by engines, its events polled by one
//! thread, stopped when the last engine is gone. A stop that takes too long is left to itself.

#![expect(unsafe_code, reason = "the C interface of libqat")]

use crate::calls::{self, Call, Calls};
use crate::channel::Channel;
use crate::instance::{lock, Instance, Unfit};
use crate::load::{Api, Libraries};
use crate::mailbox::State;
use crate::start::{StartError, StartOptions};
use crate::watched::{watched, Unfinished};
use qat_abi as abi;
use qat_abi::CpaStatus;
use std::ffi::CString;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{mpsc, Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The started library. It is stopped when the caller and the last engine have dropped it. That
/// takes some seconds at most: a stop that does not end is left to a thread of its own.
#[derive(Debug)]
pub struct Qat {
    inner: Arc<Inner>,
    events: Option<JoinHandle<()>>,
    required: bool,
}

#[derive(Debug)]
struct Inner {
    api: &'static Api,
    /// Whether `icp_sal_userStartMultiProcess` succeeded, so that a stop is due.
    running: bool,
    instances: Vec<Arc<Instance>>,
    unfit: Vec<Unfit>,
    /// Channels whose engines are gone while the device still has requests.
    orphans: Mutex<Vec<Channel>>,
    stopping: AtomicBool,
    stopped: AtomicBool,
}

/// One `Qat` a process, because the library can be started only once.
static STARTED: AtomicBool = AtomicBool::new(false);

/// How long a stop waits for requests in flight.
const STOP_GRACE: Duration = Duration::from_millis(250);
/// The longest wait for a stop as a whole. The library stops in milliseconds, or perhaps never.
const STOP_TIME: Duration = Duration::from_secs(5);

impl Qat {
    /// Starts the library and queries its instances.
    ///
    /// # Errors
    ///
    /// [`StartError`]; each is normal on a host without QAT.
    pub fn start(libraries: &Libraries, options: &StartOptions) -> Result<Arc<Self>, StartError> {
        let section = CString::new(options.section.clone())
            .map_err(|_| StartError::Section(options.section.clone()))?;
        let api = libraries.api;
        if STARTED.swap(true, Ordering::AcqRel) {
            return Err(StartError::AlreadyStarted);
        }
        let inner = Arc::new(Inner::start_watched(api, section)?);
        let (of_thread, interval) = (Arc::clone(&inner), options.event_interval);
        let events = std::thread::Builder::new()
            .name("qat-events".into())
            .spawn(move || of_thread.watch(interval))
            .map_err(|error| StartError::Thread(error.to_string()))?;
        Ok(Arc::new(Self { inner, events: Some(events), required: options.required }))
    }

    /// The instances that cannot be used.
    pub fn unfit(&self) -> &[Unfit] {
        &self.inner.unfit
    }

    pub(crate) fn is_required(&self) -> bool {
        self.required
    }

    pub(crate) fn all(&self) -> &[Arc<Instance>] {
        &self.inner.instances
    }

    pub(crate) fn api(&self) -> &'static Api {
        self.inner.api
    }

    /// Free instances whose device runs. Each is claimed when it is returned: use it or release it.
    pub(crate) fn claims(&self) -> impl Iterator<Item = &Arc<Instance>> {
        self.inner
            .instances
            .iter()
            .filter(|instance| instance.mailbox.state() == State::Running && instance.claim())
    }

    /// Takes a channel whose engine is gone. It is closed when the device has returned all
    /// requests.
    pub(crate) fn close(&self, channel: Channel) {
        if let Err(channel) = channel.close() {
            channel.instance().neglected.store(true, Ordering::Release);
            lock(&self.inner.orphans).push(channel);
        }
    }
}

impl Drop for Qat {
    fn drop(&mut self) {
        self.inner.stopping.store(true, Ordering::Release);
        let (inner, events) = (Arc::clone(&self.inner), self.events.take());
        let (done, ended) = mpsc::channel();
        let stop = move || {
            if let Some(events) = events {
                events.thread().unpark();
                // A panic of the thread was already reported; the stop goes on.
                let _ = events.join();
            }
            inner.stop();
            drop(inner);
            // Nobody waits any more if this took too long.
            let _ = done.send(());
        };
        // Without this thread the event thread, which ends now, has the last reference, and stops
        // the library.
        let stops = std::thread::Builder::new().name("qat-stop".into()).spawn(stop);
        if stops.is_err() || ended.recv_timeout(STOP_TIME).is_err() {
            calls::leave_behind();
        }
    }
}

/// Ends the process at once with this status, without the exit handlers of this program and of the
/// libraries. For a process with [`is_stuck`](crate::is_stuck): the handlers of the QAT libraries
/// may wait for the thread that is stuck in them.
pub fn end_process(status: u8) -> ! {
    extern "C" {
        fn _exit(status: std::ffi::c_int) -> !;
    }
    // SAFETY: the C library's function; it takes a number and runs nothing of this process.
    unsafe { _exit(status.into()) }
}

impl Inner {
    /// As [`start`](Self::start), until a call of the library hangs.
    fn start_watched(api: &'static Api, section: CString) -> Result<Self, StartError> {
        let calls = Arc::<Calls>::default();
        calls::register(&calls);
        let start = move || {
            let _inside = calls.enter(Call::Start);
            Self::start(api, &section)
        };
        watched(start).unwrap_or_else(|error| match error {
            Unfinished::Hang(hang) => Err(hang.into()),
            Unfinished::Thread(error) => {
                STARTED.store(false, Ordering::Release);
                Err(StartError::Thread(error.to_string()))
            }
        })
    }

    fn start(api: &'static Api, section: &std::ffi::CStr) -> Result<Self, StartError> {
        // From here on dropping `inner` undoes what was done, including `STARTED`.
        let mut inner = Self {
            api,
            running: false,
            instances: Vec::new(),
            unfit: Vec::new(),
            orphans: Mutex::new(Vec::new()),
            stopping: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
        };
        // SAFETY: no preconditions.
        if unsafe { (api.is_available)() } != abi::CPA_TRUE {
            return Err(StartError::Unavailable);
        }
        let start =
            |status| StartError::Start { section: section.to_string_lossy().into_owned(), status };
        // SAFETY: a NUL-terminated string, copied by the library.
        let status = unsafe { (api.start)(section.as_ptr(), abi::CPA_FALSE) };
        if status != abi::CPA_STATUS_SUCCESS {
            return Err(start(status));
        }
        inner.running = true;
        for (ordinal, handle) in Self::handles(api).map_err(start)?.into_iter().enumerate() {
            let Ok(ordinal) = u16::try_from(ordinal) else { break };
            match Instance::probe(api, handle, ordinal) {
                Ok(instance) => inner.instances.push(Arc::new(instance)),
                Err(unfit) => inner.unfit.push(unfit),
            }
        }
        if inner.instances.is_empty() {
            return Err(StartError::NoInstance(std::mem::take(&mut inner.unfit)));
        }
        spread(&mut inner.instances);
        Ok(inner)
    }

    fn handles(api: &Api) -> Result<Vec<abi::CpaInstanceHandle>, CpaStatus> {
        let mut count = 0;
        // SAFETY: the pointer is to a live local.
        let status = unsafe { (api.num_instances)(&raw mut count) };
        if status != abi::CPA_STATUS_SUCCESS {
            return Err(status);
        }
        let mut handles = vec![std::ptr::null_mut(); usize::from(count)];
        if handles.is_empty() {
            return Ok(handles);
        }
        // SAFETY: room for `count` handles.
        match unsafe { (api.instances)(count, handles.as_mut_ptr()) } {
            abi::CPA_STATUS_SUCCESS => Ok(handles),
            status => Err(status),
        }
    }

    /// The event thread.
    fn watch(&self, interval: Duration) {
        while !self.stopping.load(Ordering::Acquire) {
            std::thread::park_timeout(interval);
            // SAFETY: the library is started. FAIL and RETRY both mean that there were no events.
            let _: CpaStatus = unsafe { (self.api.poll_events)() };
            for instance in &self.instances {
                let unwell = instance.mailbox.state() != State::Running;
                // A device restarts only after its rings were polled empty, and an engine without
                // work does not poll. An engine with work has the turn, and polls.
                let watched = unwell || instance.neglected.load(Ordering::Acquire);
                if watched && instance.is_started() && instance.turn.try_take() {
                    instance.poll(self.api);
                    instance.turn.end();
                }
            }
            self.bury();
        }
    }

    /// Closes the orphans whose requests have all come back.
    fn bury(&self) {
        // The lock is free meanwhile: if a call of the library never returned, each engine that
        // gives a channel up would wait for it.
        let orphans = std::mem::take(&mut *lock(&self.orphans));
        let left: Vec<Channel> =
            orphans.into_iter().filter_map(|channel| channel.close().err()).collect();
        lock(&self.orphans).extend(left);
    }

    /// Stops the library. All engines are gone, and the event thread has ended.
    fn stop(&self) {
        if self.stopped.swap(true, Ordering::AcqRel) {
            return;
        }
        let end = Instant::now() + STOP_GRACE;
        loop {
            self.bury();
            if lock(&self.orphans).is_empty() || Instant::now() >= end {
                break;
            }
            // SAFETY: the library is started.
            let _: CpaStatus = unsafe { (self.api.poll_events)() };
            std::thread::sleep(Duration::from_millis(1));
        }
        // The device may still write to the memory of requests that have not come back, so that
        // memory is leaked.
        let lost: Vec<u16> = std::mem::take(&mut *lock(&self.orphans))
            .into_iter()
            .map(|channel| {
                let ordinal = channel.instance().ordinal;
                channel.abandon();
                ordinal
            })
            .collect();
        for instance in &self.instances {
            instance.stop(self.api, lost.contains(&instance.ordinal));
        }
        if self.running {
            // SAFETY: the library is started, all engines are gone, the event thread has ended.
            let _: CpaStatus = unsafe { (self.api.stop)() };
        }
        STARTED.store(false, Ordering::Release);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Orders the instances so that the first engines go to different devices.
fn spread(instances: &mut [Arc<Instance>]) {
    let mut seen: Vec<(u16, usize)> = Vec::new();
    let turns: Vec<(u16, usize)> = instances
        .iter()
        .map(|instance| {
            let package = instance.info.package;
            let turn = match seen.iter_mut().find(|(this, _)| *this == package) {
                Some((_, count)) => {
                    *count += 1;
                    *count
                }
                None => {
                    seen.push((package, 0));
                    0
                }
            };
            (instance.ordinal, turn)
        })
        .collect();
    instances.sort_by_key(|instance| {
        turns.iter().find(|(ordinal, _)| *ordinal == instance.ordinal).map(|&(_, turn)| turn)
    });
}
