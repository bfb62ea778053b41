//! The player: a process that serves an image to QEMU. `restore` starts it, and another one if it
//! dies.

use crate::image_lock::ImageLock;
use crate::saved_vm::open;
use crate::say::{printable, say, show};
use anyhow::Context;
use clap::Args;
use image::{HotSet, Image};
use player::{Event, HotLimits, PlayError, PlayOptions, Played, Player};
use serde_json::{json, Value};
use std::io::{BufRead, BufReader, ErrorKind};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Arguments of the player's process.
#[derive(Args, Debug)]
pub(crate) struct PlayArgs {
    /// Image
    image: PathBuf,
    /// Identity of the image, hexadecimal
    identity: String,
    /// Socket on which QEMU listens
    socket: PathBuf,
    /// Decompression threads
    threads: usize,
    /// Bytes a second of pages that nobody has asked for
    #[arg(long)]
    rate: Option<u64>,
    /// Go on where another player has stopped
    #[arg(long)]
    resume: bool,
    /// Neither use nor write the hot set
    #[arg(long)]
    no_hot_set: bool,
}

/// Options of a player's process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlayerOptions {
    pub(crate) play: PlayOptions,
    /// Use and write the image's hot set.
    pub(crate) hot_set: bool,
}

/// Limits of the pages that are sent before the VM runs, so that it does not run much later.
const HOT: HotLimits = HotLimits { bytes: 256 << 10, time: Duration::from_millis(100) };

/// Time limit for QEMU to listen.
const LISTENS: Duration = Duration::from_secs(60);

/// Runs as a player.
pub(crate) fn run(args: &PlayArgs) -> anyhow::Result<ExitCode> {
    let _ = rustix::thread::set_name(c"platen");
    let image = match open(&args.image) {
        Ok(image) => image,
        Err(error) => return fail(Failed::Untouched, &format!("{error:#}")),
    };
    if identity_of(&image) != args.identity {
        // Its pages would be wrong ones.
        let text = format!("image {} was replaced by another one", args.image.display());
        return fail(Failed::Untouched, &text);
    }
    let mut set = HotSet::default();
    let is_hot = !args.no_hot_set && !args.resume;
    if is_hot {
        set = HotSet::read(&args.image, &image).unwrap_or_else(|damage| {
            let path = HotSet::path(&args.image);
            say(&format!("{} is ignored: {}", path.display(), printable(&damage.chain())));
            HotSet::default()
        });
    }
    let options = PlayOptions { threads: args.threads, rate: args.rate };
    // Before the connection: a damaged unit then costs QEMU nothing.
    let player = Player::new(&image, options).and_then(|mut player| {
        player.prepare(&set, HOT)?;
        Ok(player)
    });
    let player = match player {
        Ok(player) => player,
        Err(error) => return fail(Failed::of(&error, true), &described(&error, &args.image)),
    };
    let socket = match connect(&args.socket) {
        Ok(socket) => socket,
        Err(error) => return fail(Failed::Otherwise, &format!("{error:#}")),
    };
    let mut on = |event: Event| {
        let name = if event == Event::Running { "running" } else { "loaded" };
        // The guest needs its pages even if nobody reads this output.
        let _ = show(&format!("{}\n", json!({ "event": name })));
    };
    let played = match args.resume {
        true => player.resume(socket, &mut on),
        false => player.play(socket, &mut on),
    };
    let played = match played {
        Ok(played) => played,
        Err(error) => return fail(Failed::of(&error, false), &described(&error, &args.image)),
    };
    // The restore has succeeded, whatever happens to the hot set.
    let _ = show(&format!("{}\n", report(&played)));
    if is_hot && set.add(&played.asked) {
        if let Err(error) = set.write(&args.image, &image) {
            let error = anyhow::Error::from(error);
            say(&format!("the next restore cannot know what the VM asked for: {error:#}"));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn identity_of(image: &Image) -> String {
    format!("{:032x}", image.identity())
}

/// What an error that ends the player leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failed {
    /// The image is damaged, and QEMU has received nothing: it waits for a player.
    Untouched,
    /// The image is damaged. A copy of it may be sound.
    Damaged,
    Otherwise,
}

impl Failed {
    fn of(error: &PlayError, untouched: bool) -> Self {
        match error {
            PlayError::Image(_) if untouched => Self::Untouched,
            PlayError::Image(_) => Self::Damaged,
            _ => Self::Otherwise,
        }
    }
}

/// Reports the error that ends the player.
fn fail(failed: Failed, error: &str) -> anyhow::Result<ExitCode> {
    let event = json!({
        "event": "failed", "damaged": failed != Failed::Otherwise,
        "untouched": failed == Failed::Untouched, "error": error,
    });
    let _ = show(&format!("{event}\n"));
    Ok(ExitCode::FAILURE)
}

/// The error with its causes, and the image if that is at fault.
fn described(error: &PlayError, image: &Path) -> String {
    let mut text = error.to_string();
    let mut cause: &dyn std::error::Error = error;
    while let Some(source) = cause.source() {
        text += &format!(": {source}");
        cause = source;
    }
    match error {
        PlayError::Image(_) => format!("image {}: {text}", image.display()),
        _ => text,
    }
}

fn report(played: &Played) -> Value {
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    json!({
        "event": "done", "running-ms": ms(played.running), "loaded-ms": ms(played.loaded),
        "requests": played.requests, "crossed": played.crossed, "pages": played.pages,
        "zeros": played.zeros, "hot": played.hot, "bytes": played.bytes,
        "served-p50-ms": ms(played.served_median), "served-p99-ms": ms(played.served_p99),
        "cpu-s": crate::report::process_cpu(),
    })
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

/// The process of a player.
pub(crate) struct PlayerProcess {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl PlayerProcess {
    /// Starts a player from this executable. It holds `lock` until it ends.
    pub(crate) fn start(
        path: &Path,
        image: &Image,
        lock: &ImageLock,
        socket: &Path,
        options: PlayerOptions,
        resume: bool,
    ) -> anyhow::Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.arg0("platen").arg("play").arg(path).arg(identity_of(image));
        command.arg(socket).arg(options.play.threads.to_string());
        if let Some(rate) = options.play.rate {
            command.args(["--rate", &rate.to_string()]);
        }
        if resume {
            command.arg("--resume");
        }
        if !options.hot_set {
            command.arg("--no-hot-set");
        }
        // An interrupt at the terminal is for `restore` only. The player continues alone, since the
        // guest would stop without it.
        command.process_group(0);
        command.stdin(lock.handle()?).stdout(Stdio::piped());
        let mut child = command.spawn().context("cannot start the process that plays the image")?;
        let lines = BufReader::new(child.stdout.take().context("it has no standard output")?);
        Ok(Self { child, lines })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the player's next event; `None` once it has ended or died.
    pub(crate) fn event(&mut self) -> Option<Value> {
        let mut line = String::new();
        match self.lines.read_line(&mut line) {
            Ok(0) | Err(_) => None,
            // Its death may have cut the line: that is no event.
            Ok(_) => serde_json::from_str(&line).ok(),
        }
    }

    /// Whether the player ends within `limit`. One that does not goes on without this process.
    pub(crate) fn ends_within(&mut self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        loop {
            match self.child.try_wait() {
                Ok(None) if Instant::now() < until => std::thread::sleep(Duration::from_millis(2)),
                ended => return !matches!(ended, Ok(None)),
            }
        }
    }

    /// Waits for the end of the player.
    pub(crate) fn end(mut self) -> anyhow::Result<ExitStatus> {
        self.child.wait().context("cannot wait for the process that plays the image")
    }
}

/// Describes the end of a player.
pub(crate) fn ended(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("the player was ended by signal {signal}"),
        (_, code) => format!("the player ended with status {}", code.unwrap_or(-1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_player_whose_disk_hangs_is_not_waited_for() {
        let child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = child.unwrap();
        let input = child.stdin.take();
        let lines = BufReader::new(child.stdout.take().unwrap());
        let mut player = PlayerProcess { child, lines };
        assert!(!player.ends_within(Duration::from_millis(5)));
        drop(input);
        assert!(player.ends_within(Duration::from_secs(300)));
    }
}
