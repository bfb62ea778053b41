//! A pending request to replace the server.

use super::changes::Changes;
use super::claims::Claims;
use super::covered::Covered;
use super::plan::Plan;
use super::requests::{Client, Requests};
use anyhow::Context;
use std::ffi::OsString;
use std::fs::File;
use std::os::fd::OwnedFd;

/// A pending request.
pub(super) struct Renewal {
    pub(super) client: Client,
    /// The new program, for `upgrade`.
    pub(super) program: Option<File>,
    pub(super) settings: Option<Settings>,
    /// Descriptors that the new server inherits only for its start.
    pub(super) held: Option<[OwnedFd; 2]>,
}

/// Requested settings, or, once they are `in_effect`, those of the present server.
pub(super) struct Settings {
    pub(super) changes: Changes,
    pub(super) plan: &'static Plan<'static>,
    /// The text of the policy's settings.
    pub(super) policy: Option<OwnedFd>,
    /// If a size was asked for, be it the present one: then all of the disk is to have swap areas.
    pub(super) covered: Option<Covered>,
    /// Whether the requested settings were exchanged for the present ones, before "go" is sent.
    pub(super) in_effect: bool,
}

impl Settings {
    /// Exchanges these settings for others. A second exchange restores both.
    pub(super) fn exchange(
        &mut self,
        changes: &mut Changes,
        plan: &mut &'static Plan<'static>,
        policy: &mut Option<OwnedFd>,
        covered: &mut Covered,
    ) {
        std::mem::swap(changes, &mut self.changes);
        std::mem::swap(plan, &mut self.plan);
        std::mem::swap(policy, &mut self.policy);
        if let Some(other) = &mut self.covered {
            std::mem::swap(covered, other);
        }
        self.in_effect = !self.in_effect;
    }
}

/// The socket for requests.
pub(super) fn requests(claims: &Claims) -> anyhow::Result<Requests> {
    let listening = claims.requests.as_ref().context("no socket for requests")?;
    Requests::new(&listening.listener)
}

/// The arguments of this process, with these changes, for a server or another program.
pub(super) fn arguments(changes: &Changes) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = Vec::new();
    let mut own = std::env::args_os().skip(1);
    while let Some(argument) = own.next() {
        if argument == "--changed" || argument == "--adopt" {
            own.next();
        } else {
            arguments.push(argument);
        }
    }
    let text = changes.to_string();
    if !text.is_empty() {
        arguments.extend(["--changed".into(), text.into()]);
    }
    arguments
}

#[cfg(test)]
mod tests {
    use super::super::plan::tests::args;
    use super::*;
    use crate::size::Size;
    use std::fs::File;
    use std::os::fd::AsRawFd;

    /// With the former size, an area that an administrator had taken off was swapped to again.
    #[test]
    fn settings_whose_server_fails_leave_the_former_ones_and_the_areas_of_the_disk() {
        let plan = |words| &*Box::leak(Box::new(Plan::new(args(words), None).unwrap()));
        let open = || OwnedFd::from(File::open("/dev/null").unwrap());
        let large = Changes { size: Some(Size(2 << 30)), ..Changes::default() };
        for sizes in [true, false] {
            let mut asked = Settings {
                changes: large.clone(),
                plan: plan("--nbd unix:/x --mem-limit 2G"),
                policy: Some(open()),
                covered: sizes.then(Covered::default),
                in_effect: false,
            };
            let (mut changes, mut policy) = (Changes::default(), Some(open()));
            let (mut present, mut covered) = (plan("--nbd unix:/x"), Covered::up_to(1 << 30));
            let (former, number) = (present, policy.as_ref().map(AsRawFd::as_raw_fd));
            asked.exchange(&mut changes, &mut present, &mut policy, &mut covered);
            assert!(asked.in_effect && changes == large && !std::ptr::eq(present, former));
            let all = if sizes { Covered::default() } else { Covered::up_to(1 << 30) };
            assert_eq!(covered, all);
            asked.exchange(&mut changes, &mut present, &mut policy, &mut covered);
            assert!(!asked.in_effect && changes == Changes::default());
            assert!(std::ptr::eq(present, former));
            assert_eq!(policy.as_ref().map(AsRawFd::as_raw_fd), number);
            assert_eq!(covered, Covered::up_to(1 << 30));
        }
    }
}
