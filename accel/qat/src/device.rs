//! The device's side of an engine: requests in flight, suspicion, recovery.

mod answers;
mod care;
mod requests;

use crate::calls::Calls;
use crate::channel::{Channel, Setup};
use crate::counters::{set, Reason};
use crate::delivery::{Delivery, Done, Queued, Work};
use crate::instance::{Instance, InstanceError};
use crate::load::Api;
use crate::mailbox::{Mailbox, State};
use crate::options::{Direction, EngineOptions};
use crate::piece::Op;
use crate::process::Qat;
use qat_abi as abi;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Duration;

/// The owner of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// No owner.
    Free,
    /// The caller fills it.
    Leased,
    /// It waits for room in the ring.
    Pending,
    /// The device. With `redo` it is also queued for software, and the first result is delivered.
    Flying { redo: bool },
    /// The software's queue; the device is done with the slot or never had it.
    Queued,
    /// The device, after software has delivered its piece.
    Lost,
    /// The device, with a probe.
    Probe,
}

#[derive(Debug)]
struct Slot {
    phase: Phase,
    work: Work,
    /// Number of its place in the software's queue.
    number: u64,
}

/// Whether the device gets requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trust {
    Good,
    /// Software does everything until a probe is answered. `since` is the start of the suspicion,
    /// `sent` the probe in flight.
    Suspect {
        since: u64,
        probe_at: u64,
        sent: Option<(u16, u64)>,
    },
}

/// Checks that find a late piece, within `FORGIVEN_NS`, before the instance becomes suspect.
const LATES: u32 = 3;
/// Pause before a probe: first and longest. It doubles while the device fails.
const BACKOFF_NS: (u64, u64) = (20_000_000, 10_000_000_000);

#[derive(Debug)]
pub(crate) struct Device {
    channel: Channel,
    mailbox: &'static Mailbox,
    slots: Vec<Slot>,
    free: Vec<u16>,
    probe_free: Vec<u16>,
    pending: VecDeque<u16>,
    /// Slots in phase `Flying`, and their plain bytes.
    flying: usize,
    flying_bytes: usize,
    /// Slots in phase `Lost`.
    lost: usize,
    /// Checks since `lates_since` that found a late piece.
    lates: u32,
    lates_since: u64,
    /// Slots leased, pending or queued: pieces of the caller that prevent the exchange of this
    /// device.
    held: usize,
    /// Nanoseconds of the busy device for 1 KiB; and since when it is busy.
    rate: u64,
    busy_since: u64,
    last_answer: u64,
    trust: Trust,
    trusted_since: u64,
    backoff: u64,
    state: State,
    /// When `state` ceased to be Running.
    down_since: u64,
    restarts: u64,
    fatals: u64,
    next_look: u64,
    poll_failures: u32,
    errors: u32,
    idle_retries: u32,
    until_verify: u32,
    deadline: u64,
    options: EngineOptions,
    probe_plain: Vec<u8>,
    probe_packed: Vec<u8>,
}

/// Slots reserved for probes. More than one, because an unanswered probe occupies its slot.
const PROBE_SLOTS: usize = 2;
/// Consecutive failed polls before the instance becomes suspect.
const POLL_FAILURES: u32 = 3;
/// Consecutive errors of the device on data that software could handle.
const ERRORS: u32 = 8;
/// Consecutive RETRYs with none of our requests in the ring.
const IDLE_RETRIES: u32 = 16;

impl Device {
    pub(crate) fn new(
        api: &'static Api,
        instance: &Arc<Instance>,
        options: &EngineOptions,
        delivery: &mut Delivery,
        calls: &Arc<Calls>,
    ) -> Result<Self, InstanceError> {
        let setup = Setup {
            level: options.level,
            direction: match options.direction {
                Direction::Both => abi::CPA_DC_DIR_COMBINED,
                Direction::Compress => abi::CPA_DC_DIR_COMPRESS,
                Direction::Decompress => abi::CPA_DC_DIR_DECOMPRESS,
            },
            slots: options.depth + PROBE_SLOTS,
            max_plain: options.max_plain,
            room: options.room(),
        };
        let channel = Channel::new(api, Arc::clone(instance), &setup, calls)?;
        let mailbox = instance.mailbox;
        let depth = u16::try_from(options.depth).expect("at most 256");
        let probes = depth..depth + u16::try_from(PROBE_SLOTS).expect("a constant");
        // Letters in an order that gives matches, literals and a dynamic tree at any length.
        let letters = b"platen looks whether the device is well";
        let probe_plain: Vec<u8> = (0..options.max_plain.min(4096))
            .map(|i| letters[(i * i / 8) % letters.len()])
            .collect();
        let probe_packed = delivery.software.compress(&probe_plain).to_vec();
        let slot = |_| Slot { phase: Phase::Free, work: Work::NONE, number: 0 };
        delivery.tick();
        Ok(Self {
            mailbox,
            slots: (0..setup.slots).map(slot).collect(),
            free: (0..depth).rev().collect(),
            probe_free: probes.collect(),
            pending: VecDeque::with_capacity(options.depth),
            flying: 0,
            flying_bytes: 0,
            lost: 0,
            lates: 0,
            lates_since: delivery.now,
            held: 0,
            rate: 0,
            busy_since: delivery.now,
            last_answer: delivery.now,
            trust: Trust::Good,
            trusted_since: delivery.now,
            backoff: BACKOFF_NS.0,
            state: State::Running,
            down_since: delivery.now,
            restarts: mailbox.restarts.load(Ordering::Relaxed),
            fatals: mailbox.fatals.load(Ordering::Relaxed),
            next_look: 0,
            poll_failures: 0,
            errors: 0,
            idle_retries: 0,
            until_verify: options.verify_every,
            deadline: u64::try_from(options.deadline.as_nanos()).expect("at most 60 s"),
            options: options.clone(),
            probe_plain,
            probe_packed,
            channel,
        })
    }

    pub(crate) fn usable(&self) -> bool {
        self.trust == Trust::Good && self.state == State::Running
    }

    /// Why the device is not usable.
    pub(crate) fn unusable(&self) -> Option<Reason> {
        match (self.state, self.trust) {
            (State::Fatal, _) => Some(Reason::Fatal),
            (State::Restarting, _) => Some(Reason::Restarting),
            (State::Running, Trust::Suspect { .. }) => Some(Reason::Suspect),
            (State::Running, Trust::Good) => None,
        }
    }

    /// Whether half of the device's slots are lost to requests that never came back. Then the
    /// device is given up.
    pub(crate) fn is_worn(&self) -> bool {
        self.lost * 2 >= self.options.depth
    }

    /// Lets the event thread poll: there is nothing to do for a while.
    pub(crate) fn rest(&mut self) {
        self.channel.rest();
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.flying
    }

    /// Whether none of this engine's requests is with the device or pending.
    pub(crate) fn is_idle(&self) -> bool {
        self.flying == 0 && self.held == 0
    }

    /// Whether the device has been unusable for `ns`, and no piece of the caller is in its slots.
    pub(crate) fn is_useless_since(&self, now: u64, ns: u64) -> bool {
        let since = match (self.state, self.trust) {
            (State::Running, Trust::Good) => return false,
            (State::Running, Trust::Suspect { since, .. }) => since,
            _ => self.down_since,
        };
        self.is_idle() && now >= since.saturating_add(ns)
    }

    /// Estimated nanoseconds until the device has done all requests in flight.
    pub(crate) fn wait_ns(&self) -> u64 {
        self.flying_bytes as u64 * self.rate / 1024
    }

    /// The longest wait with which a piece is still given to the device, nanoseconds.
    pub(crate) fn patience(&self) -> u64 {
        self.deadline / 2
    }

    pub(crate) fn lease(&mut self) -> Option<u16> {
        let slot = self.free.pop()?;
        self.slots[usize::from(slot)].phase = Phase::Leased;
        self.held += 1;
        Some(slot)
    }

    pub(crate) fn unlease(&mut self, slot: u16) {
        self.held -= 1;
        self.recycle(slot);
    }

    pub(crate) fn source(&mut self, slot: u16) -> &mut [u8] {
        debug_assert_eq!(self.slots[usize::from(slot)].phase, Phase::Leased);
        self.channel.source_mut(slot)
    }

    /// Handles events, deadlines, pending slots and probes.
    pub(crate) fn tend(&mut self, delivery: &mut Delivery) {
        self.look_at_events(delivery);
        if delivery.now >= self.next_look {
            self.look_at_deadlines(delivery);
        }
        if !self.pending.is_empty() {
            self.try_pending(delivery);
        }
        if let Trust::Suspect { probe_at, sent, .. } = self.trust {
            if self.state == State::Running {
                self.probe(probe_at, sent, delivery);
            }
        }
    }

    /// Does a queued piece in software. If its callback has come meanwhile, it was removed from the
    /// queue.
    pub(crate) fn redo(
        &mut self,
        slot: u16,
        queued: &Queued,
        delivery: &mut Delivery,
        done: &mut impl Done,
    ) {
        let at = &mut self.slots[usize::from(slot)];
        debug_assert_eq!(at.number, queued.number, "slot {slot} is queued for another piece");
        if at.number != queued.number {
            return;
        }
        let work = at.work;
        let good = delivery.redo(&work, self.channel.source(slot, work.len), queued.reason, done);
        match self.slots[usize::from(slot)].phase {
            Phase::Flying { .. } => {
                self.slots[usize::from(slot)].phase = Phase::Lost;
                self.landed(&work);
                self.lost += 1;
                set(&delivery.counters.quarantined, self.lost as u64);
                if self.is_worn() {
                    self.suspect(Reason::Late, delivery);
                }
            }
            _ => {
                self.held -= 1;
                self.recycle(slot);
            }
        }
        // An error counts against the device only if software succeeds: broken data from a peer
        // does not. Nor does data that software tolerates and a device need not, such as bytes
        // after the end.
        let data = queued.reason == Reason::Wrong && matches!(work.op, Op::Decompress { .. });
        let error = matches!(queued.reason, Reason::Failed | Reason::Wrong | Reason::Refused);
        if good && error && !data {
            self.errors += 1;
            if self.errors >= ERRORS {
                self.suspect(queued.reason, delivery);
            }
        }
    }

    /// Ends the use of the device: the engine is dropped, or takes another instance.
    pub(crate) fn retire(mut self, qat: &Qat, delivery: &mut Delivery) {
        delivery.tick();
        let end = delivery.now + self.deadline;
        while self.usable() && self.channel.drain() > 0 && delivery.now < end {
            std::thread::sleep(Duration::from_micros(50));
            delivery.tick();
            self.state = self.mailbox.state();
        }
        set(&delivery.counters.quarantined, 0);
        set(&delivery.counters.in_flight, 0);
        qat.close(self.channel);
    }

    fn landed(&mut self, work: &Work) {
        self.flying -= 1;
        self.flying_bytes -= work.plain_len();
    }

    fn recycle(&mut self, slot: u16) {
        self.slots[usize::from(slot)].phase = Phase::Free;
        if usize::from(slot) < self.options.depth {
            self.free.push(slot);
        } else {
            self.probe_free.push(slot);
        }
    }
}
