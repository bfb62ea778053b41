//! `platen restore`: loads a saved VM into a QEMU that waits with -incoming defer.

use crate::image_command::open;
use crate::image_lock::ImageLock;
use crate::monitor::OLDEST;
use crate::restore_fit::{
    is_preallocated, machine_differs, refuse_another_image, socket_name, why_not_instant,
};
use crate::restore_load::load;
use crate::restore_player::{ended, Player};
use crate::saved_vm::{refuse_in_progress, write_json, Before, PLAIN};
use crate::say::say;
use crate::size::Size;
use anyhow::{bail, ensure, Context};
use clap::Args;
use image::{check_units, Image, Options};
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
    /// Another copy of the image, used if IMAGE is damaged. Repeatable
    #[arg(long, value_name = "IMAGE")]
    copy: Vec<PathBuf>,
    /// Load everything before the VM runs. Without this option the VM runs at once, where its QEMU
    /// can do that, and its RAM is loaded while it runs
    #[arg(long)]
    load: bool,
    /// Continue with a VM that runs at this QEMU already and lacks pages, because `platen restore`
    /// was killed or its image damaged. IMAGE is the same image, or a copy
    #[arg(long, conflicts_with = "load")]
    recover: bool,
    /// Compare the checksums of all units of IMAGE and its copies before QEMU is touched
    #[arg(long)]
    verify: bool,
    /// Permit other restores of this image that have --shared, too. Each VM needs its own disks, MAC
    /// addresses and UUID
    #[arg(long)]
    shared: bool,
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
    let monitor = || format!("monitor {}", args.qmp);
    let images = sources(args)?;
    let mut before = Before::default();
    let mut qmp = connect_monitor(args).with_context(monitor)?;
    let result = restore(args, images, &mut qmp, &mut before).with_context(monitor);
    let put_back = before.put_back(&mut qmp).with_context(monitor);
    let report = match &result {
        Ok(report) => report.clone(),
        Err(error) => json!({ "status": "failed", "error": format!("{error:#}") }),
    };
    write_json(args.json.as_deref(), &report);
    // After a failure QEMU may have ended, or may refuse, since its migration is not over.
    result.and(put_back).map(|()| ExitCode::SUCCESS)
}

/// An image that the VM can be restored from.
struct Source<'a> {
    path: &'a Path,
    image: Arc<Image>,
    lock: ImageLock,
}

/// Opens and locks the image and its copies, and with `--verify` compares their checksums.
fn sources(args: &RestoreArgs) -> anyhow::Result<VecDeque<Source<'_>>> {
    let mut sources = VecDeque::new();
    for path in std::iter::once(&args.image).chain(&args.copy) {
        let (image, lock) = (open(path)?, ImageLock::take(path, args.shared)?);
        sources.push_back(Source { path, image, lock });
    }
    let hash = sources[0].image.hash();
    for copy in sources.iter().skip(1) {
        let (copied, path) = (copy.image.hash(), copy.path.display());
        ensure!(copied == hash, "{path} is no copy of {}", args.image.display());
    }
    if args.verify {
        let mut damaged = None;
        sources.retain(|source| {
            let Err(error) = check_units(&source.image, threads(args)) else { return true };
            say(&format!("image {}: {error}", source.path.display()));
            damaged = Some(error);
            false
        });
        if let (Some(error), true) = (damaged, sources.is_empty()) {
            let context = format!("image {}: no copy of it is sound", args.image.display());
            return Err(error).context(context);
        }
    }
    Ok(sources)
}

fn threads(args: &RestoreArgs) -> usize {
    args.decompress_threads.map_or(Options::default().threads, usize::from)
}

fn connect_monitor(args: &RestoreArgs) -> anyhow::Result<Qmp> {
    // Out of band from the beginning: a QEMU whose main loop waits for a page cannot negotiate it
    // later.
    let qmp = Qmp::connect_out_of_band(args.qmp.path(), MONITOR)?;
    let version = qmp.version();
    if (version.major, version.minor) < OLDEST {
        bail!("this is QEMU {version}; platen knows QEMU 7.2 and later: upgrade QEMU");
    }
    Ok(qmp)
}

fn restore(
    args: &RestoreArgs,
    images: VecDeque<Source<'_>>,
    qmp: &mut Qmp,
    before: &mut Before,
) -> anyhow::Result<Value> {
    let image = &Arc::clone(&images[0].image);
    let dir = tempfile::Builder::new()
        .prefix("platen-")
        .tempdir()
        .context("cannot make a private directory")?;
    if args.recover {
        refuse_another_image(qmp, image)?;
        let mut instant = Supervisor::new(args, images, qmp, dir);
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
    refuse_in_progress(qmp)?;
    if let Some(other) = machine_differs(qmp, image)? {
        bail!(
            "the VM was saved from machine type {}, and this QEMU has {other}: start it with -machine {}",
            image.state().machine().unwrap_or_default(),
            image.state().machine().unwrap_or_default(),
        );
    }
    before.set(qmp, &PLAIN)?;
    let mut reason = why_not_instant(qmp, image)?;
    if reason.is_none() {
        // QEMU itself checks whether its host and its RAM permit postcopy.
        let set = before.set(qmp, &[("postcopy-ram", true)]);
        reason = set.err().map(|error| format!("{error:#}"));
    }
    if args.load || reason.is_some() {
        if let (Some(reason), false) = (&reason, args.load) {
            say(&format!("everything is loaded before the VM runs, because {reason}"));
        }
        let empty = reason.is_none() && !is_preallocated(qmp)?;
        let reader = if empty { Reader::EmptyQemu } else { Reader::Qemu };
        let fallback = reason.filter(|_| !args.load);
        let how = PlainOptions { threads: threads(args), reader };
        load(image, qmp, &dir, how, fallback.as_deref())
    } else {
        let mut instant = Supervisor::new(args, images, qmp, dir);
        instant.listen()?;
        instant.supervise(false)
    }
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
    images: VecDeque<Source<'a>>,
    /// Number of players that have died.
    deaths: u32,
}

impl<'a> Supervisor<'a> {
    fn new(
        args: &'a RestoreArgs,
        images: VecDeque<Source<'a>>,
        qmp: &'a mut Qmp,
        dir: tempfile::TempDir,
    ) -> Self {
        let socket = dir.path().join(socket_name(&images[0].image, 0));
        let rate = Some(args.push_rate.0).filter(|&rate| rate > 0);
        let options = PlayOptions { threads: threads(args), rate };
        Self { args, qmp, dir, options, socket, images, deaths: 0 }
    }

    fn listen(&mut self) -> anyhow::Result<()> {
        Ok(self.qmp.migrate_incoming(&format!("unix:{}", self.socket.display()))?)
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
            let Source { path, image, lock } = &self.images[0];
            let mut player = Player::start(path, image, lock, &self.socket, self.options, resume)?;
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
                say(&format!("{why}; another goes on from {}", self.images[0].path.display()));
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
