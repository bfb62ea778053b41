//! The control socket: one line of request, one line of JSON as answer. Requests: `stat`;
//! `writeback WHAT`, which returns a ticket; `written TICKET`.
//!
//! One client at a time, with one second and 64 bytes for its request: no client can make the
//! server block or grow. The I/O path does not use it.

use super::args::ServeArgs;
use super::endpoint::Endpoint;
use anyhow::{bail, ensure, Context};
use relay::{Listening, RelayError, UnixAddress};
use std::fmt;
use std::fs::{DirBuilder, Permissions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(1);
const QUESTION: usize = 64;
/// Limit on the size of an answer, in bytes.
const ANSWER: usize = 1 << 20;
/// Time limit for an answer, from the connection on.
const ANSWERED: Duration = Duration::from_secs(5);
/// Attempts to ask a server that ends the connection without an answer.
const ATTEMPTS: u32 = 3;
/// Pause before another attempt: while the listen backlog is full, or when the server has ended the
/// connection.
const AGAIN: Duration = Duration::from_millis(20);
/// The shortest time-out of a socket: zero would mean no time-out.
const A_MOMENT: Duration = Duration::from_millis(1);

/// Root's folder. Its sockets are for root alone; the folders of `platen host`, which runs as a
/// user of its own, and those of QEMU's sockets are in it, too.
const SHARED: &str = "/run/platen";

/// The folder of the control sockets.
pub(crate) fn folder(given: Option<&Path>) -> anyhow::Result<PathBuf> {
    if let Some(given) = given {
        return Ok(given.to_owned());
    }
    if rustix::process::geteuid().is_root() {
        return Ok(SHARED.into());
    }
    let Some(runtime) = std::env::var_os("XDG_RUNTIME_DIR") else {
        bail!("XDG_RUNTIME_DIR is not set: say --run-dir DIR");
    };
    Ok(Path::new(&runtime).join("platen"))
}

/// Address of the control socket of the device `name`.
pub(crate) fn address(folder: &Path, name: &str) -> UnixAddress {
    UnixAddress::from(folder.join(format!("{name}.sock")))
}

/// As [`folder`], but creates the folder if it is missing, and checks its owner and mode.
pub(crate) fn make_folder(given: Option<&Path>) -> anyhow::Result<PathBuf> {
    let folder = folder(given)?;
    make(&folder, folder == Path::new(SHARED))?;
    Ok(folder)
}

/// Creates a folder for this user alone. All users may pass through a `shared` one, which may be of
/// an older version that made it for root alone.
fn make(folder: &Path, shared: bool) -> anyhow::Result<()> {
    const OWN: u32 = 0o700;
    const PASSAGE: u32 = 0o711;
    DirBuilder::new()
        .recursive(true)
        .mode(OWN)
        .create(folder)
        .with_context(|| format!("cannot make the folder {}", folder.display()))?;
    let there = std::fs::metadata(folder).with_context(|| folder.display().to_string())?;
    let user = rustix::process::geteuid().as_raw();
    check_owner(folder, (there.uid(), there.mode()), user)?;
    if shared && there.uid() == user && there.mode() & 0o777 == OWN {
        std::fs::set_permissions(folder, Permissions::from_mode(PASSAGE))
            .with_context(|| folder.display().to_string())?;
    }
    Ok(())
}

/// Refuses a folder in which another user could replace a device's control socket.
fn check_owner(folder: &Path, (owner, mode): (u32, u32), user: u32) -> anyhow::Result<()> {
    const WRITABLE_BY_OTHERS: u32 = 0o022;
    const STICKY: u32 = 0o1000;
    let folder = folder.display();
    ensure!(
        owner == user || owner == 0,
        "--run-dir: {folder} belongs to user {owner}, and this is user {user}: give a folder of your own"
    );
    ensure!(
        mode & WRITABLE_BY_OTHERS == 0 || mode & STICKY != 0,
        "--run-dir: other users may write to {folder} (mode {:o}): give another folder, or `chmod go-w` it",
        mode & 0o7777
    );
    Ok(())
}

/// Listens on the control socket of `name`.
pub(crate) fn listen(folder: &Path, name: &str) -> anyhow::Result<Listening> {
    address(folder, name).listen().map_err(|error| {
        let taken = matches!(&error, RelayError::Listen { source, .. } if source.kind() == ErrorKind::AddrInUse);
        let what = match taken {
            true => format!("device {name} is served already"),
            false => format!("device {name} cannot have its control socket"),
        };
        anyhow::Error::from(error).context(what)
    })
}

/// Refuses an NBD socket with the path of the control socket.
pub(crate) fn check(args: &ServeArgs) -> anyhow::Result<()> {
    let Some(nbd) = &args.nbd else { return Ok(()) };
    let control = address(&folder(args.control.run_dir.as_deref())?, &args.name);
    let whole = |path: &Path| {
        let folder = path.parent().and_then(|folder| folder.canonicalize().ok());
        folder.zip(path.file_name()).map_or(path.to_owned(), |(folder, name)| folder.join(name))
    };
    ensure!(
        whole(nbd.path()) != whole(control.path()),
        "--nbd: {} is the control socket of device {}: give another path, or --name or --run-dir",
        nbd.path().display(),
        args.name
    );
    Ok(())
}

/// Answers each request with the text that `answer` returns, until the endpoint is dropped. `None`
/// means an unknown request.
pub(crate) fn start(
    listener: UnixListener,
    answer: impl Fn(&str) -> Option<String> + Send + 'static,
) -> anyhow::Result<Endpoint> {
    Endpoint::start("control", listener, move |stream| serve(stream, &answer))
}

fn serve(stream: &UnixStream, answer: impl Fn(&str) -> Option<String>) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    let question = read_line(stream, QUESTION, Instant::now() + PATIENCE)?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut writer = stream;
    match question.strip_suffix('\n').and_then(answer) {
        Some(answer) => writer.write_all(format!("{answer}\n").as_bytes()),
        None => writer.write_all(b"{\"error\":\"not a command of this device\"}\n"),
    }
}

/// Reads a line of at most `most` bytes, or up to the end of the stream. `TimedOut` if the line is
/// not complete by `until`, however much has arrived.
///
/// A thread that gets no CPU until then reads once what waits in the socket: the peer was in time.
fn read_line(mut stream: &UnixStream, most: usize, until: Instant) -> io::Result<String> {
    let (mut line, mut part) = (Vec::new(), [0; 4096]);
    let mut is_last = false;
    while line.len() < most && line.last() != Some(&b'\n') {
        if is_last {
            return Err(ErrorKind::TimedOut.into());
        }
        let left = until.saturating_duration_since(Instant::now());
        is_last = left.is_zero();
        stream.set_read_timeout(Some(left.max(A_MOMENT)))?;
        let room = part.len().min(most - line.len());
        match stream.read(&mut part[..room]) {
            Ok(0) => break,
            Ok(got) => line.extend_from_slice(&part[..got]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                return Err(ErrorKind::TimedOut.into());
            }
            Err(error) => return Err(error),
        }
    }
    let invalid = |_| io::Error::from(ErrorKind::InvalidData);
    String::from_utf8(line).map_err(invalid)
}

/// The error of a server that is there and has not answered in this time.
#[derive(Debug)]
pub(crate) struct Silent(Duration);

impl fmt::Display for Silent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "it does not answer within {} s", self.0.as_secs())
    }
}

impl std::error::Error for Silent {}

/// Sends a request to a control socket, and waits at most 5 s for the answer.
///
/// # Errors
/// As for [`ask_within`].
pub(crate) fn ask(path: &Path, question: &str) -> anyhow::Result<String> {
    ask_within(path, question, ANSWERED)
}

/// Sends a request to a control socket, and waits at most `limit` for the answer. Asks again if the
/// server ends the connection without an answer: it does so if this process got no CPU for longer
/// than a client has for its request.
///
/// # Errors
/// There is no answer. The message has the device as its subject: "it is not served", "it does not
/// answer within 5 s".
pub(crate) fn ask_within(path: &Path, question: &str, limit: Duration) -> anyhow::Result<String> {
    for _ in 0..ATTEMPTS {
        if let Some(answer) = ask_once(path, question, limit)? {
            return Ok(answer);
        }
        thread::sleep(AGAIN);
    }
    bail!("it ended the connection and has not answered")
}

/// As [`ask_within`]; `None` if the server ends the connection without an answer.
fn ask_once(path: &Path, question: &str, limit: Duration) -> anyhow::Result<Option<String>> {
    let (address, until) = (UnixAddress::from(path.to_owned()), Instant::now() + limit);
    let stream = loop {
        match address.connect_now() {
            Ok(stream) => break stream,
            // The listen backlog is full.
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if Instant::now() >= until {
                    bail!(Silent(limit));
                }
                thread::sleep(AGAIN);
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                bail!("it is not served: there is no {}", path.display());
            }
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                bail!(
                    "it is not served: no process listens on {}, which a dead server left",
                    path.display()
                );
            }
            Err(error) => {
                return Err(error).with_context(|| format!("cannot connect to {}", path.display()));
            }
        }
    };
    stream.set_write_timeout(Some(PATIENCE))?;
    let asked = (&stream).write_all(format!("{question}\n").as_bytes());
    match asked.and_then(|()| read_line(&stream, ANSWER, until)) {
        Ok(answer) => Ok((!answer.is_empty()).then_some(answer)),
        Err(error) => match error.kind() {
            ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => Ok(None),
            ErrorKind::TimedOut | ErrorKind::WouldBlock => bail!(Silent(limit)),
            _ => Err(anyhow::Error::from(error).context("its connection was lost")),
        },
    }
}

#[cfg(test)]
mod tests;
