//! Supervision of the device: events, deadlines, suspicion, probes.

use super::{Device, Phase, Trust, BACKOFF_NS, LATES};
use crate::counters::{add, Reason};
use crate::delivery::{Delivery, Work};
use crate::mailbox::{Events, State};
use crate::options::Direction;
use crate::piece::Op;
use qat_abi as abi;
use std::sync::atomic::Ordering;

impl Device {
    pub(super) fn look_at_events(&mut self, delivery: &mut Delivery) {
        let Events { state, fatals, restarts } = self.mailbox.events();
        // A death between two polls counts although the state is Running again: the requests in
        // flight are lost.
        if (state != self.state && state != State::Running) || fatals != self.fatals {
            if self.state == State::Running {
                self.down_since = delivery.now;
            }
            self.flush(
                if state == State::Restarting { Reason::Restarting } else { Reason::Fatal },
                delivery,
            );
        }
        (self.state, self.fatals) = (state, fatals);
        if restarts != self.restarts {
            self.restarts = restarts;
            if state == State::Running {
                self.recover(delivery);
            }
        }
    }

    /// Does late pieces in software. If the device has answered nothing for half the deadline, it
    /// is silent: does all pieces in software.
    pub(super) fn look_at_deadlines(&mut self, delivery: &mut Delivery) {
        // Rarely, so that it costs nothing; and early by the pause, so that no piece is late
        // because of it.
        let pause = self.deadline / 16;
        self.next_look = delivery.now + pause;
        // Software takes time too: start early enough for the last piece.
        let op = if self.options.direction == Direction::Decompress {
            Op::Decompress { plain_len: 0 }
        } else {
            Op::Compress
        };
        let lead = delivery.software_ns(op, self.flying_bytes).min(self.deadline / 4) + pause;
        let (mut silent, mut late) = (false, false);
        for slot in 0..self.options.depth {
            let at = &self.slots[slot];
            let due = at.work.at + self.deadline <= delivery.now + lead;
            let slot = u16::try_from(slot).expect("at most 256");
            match at.phase {
                Phase::Flying { redo: false } if due => {
                    add(&delivery.counters.deadlines, 1);
                    self.hedge(slot, Reason::Late, delivery);
                    late = true;
                    silent |= self.last_answer + self.deadline / 2 <= delivery.now;
                }
                Phase::Pending if due => {
                    self.pending.retain(|&pending| pending != slot);
                    self.hand_over(slot, Reason::Busy, delivery);
                }
                _ => {}
            }
        }
        if late {
            if delivery.now > self.lates_since.saturating_add(FORGIVEN_NS) {
                (self.lates, self.lates_since) = (0, delivery.now);
            }
            self.lates += 1;
        }
        // A device that answers most requests and loses some would cost a deadline for each.
        if silent || self.lates >= LATES {
            self.suspect(Reason::Late, delivery);
        }
    }

    /// Stops submitting to the device, and does its pieces in software.
    pub(super) fn suspect(&mut self, reason: Reason, delivery: &mut Delivery) {
        if self.trust == Trust::Good {
            if delivery.now >= self.trusted_since.saturating_add(FORGIVEN_NS) {
                self.backoff = BACKOFF_NS.0;
            }
            let probe_at = self.next_probe(delivery.now);
            self.trust = Trust::Suspect { since: delivery.now, probe_at, sent: None };
            add(&delivery.counters.suspicions, 1);
            // The event thread polls the instance meanwhile, because an idle engine does not.
            self.channel.instance().neglected.store(true, Ordering::Release);
        }
        self.flush(reason, delivery);
    }

    pub(super) fn recover(&mut self, delivery: &mut Delivery) {
        self.trust = Trust::Good;
        self.trusted_since = delivery.now;
        self.channel.instance().neglected.store(false, Ordering::Release);
        (self.errors, self.poll_failures, self.idle_retries, self.lates) = (0, 0, 0, 0);
        add(&delivery.counters.recoveries, 1);
    }

    pub(super) fn flush(&mut self, reason: Reason, delivery: &mut Delivery) {
        while let Some(slot) = self.pending.pop_front() {
            self.hand_over(slot, reason, delivery);
        }
        if self.flying == 0 {
            return;
        }
        for slot in 0..self.options.depth {
            if self.slots[slot].phase == (Phase::Flying { redo: false }) {
                self.hedge(u16::try_from(slot).expect("at most 256"), reason, delivery);
            }
        }
    }

    pub(super) fn next_probe(&mut self, now: u64) -> u64 {
        let probe_at = now + self.backoff;
        self.backoff = (self.backoff * 2).min(BACKOFF_NS.1);
        probe_at
    }

    /// Handles the answer to a request that was given up: the next probe follows soon.
    pub(super) fn sign_of_life(&mut self, status: abi::CpaStatus, now: u64) {
        if let (Trust::Suspect { since, sent: None, .. }, abi::CPA_STATUS_SUCCESS) =
            (self.trust, status)
        {
            self.trust = Trust::Suspect { since, probe_at: now, sent: None };
        }
    }

    /// Sends a probe of made-up data, so that no page waits for a device that may be dead.
    pub(super) fn probe(
        &mut self,
        probe_at: u64,
        sent: Option<(u16, u64)>,
        delivery: &mut Delivery,
    ) {
        let Trust::Suspect { since, .. } = self.trust else { return };
        if let Some((_, at)) = sent {
            if delivery.now >= at + self.deadline {
                // Not answered. Its slot stays with the device; a late answer is a sign of life.
                let probe_at = self.next_probe(delivery.now);
                self.trust = Trust::Suspect { since, probe_at, sent: None };
            }
            return;
        }
        if delivery.now < probe_at {
            return;
        }
        let Some(slot) = self.probe_free.pop() else {
            let probe_at = self.next_probe(delivery.now);
            self.trust = Trust::Suspect { since, probe_at, sent: None };
            return;
        };
        let (op, bytes) = match self.options.direction {
            Direction::Decompress => {
                (Op::Decompress { plain_len: self.probe_plain.len() }, &self.probe_packed)
            }
            _ => (Op::Compress, &self.probe_plain),
        };
        let len = bytes.len();
        self.channel.source_mut(slot)[..len].copy_from_slice(bytes);
        let crc32 = libdeflater::crc32(&self.probe_plain);
        self.slots[usize::from(slot)].work = Work { op, len, tag: 0, crc32, at: delivery.now };
        add(&delivery.counters.probes, 1);
        let status = self.channel.submit(slot, len, op);
        self.trust = if status == abi::CPA_STATUS_SUCCESS {
            self.slots[usize::from(slot)].phase = Phase::Probe;
            Trust::Suspect { since, probe_at, sent: Some((slot, delivery.now)) }
        } else {
            self.recycle(slot);
            Trust::Suspect { since, probe_at: self.next_probe(delivery.now), sent: None }
        };
    }
}

/// A device that has worked for this long starts again with the shortest pause.
const FORGIVEN_NS: u64 = 10_000_000_000;
