//! A libqpl with faults, for the tests of this crate and of the relays.

use libdeflater::{CompressionLvl, Compressor as Libdeflate};
use qpl::{Job, Library, Path, Status};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The status of libqpl's hardware path without a device.
const NO_DEVICE: Status = Status(501);
/// A status of no job that is well.
pub(crate) const INTERNAL: Status = Status(6);

/// The status of a transfer that is too long for the queue.
const TRANSFER_SIZE: Status = Status(319);

/// A fault of a job.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    /// The job is refused.
    Refuses(Status),
    /// The job ends with this status.
    EndsWith(Status),
    /// Works on for ever.
    Silent,
    /// Works on for so many checks.
    Slow(u32),
    /// Every queue is full for so many attempts.
    Busy(u32),
    /// Every queue is full for so long, then works on for so many checks.
    Full(Duration, u32),
    /// One bit of the stream.
    Flips,
    /// Says that it wrote so many bytes.
    Says(u32),
}

/// A libqpl that compresses by libdeflate, with faults by the number of the job.
#[derive(Debug)]
pub(crate) struct Fake {
    pub(crate) version: &'static str,
    /// The sizes of jobs.
    pub(crate) hardware: Result<u32, Status>,
    pub(crate) software: Result<u32, Status>,
    /// There is no memory for any.
    pub(crate) no_jobs: bool,
    /// The most bytes of a transfer of the hardware path.
    pub(crate) longest: usize,
    pub(crate) state: Arc<State>,
}

/// Faults to come, and what was seen.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) faults: Mutex<BTreeMap<u32, Fault>>,
    /// The fault of all jobs from a number on.
    pub(crate) from: Mutex<Option<(u32, Fault)>>,
    pub(crate) started: AtomicU32,
    pub(crate) abandoned: AtomicU32,
    pub(crate) freed: AtomicU32,
    /// There is no memory for a further job.
    pub(crate) no_more_jobs: AtomicBool,
}

impl State {
    fn fault(&self, number: u32) -> Option<Fault> {
        let all = self.from.lock().unwrap().filter(|(from, _)| number >= *from);
        self.faults.lock().unwrap().get(&number).copied().or(all.map(|(_, fault)| fault))
    }
}

impl Library for Fake {
    fn version(&self) -> String {
        self.version.to_owned()
    }

    fn job_size(&self, path: Path) -> Result<u32, Status> {
        match path {
            Path::Hardware => self.hardware,
            Path::Software => self.software,
        }
    }

    fn job(&self, path: Path, size: u32, capacity: usize) -> Result<Box<dyn Job>, Status> {
        assert_eq!(Ok(size), self.job_size(path));
        if self.no_jobs || self.state.no_more_jobs.load(Ordering::SeqCst) {
            return Err(Status(101));
        }
        Ok(Box::new(FakeJob {
            state: Arc::clone(&self.state),
            input: vec![0x5a; capacity],
            output: vec![0xa5; capacity],
            fault: None,
            busy: None,
            checks: 0,
            written: 0,
            ended: Status::OK,
            is_abandoned: false,
            longest: if path == Path::Hardware { self.longest } else { usize::MAX },
        }))
    }
}

#[derive(Debug)]
struct FakeJob {
    state: Arc<State>,
    input: Vec<u8>,
    output: Vec<u8>,
    fault: Option<Fault>,
    /// Attempts that are still refused.
    busy: Option<u32>,
    checks: u32,
    written: u32,
    ended: Status,
    is_abandoned: bool,
    longest: usize,
}

impl Job for FakeJob {
    fn input(&mut self) -> &mut [u8] {
        &mut self.input
    }

    fn start(&mut self, len: usize, room: usize) -> Status {
        if self.busy.is_none() {
            self.fault = self.state.fault(self.state.started.fetch_add(1, Ordering::SeqCst));
            self.checks = 0;
        }
        if let Some(Fault::Busy(times)) = self.fault {
            let left = self.busy.unwrap_or(times);
            if left > 0 {
                self.busy = Some(left - 1);
                return Status::QUEUES_ARE_BUSY;
            }
        }
        if let (Some(Fault::Full(time, _)), None) = (self.fault, self.busy) {
            std::thread::sleep(time);
            self.busy = Some(0);
            return Status::QUEUES_ARE_BUSY;
        }
        self.busy = None;
        if len > self.longest {
            return TRANSFER_SIZE;
        }
        if let Some(Fault::Refuses(status)) = self.fault {
            return status;
        }
        let mut libdeflate = Libdeflate::new(CompressionLvl::new(1).unwrap());
        let made = libdeflate.deflate_compress(&self.input[..len], &mut self.output[..room]);
        (self.written, self.ended) = match made {
            Ok(len) => (u32::try_from(len).unwrap(), Status::OK),
            Err(_) => (0, Status::MORE_OUTPUT_NEEDED),
        };
        match self.fault {
            Some(Fault::EndsWith(status)) => self.ended = status,
            Some(Fault::Flips) => self.output[self.written as usize / 2] ^= 0x10,
            Some(Fault::Says(len)) => self.written = len,
            _ => {}
        }
        Status::OK
    }

    fn check(&mut self) -> Status {
        self.checks += 1;
        match self.fault {
            Some(Fault::Silent) => Status::BEING_PROCESSED,
            Some(Fault::Slow(checks) | Fault::Full(_, checks)) if self.checks <= checks => {
                Status::BEING_PROCESSED
            }
            _ => self.ended,
        }
    }

    fn written(&self) -> u32 {
        self.written
    }

    fn output(&self) -> &[u8] {
        &self.output
    }

    fn abandon(mut self: Box<Self>) {
        self.is_abandoned = true;
        self.state.abandoned.fetch_add(1, Ordering::SeqCst);
        std::mem::forget(self);
    }
}

impl Drop for FakeJob {
    fn drop(&mut self) {
        assert!(!self.is_abandoned, "a device may still write to this memory");
        self.state.freed.fetch_add(1, Ordering::SeqCst);
    }
}

/// Without a device, as on most hosts.
pub(crate) fn fake() -> Fake {
    Fake {
        version: "1.9.0",
        hardware: Err(NO_DEVICE),
        software: Ok(4096),
        no_jobs: false,
        longest: usize::MAX,
        state: Arc::default(),
    }
}
