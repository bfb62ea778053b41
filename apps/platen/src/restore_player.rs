//! The player: a process that serves an image to QEMU. `restore` starts it, and another one if it
//! dies.

use crate::image_command::open;
use crate::image_lock::ImageLock;
use crate::say::show;
use anyhow::Context;
use clap::Args;
use image::Image;
use player::{play, resume, Event, PlayError, PlayOptions, Played};
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
}

/// Time limit for QEMU to listen.
const LISTENS: Duration = Duration::from_secs(60);

/// Runs as a player.
pub(crate) fn run(args: &PlayArgs) -> anyhow::Result<ExitCode> {
    let _ = rustix::thread::set_name(c"platen");
    let image = match open(&args.image) {
        Ok(image) => image,
        Err(error) => return fail(true, &format!("{error:#}")),
    };
    if identity_of(&image) != args.identity {
        // Its pages would be wrong ones.
        let text = format!("image {} was replaced by another one", args.image.display());
        return fail(true, &text);
    }
    let socket = match connect(&args.socket) {
        Ok(socket) => socket,
        Err(error) => return fail(false, &format!("{error:#}")),
    };
    let mut on = |event: Event| {
        let name = if event == Event::Running { "running" } else { "loaded" };
        // The guest needs its pages even if nobody reads this output.
        let _ = show(&format!("{}\n", json!({ "event": name })));
    };
    let of = if args.resume { resume } else { play };
    let options = PlayOptions { threads: args.threads, rate: args.rate };
    let played = of(&image, socket, options, &mut on);
    match &played {
        Ok(played) => {
            let _ = show(&format!("{}\n", report(played)));
            Ok(ExitCode::SUCCESS)
        }
        Err(error) => fail(matches!(error, PlayError::Image(_)), &format!("{:#}", Chain(error))),
    }
}

fn identity_of(image: &Image) -> String {
    format!("{:032x}", image.identity())
}

/// Reports the error that ends the player. `damaged`: a copy of the image may be sound.
fn fail(damaged: bool, error: &str) -> anyhow::Result<ExitCode> {
    let _ =
        show(&format!("{}\n", json!({ "event": "failed", "damaged": damaged, "error": error })));
    Ok(ExitCode::FAILURE)
}

/// Displays an error with its causes, as anyhow does.
struct Chain<'a>(&'a PlayError);

impl std::fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut error: &dyn std::error::Error = self.0;
        write!(f, "{error}")?;
        while let Some(source) = error.source() {
            write!(f, ": {source}")?;
            error = source;
        }
        Ok(())
    }
}

fn report(played: &Played) -> Value {
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    json!({
        "event": "done", "running-ms": ms(played.running), "loaded-ms": ms(played.loaded),
        "requests": played.requests, "crossed": played.crossed, "pages": played.pages,
        "zeros": played.zeros, "bytes": played.bytes,
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

/// A running player.
pub(crate) struct Player {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Player {
    /// Starts a player from this executable. It holds `lock` until it ends.
    pub(crate) fn start(
        path: &Path,
        image: &Image,
        lock: &ImageLock,
        socket: &Path,
        options: PlayOptions,
        resume: bool,
    ) -> anyhow::Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.arg0("platen").arg("play").arg(path).arg(identity_of(image));
        command.arg(socket).arg(options.threads.to_string());
        if let Some(rate) = options.rate {
            command.args(["--rate", &rate.to_string()]);
        }
        if resume {
            command.arg("--resume");
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
