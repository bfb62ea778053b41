//! The server's end of the socket to its supervisor, which is standard input.

use crate::device::inherited::Go;
use crate::device::owner;
use crate::say::{say, say_untaken};
use anyhow::Context;
use codec::Settings;
use policy::Trainer;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{sendmsg, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use std::io::{BufRead, BufReader, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::parent_id;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread;
use swap::supervisor::words;
use ublk::Owner;

/// Interval at which a stand-by server maps memory added to the store.
const MEANWHILE: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

/// The socket, if there is a supervisor.
pub(super) struct Supervisor {
    stream: Option<UnixStream>,
    /// Whether the supervisor has exited, or never existed.
    gone: Arc<AtomicBool>,
    /// The owner of the ublk disk.
    owner: Owner,
    /// The name by which the kernel knows the NBD disk of the supervisor, which has made the
    /// listening socket, if it could be read.
    backend: Option<String>,
}

impl Supervisor {
    /// `there` tells whether a supervisor started this process.
    pub(super) fn new(there: bool) -> anyhow::Result<Self> {
        let input: BorrowedFd<'_> = rustix::stdio::stdin();
        let stream = there.then(|| input.try_clone_to_owned()).transpose()?;
        let owner = if there { owner::of_server() } else { owner::new() };
        let gone = Arc::new(AtomicBool::new(!there));
        // A ublk disk needs none.
        let backend = there.then(|| swap::nbd::backend(parent_id()).ok()).flatten();
        Ok(Self { stream: stream.map(UnixStream::from), gone, owner, backend })
    }

    /// The owner of the ublk disk.
    pub(super) fn owner(&self) -> Owner {
        self.owner
    }

    /// The name with which the kernel takes connections for the NBD disk. Without it the kernel
    /// takes none.
    ///
    /// # Errors
    /// It cannot be read, now as at the start.
    pub(super) fn backend(&self) -> anyhow::Result<String> {
        match &self.backend {
            Some(name) => Ok(name.clone()),
            None => swap::nbd::backend(parent_id()).context("cannot read /proc/self/ns/pid"),
        }
    }

    /// Whether a supervisor has started this process.
    pub(super) fn is_there(&self) -> bool {
        self.stream.is_some()
    }

    /// Whether the supervisor has exited, or never existed.
    pub(super) fn has_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Waits until this server is needed; `None` if the supervisor exits first.
    pub(super) fn wait_for_go(&self, mut meanwhile: impl FnMut()) -> anyhow::Result<Option<Go>> {
        let mut line = Vec::with_capacity(64);
        let mut byte = [0];
        // Read byte by byte: the data after this line belongs to `listen`.
        let mut stream = self.stream.as_ref().context("no supervisor to say go")?;
        loop {
            let mut fds = [PollFd::new(&stream, PollFlags::IN)];
            match poll(&mut fds, Some(&MEANWHILE)) {
                Ok(0) => meanwhile(),
                Err(Errno::INTR) => {}
                // The read reports an error.
                _ => break,
            }
        }
        while line.len() < 64 && stream.read(&mut byte)? == 1 {
            if byte[0] == b'\n' {
                let line = String::from_utf8_lossy(&line).into_owned();
                let go = line.strip_prefix(words::GO).with_context(|| format!("told {line:?}"))?;
                return Ok(Some(go.into()));
            }
            line.push(byte[0]);
        }
        Ok(None)
    }

    /// Returns the channel by which a server has its supervisor start trainers.
    pub(super) fn trainer(&self, settings: Settings) -> anyhow::Result<Option<Trainer>> {
        let Some(stream) = &self.stream else { return Ok(None) };
        let (start, stop) = (stream.try_clone()?, stream.try_clone()?);
        // Neither call waits or allocates. If one fails, there is no trainer, and the other end of
        // its channel closes.
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let start = Box::new(move |channel: OwnedFd| {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let channel = [channel.as_fd()];
            if control.push(SendAncillaryMessage::ScmRights(&channel)) {
                let line = [words::TRAIN, "\n"].map(|part| IoSlice::new(part.as_bytes()));
                let _ = sendmsg(&start, &line, &mut control, flags);
            }
        });
        let stop = Box::new(move || {
            let line = [words::ENOUGH, "\n"].map(|part| IoSlice::new(part.as_bytes()));
            let _ = sendmsg(&stop, &line, &mut SendAncillaryBuffer::default(), flags);
        });
        Ok(Some(Trainer { settings, start, stop }))
    }

    /// Sends a line. A supervisor that has exited does not receive it.
    pub(super) fn tell(&self, line: &str) {
        if let Some(stream) = &self.stream {
            let _ = rustix::io::write(stream, format!("{line}\n").as_bytes());
        }
    }

    /// Reports that this server can replace the present one.
    pub(super) fn tell_stands_by(&self) {
        // First, because the supervisor hands over, or refuses to, when it reads the second line.
        self.tell(words::NAMES_DISK);
        self.tell(words::STANDS_BY);
    }

    /// Ends this process at once with its error, if the supervisor then starts another server. That
    /// one waits for the end of this process, which would otherwise wait for all of its requests to
    /// a disk that may not answer. The device's users wait meanwhile.
    pub(super) fn give_up(&self, error: &anyhow::Error) {
        if !self.has_gone() {
            say(&format!("{error:#}"));
            std::process::exit(1);
        }
    }

    /// As [`give_up`](Self::give_up), for the error of a ublk disk. If no other server follows,
    /// calls `remove`: processes that have the disk open would wait for ever.
    pub(super) fn give_up_disk(
        &self,
        error: &anyhow::Error,
        remove: impl FnOnce() -> anyhow::Result<()>,
    ) {
        self.give_up(error);
        if let Err(error) = remove() {
            say(&format!("{error:#}"));
        }
    }

    /// Calls `stop` on the supervisor's order. When the supervisor has been killed, a server with a
    /// kernel `disk` continues and obeys signals, except while the host swaps to the disk; other
    /// servers stop.
    pub(super) fn listen(
        &self,
        name: &str,
        disk: Option<String>,
        stop: impl Fn() + Send + Sync + 'static,
    ) -> anyhow::Result<()> {
        let stop = Arc::new(stop);
        let alone = disk.is_some();
        let (stopped, seen) = (Arc::clone(&stop), Arc::clone(&self.gone));
        // A terminal and a service manager signal every process; only the supervisor knows the
        // order in which processes must stop.
        ctrlc::set_handler(move || {
            if seen.load(Ordering::Acquire) {
                match disk.as_ref().filter(|disk| swapped_to(disk)) {
                    Some(disk) => {
                        let areas = swap::area::nodes(Path::new(disk));
                        let areas: Vec<_> =
                            areas.iter().map(|area| area.to_string_lossy()).collect();
                        say(&format!("{disk} is swapped to: first `swapoff {}`", areas.join(" ")));
                    }
                    None => stopped(),
                }
            }
        })
        .context("cannot handle signals")?;
        let Some(stream) = &self.stream else { return Ok(()) };
        // The supervisor blocks these signals, and its children inherit the mask.
        say_untaken(swap::unblock_end_signals().err());
        let (gone, name) = (Arc::clone(&self.gone), name.to_owned());
        let mut reader = BufReader::new(stream.try_clone()?);
        thread::Builder::new().name("supervisor".into()).spawn(move || {
            let (mut line, mut ordered) = (String::new(), false);
            while reader.read_line(&mut line).is_ok_and(|got| got > 0) {
                if line.trim_end() == words::END {
                    ordered = true;
                    stop();
                }
                line.clear();
            }
            gone.store(true, Ordering::Release);
            if !alone {
                if !ordered {
                    say(&format!(
                        "{name}: the supervisor has died: the device ends, and its contents with it"
                    ));
                }
                stop();
            }
        })?;
        Ok(())
    }
}

/// Whether the kernel swaps to this disk, or does not answer.
pub(super) fn swapped_to(disk: &str) -> bool {
    !matches!(swap::area::in_use(Path::new(disk)), Ok(None))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn a_successor_announces_that_it_names_its_disk_before_it_stands_by() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let gone = Arc::new(AtomicBool::new(false));
        let supervisor =
            Supervisor { stream: Some(theirs), gone, owner: owner::new(), backend: None };
        supervisor.tell_stands_by();
        drop(supervisor);
        // Supervisors of other versions wait for these words.
        let told = std::io::read_to_string(ours).unwrap();
        assert_eq!(told, "names its disk\nstands by\n");
    }

    /// Set where the test below runs this program.
    const GIVES_UP: &str = "gives_up_while_a_thread_waits_for_a_disk";

    #[test]
    fn gives_up_while_a_thread_waits_for_a_disk() {
        let Some(supervisor) = std::env::var_os(GIVES_UP) else { return };
        let is_killed = supervisor == "killed";
        let supervisor = Supervisor::new(supervisor != "never").unwrap();
        if is_killed {
            supervisor.gone.store(true, Ordering::Release);
        }
        thread::spawn(|| loop {
            thread::park();
        });
        let error = anyhow::anyhow!("queue 3 has failed");
        supervisor.give_up_disk(&error, || Err(anyhow::anyhow!("the disk goes")));
        std::process::exit(70);
    }

    #[test]
    fn a_server_that_another_one_follows_ends_at_once_and_the_disk_of_another_goes() {
        for (supervisor, code) in [("there", 1), ("killed", 70), ("never", 70)] {
            let name = format!("{}::{GIVES_UP}", module_path!().split_once("::").unwrap().1);
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", &name, "--nocapture"]).env(GIVES_UP, supervisor);
            let ended = command.stdin(Stdio::null()).output().unwrap();
            assert_eq!(ended.status.code(), Some(code), "{ended:?}");
            let said = String::from_utf8_lossy(&ended.stderr).into_owned();
            let follows = supervisor == "there";
            assert_eq!(said.contains("queue 3 has failed"), follows, "{said}");
            assert_eq!(said.contains("the disk goes"), !follows, "{said}");
        }
    }
}
