//! The player: a process that serves an image to one QEMU or several. `restore` starts it, and
//! starts another one if it dies.
//!
//! Its standard output is a socket of packets. It reads commands there, one for each QEMU, and
//! writes events, each with the number of its VM; all are JSON. Once `restore` has closed the
//! socket, or has died, the player continues alone until its QEMUs have everything.

use crate::image_watch;
use crate::remote_image::{Remote, RemoteOptions};
use crate::restore_events::Events;
use crate::restore_player_events::{described, failed, figures, report, Failed};
use crate::saved_vm::open;
use crate::say::{printable, say};
use anyhow::Context;
use clap::Args;
use host::Channel;
use image::{HotPage, HotSet, Image};
use player::{Event, HotLimits, PlayError, Player, UnitCache};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Arguments of the player's process.
#[derive(Args, Debug)]
pub(crate) struct PlayArgs {
    /// Image
    image: PathBuf,
    /// Identity of the image, hexadecimal
    identity: String,
    /// Decompression threads
    threads: usize,
    /// Bytes of decoded units to keep for all VMs
    cache: usize,
    /// Rate in bytes a second of pages that no VM has asked for, for each VM
    #[arg(long)]
    rate: Option<u64>,
    /// Neither use nor write the hot set
    #[arg(long)]
    no_hot_set: bool,
    /// Session in which `restore` has opened an image of another host
    #[arg(long)]
    session: Option<String>,
    /// Other VMs may be restored from the image
    #[arg(long)]
    shared: bool,
    #[command(flatten)]
    remote: RemoteOptions,
}

/// A command to the player: serve a QEMU.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Serve {
    /// Number of the VM, for events.
    pub(crate) vm: usize,
    /// Socket on which its QEMU listens, or will listen.
    pub(crate) socket: PathBuf,
    /// Continue after another player, on the connection that comes with the command.
    pub(crate) resume: bool,
}

/// Limits of the pages that are sent before the VM runs, so that it does not run much later.
const HOT: HotLimits = HotLimits { bytes: 256 << 10, time: Duration::from_millis(100) };

/// Time limit for QEMU to listen.
const LISTENS: Duration = Duration::from_secs(60);

/// Runs as a player.
pub(crate) fn run(args: &PlayArgs) -> anyhow::Result<ExitCode> {
    let _ = rustix::thread::set_name(c"platen");
    let commands = rustix::stdio::stdout().as_fd().try_clone_to_owned();
    let commands = Arc::new(Channel::from(commands.context("the player's commands")?));
    let events = Events::begin(Arc::clone(&commands))?;
    image_watch::begin(image_watch::VMS)?;
    let playing = Playing::new(args, events);
    thread::scope(|scope| {
        // The commands end when `restore` wants no more, or has died.
        while let Ok(Some((serve, connection))) = commands.receive::<Serve>() {
            let (vm, playing) = (serve.vm, &playing);
            let thread = thread::Builder::new().name(format!("play-{vm}"));
            let serve = move || playing.serve(&serve, connection);
            if let Err(error) = thread.spawn_scoped(scope, serve) {
                let error = format!("the player cannot start a thread: {error}");
                playing.events.tell(failed(vm, Failed::Otherwise, &error));
            }
        }
    });
    playing.end()
}

/// State that all VMs of a player share.
struct Playing<'a> {
    args: &'a PlayArgs,
    events: Events,
    /// The reason, if the image cannot be served.
    opened: Result<Opened, (Failed, String)>,
    /// The hot set that the first VM has read.
    set: OnceLock<HotSet>,
    /// Requests of the VMs that this player has served from the beginning to the end.
    asked: Mutex<Vec<Vec<HotPage>>>,
}

impl<'a> Playing<'a> {
    fn new(args: &'a PlayArgs, events: Events) -> Self {
        let (opened, set) = (open_checked(args), OnceLock::new());
        Self { args, events, opened, set, asked: Mutex::default() }
    }

    /// Serves one QEMU to the end.
    fn serve(&self, serve: &Serve, connection: Option<OwnedFd>) {
        if let Err((how, error)) = self.play(serve, connection) {
            self.events.tell(failed(serve.vm, how, &error));
        }
    }

    fn play(&self, serve: &Serve, connection: Option<OwnedFd>) -> Result<(), (Failed, String)> {
        let opened = self.opened.as_ref().map_err(Clone::clone)?;
        let failed = |error: PlayError, untouched| {
            (Failed::of(&error, untouched), described(&error, &self.args.image))
        };
        let is_hot = !self.args.no_hot_set && !serve.resume;
        // This comes before the connection: a damaged unit then costs QEMU nothing.
        let mut player =
            Player::sharing(&opened.cache, self.args.rate).map_err(|error| failed(error, true))?;
        if is_hot {
            let set = self.set.get_or_init(|| self.read_hot_set(opened));
            player.prepare(set, HOT).map_err(|error| failed(error, true))?;
        }
        // A player that is killed without this event has told QEMU nothing.
        self.events.tell_first(&json!({ "event": "connecting", "vm": serve.vm }));
        let socket = match (serve.resume, connection) {
            (true, Some(connection)) => Ok(UnixStream::from(connection)),
            (true, None) => Err("the player has got no connection to QEMU".into()),
            (false, _) => connect(&serve.socket).map_err(|error| format!("{error:#}")),
        };
        let socket = socket.map_err(|error: String| (Failed::Otherwise, error))?;
        let mut on = |event: Event| {
            let told = |name: &str| json!({ "event": name, "vm": serve.vm });
            match event {
                // Without this event `restore` sends RESUME should this process be killed: it may
                // not follow a page, or a part of one.
                Event::Resuming => self.events.tell_first(&told("resuming")),
                Event::Running => self.events.tell(told("running")),
                _ => self.events.tell(told("loaded")),
            }
        };
        let played = match serve.resume {
            true => player.resume(socket, &mut on),
            false => player.play(socket, &mut on),
        };
        let played = played.map_err(|error| failed(error, false))?;
        self.events.tell(report(serve.vm, &played));
        if is_hot {
            self.asked.lock().unwrap_or_else(PoisonError::into_inner).push(played.asked);
        }
        Ok(())
    }

    fn read_hot_set(&self, opened: &Opened) -> HotSet {
        let read = match &opened.remote {
            Some(remote) => remote.hot_set().map_err(|error| format!("{error:#}")),
            None => HotSet::read(&self.args.image, &opened.image).map_err(|error| error.chain()),
        };
        read.unwrap_or_else(|error| {
            let path = HotSet::path(&self.args.image);
            say(&format!("{} is ignored: {}", path.display(), printable(&error)));
            HotSet::default()
        })
    }

    /// Reports the player's own figures, and writes the hot set. The restores have ended already,
    /// whatever happens to the hot set.
    fn end(self) -> anyhow::Result<ExitCode> {
        let Ok(opened) = &self.opened else {
            self.events.end();
            return Ok(ExitCode::FAILURE);
        };
        self.events.tell(figures(opened.cache.decoded()));
        let mut set = self.set.into_inner().unwrap_or_default();
        let mut has_changed = false;
        for asked in self.asked.into_inner().unwrap_or_else(PoisonError::into_inner) {
            has_changed |= set.add(&asked);
        }
        // The hot set of another host's image belongs to that host.
        if has_changed && opened.remote.is_none() {
            if let Err(error) = set.write(&self.args.image, &opened.image) {
                let error = anyhow::Error::from(error);
                say(&format!("the next restore cannot know what the VM asked for: {error:#}"));
            }
        }
        if let Some(remote) = &opened.remote {
            remote.end();
        }
        // Last: `restore` may be stopped, and the hot set is written nevertheless.
        self.events.end();
        Ok(ExitCode::SUCCESS)
    }
}

/// An image that is served.
struct Opened {
    image: Arc<Image>,
    cache: Arc<UnitCache>,
    remote: Option<Remote>,
}

/// Opens the image, and starts the threads that read it.
fn open_checked(args: &PlayArgs) -> Result<Opened, (Failed, String)> {
    let opened = if Remote::is_remote(&args.image) {
        Remote::open(&args.image, args.shared, args.session.as_deref(), &args.remote)
            .map(|remote| (Arc::clone(&remote.image), Some(remote)))
    } else {
        open(&args.image).map(|image| (image, None))
    };
    let (image, remote) = opened.map_err(|error| (Failed::Untouched, format!("{error:#}")))?;
    if identity_of(&image) != args.identity {
        // The pages of another image would be wrong.
        let text = format!("image {} was replaced by another one", args.image.display());
        return Err((Failed::Untouched, text));
    }
    match UnitCache::new(&image, args.threads, args.cache) {
        Ok(cache) => Ok(Opened { image, cache, remote }),
        Err(error) => Err((Failed::Otherwise, described(&error, &args.image))),
    }
}

pub(crate) fn identity_of(image: &Image) -> String {
    format!("{:032x}", image.identity())
}

/// Connects to a QEMU that is about to listen.
pub(crate) fn connect(path: &Path) -> anyhow::Result<UnixStream> {
    let until = Instant::now() + LISTENS;
    loop {
        match UnixStream::connect(path) {
            Err(error)
                if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused)
                    && Instant::now() < until =>
            {
                std::thread::sleep(Duration::from_millis(2));
            }
            result => {
                return result.with_context(|| format!("cannot connect to {}", path.display()));
            }
        }
    }
}
