//! Supervises the service of a VM that runs while its RAM is loaded.

use crate::restore_fit::{socket_name, why_paused};
use crate::restore_player::{connect, Serve};
use crate::restore_players::{Players, Service};
use crate::restore_recovery::{ends_unrun, recover, Without, ANSWERS, ENDS, PAUSES, UNANSWERED};
use crate::restore_service::{complete, Copies, End, AGAIN, ATTEMPTS};
use crate::restore_vm::Vm;
use crate::saved_vm::{listen, wait_started};
use anyhow::{bail, Context};
use player::Recovery;
use qmp::Qmp;
use serde_json::{json, Value};
use std::path::PathBuf;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

/// Longest time that an ending QEMU keeps its monitor open after it has closed its other sockets.
const NOTICED: Duration = Duration::from_secs(2);

/// A VM that runs while its RAM is loaded; has another player serve it if one dies.
pub(crate) struct Supervisor<'a> {
    vm: &'a Vm,
    qmp: &'a mut Qmp,
    copies: Copies<'a>,
    dir: tempfile::TempDir,
    socket: PathBuf,
    /// Number of players that have died.
    deaths: u32,
    /// Whether the guest's CPUs have run, as far as QEMU's events tell.
    has_run: bool,
    begin: Instant,
    /// Time until QEMU had loaded the devices, milliseconds.
    running_ms: Option<f64>,
    /// Whether QEMU has reported the VM's state since it loaded the devices.
    is_known: bool,
}

impl<'a> Supervisor<'a> {
    pub(crate) fn new(
        vm: &'a Vm,
        qmp: &'a mut Qmp,
        players: &'a Players<'a>,
        dir: tempfile::TempDir,
    ) -> Self {
        Self {
            socket: dir.path().join(socket_name(players.image(), 0)),
            vm,
            qmp,
            copies: Copies::new(players),
            dir,
            deaths: 0,
            has_run: false,
            begin: Instant::now(),
            running_ms: None,
            is_known: false,
        }
    }

    /// Restores the VM; returns the report.
    pub(crate) fn begin(mut self) -> anyhow::Result<Value> {
        listen(self.qmp, &format!("unix:{}", self.socket.display()))?;
        self.begin = Instant::now();
        self.supervise(false)
    }

    /// Continues a restore whose player has died; returns the report.
    pub(crate) fn go_on(mut self) -> anyhow::Result<Value> {
        self.deaths = 1;
        self.has_run = true;
        self.is_known = true;
        match self.recover(PAUSES)? {
            Without::Listens => self.supervise(true),
            Without::Completed => self.completed(),
        }
    }

    /// Makes QEMU listen for the next player.
    fn recover(&mut self, patience: Duration) -> anyhow::Result<Without> {
        self.socket = self.dir.path().join(socket_name(self.copies.players.image(), self.deaths));
        let uri = format!("unix:{}", self.socket.display());
        recover(self.qmp, &uri, patience)
    }

    /// Reports a VM that had everything when its player died.
    fn completed(&mut self) -> anyhow::Result<Value> {
        self.vm.say_loaded();
        self.done(json!({}))
    }

    /// Whether QEMU's monitor stays open for [`NOTICED`].
    fn qemu_lives(&mut self) -> bool {
        // Queued events precede the end of file. QEMU sends RESUME before the guest's CPUs run. A
        // guest can cause an event a second.
        let until = Instant::now() + 5 * NOTICED;
        loop {
            let event = self.qmp.poll_event(NOTICED);
            // RESUME may be among those that were dropped.
            self.has_run |= self.qmp.events_dropped() > 0;
            match event {
                Err(_) => return false,
                Ok(None) => return true,
                Ok(Some(event)) => self.has_run |= event.name == "RESUME",
            }
            if Instant::now() > until {
                return true;
            }
        }
    }

    /// Has players serve the VM until one of them has sent QEMU everything.
    fn supervise(&mut self, mut resume: bool) -> anyhow::Result<Value> {
        let mut attempts = 0;
        let mut recovery = None;
        loop {
            if resume && recovery.is_none() {
                recovery = Some(Recovery::new(connect(&self.socket)?));
            }
            let serve = Serve { vm: self.vm.number, socket: self.socket.clone(), resume };
            let service = self.copies.serve(&serve, recovery.as_ref())?;
            let mut has_connected = false;
            let (why, failed) = match self.follow(&service, resume, &mut recovery) {
                End::Done(report) => return self.done(report),
                End::Failed(event) => {
                    (event["error"].as_str().unwrap_or_default().to_owned(), Some(event))
                }
                End::Died { connecting } => {
                    attempts += 1;
                    has_connected = connecting;
                    // The player has sent QEMU nothing, for example because it died between the end
                    // of one VM and the beginning of the next.
                    if !connecting && attempts < ATTEMPTS {
                        continue;
                    }
                    (service.player.why_it_ended(), None)
                }
            };
            let started = self.running_ms.is_some() || resume;
            let is_untouched = match &failed {
                Some(event) => event["untouched"] == true,
                None => !has_connected,
            };
            if !started && failed.is_some() && is_untouched && self.copies.next() {
                self.vm.say(&format!("{why}; another begins from {}", self.copies.path()));
                continue;
            }
            self.deaths += 1;
            // QEMU pauses again.
            recovery = None;
            // QEMU may have obeyed RUN although the player could no longer report it. One that was
            // sent too little ends when its connection is lost.
            let patience = if started || !is_untouched { PAUSES } else { NOTICED };
            let replaced = self.replace(&why, failed.as_ref(), patience);
            if !started && !self.has_run && replaced.is_err() {
                // QEMU may have been sent all that it needs to run the VM, and be slow.
                if !is_untouched && !ends_unrun(self.qmp, ENDS) {
                    bail!(
                        "{why}, and QEMU was slow and was told to end: the VM may have run, or may run yet. Look before you start it again: \
                         once it has run, its disks are not those of the image any more"
                    );
                }
                bail!(
                    "{why}, before the VM ran (QEMU's log has the reason, for example a device of the VM that this QEMU lacks); the image is as \
                     good as before. End this QEMU (by SIGKILL if it does not \
                     end by itself) and start it again"
                );
            }
            match replaced? {
                Without::Listens => resume = true,
                Without::Completed => return self.completed(),
            }
        }
    }

    /// Makes QEMU wait for another player, after the VM has run.
    fn replace(
        &mut self,
        why: &str,
        failed: Option<&Value>,
        patience: Duration,
    ) -> anyhow::Result<Without> {
        let again = format!("platen restore COPY --qmp {} --recover", self.vm.address);
        let damaged = failed.is_some_and(|event| event["damaged"] == true);
        let goes_on = failed.is_none() || (damaged && self.copies.next());
        let asked = if goes_on { self.recover(patience) } else { Ok(Without::Listens) };
        // This check comes last, since it takes NOTICED while the guest waits.
        if (!goes_on || asked.is_err()) && !self.qemu_lives() {
            // Until QEMU has obeyed RUN, it ends instead of waiting for another player.
            if !self.has_run {
                bail!(
                    "{why}, before the VM ran, and this QEMU has ended (its log has the reason, for example a \
                     device of the VM that this QEMU lacks); the image is as good as before"
                );
            }
            bail!(
                "{why}: this QEMU has ended. The image is as good as before, but the VM has run: its disks are not \
                 those of the image any more"
            );
        }
        let without =
            asked.with_context(|| format!("{why}, and no other can go on; try later: {again}"))?;
        if !goes_on {
            bail!("{why}. The VM waits for the pages that it lacks; go on with a sound image: {again}");
        }
        if without == Without::Listens {
            self.vm.say(&format!("{why}; another goes on from {}", self.copies.path()));
        }
        Ok(without)
    }

    /// Follows the events of one player.
    fn follow(&mut self, service: &Service, resume: bool, recovery: &mut Option<Recovery>) -> End {
        let (mut connecting, mut is_loaded) = (false, false);
        loop {
            let asks = self.running_ms.is_some() && !self.is_known && !is_loaded;
            let may_ask = asks && self.qmp.unanswered() < UNANSWERED;
            let event = match (asks, may_ask) {
                (true, true) => service.events.recv_timeout(AGAIN),
                // QEMU's main loop waits, for a page or for a CPU, and may answer later.
                (true, false) => service.events.recv_timeout(ANSWERS),
                (false, _) => service.events.recv().map_err(RecvTimeoutError::from),
            };
            let event = match event {
                Ok(event) => event,
                Err(RecvTimeoutError::Timeout) => {
                    if may_ask {
                        self.ask_state();
                    }
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => return End::Died { connecting },
            };
            match event["event"].as_str() {
                Some("connecting") => connecting = true,
                Some("resuming") => {
                    if let Some(recovery) = recovery.take() {
                        recovery.is_resumed();
                    }
                }
                Some("running") if self.running_ms.is_none() && !resume => {
                    self.running_ms = Some(self.begin.elapsed().as_secs_f64() * 1e3);
                    self.ask_state();
                }
                Some("running") => self.vm.say("the VM goes on"),
                Some("loaded") => {
                    is_loaded = true;
                    if self.running_ms.is_some() && !self.is_known {
                        self.ask_state();
                    }
                    self.vm.say_loaded();
                }
                Some("done") => return End::Done(event),
                Some("failed") => return End::Failed(event),
                _ => {}
            }
        }
    }

    /// Asks QEMU for the VM's state, and prints it once the VM has started.
    fn ask_state(&mut self) {
        // The end of QEMU shows in the player's events.
        let Ok(answer) = self.qmp.execute_within("query-status", None, ANSWERS) else { return };
        match answer["status"].as_str() {
            Some("inmigrate") | None => {}
            Some(state) => self.say_state(state),
        }
    }

    /// Prints the VM's state, once.
    fn say_state(&mut self, state: &str) {
        if std::mem::replace(&mut self.is_known, true) {
            return;
        }
        match (state, why_paused(state, self.copies.players.image())) {
            (_, Some(why)) => self.vm.say(why),
            ("running", None) => self.vm.say("the VM runs; its RAM is loaded while it does"),
            ("paused", None) => self.vm.say(
                "the VM is paused, as it was saved; its RAM is loaded, and cont may resume it meanwhile",
            ),
            (state, None) => self.vm.say(&format!("the VM is '{state}'; its RAM is loaded")),
        }
    }

    /// Completes the report of the player that has sent everything.
    fn done(&mut self, mut report: Value) -> anyhow::Result<Value> {
        let state = wait_started(self.qmp)?;
        self.say_state(&state);
        complete(&mut report, self.deaths, self.running_ms, &state);
        Ok(report)
    }
}
