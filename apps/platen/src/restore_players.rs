//! The players of a restore: processes that serve an image, or a copy of it, to its VMs.

use crate::remote_image::RemoteOptions;
use crate::restore_player::{identity_of, Serve};
use crate::restore_source::{From, Source};
use crate::say::say;
use anyhow::{bail, Context};
use host::Channel;
use image::Image;
use player::Recovery;
use rustix::net::{shutdown, Shutdown};
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

/// Longest wait for a player that writes the hot set of a finished restore, to a disk that may
/// hang.
const HOT_SET: Duration = Duration::from_secs(2);

/// The image, its copies, and the players that serve them. All VMs of a restore share them.
pub(crate) struct Players<'a> {
    sources: Vec<Source<'a>>,
    options: PlayerOptions<'a>,
    started: Mutex<Vec<Arc<Player>>>,
}

/// The service of one VM by a player.
pub(crate) struct Service {
    pub(crate) player: Arc<Player>,
    /// Events of the VM. It is disconnected once the player has ended.
    pub(crate) events: Receiver<Value>,
}

impl<'a> Players<'a> {
    pub(crate) fn new(sources: Vec<Source<'a>>, options: PlayerOptions<'a>) -> Self {
        Self { sources, options, started: Mutex::default() }
    }

    /// The image (0) or one of its copies; `None` if there are fewer copies.
    pub(crate) fn source(&self, nth: usize) -> Option<&Source<'a>> {
        self.sources.get(nth)
    }

    /// The image.
    pub(crate) fn image(&self) -> &Arc<Image> {
        &self.sources[0].image
    }

    /// Has a VM served from copy `nth`: by the player that serves it to other VMs, or by another
    /// one if that player has died. With `recovery` the player continues on that connection.
    pub(crate) fn serve(
        &self,
        nth: usize,
        serve: &Serve,
        recovery: Option<&Recovery>,
    ) -> anyhow::Result<Service> {
        let mut started = lock(&self.started);
        for player in started.iter().filter(|player| player.source == nth) {
            if let Some(events) = player.serve(serve, recovery)? {
                return Ok(Service { player: Arc::clone(player), events });
            }
        }
        let player = Arc::new(Player::start(nth, &self.sources[nth], self.options)?);
        say(&format!("player {} begins", player.pid));
        started.push(Arc::clone(&player));
        // Without a sender there are no events: this player has died already.
        let events = player.serve(serve, recovery)?.unwrap_or_else(|| channel().1);
        Ok(Service { player, events })
    }

    /// Lets the players end and write the hot set. Returns their figures.
    pub(crate) fn end(&self) -> Vec<Value> {
        let started = std::mem::take(&mut *lock(&self.started));
        for player in &started {
            // This fails if the player has died.
            let _ = shutdown(&*player.channel, Shutdown::Write);
        }
        let mut figures = Vec::new();
        for player in &started {
            // A player holds the image's lock while it writes the hot set.
            let is_late = !player.ends_within(HOT_SET);
            let mut of_it = player.heard.figures.get().cloned();
            if let Some(figures) = of_it.as_mut().and_then(Value::as_object_mut) {
                figures.remove("event");
            }
            figures.extend(of_it);
            if is_late {
                say(if player.heard.figures.get().is_some() {
                    "the player still writes the pages that the VM asked for beside the image"
                } else {
                    "the player continues without this process"
                });
            }
        }
        for source in &self.sources {
            if let From::There(remote) = &source.from {
                remote.end();
            }
        }
        figures
    }
}

/// A player's process.
pub(crate) struct Player {
    pub(crate) pid: u32,
    /// The copy of the image that it serves.
    source: usize,
    /// The commands to the player, and its events.
    channel: Arc<Channel>,
    heard: Arc<Heard>,
    /// Disconnected once the player has ended.
    ended: Mutex<Receiver<()>>,
}

/// Reports of a player.
#[derive(Default)]
struct Heard {
    /// Where the events of each VM go.
    vms: Mutex<Vms>,
    status: OnceLock<ExitStatus>,
    /// The player's own figures.
    figures: OnceLock<Value>,
}

#[derive(Default)]
struct Vms {
    events: HashMap<usize, Sender<Value>>,
    /// Whether the player serves no VM any more.
    is_over: bool,
}

impl Player {
    /// Starts a player from this executable. It holds the image's lock until it ends.
    fn start(nth: usize, source: &Source<'_>, options: PlayerOptions<'_>) -> anyhow::Result<Self> {
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
    fn serve(
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
    fn ends_within(&self, limit: Duration) -> bool {
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Stdio;

    #[test]
    fn a_player_whose_disk_hangs_is_not_waited_for() {
        let (ours, theirs) = Channel::pair().unwrap();
        let mut command = Command::new("cat");
        let child = command.stdin(Stdio::piped()).stdout(theirs).spawn();
        drop(command);
        let mut child = child.unwrap();
        let input = child.stdin.take();
        let player = Player::over(0, ours, child).unwrap();
        assert!(!player.ends_within(Duration::from_millis(5)));
        drop(input);
        assert!(player.ends_within(Duration::from_secs(300)));
        assert_eq!(player.why_it_ended(), "the player ended with status 0");
        // Another one has to serve its VMs.
        let serve = Serve { vm: 0, socket: "none".into(), resume: false };
        assert!(player.serve(&serve, None).unwrap().is_none());
    }

    #[test]
    fn events_reach_the_vm_that_they_are_of_until_the_player_ends() {
        let (ours, theirs) = Channel::pair().unwrap();
        // It repeats each command, which has the number of a VM as an event has.
        let mut command = Command::new("cat");
        let input = theirs.try_clone().unwrap();
        let child = command.stdin(input).stdout(theirs).spawn().unwrap();
        drop(command);
        let player = Player::over(0, ours, child).unwrap();
        let serve = |vm| Serve { vm, socket: format!("{vm}").into(), resume: false };
        let [one, two] = [1, 2].map(|vm| player.serve(&serve(vm), None).unwrap().unwrap());
        for (events, socket) in [(&two, "2"), (&one, "1")] {
            let event = events.recv_timeout(Duration::from_secs(300)).unwrap();
            assert_eq!(event["socket"], socket);
        }
        shutdown(&*player.channel, Shutdown::Write).unwrap();
        assert!(one.recv().is_err() && two.recv().is_err());
    }

    /// A player that has not got a command reports nothing, and its VM would wait for ever.
    #[test]
    fn a_command_that_cannot_be_sent_is_an_error_and_no_wait() {
        let (ours, theirs) = Channel::pair().unwrap();
        let mut command = Command::new("cat");
        let input = theirs.try_clone().unwrap();
        let child = command.stdin(input).stdout(theirs).spawn().unwrap();
        drop(command);
        let player = Player::over(0, ours, child).unwrap();
        let serve = Serve { vm: 1, socket: "x".repeat(1 << 20).into(), resume: false };
        let error = player.serve(&serve, None).expect_err("too long for a packet");
        assert!(format!("{error:#}").contains("limit"), "{error:#}");
        shutdown(&*player.channel, Shutdown::Write).unwrap();
    }
}
