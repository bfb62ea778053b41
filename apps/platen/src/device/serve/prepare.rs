//! A server's work before it opens the store: checks, precautions, stand-by, claims.

use super::heap::ServersHeap;
use super::succession::Succession;
use super::supervisor::Supervisor;
use crate::device::args::ServeArgs;
use crate::device::claims::{Claims, Left, Ways};
use crate::device::inherited::{descriptor, Inherited};
use crate::device::plan::Plan;
use crate::device::{backing, control, settings_file};
use crate::say::{say_by_a_thread, say_untaken};
use anyhow::Context;
use std::os::fd::AsFd;
use store::{Ahead, FileDisk};

/// A server that has to serve and may open its store.
pub(super) struct Prepared<'a> {
    pub(super) plan: Plan<'a>,
    pub(super) inherited: Inherited,
    pub(super) supervisor: Supervisor,
    /// The backing device inherited from the supervisor.
    pub(super) disk_left: Option<anyhow::Result<FileDisk>>,
    /// The store, as mapped by a stand-by server.
    pub(super) ahead: Option<Ahead>,
    /// Name and sockets of a server without a supervisor.
    pub(super) claims: Option<Claims>,
    pub(super) ways: Ways,
    /// The supervisor's files, which this server removes if it outlives the supervisor.
    pub(super) left: Left,
}

impl<'a> Prepared<'a> {
    /// Returns `None` if this process stood by and was never needed.
    pub(super) fn new(
        args: &'a ServeArgs,
        inherited: Option<&Inherited>,
    ) -> anyhow::Result<Option<Self>> {
        if inherited.is_none() {
            control::check(args)?;
            swap::ignore_size_signal()?;
        } else {
            // The supervisor decides in which order processes stop.
            swap::ignore_signals()?;
        }
        // Read it while nothing depends on this process: reading a file may need memory, and so
        // this device.
        let text = match inherited {
            None => settings_file::of(args)?,
            Some(inherited) => settings_file::inherited(inherited)?,
        };
        let mut plan = Plan::new(args, text.as_deref())?;
        let supervised = inherited.is_some();
        if !supervised {
            plan.check_threads()?;
        }
        let mut inherited = inherited.cloned().unwrap_or_default();
        let disk = inherited.device.filter(|_| args.ublk).map(|id| {
            let info = ublk::Control::open(plan.ublk_options().timeout)?.info(id)?;
            plan.take_over(&info);
            anyhow::Ok(info)
        });
        let disk_left = backing::inherit(&inherited);
        let table = disk_left.as_ref().map(backing::table);
        let mut heap = ServersHeap::reserve(&inherited, plan.heap(table));
        if args.swap {
            say_untaken(swap::own());
        }
        let supervisor = Supervisor::new(supervised)?;
        if args.swap && args.nbd.is_some() && supervisor.is_there() {
            // A server that could not connect the kernel's client again must not stand by.
            supervisor.backend()?;
        }
        let mut ahead = None;
        if inherited.standby {
            heap.map();
            let private = if heap.is_there() { 0 } else { plan.heap(table) };
            let warmed = swap::warm(private, plan.threads(table), &Plan::small_stacks());
            warmed.context("cannot get memory to stand by")?;
            let store = descriptor(inherited.store);
            let mapped = store.and_then(|store| Ok(Ahead::map(store.as_fd())?));
            let owner = supervisor.owner();
            let succession = Succession::new(&plan, &inherited, &mapped, &disk_left, disk, owner)?;
            // Without a mapping the take-over is as for any other server, and reports what is wrong
            // with the store.
            let mut mapped = mapped.ok();
            let mut touch = || {
                mapped.as_mut().map(Ahead::touch);
            };
            touch();
            if args.swap {
                say_untaken(swap::prefer_alone().err());
            }
            if let Some(succession) = &succession {
                succession.stand_by(&supervisor)?;
            }
            let go = supervisor.wait_for_go(touch)?;
            if let (Some(succession), Some(_)) = (&succession, &go) {
                succession.succeed();
            }
            ahead = mapped;
            match go {
                Some(go) => (inherited.device, inherited.in_software) = (go.device, go.in_software),
                None => return Ok(None),
            }
            heap.adopt();
        } else {
            heap.adopt_anew();
        }
        // Before the store: another device may have the name or a socket already.
        let claims = (!supervisor.is_there()).then(|| Claims::make(args, false)).transpose()?;
        if let Some(claims) = &claims {
            claims.succeed(args.ublk.then(|| supervisor.owner()))?;
        }
        let ways = claims.as_ref().map_or_else(|| Ways::inherited(&inherited), Claims::ways)?;
        let left = Left::of(args, supervisor.is_there());
        say_by_a_thread();
        Ok(Some(Self { plan, inherited, supervisor, disk_left, ahead, claims, ways, left }))
    }
}
