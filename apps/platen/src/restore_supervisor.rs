//! Supervises the players of a restore in which the VM runs while its RAM is loaded.

use crate::restore_fit::{say_if_paused, socket_name, was_paused};
use crate::restore_player::{ended, PlayerOptions, PlayerProcess};
use crate::restore_source::Source;
use crate::saved_vm::wait_started;
use crate::say::say;
use anyhow::{bail, Context};
use qmp::Qmp;
use relay::UnixAddress;
use serde_json::{json, Value};
use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Time limit for QEMU to reach [`PAUSED`] after a player has died.
const SETTLES: Duration = Duration::from_secs(60);
/// Longest time that an ending QEMU keeps its monitor open after it has closed its other sockets.
const NOTICED: Duration = Duration::from_secs(2);
/// Longest wait for a player that writes the hot set of a finished restore, to a disk that may hang.
const HOT_SET: Duration = Duration::from_secs(2);
/// QEMU's migration status for a postcopy that has lost its source.
const PAUSED: &str = "postcopy-paused";

/// A restore in which the VM runs while its RAM is loaded; replaces players that die.
pub(crate) struct Supervisor<'a> {
    /// The monitor's address, for messages.
    address: &'a UnixAddress,
    qmp: &'a mut Qmp,
    dir: tempfile::TempDir,
    options: PlayerOptions,
    socket: PathBuf,
    /// The image and its copies; the first one is in use.
    images: VecDeque<Source<'a>>,
    /// Number of players that have died.
    deaths: u32,
    /// Whether the guest's CPUs have run, as far as QEMU's events tell.
    has_run: bool,
}

impl<'a> Supervisor<'a> {
    pub(crate) fn new(
        address: &'a UnixAddress,
        qmp: &'a mut Qmp,
        images: VecDeque<Source<'a>>,
        options: PlayerOptions,
        dir: tempfile::TempDir,
    ) -> Self {
        let socket = dir.path().join(socket_name(&images[0].image, 0));
        Self { address, qmp, dir, options, socket, images, deaths: 0, has_run: false }
    }

    /// Restores the VM; returns the report.
    pub(crate) fn begin(mut self) -> anyhow::Result<Value> {
        self.qmp.migrate_incoming(&format!("unix:{}", self.socket.display()))?;
        self.supervise(false)
    }

    /// Continues a restore whose player has died; returns the report.
    pub(crate) fn go_on(mut self) -> anyhow::Result<Value> {
        self.deaths = 1;
        self.has_run = true;
        self.recover()?;
        self.supervise(true)
    }

    /// Makes QEMU listen for the next player. QEMU accepts that once it has noticed that the last
    /// one is gone.
    fn recover(&mut self) -> anyhow::Result<()> {
        self.socket = self.dir.path().join(socket_name(&self.images[0].image, self.deaths));
        let uri = format!("unix:{}", self.socket.display());
        let until = Instant::now() + SETTLES;
        loop {
            let asked =
                self.qmp.execute_out_of_band("migrate-recover", Some(json!({ "uri": uri })));
            match asked {
                Ok(_) => return Ok(()),
                Err(error @ qmp::QmpError::Refused { .. }) if Instant::now() > until => {
                    return Err(error).context(format!(
                        "QEMU does not come to {PAUSED}: has its VM everything, or is a player at work still?"
                    ));
                }
                Err(qmp::QmpError::Refused { .. }) => std::thread::sleep(Duration::from_millis(20)),
                Err(error) => return Err(error.into()),
            }
        }
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

    /// Starts players until one has sent QEMU everything.
    fn supervise(&mut self, mut resume: bool) -> anyhow::Result<Value> {
        let begin = Instant::now();
        let mut running_ms = None;
        loop {
            let Source { path, image, lock } = &self.images[0];
            let mut player =
                PlayerProcess::start(path, image, lock, &self.socket, self.options, resume)?;
            say(&format!("player {} begins", player.pid()));
            let (mut done, mut failed) = (None, None);
            while let Some(event) = player.event() {
                match event["event"].as_str() {
                    Some("running") if running_ms.is_none() && !resume => {
                        running_ms = Some(begin.elapsed().as_secs_f64() * 1e3);
                        say(if was_paused(image) {
                            "the VM is paused, as it was saved; its RAM is loaded, and cont may resume it meanwhile"
                        } else {
                            "the VM runs; its RAM is loaded while it does"
                        });
                    }
                    Some("running") => say("the VM goes on"),
                    Some("loaded") => say("everything is loaded: the image is not needed any more"),
                    Some("done") => {
                        done = Some(event);
                        break;
                    }
                    Some("failed") => failed = Some(event),
                    _ => {}
                }
            }
            if let Some(mut report) = done {
                // The player holds the image's lock while it writes the hot set.
                if !player.ends_within(HOT_SET) {
                    say("the player still writes the pages that the VM asked for beside the image");
                }
                report["status"] = "completed".into();
                report["mode"] = "instant".into();
                report["deaths"] = self.deaths.into();
                report["started-ms"] = running_ms.into();
                let vm = wait_started(self.qmp)?;
                say_if_paused(&vm, image);
                report["vm"] = vm.into();
                if let Some(report) = report.as_object_mut() {
                    report.remove("event");
                }
                return Ok(report);
            }
            let status = player.end()?;
            let why = match &failed {
                Some(event) => event["error"].as_str().unwrap_or_default().to_owned(),
                None => ended(status),
            };
            let started = running_ms.is_some() || resume;
            let is_untouched = failed.as_ref().is_some_and(|event| event["untouched"] == true);
            if !started && is_untouched && self.images.len() > 1 {
                self.images.pop_front();
                say(&format!("{why}; another begins from {}", self.images[0].path.display()));
                continue;
            }
            self.deaths += 1;
            if !started {
                bail!(
                    "{why}, before the VM ran; the image is as good as before. End this QEMU (by SIGKILL if it does not \
                     end by itself) and start it again"
                );
            }
            let again = format!("platen restore COPY --qmp {} --recover", self.address);
            let damaged = failed.as_ref().is_some_and(|event| event["damaged"] == true);
            // The last image stays in the queue, for a player that is killed later.
            let copy = (damaged && self.images.len() > 1).then(|| self.images.pop_front());
            let goes_on = failed.is_none() || copy.is_some();
            let asked = if goes_on {
                say(&format!("{why}; another goes on from {}", self.images[0].path.display()));
                self.recover()
            } else {
                Ok(())
            };
            // This check comes last, since it takes NOTICED while the guest waits.
            if (!goes_on || asked.is_err()) && !self.qemu_lives() {
                // QEMU ends, instead of waiting for another player, until it has obeyed RUN.
                if !self.has_run {
                    bail!("{why}, before the VM ran, and this QEMU has ended; the image is as good as before");
                }
                bail!(
                    "{why}: this QEMU has ended. The image is as good as before, but the VM has run: its disks are not \
                     those of the image any more"
                );
            }
            asked.with_context(|| format!("{why}, and no other can go on; try later: {again}"))?;
            if !goes_on {
                bail!("{why}. The VM waits for the pages that it lacks; go on with a sound image: {again}");
            }
            resume = true;
        }
    }
}
