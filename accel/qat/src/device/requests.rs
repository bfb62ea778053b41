//! Requests to the device: submitted, pending while the ring is full, or passed to software.

use super::{Device, Phase, IDLE_RETRIES};
use crate::counters::{add, Reason};
use crate::delivery::{Delivery, Place, Work};
use qat_abi as abi;

impl Device {
    /// Submits a filled slot to the device or, if there is a `reason` against that, to software.
    pub(crate) fn submit(
        &mut self,
        slot: u16,
        work: Work,
        reason: Option<Reason>,
        delivery: &mut Delivery,
    ) {
        self.slots[usize::from(slot)].work = work;
        match reason {
            Some(reason) => self.hand_over(slot, reason, delivery),
            // Behind the slots that are already pending.
            None if !self.pending.is_empty() => self.pend(slot),
            None => match self.fly(slot, delivery) {
                Flown::Away => {}
                Flown::Full => self.pend(slot),
                Flown::Refused(reason) => self.hand_over(slot, reason, delivery),
            },
        }
    }

    fn fly(&mut self, slot: u16, delivery: &mut Delivery) -> Flown {
        let work = self.slots[usize::from(slot)].work;
        match self.channel.submit(slot, work.len, work.op) {
            abi::CPA_STATUS_SUCCESS => {
                if self.flying == 0 {
                    self.busy_since = delivery.now;
                    self.last_answer = delivery.now;
                }
                self.idle_retries = 0;
                self.flying += 1;
                self.flying_bytes += work.plain_len();
                self.held -= 1;
                self.slots[usize::from(slot)].phase = Phase::Flying { redo: false };
                Flown::Away
            }
            abi::CPA_STATUS_RETRY => {
                add(&delivery.counters.retries, 1);
                Flown::Full
            }
            status => {
                add(&delivery.counters.refusals, 1);
                match status {
                    abi::CPA_STATUS_RESTARTING => self.suspect(Reason::Restarting, delivery),
                    abi::CPA_STATUS_FATAL => self.suspect(Reason::Fatal, delivery),
                    _ => {}
                }
                Flown::Refused(self.unusable().unwrap_or(Reason::Refused))
            }
        }
    }

    pub(super) fn try_pending(&mut self, delivery: &mut Delivery) {
        while let Some(&slot) = self.pending.front() {
            match self.fly(slot, delivery) {
                Flown::Away => {
                    self.pending.pop_front();
                }
                Flown::Refused(reason) => {
                    // If that raised a suspicion, the queue is empty already.
                    if self.pending.front() == Some(&slot) {
                        self.pending.pop_front();
                        self.hand_over(slot, reason, delivery);
                    }
                }
                Flown::Full => {
                    if self.flying == 0 {
                        self.idle_retries += 1;
                        if self.idle_retries >= IDLE_RETRIES {
                            // Full although it has none of our requests, or only lost ones.
                            self.suspect(Reason::Refused, delivery);
                        }
                        return;
                    }
                    let work = self.slots[usize::from(slot)].work;
                    if self.options.share
                        && !delivery.has_queued()
                        && delivery.software_ns(work.op, work.plain_len()) < self.wait_ns()
                    {
                        self.pending.pop_front();
                        self.hand_over(slot, Reason::Busy, delivery);
                    }
                    return;
                }
            }
        }
    }

    fn pend(&mut self, slot: u16) {
        self.slots[usize::from(slot)].phase = Phase::Pending;
        self.pending.push_back(slot);
    }

    /// Queues a slot, which the device does not have, for software.
    pub(super) fn hand_over(&mut self, slot: u16, reason: Reason, delivery: &mut Delivery) {
        let at = &mut self.slots[usize::from(slot)];
        at.phase = Phase::Queued;
        at.number = delivery.queue(Place::Pinned(slot), at.work.plain_len(), reason);
    }

    /// Queues a slot, which the device has, for software as well.
    pub(super) fn hedge(&mut self, slot: u16, reason: Reason, delivery: &mut Delivery) {
        let at = &mut self.slots[usize::from(slot)];
        at.phase = Phase::Flying { redo: true };
        at.number = delivery.queue(Place::Pinned(slot), at.work.plain_len(), reason);
    }
}

/// The result of a submission.
enum Flown {
    /// The device has the request.
    Away,
    /// The ring has no room.
    Full,
    /// This device has refused the request.
    Refused(Reason),
}
