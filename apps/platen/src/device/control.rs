//! The control socket: one line in, one line of JSON out. `stat`; `writeback` and what, which gives a ticket, and
//! `written` and that.
//!
//! One client at a time, a second for each, 64 bytes of question: nobody who connects can make the
//! server wait or grow. It has nothing to do with the I/O path.

use anyhow::{bail, Context};
use relay::{Listening, UnixAddress};
use rustix::event::{poll, PollFd, PollFlags};
use std::fs::DirBuilder;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(1);
const QUESTION: u64 = 64;
/// More than any answer has.
const ANSWER: u64 = 1 << 20;

/// The folder of the control sockets.
pub(crate) fn folder(given: Option<&Path>) -> anyhow::Result<PathBuf> {
    if let Some(given) = given {
        return Ok(given.to_owned());
    }
    if rustix::process::geteuid().is_root() {
        return Ok("/run/platen".into());
    }
    let Some(runtime) = std::env::var_os("XDG_RUNTIME_DIR") else {
        bail!("XDG_RUNTIME_DIR is not set: say --run-dir DIR");
    };
    Ok(Path::new(&runtime).join("platen"))
}

/// Where the control socket of the device `name` is.
pub(crate) fn address(folder: &Path, name: &str) -> UnixAddress {
    UnixAddress::from(folder.join(format!("{name}.sock")))
}

/// The same, which is made if it is not there, and is one's own.
pub(crate) fn make_folder(given: Option<&Path>) -> anyhow::Result<PathBuf> {
    let folder = folder(given)?;
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&folder)
        .with_context(|| format!("cannot make the folder {}", folder.display()))?;
    Ok(folder)
}

/// Listens on the control socket of `name`.
pub(crate) fn listen(folder: &Path, name: &str) -> anyhow::Result<Listening> {
    address(folder, name)
        .listen()
        .with_context(|| format!("device {name} is served already, or was not ended cleanly"))
}

/// Answers questions with what `answer` gives, until dropped; it gives none to what it does not know.
pub(crate) struct Control {
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl Control {
    pub(crate) fn start(
        listener: UnixListener,
        answer: impl Fn(&str) -> Option<String> + Send + 'static,
    ) -> anyhow::Result<Self> {
        let (stopped, stop) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        listener.set_nonblocking(true)?;
        let thread = thread::Builder::new().name("control".into()).spawn(move || loop {
            let mut fds =
                [PollFd::new(&stopped, PollFlags::IN), PollFd::new(&listener, PollFlags::IN)];
            match poll(&mut fds, None) {
                Ok(_) if !fds[0].revents().is_empty() => return,
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(_) => return,
            }
            let Ok((stream, _)) = listener.accept() else {
                // Out of descriptors, perhaps: not at full speed.
                thread::sleep(Duration::from_millis(10));
                continue;
            };
            // One that leaves or says nothing gets nothing.
            let _ = serve(&stream, &answer);
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let _ = rustix::io::write(self.stop.as_fd(), &[0]);
        if let Some(thread) = self.thread.take() {
            // Its panic was shown.
            let _ = thread.join();
        }
    }
}

fn serve(stream: &UnixStream, answer: impl Fn(&str) -> Option<String>) -> std::io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut question = String::new();
    BufReader::new(stream.take(QUESTION)).read_line(&mut question)?;
    let mut writer = stream;
    match question.strip_suffix('\n').and_then(answer) {
        Some(answer) => writer.write_all(format!("{answer}\n").as_bytes()),
        None => writer.write_all(b"{\"error\":\"not a command of this device\"}\n"),
    }
}

/// Asks the device behind a control socket.
pub(crate) fn ask(path: &Path, question: &str) -> anyhow::Result<String> {
    let stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(5 * PATIENCE))?;
    let mut writer = &stream;
    writer.write_all(format!("{question}\n").as_bytes())?;
    let mut answer = String::new();
    BufReader::new((&stream).take(ANSWER)).read_line(&mut answer)?;
    Ok(answer)
}
