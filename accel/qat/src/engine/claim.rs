//! An engine's instance: claimed when one is free, exchanged when it stays unusable.

use super::{Engine, CLAIM_PAUSE_NS};
use crate::device::Device;
use crate::instance::{Instance, InstanceError};
use crate::process::Qat;
use std::sync::Arc;

/// An instance with less depth than this is not used.
const LEAST_DEPTH: usize = 8;
/// An instance that has been unusable for this long is exchanged for a free one.
const EXCHANGE_AFTER_NS: u64 = 1_000_000_000;

impl Engine {
    /// Claims a free instance, if this engine has none or its own has been dead for a while.
    pub(super) fn look_for_instance(&mut self) {
        let Some(qat) = self.qat.clone() else {
            self.claim_at = u64::MAX;
            return;
        };
        if self
            .device
            .as_ref()
            .is_some_and(|device| !device.is_useless_since(self.delivery.now, EXCHANGE_AFTER_NS))
        {
            self.claim_at = self.delivery.now + EXCHANGE_AFTER_NS;
            return;
        }
        self.claim_at = self.delivery.now + self.claim_pause;
        self.claim_pause = (self.claim_pause * 2).min(CLAIM_PAUSE_NS.1);
        for instance in qat.claims() {
            match self.open(&qat, instance) {
                Ok((device, depth)) => {
                    let less = (depth < self.options.depth).then(|| {
                        format!(
                            "pinned memory for {depth} of {} requests; raise the memlock limit (ulimit -l)",
                            self.options.depth
                        )
                    });
                    instance.report(Some(Arc::clone(&self.delivery.counters)), less);
                    if let Some(old) = self.device.replace(device) {
                        self.delivery.withdraw_pinned();
                        old.retire(&qat, &mut self.delivery);
                    }
                    self.claim_pause = CLAIM_PAUSE_NS.0;
                    return;
                }
                Err(error) => {
                    instance.release();
                    instance.report(None, Some(error.to_string()));
                }
            }
        }
    }

    /// Opens a device on a claimed instance, with less depth if pinned memory does not suffice.
    fn open(
        &mut self,
        qat: &Qat,
        instance: &Arc<Instance>,
    ) -> Result<(Device, usize), InstanceError> {
        let mut options = self.options.clone();
        loop {
            match Device::new(qat.api(), instance, &options, &mut self.delivery, &self.calls) {
                Ok(device) => return Ok((device, options.depth)),
                Err(InstanceError::Memory { .. }) if options.depth >= 2 * LEAST_DEPTH => {
                    options.depth /= 2
                }
                Err(error) => return Err(error),
            }
        }
    }
}
