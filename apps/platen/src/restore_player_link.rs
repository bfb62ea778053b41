//! A player's process as its restore sees it: start, commands, events and end.

use crate::remote_image::RemoteOptions;
use crate::restore_player::{identity_of, Serve};
use crate::restore_source::{From, Source};
use anyhow::{bail, Context};
use host::Channel;
use player::Recovery;
use serde_json::Value;
use std::collections::HashMap;
use std::io::ErrorKind;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{channel, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

/// Options of a player's process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlayerOptions<'a> {
    /// Threads that decode units.
    pub(crate) threads: usize,
    /// Limit of the background pages of each VM, bytes per second; `None` is no limit.
    pub(crate) rate: Option<u64>,
    /// Bytes of decoded units to keep for all VMs.
    pub(crate) cache: u64,
    /// Whether to use and write the image's hot set.
    pub(crate) hot_set: bool,
    /// Whether other VMs may be restored from the image.
    pub(crate) shared: bool,
    /// How another host's images are reached.
    pub(crate) remote: &'a RemoteOptions,
}

/// A player's process.
pub(crate) struct Player {
    pub(crate) pid: u32,
    /// The copy of the image that it serves.
    pub(crate) source: usize,
    /// The commands to the player, and its events.
    pub(crate) channel: Arc<Channel>,
    pub(crate) heard: Arc<Heard>,
    /// Disconnected once the player has ended.
    ended: Mutex<Receiver<()>>,
}

/// Reports of a player.
#[derive(Default)]
pub(crate) struct Heard {
    /// Where the events of each VM go.
    vms: Mutex<Vms>,
    status: OnceLock<ExitStatus>,
    /// The player's own figures.
    pub(crate) figures: OnceLock<Value>,
}

#[derive(Default)]
struct Vms {
    events: HashMap<usize, Sender<Value>>,
    /// Whether the player serves no VM any more.
    is_over: bool,
}

impl Player {
    /// Starts a player from this executable. It holds the image's lock until it ends.
    pub(crate) fn start(
        nth: usize,
        source: &Source<'_>,
        options: PlayerOptions<'_>,
    ) -> anyhow::Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.arg0("platen").arg("play").arg(source.path).arg(identity_of(&source.image));
        command.args([options.threads.to_string(), options.cache.to_string()]);
        if let Some(rate) = options.rate {
            command.args(["--rate", &rate.to_string()]);
        }
        if !options.hot_set {
            command.arg("--no-hot-set");
        }
        // An interrupt at the terminal is for `restore` only. The player continues alone, since the
        // guests would stop without it.
        command.process_group(0);
        let (ours, theirs) = Channel::pair().context("a socket to the player")?;
        match &source.from {
            From::Here(lock) => command.stdin(lock.handle()?),
            From::There(remote) => {
                command.args(["--session", &remote.session]).args(options.remote.to_args());
                if options.shared {
                    command.arg("--shared");
                }
                command.stdin(Stdio::null())
            }
        };
        command.stdout(theirs);
        let child = command.spawn().context("cannot start the process that plays the image")?;
        // Dropping this closes our copy of the player's end, so that the player's death is noticed.
        drop(command);
        Self::over(nth, ours, child)
    }

    /// Watches a player that has been started.
    fn over(nth: usize, ours: Channel, child: Child) -> anyhow::Result<Self> {
        let (pid, heard, ours) = (child.id(), Arc::new(Heard::default()), Arc::new(ours));
        let (over, ended) = channel();
        let (to, events) = (Arc::clone(&heard), Arc::clone(&ours));
        let listen = move || {
            to.listen(&events, child);
            drop(over);
        };
        thread::Builder::new()
            .name("player".into())
            .spawn(listen)
            .context("cannot start a thread")?;
        Ok(Self { pid, source: nth, channel: ours, heard, ended: Mutex::new(ended) })
    }

    /// Has the player serve a VM; returns `None` if the player has ended.
    pub(crate) fn serve(
        &self,
        serve: &Serve,
        recovery: Option<&Recovery>,
    ) -> anyhow::Result<Option<Receiver<Value>>> {
        let mut vms = lock(&self.heard.vms);
        if vms.is_over {
            return Ok(None);
        }
        let (to, events) = channel();
        vms.events.insert(serve.vm, to);
        match self.channel.send(serve, recovery.and_then(Recovery::connection)) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                bail!("player {} takes no commands: is it stopped?", self.pid)
            }
            // The player has died, which `events` shows.
            Err(error) if is_over(&error) => {}
            // It would report nothing of this VM, however long one waits.
            sent => sent.with_context(|| format!("cannot give player {} the VM", self.pid))?,
        }
        Ok(Some(events))
    }

    /// Whether the player ends within `limit`. Otherwise it continues without this process.
    pub(crate) fn ends_within(&self, limit: Duration) -> bool {
        lock(&self.ended).recv_timeout(limit) != Err(RecvTimeoutError::Timeout)
    }

    /// Waits for the player's end, and describes it.
    pub(crate) fn why_it_ended(&self) -> String {
        // Nothing is ever sent on this channel.
        let _ = lock(&self.ended).recv();
        match self.heard.status.get().map(|status| (status.signal(), status.code())) {
            Some((Some(signal), _)) => format!("the player was ended by signal {signal}"),
            Some((_, Some(code))) => format!("the player ended with status {code}"),
            _ => "the player ended".into(),
        }
    }
}

impl Heard {
    /// Passes the events on until the player has ended.
    fn listen(&self, channel: &Channel, mut child: Child) {
        loop {
            match channel.receive::<Value>() {
                Ok(Some((event, _))) => self.hear(event),
                Err(error) if error.kind() == ErrorKind::InvalidData => {}
                _ => break,
            }
        }
        if let Ok(status) = child.wait() {
            let _ = self.status.set(status);
        }
        let mut vms = lock(&self.vms);
        vms.is_over = true;
        vms.events.clear();
    }

    fn hear(&self, event: Value) {
        let vm = event["vm"].as_u64().and_then(|vm| usize::try_from(vm).ok());
        match vm {
            Some(vm) => {
                if let Some(to) = lock(&self.vms).events.get(&vm) {
                    // The VM's restore may have failed meanwhile.
                    let _ = to.send(event);
                }
            }
            None => {
                let _ = self.figures.set(event);
            }
        }
    }
}

/// Whether the process at the other end of a channel has ended.
fn is_over(error: &std::io::Error) -> bool {
    let ends = [
        ErrorKind::BrokenPipe,
        ErrorKind::ConnectionRefused,
        ErrorKind::ConnectionReset,
        ErrorKind::NotConnected,
    ];
    ends.contains(&error.kind())
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
