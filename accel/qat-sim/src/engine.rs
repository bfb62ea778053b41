//! The device's threads, and its simulated time.
//!
//! An engine thread polls all rings in turn, takes a batch of tasks, executes each on copies of the
//! data, and queues the responses. A request's simulated time is computed independently of the
//! thread's time: a response is not delivered before it is due. The threads' CPU time is counted
//! separately from the process's.

#![expect(unsafe_code, reason = "reads per-thread CPU clocks")]

mod transfer;

use crate::counters::add;
use crate::deflate::{self, Slices};
use crate::faults::Effect;
use crate::instance::{Instance, Response, Task};
use crate::machine::Machine;
use crate::random::Random;
use crate::script::{Direction, Engine, Order};
use qat_abi::{
    CpaDcRqResults, CPA_DC_FATALERR, CPA_DC_OK, CPA_DC_OVERFLOW, CPA_STATUS_FAIL,
    CPA_STATUS_SUCCESS,
};
use std::sync::atomic::Ordering;
use std::sync::PoisonError;
use std::time::Duration;

/// Tasks taken at a time: few enough to share with a second thread, many enough to be worth the
/// lock.
const BATCH: usize = 32;
/// Polls of empty rings, 20 us apart, before a thread sleeps until it is woken.
const IDLE_LOOKS: usize = 50;
const IDLE_SLEEP: Duration = Duration::from_micros(20);
const PARK: Duration = Duration::from_millis(100);

/// A thread of the device, from start to stop.
pub(crate) fn run(machine: &Machine, seed: u64) {
    let clock = machine.clocks.enter();
    // SAFETY: a thread may set its own timer slack; without it, sleeps of 20 us would be longer.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1000_usize) };
    let mut worker = Worker {
        machine,
        random: Random::new(seed),
        slices: Slices::new(),
        batch: Vec::with_capacity(BATCH),
        responses: Vec::with_capacity(BATCH),
        plain: Vec::new(),
        out: Vec::new(),
        list: Vec::new(),
        last_due_ns: vec![0; machine.instances.len()],
    };
    let mut idle = 0;
    while !machine.stopping.load(Ordering::Acquire) {
        if worker.round() {
            idle = 0;
            continue;
        }
        idle += 1;
        if idle < IDLE_LOOKS {
            std::thread::sleep(IDLE_SLEEP);
        } else {
            let longest = machine.until_late().map_or(PARK, |wait| wait.min(PARK));
            machine.doorbell.park(longest, || !machine.has_work());
        }
    }
    machine.clocks.remove(clock, machine.tallies);
}

struct Worker<'a> {
    machine: &'a Machine,
    random: Random,
    slices: Slices,
    batch: Vec<Task>,
    responses: Vec<Response>,
    plain: Vec<u8>,
    out: Vec<u8>,
    list: Vec<u8>,
    /// By instance, for order `fifo`, which has one thread: a small request does not overtake a
    /// large one.
    last_due_ns: Vec<u64>,
}

impl Worker<'_> {
    /// Polls all rings once; false if there was nothing.
    fn round(&mut self) -> bool {
        let machine = self.machine;
        let mut worked = false;
        for instance in &machine.instances {
            if instance.silent.load(Ordering::Acquire) {
                continue;
            }
            // Pairs with the Release in `submit`.
            if instance.queued.load(Ordering::Acquire) > 0 {
                let mut queue = instance.queue.lock().unwrap_or_else(PoisonError::into_inner);
                let taken = queue.len().min(BATCH);
                self.batch.extend(queue.drain(..taken));
                instance.queued.store(queue.len(), Ordering::Release);
            }
            machine.take_late(instance, &mut self.batch);
            if self.batch.is_empty() {
                continue;
            }
            worked = true;
            let mut batch = std::mem::take(&mut self.batch);
            if machine.settings.order == Order::Shuffled {
                self.random.shuffle(&mut batch);
            }
            for task in batch.drain(..) {
                self.serve(instance, task);
            }
            self.batch = batch;
            self.deliver(instance);
        }
        worked
    }

    fn deliver(&mut self, instance: &Instance) {
        let _gate = instance.gate.read().unwrap_or_else(PoisonError::into_inner);
        let epoch = instance.epoch();
        let mut done = instance.done.lock().unwrap_or_else(PoisonError::into_inner);
        done.extend(self.responses.drain(..).filter(|response| response.epoch == epoch));
        instance.done_count.store(done.len(), Ordering::Release);
    }

    fn serve(&mut self, instance: &Instance, mut task: Task) {
        if task.epoch != instance.epoch() {
            return;
        }
        if let Effect::Late(ms) = task.effect {
            task.effect = Effect::None;
            self.machine.delay(instance.index, task, ms);
            return;
        }
        let (status, mut results) = match self.perform(instance, &task) {
            Ok(results) => (CPA_STATUS_SUCCESS, results),
            Err((status, code)) => (
                status,
                CpaDcRqResults { status: code, checksum: task.seed, ..CpaDcRqResults::default() },
            ),
        };
        let service = &self.machine.services[instance.package];
        let mut due_ns = 0;
        if service.is_timed() {
            let bytes = match task.direction {
                Direction::Compress => results.consumed,
                Direction::Decompress => results.produced,
            };
            due_ns = service.due(task.submitted_ns, bytes as usize);
            match self.machine.settings.order {
                Order::Shuffled => due_ns += self.random.below(service.latency_ns / 2 + 1),
                Order::Fifo => {
                    due_ns = due_ns.max(self.last_due_ns[instance.index]);
                    self.last_due_ns[instance.index] = due_ns;
                }
            }
        }
        // Falsifies the results, not the time.
        if let (Effect::Produced(bytes), CPA_DC_OK) = (task.effect, results.status) {
            results.produced = bytes;
        }
        let tie = match self.machine.settings.order {
            Order::Shuffled => self.random.next(),
            Order::Fifo => task.sequence,
        };
        let Task { slot, epoch, sequence, .. } = task;
        self.responses.push(Response { slot, epoch, sequence, due_ns, tie, status, results });
    }

    /// Executes a request. The error has the statuses of the callback and of the results.
    fn perform(&mut self, instance: &Instance, task: &Task) -> Result<CpaDcRqResults, (i32, i32)> {
        let violation = (CPA_STATUS_FAIL, CPA_DC_FATALERR);
        let Some((source, source_bytes)) = self.read_list(instance, task.source) else {
            return Err(violation);
        };
        let mut input = std::mem::take(&mut self.plain);
        input.resize(source_bytes, 0);
        let read = self.read_data(instance, &source, &mut input);
        let target = self.read_list(instance, task.target);
        let mut out = std::mem::take(&mut self.out);
        let result = match (read, target) {
            (true, Some((target, room))) => {
                self.transform(instance, task, &input, &target, room, &mut out)
            }
            _ => Err(violation),
        };
        self.plain = input;
        self.out = out;
        result
    }

    fn transform(
        &mut self,
        instance: &Instance,
        task: &Task,
        input: &[u8],
        target: &[(u64, usize)],
        room: usize,
        out: &mut Vec<u8>,
    ) -> Result<CpaDcRqResults, (i32, i32)> {
        if let Effect::Status(code) | Effect::Error(code) = task.effect {
            // A failing device leaves garbage in the output.
            out.clear();
            out.resize(room.min(64), 0xdb);
            self.write_data(instance, task, target, out);
            let status = match task.effect {
                Effect::Status(_) => CPA_STATUS_SUCCESS,
                _ => CPA_STATUS_FAIL,
            };
            return Err((status, code));
        }
        let stored = self.machine.settings.engine == Engine::Stored;
        let done = match task.direction {
            Direction::Compress if stored => deflate::store(input, task.params.last, room, out),
            Direction::Compress => self.slices.compress(input, task.params, room, out),
            Direction::Decompress => self.slices.decompress(input, room, out),
        };
        let done = done.map_err(|code| match (task.direction, code) {
            // As in Gen4's traditional API: an overflow of a stateless compression is no failure.
            (Direction::Compress, CPA_DC_OVERFLOW) => (CPA_STATUS_SUCCESS, code),
            _ => (CPA_STATUS_FAIL, code),
        })?;
        let (plain, deflated) = match task.direction {
            Direction::Compress => (&input[..done.consumed], out.len()),
            Direction::Decompress => (&out[..], done.consumed),
        };
        let tally = &self.machine.tallies.instances[instance.index];
        add(&tally.plain_bytes, plain.len() as u64);
        add(&tally.deflated_bytes, deflated as u64);
        let mut checksum = deflate::checksum(task.params.checksum, task.seed, plain);
        match task.effect {
            Effect::Crc => checksum ^= 1,
            Effect::Flip if !out.is_empty() => {
                let bit = self.random.below(out.len() as u64 * 8);
                let index = usize::try_from(bit / 8).unwrap_or(0);
                out[index] ^= 1 << (bit % 8);
            }
            _ => {}
        }
        if !self.write_data(instance, task, target, out) {
            return Err((CPA_STATUS_FAIL, CPA_DC_FATALERR));
        }
        let compress = task.direction == Direction::Compress;
        Ok(CpaDcRqResults {
            status: CPA_DC_OK,
            produced: u32::try_from(out.len()).unwrap_or(u32::MAX),
            consumed: u32::try_from(done.consumed).unwrap_or(u32::MAX),
            checksum,
            endOfLastBlock: u32::from(!compress && done.flag),
            dataUncompressed: u32::from(compress && done.flag),
        })
    }
}
