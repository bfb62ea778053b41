//! A server that replaces a live one. It reports that it cannot take over before "go", or it ends
//! the present server and takes over.

use super::supervisor::Supervisor;
use crate::device::claims::left;
use crate::device::inherited::{descriptor, Inherited};
use crate::device::plan::Plan;
use crate::say::say_to;
use anyhow::{ensure, Context};
use pulse::Pulse;
use rustix::event::{poll, PollFd, PollFlags};
use rustix::process::{pidfd_send_signal, Signal};
use std::os::fd::{AsFd, OwnedFd};
use store::{Ahead, FileDisk};
use swap::supervisor::step;

#[derive(Debug)]
pub(super) struct Succession {
    /// The present server.
    present: OwnedFd,
    /// Standard error once this server stands by.
    log: OwnedFd,
    pulse: Pulse,
}

impl Succession {
    /// Returns `None` for a stand-by server that replaces only a dead one.
    ///
    /// # Errors
    /// The present server holds state that this one, with this program and these settings, cannot
    /// take over. The present server continues.
    pub(super) fn new(
        plan: &Plan<'_>,
        inherited: &Inherited,
        store: &anyhow::Result<Ahead>,
        backing: &Option<anyhow::Result<FileDisk>>,
        disk: Option<anyhow::Result<ublk::Info>>,
        owner: ublk::Owner,
    ) -> anyhow::Result<Option<Self>> {
        let (Some(present), Some(log)) = (inherited.succeeds, inherited.log) else {
            return Ok(None);
        };
        let store = store.as_ref().map_err(|error| anyhow::anyhow!("{error:#}"))?;
        store.check(&plan.store_options())?;
        if let Some(Err(error)) = backing {
            anyhow::bail!("{error:#}");
        }
        ensure!(
            backing.is_some() == plan.policy.backing_dev.is_some(),
            "backing_dev: a device has its backing device from its start on, or none"
        );
        if let (Some(disk), Some(buffers)) = (disk, inherited.buffers) {
            let found = rustix::fs::fstat(descriptor(buffers)?)?.st_size;
            // The disk stays as the machine had CPUs and memory when it was made.
            let options = ublk::Options { owner, ..plan.ublk_options() };
            options.check(&disk?, u64::try_from(found)?)?;
        }
        // The arguments may mean fewer pages than the store has: a server that grew it died before
        // it served.
        if plan.pages > store.pages() {
            if plan.args.ublk {
                ensure!(
                    ublk::Control::open(plan.ublk_options().timeout)?.changes_sizes(),
                    "--size: this kernel cannot change the size of a ublk disk, Linux 6.16 or \
                     later can: end the device and start it with --size {}",
                    plan.args.size
                );
            }
            // Last, because the memory stays with the store until its next server.
            store.grow(&plan.store_options()).context("--size")?;
        }
        let pulse = inherited.pulse.context("the supervisor has left no signs of life")?;
        let pulse = Pulse::open(&descriptor(pulse)?).context("signs of life")?;
        Ok(Some(Self { present: left(present)?, log: left(log)?, pulse }))
    }

    /// Reports that this server can take over and has its memory.
    pub(super) fn stand_by(&self, supervisor: &Supervisor) -> anyhow::Result<()> {
        say_to(self.log.as_fd()).context("cannot write to the log")?;
        step("successor stands by");
        supervisor.tell_stands_by();
        Ok(())
    }

    /// Ends the present server. The supervisor does so too, unless it has been killed meanwhile.
    pub(super) fn succeed(&self) {
        step("successor goes");
        // A process that has exited needs no signal.
        let _ = pidfd_send_signal(&self.present, Signal::KILL);
        let mut fds = [PollFd::new(&self.present, PollFlags::IN)];
        // A process in a disk request exits only when the disk answers; until then it holds the
        // store.
        while poll(&mut fds, None).is_err() {}
        self.pulse.clear();
        step("successor alone");
    }
}
