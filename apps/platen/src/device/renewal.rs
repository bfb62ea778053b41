//! Replacement of a live server by a device's supervisor: with other settings (`set`), or by
//! another program (`upgrade`).
//!
//! For an upgrade the supervisor's process executes the new program (`execve`), after the new
//! server has shown that it can take over and has its memory. So there is one supervisor at any
//! time, and servers remain its children. The new server also locks the new program in memory.

mod names;
mod size;

use super::adopt::Adopt;
use super::another::{check_memory, Another};
use super::changes::Changes;
use super::claims::{taken, Claims};
use super::covered::Covered;
use super::inherited::Inherited;
use super::manager::Manager;
use super::pending::{arguments, requests, Renewal, Settings};
use super::plan::Plan;
use super::requests::{Client, Request, DONE};
use super::serving::{heap, inheritable, Serving};
use super::settings_file;
use anyhow::{ensure, Context};
use pulse::Pulse;
use rustix::io::{fcntl_setfd, FdFlags};
use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use swap::supervisor::{Adopted, HandOver};
use ublk::Owner;

impl Serving {
    /// Adopts the state of the supervisor that this process was before `execve`.
    pub(super) fn adopt(
        plan: &'static Plan<'static>,
        changes: Changes,
        claims: Claims,
        handed: &Adopt,
        resume: OwnedFd,
        manager: Manager,
        owner: Owner,
    ) -> anyhow::Result<Self> {
        let servers = &handed.inherited;
        let take = |number: i32| taken(number).and_then(inheritable);
        let pulse_fd = take(servers.pulse.context("no signs of life are handed over")?)?;
        Ok(Self {
            plan,
            changes,
            requests: requests(&claims)?,
            renewal: Some(Renewal {
                client: Client(taken(handed.client)?),
                program: None,
                settings: None,
                held: None,
            }),
            in_software: false,
            trouble: RefCell::new(None),
            claims,
            store: take(servers.store)?,
            buffers: servers.buffers.map(take).transpose()?,
            // The former program may have had none.
            heap: match servers.heap {
                Some(heap) => Some(take(heap)?),
                None => heap(plan.args.swap)?,
            },
            backing: servers.backing.map(take).transpose()?,
            new_backing: None,
            policy: servers.policy.map(take).transpose()?,
            pulse: Pulse::open(&pulse_fd).context("cannot map signs of life")?,
            pulse_fd,
            resume,
            manager,
            owner,
            device: servers.device,
            disk: servers.disk.as_ref().map(Into::into),
            covered: servers.device.map(|id| Covered::whole(&ublk::disk(id))).unwrap_or_default(),
            attacher: None,
        })
    }

    /// Adopts the processes of the former supervisor.
    pub(super) fn adopted(&self, handed: &Adopt) -> anyhow::Result<Adopted> {
        let process = |(pid, channel): (u32, i32)| Ok::<_, anyhow::Error>((pid, taken(channel)?));
        Ok(Adopted {
            server: process(handed.server)?,
            successor: process(handed.successor)?,
            dismissed: handed.dismissed.clone(),
        })
    }

    /// Handles a request. Returns the command that starts the new server, if the request asks for
    /// one.
    pub(super) fn take_request(&mut self, server: Result<BorrowedFd<'_>, &str>) -> Option<Command> {
        let (request, client) = self.requests.take()?;
        if let Request::State = request {
            client.say(self.trouble.borrow().as_deref().unwrap_or(DONE));
            return None;
        }
        let begun = server.map_err(|why| anyhow::anyhow!("{why}"));
        match begun.and_then(|server| self.begin(server, request, &client)) {
            Ok((command, program, settings, held)) => {
                self.renewal = Some(Renewal { client, program, settings, held: Some(held) });
                Some(command)
            }
            Err(error) => {
                client.refuse(&format!("{error:#}"));
                None
            }
        }
    }

    #[expect(clippy::type_complexity, reason = "the parts of a renewal")]
    fn begin(
        &self,
        server: BorrowedFd<'_>,
        request: Request,
        client: &Client,
    ) -> anyhow::Result<(Command, Option<File>, Option<Settings>, [OwnedFd; 2])> {
        let (program, settings) = match request {
            Request::Set(changes, policy) => (None, Some(self.settings(&changes, policy)?)),
            Request::Upgrade(program) => (Some(program), None),
            Request::State => (None, None),
        };
        let log = rustix::stdio::stderr().try_clone_to_owned();
        let held = [inheritable(server.try_clone_to_owned()?)?, inheritable(log?)?];
        let mut inherited = self.inherited(true, true);
        [inherited.succeeds, inherited.log] = held.each_ref().map(|fd| Some(fd.as_raw_fd()));
        // Another program may not hang, and an earlier one does not know this.
        inherited.in_software &= program.is_none();
        if let Some(policy) = settings.as_ref().and_then(|settings| settings.policy.as_ref()) {
            inherited.policy = Some(policy.as_raw_fd());
        }
        let changes = settings.as_ref().map_or(&self.changes, |settings| &settings.changes);
        let plan = settings.as_ref().map_or(self.plan, |settings| settings.plan);
        if plan.args.swap {
            let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
            check_memory(&meminfo, self.memory_of_another(plan, program.is_some()))?;
        }
        let path = program.as_ref().map(path);
        let mut command = self.command(path.as_deref(), &inherited, changes, plan);
        // Until it stands by, the new server reports errors to the client.
        command.stderr(Stdio::from(client.0.try_clone()?));
        Ok((command, program, settings, held))
    }

    /// Memory that a server with this plan takes beside the present one.
    fn memory_of_another(&self, plan: &Plan<'_>, is_other_program: bool) -> u64 {
        let allocated = |fd: &OwnedFd| {
            let blocks = rustix::fs::fstat(fd).map_or(0, |found| found.st_blocks);
            u64::try_from(blocks).unwrap_or(0) * 512
        };
        Another {
            is_other_program,
            heap: plan.heap(None) as u64,
            present_heap: self.heap.as_ref().map_or(0, allocated),
            threads: (plan.threads(None) + Plan::small_stacks().len()) as u64,
            stored: allocated(&self.store),
        }
        .memory()
    }

    /// Builds and checks the settings that `set` requests.
    fn settings(&self, asked: &Changes, policy: Option<OwnedFd>) -> anyhow::Result<Settings> {
        let present = self.plan.args;
        if let Some(size) = asked.size {
            self.check_size(size)?;
        }
        let changes = self.changes.then(asked);
        let mut args = present.clone();
        args.change(asked);
        if asked.codec.is_some() && asked.level.is_none() {
            args.level = None;
        }
        let kept = match (policy, &self.policy) {
            (Some(clients), _) => Some(settings_file::keep(clients)?),
            (None, Some(present)) => {
                Some((present.try_clone()?, settings_file::shared(present.as_fd())?))
            }
            (None, None) => None,
        };
        let (policy, text) = kept.unzip();
        let policy = policy.map(inheritable).transpose()?;
        // Leaked: they live as long as the process, as its first arguments do. Each takes a few
        // hundred bytes, and only user requests create them.
        let args = Box::leak(Box::new(args));
        let plan = Box::leak(Box::new(Plan::new(args, text.as_deref())?));
        // An earlier version may have started a device with too many.
        if self.plan.check_threads().is_ok() {
            plan.check_threads()?;
        }
        let [now, then] = [&self.plan.policy, &plan.policy].map(|policy| &policy.backing_dev);
        ensure!(
            now == then,
            "backing_dev: a device has its backing device, or none, from its start to its end"
        );
        let covered = asked.size.map(|_| Covered::default());
        Ok(Settings { changes, plan, policy, covered, in_effect: false })
    }

    /// Switches to the new server's settings, or executes its program, before "go" is sent.
    pub(super) fn hand_over_to(&mut self, state: &HandOver<'_>) -> io::Result<()> {
        let Some(mut renewal) = self.renewal.take() else { return Ok(()) };
        if let Some(program) = &renewal.program {
            let disk = self.disk.as_deref();
            if let Err(error) = names::check(disk, state.names_disk, program, swap::nbd::is_named) {
                self.renewal = Some(renewal);
                return Err(error);
            }
        }
        // The new server has inherited its own copies.
        renewal.held = None;
        if let Some(settings) = &mut renewal.settings {
            // Restored if the new server does not start.
            self.exchange(settings);
        }
        let program = renewal.program.as_ref().map(path);
        let error = program.map(|path| self.become_program(&path, state, &renewal.client));
        self.renewal = Some(renewal);
        error.map_or(Ok(()), Err)
    }

    fn exchange(&mut self, settings: &mut Settings) {
        let Self { changes, plan, policy, covered, .. } = self;
        settings.exchange(changes, plan, policy, covered);
    }

    /// Executes the program `path` in this process; returns only on failure.
    fn become_program(&self, path: &str, state: &HandOver<'_>, client: &Client) -> io::Error {
        let mut handed = Adopt {
            server: (state.server.pid, state.server.channel.as_raw_fd()),
            successor: (state.successor.pid, state.successor.channel.as_raw_fd()),
            dismissed: state.dismissed.clone(),
            client: client.0.as_raw_fd(),
            inherited: Inherited { in_software: false, ..self.inherited(false, true) },
            ..Adopt::default()
        };
        self.claims.note_for_program(&mut handed);
        let own = self.claims.requests.as_ref().map(|requests| requests.listener.as_fd());
        let fds = [state.server.channel, state.successor.channel, client.0.as_fd()];
        let fds = || fds.into_iter().chain(own);
        let mut command = Command::new(path);
        command.arg0("platen").args(arguments(&self.changes)).arg("--adopt");
        command.arg(handed.to_string());
        if let Some(socket) = &self.manager.notify {
            command.env("NOTIFY_SOCKET", socket);
        }
        if self.manager.watched {
            command.env("WATCHDOG_USEC", "1000000");
        }
        let kept = fds().try_for_each(|fd| fcntl_setfd(fd, FdFlags::empty()));
        let error = kept.map_or_else(io::Error::from, |()| command.exec());
        for fd in fds() {
            // Other child processes must not inherit them.
            let _ = fcntl_setfd(fd, FdFlags::CLOEXEC);
        }
        io::Error::other(format!("the supervisor cannot become the new program: {error}"))
    }

    /// Sends the outcome to the client. On failure of `set`, restores the former settings.
    pub(super) fn answer_renewal(&mut self, outcome: Result<(), String>) {
        let Some(renewal) = self.renewal.take() else { return };
        match (outcome, renewal.settings) {
            // `settings` has the former changes by now.
            (Ok(()), Some(former)) if former.changes.size != self.changes.size => {
                match self.smaller_than_asked() {
                    None => renewal.client.say(DONE),
                    Some(why) => renewal.client.refuse(&why),
                }
            }
            (Ok(()), _) => renewal.client.say(DONE),
            (Err(why), Some(mut settings)) if settings.in_effect => {
                self.exchange(&mut settings);
                renewal.client.refuse(&format!("{why}; the next one has the former settings"));
            }
            // This process already executes the new program.
            (Err(why), None) if renewal.program.is_none() => renewal.client.refuse(&format!(
                "{why}; the supervisor is the new program's already, and starts another server"
            )),
            (Err(why), _) => renewal.client.refuse(&why),
        }
    }
}

/// The path of an open program.
fn path(program: &File) -> String {
    format!("/proc/self/fd/{}", program.as_raw_fd())
}
