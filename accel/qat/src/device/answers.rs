//! Judges the device's answers, and delivers them or passes the pieces to software.

use super::{Device, Phase, Trust, POLL_FAILURES};
use crate::channel::slot_of;
use crate::counters::{add, set, Reason};
use crate::delivery::{smooth, Delivery, Done, Work};
use crate::piece::Op;
use qat_abi as abi;

impl Device {
    /// Collects callbacks, delivers good results, queues the others for software.
    pub(crate) fn collect(&mut self, delivery: &mut Delivery, done: &mut impl Done) {
        if self.channel.owned() == 0 {
            return;
        }
        match self.channel.poll() {
            abi::CPA_STATUS_SUCCESS | abi::CPA_STATUS_RETRY => self.poll_failures = 0,
            abi::CPA_STATUS_RESTARTING => self.suspect(Reason::Restarting, delivery),
            abi::CPA_STATUS_FATAL => self.suspect(Reason::Fatal, delivery),
            _ => {
                add(&delivery.counters.poll_failures, 1);
                self.poll_failures += 1;
                if self.poll_failures >= POLL_FAILURES {
                    self.suspect(Reason::Poll, delivery);
                }
            }
        }
        // Callbacks may have come despite the failure, or from the event thread's poll.
        let before = self.flying_bytes;
        for word in 0..self.channel.words() {
            let mut bits = self.mailbox.take_done(word);
            while bits != 0 {
                self.called_back(slot_of(word, bits), delivery, done);
                bits &= bits - 1;
            }
        }
        let got = before - self.flying_bytes;
        if got > 0 {
            self.rate = smooth(self.rate, self.busy_since, delivery.now, got);
            set(&delivery.counters.device_ns_per_kib, self.rate);
            self.busy_since = delivery.now;
            self.last_answer = delivery.now;
        }
    }

    /// Handles the callback of `slot`, which belongs to the driver again.
    fn called_back(&mut self, slot: u16, delivery: &mut Delivery, done: &mut impl Done) {
        let status = self.channel.take_back(slot);
        match self.slots[usize::from(slot)].phase {
            Phase::Flying { .. } => {
                let mut work = self.slots[usize::from(slot)].work;
                self.landed(&work);
                let judged = self.judge(slot, &mut work, status, false, delivery);
                // If this raised a suspicion, all slots in flight have been queued for software,
                // also this one.
                let redo = self.slots[usize::from(slot)].phase == (Phase::Flying { redo: true });
                match judged {
                    Ok(len) => {
                        self.errors = 0;
                        if redo {
                            delivery.withdraw(self.slots[usize::from(slot)].number);
                        }
                        // Voids its place in the software's queue, if it has one.
                        self.slots[usize::from(slot)].number = 0;
                        delivery.deliver(&work, self.channel.output(slot, len), done);
                        self.recycle(slot);
                    }
                    Err(_) if redo => {
                        self.held += 1;
                        self.slots[usize::from(slot)].phase = Phase::Queued;
                    }
                    Err(reason) => {
                        self.held += 1;
                        // A dying device answers with FAIL before its event arrives.
                        let reason = self.unusable().unwrap_or(reason);
                        self.hand_over(slot, reason, delivery);
                    }
                }
            }
            Phase::Lost => {
                add(&delivery.counters.late, 1);
                self.lost -= 1;
                set(&delivery.counters.quarantined, self.lost as u64);
                self.recycle(slot);
                self.sign_of_life(status, delivery.now);
            }
            Phase::Probe => {
                let mut work = self.slots[usize::from(slot)].work;
                let well = self.judge(slot, &mut work, status, true, delivery).is_ok();
                self.recycle(slot);
                match self.trust {
                    Trust::Suspect { sent: Some((this, _)), since, .. } if this == slot => {
                        if well && !self.is_worn() {
                            self.recover(delivery);
                        } else {
                            let probe_at = self.next_probe(delivery.now);
                            self.trust = Trust::Suspect { since, probe_at, sent: None };
                        }
                    }
                    _ => self.sign_of_life(status, delivery.now),
                }
            }
            // `take_done` reports only announced requests, whose slots are in one of the phases
            // above.
            phase => unreachable!("callback of slot {slot} in phase {phase:?}"),
        }
    }

    /// Checks the device's results. Returns the length of the output, or why it is not used.
    fn judge(
        &mut self,
        slot: u16,
        work: &mut Work,
        status: abi::CpaStatus,
        verify: bool,
        delivery: &mut Delivery,
    ) -> Result<usize, Reason> {
        let results = self.channel.results(slot);
        if status != abi::CPA_STATUS_SUCCESS || results.status != abi::CPA_DC_OK {
            let data = matches!(work.op, Op::Decompress { .. }) && is_about_data(results.status);
            return Err(if data { Reason::Wrong } else { Reason::Failed });
        }
        let (produced, consumed) = (results.produced as usize, results.consumed as usize);
        if consumed != work.len || produced == 0 || produced > self.options.room() {
            return Err(Reason::Wrong);
        }
        let output = self.channel.output(slot, produced);
        match work.op {
            Op::Compress => {
                if results.checksum != work.crc32 {
                    return Err(Reason::Wrong);
                }
                if verify || self.is_verified() {
                    add(&delivery.counters.verified, 1);
                    let output = self.channel.output(slot, produced);
                    let plain = self.channel.source(slot, work.len);
                    if delivery.software.decompress(output, work.len) != Ok(plain) {
                        // The device's checksum and its own verification were right, so nothing
                        // that it reports can be trusted.
                        self.suspect(Reason::Wrong, delivery);
                        return Err(Reason::Wrong);
                    }
                }
            }
            Op::Decompress { plain_len } => {
                let ended = results.endOfLastBlock == abi::CPA_TRUE
                    || !self.channel.instance().info.reports_end;
                if produced != plain_len || !ended {
                    return Err(Reason::Wrong);
                }
                work.crc32 = libdeflater::crc32(output);
                if results.checksum != work.crc32 {
                    return Err(Reason::Wrong);
                }
            }
        }
        Ok(produced)
    }

    /// Whether to decompress and compare this output.
    fn is_verified(&mut self) -> bool {
        if self.options.verify_every == 0 {
            return false;
        }
        // A device that has lost its trust may have spoilt all that it has in flight.
        if self.trust != Trust::Good {
            return true;
        }
        self.until_verify -= 1;
        if self.until_verify > 0 {
            return false;
        }
        self.until_verify = self.options.verify_every;
        true
    }
}

/// Whether the data is the cause of a decompression's status (`CpaDcReqStatus`: invalid blocks,
/// codes and distances, an incomplete stream, an empty dynamic block), and not the device.
fn is_about_data(status: i32) -> bool {
    matches!(status, -10..=-1 | -15 | -19)
}
