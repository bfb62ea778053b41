//! Engines without an instance, where the user requires the device, and why they have none.

use crate::process::Qat;

/// No engine has an instance.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no codec thread can use the QAT device: {reason}; --accelerator auto goes on in software")]
pub struct NoEngine {
    reason: String,
}

impl Qat {
    /// Checks the engines that a command has made; `any` says whether one of them is
    /// [on a device](crate::Engine::on_device).
    ///
    /// # Errors
    /// None is, and the user [requires the device](crate::StartOptions::required).
    pub fn check_engines(&self, any: bool) -> Result<(), NoEngine> {
        if any || !self.is_required() {
            return Ok(());
        }
        let problems = self.problems();
        let reason = match problems.is_empty() {
            true => "no instance is free".to_owned(),
            false => problems.join("; "),
        };
        Err(NoEngine { reason })
    }

    /// Why instances could not be used, or not with all requests, as found when engines claimed
    /// them.
    pub fn problems(&self) -> Vec<String> {
        let problems = self.all().iter().filter_map(|instance| {
            let problem = instance.reported().1?;
            let is_named = problem.starts_with("instance ");
            Some(if is_named { problem } else { format!("{}: {problem}", instance.info.name) })
        });
        problems.collect()
    }
}
