//! `platen restore`: loads a saved VM into a QEMU that waits with -incoming defer.

use crate::image_command::open;
use crate::monitor::OLDEST;
use crate::restore_fit::{is_preallocated, machine_differs, why_not_instant};
use crate::restore_load::load;
use crate::restore_player::{ended, Player};
use crate::saved_vm::{refuse_in_progress, write_json, Before, PLAIN};
use crate::say::say;
use crate::size::Size;
use anyhow::{bail, ensure, Context};
use clap::Args;
use image::{Image, Options};
use player::{PlainOptions, PlayOptions, Reader};
use qmp::Qmp;
use relay::UnixAddress;
use serde_json::{json, Value};
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Arguments of `platen restore`.
#[derive(Args, Debug)]
pub(crate) struct RestoreArgs {
    /// Image of the VM
    #[arg(value_name = "IMAGE")]
    image: PathBuf,
    /// Monitor socket of a QEMU for the VM; start QEMU with the VM's options, -incoming defer and
    /// -qmp unix:PATH,server=on,wait=off
    #[arg(long, value_name = "unix:PATH")]
    qmp: UnixAddress,
    /// Another copy of the image, to go on from when IMAGE turns out to be damaged while the VM runs.
    /// Repeatable
    #[arg(long, value_name = "IMAGE")]
    copy: Vec<PathBuf>,
    /// Load everything before the VM runs. Without this option the VM runs at once, where its QEMU
    /// can do that, and its RAM is loaded while it runs
    #[arg(long)]
    load: bool,
    /// Go on with a VM that runs at this QEMU already and lacks pages, because `platen restore` was
    /// killed or its image damaged. IMAGE is the same image, or a copy
    #[arg(long, conflicts_with = "load")]
    recover: bool,
    /// Number of decompression threads, 1 to 255 [default: the number of CPUs, at most 8]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=255))]
    decompress_threads: Option<u16>,
    /// Bytes a second at which RAM that the VM has not asked for is loaded while it runs; 0 is no
    /// limit. What it asks for is not limited
    #[arg(long, value_name = "SIZE", default_value = "0")]
    push_rate: Size,
    /// Write the report to this file as one line of JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Time limit for an answer of the monitor.
const MONITOR: Duration = Duration::from_secs(10);
/// Time limit for QEMU to reach [`PAUSED`] after a player has died, and for its VM to leave
/// `inmigrate`.
const SETTLES: Duration = Duration::from_secs(60);
/// Longest time that an ending QEMU keeps its monitor open after it has closed its other sockets.
const NOTICED: Duration = Duration::from_secs(2);
/// QEMU's migration status for a postcopy that has lost its source.
const PAUSED: &str = "postcopy-paused";

pub(crate) fn run(args: &RestoreArgs) -> anyhow::Result<ExitCode> {
    let image = open(&args.image)?;
    for copy in &args.copy {
        let same = open(copy)?.hash() == image.hash();
        ensure!(same, "{} is no copy of {}", copy.display(), args.image.display());
    }
    let result = restore(args, &image).with_context(|| format!("monitor {}", args.qmp));
    let report = match &result {
        Ok(report) => report.clone(),
        Err(error) => json!({ "status": "failed", "error": format!("{error:#}") }),
    };
    write_json(args.json.as_deref(), &report);
    result.map(|_| ExitCode::SUCCESS)
}

fn restore(args: &RestoreArgs, image: &Arc<Image>) -> anyhow::Result<Value> {
    // Out of band from the beginning: a QEMU whose main loop waits for a page cannot negotiate it
    // later.
    let mut qmp = Qmp::connect_out_of_band(args.qmp.path(), MONITOR)?;
    let version = qmp.version();
    if (version.major, version.minor) < OLDEST {
        bail!("this is QEMU {version}; platen knows QEMU 7.2 and later: upgrade QEMU");
    }
    let threads = args.decompress_threads.map_or(Options::default().threads, usize::from);
    let dir = tempfile::Builder::new()
        .prefix("platen-")
        .tempdir()
        .context("cannot make a private directory")?;
    if args.recover {
        let mut instant = Supervisor::new(args, &mut qmp, dir, threads);
        instant.deaths = 1;
        instant.recover()?;
        return instant.supervise(true);
    }
    let vm = qmp.query_status()?;
    ensure!(
        vm.status == "inmigrate",
        "the VM is '{}', and a saved VM needs a QEMU that waits for one: start it with -incoming defer",
        vm.status
    );
    refuse_in_progress(&mut qmp)?;
    if let Some(other) = machine_differs(&mut qmp, image)? {
        bail!(
            "the VM was saved from machine type {}, and this QEMU has {other}: start it with -machine {}",
            image.state().machine().unwrap_or_default(),
            image.state().machine().unwrap_or_default(),
        );
    }
    let mut before = Before::default();
    before.set(&mut qmp, &PLAIN)?;
    let mut reason = why_not_instant(&mut qmp, image)?;
    if reason.is_none() {
        // QEMU itself checks whether its host and its RAM permit postcopy.
        let set = before.set(&mut qmp, &[("postcopy-ram", true)]);
        reason = set.err().map(|error| format!("{error:#}"));
    }
    let report = if args.load || reason.is_some() {
        if let (Some(reason), false) = (&reason, args.load) {
            say(&format!("everything is loaded before the VM runs, because {reason}"));
        }
        let empty = reason.is_none() && !is_preallocated(&mut qmp)?;
        let reader = if empty { Reader::EmptyQemu } else { Reader::Qemu };
        let fallback = reason.filter(|_| !args.load);
        load(image, &mut qmp, &dir, PlainOptions { threads, reader }, fallback.as_deref())?
    } else {
        let mut instant = Supervisor::new(args, &mut qmp, dir, threads);
        instant.listen()?;
        instant.supervise(false)?
    };
    before.put_back(&mut qmp)?;
    Ok(report)
}

/// Waits until the VM leaves `inmigrate`; returns its run state.
pub(crate) fn wait_started(qmp: &mut Qmp) -> anyhow::Result<String> {
    let until = Instant::now() + SETTLES;
    loop {
        let vm = qmp.query_status()?.status;
        if vm != "inmigrate" || Instant::now() > until {
            return Ok(vm);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A restore in which the VM runs while its RAM is loaded; replaces players that die.
struct Supervisor<'a> {
    args: &'a RestoreArgs,
    qmp: &'a mut Qmp,
    dir: tempfile::TempDir,
    options: PlayOptions,
    socket: PathBuf,
    /// The image and its copies; the first one is in use.
    images: VecDeque<&'a Path>,
    /// Number of players that have died.
    deaths: u32,
}

impl<'a> Supervisor<'a> {
    fn new(
        args: &'a RestoreArgs,
        qmp: &'a mut Qmp,
        dir: tempfile::TempDir,
        threads: usize,
    ) -> Self {
        let socket = dir.path().join("in.sock");
        let rate = Some(args.push_rate.0).filter(|&rate| rate > 0);
        let options = PlayOptions { threads, rate };
        let images = std::iter::once(&args.image).chain(&args.copy);
        let images = images.map(PathBuf::as_path).collect();
        Self { args, qmp, dir, options, socket, images, deaths: 0 }
    }

    fn listen(&mut self) -> anyhow::Result<()> {
        Ok(self.qmp.migrate_incoming(&format!("unix:{}", self.socket.display()))?)
    }

    /// Makes QEMU listen for the next player. QEMU accepts that once it has noticed that the last
    /// one is gone.
    fn recover(&mut self) -> anyhow::Result<()> {
        self.socket = self.dir.path().join(format!("in{}.sock", self.deaths));
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
        // Queued events precede the end of file.
        while let Ok(event) = self.qmp.poll_event(NOTICED) {
            if event.is_none() {
                return true;
            }
        }
        false
    }

    /// Starts players until one has sent QEMU everything.
    fn supervise(&mut self, mut resume: bool) -> anyhow::Result<Value> {
        let begin = Instant::now();
        let mut running_ms = None;
        loop {
            let mut player = Player::start(self.images[0], &self.socket, self.options, resume)?;
            say(&format!("player {} begins", player.pid()));
            let (mut done, mut failed) = (None, None);
            while let Some(event) = player.event() {
                match event["event"].as_str() {
                    Some("running") if running_ms.is_none() && !resume => {
                        running_ms = Some(begin.elapsed().as_secs_f64() * 1e3);
                        say("the VM runs; its RAM is loaded while it does");
                    }
                    Some("running") => say("the VM goes on"),
                    Some("loaded") => say("everything is loaded: the image is not needed any more"),
                    Some("done") => done = Some(event),
                    Some("failed") => failed = Some(event),
                    _ => {}
                }
            }
            let status = player.end()?;
            if let Some(mut report) = done {
                report["status"] = "completed".into();
                report["mode"] = "instant".into();
                report["deaths"] = self.deaths.into();
                report["started-ms"] = running_ms.into();
                report["vm"] = wait_started(self.qmp)?.into();
                if let Some(report) = report.as_object_mut() {
                    report.remove("event");
                }
                return Ok(report);
            }
            let why = match &failed {
                Some(event) => event["error"].as_str().unwrap_or_default().to_owned(),
                None => ended(status),
            };
            let started = running_ms.is_some() || resume;
            self.deaths += 1;
            if !started {
                bail!(
                    "{why}, before the VM ran; the image is as good as before. End this QEMU (by SIGKILL if it does not \
                     end by itself) and start it again"
                );
            }
            let again = format!("platen restore COPY --qmp {} --recover", self.args.qmp);
            let damaged = failed.as_ref().is_some_and(|event| event["damaged"] == true);
            // The last image stays in the queue, for a player that is killed later.
            let copy = (damaged && self.images.len() > 1).then(|| self.images.pop_front());
            let goes_on = failed.is_none() || copy.is_some();
            let asked = if goes_on {
                say(&format!("{why}; another goes on from {}", self.images[0].display()));
                self.recover()
            } else {
                Ok(())
            };
            // This check comes last, since it takes NOTICED while the guest waits.
            if (!goes_on || asked.is_err()) && !self.qemu_lives() {
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
