//! The server behind `platen device serve`: a device and its ways in. Its supervisor starts it,
//! unless it is to have none.

use super::args::{Inherited, ServeArgs};
use super::backing;
use super::claims::{self, Claims, Ways};
use super::control::{self, Control};
use super::metrics::Metrics;
use super::offload::{self, Offload};
use super::status::{Status, Transport};
use super::supervise;
use super::writeback;
use crate::say::{say, say_untaken};
use anyhow::{bail, Context};
use codec::{Dictionary, Settings};
use device::guard::IoPath;
use device::{Device, DeviceOptions};
use nbd::{Server, ServerOptions};
use policy::{Policy, Trainer};
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{sendmsg, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use std::fmt::Display;
use std::io::{BufRead, BufReader, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;
use store::{Ahead, Keeper, Store};

/// What a server allocates before it serves, beside the contexts of its threads. One that stands by
/// has so much ready.
const HEAP: usize = 3 << 19;

/// The context of a thread that compresses pages: zstd's at its lowest levels, and that of any other
/// codec or level.
const LOW_CONTEXT: usize = 448 << 10;
const CONTEXT: usize = 3 << 19;

/// Buffers of a connection by NBD.
const CONNECTION: usize = 3 << 20;

/// What the policy allocates: a stronger codec's context, buffers of a group, what it tries a
/// dictionary with. One that stands by has it ready if the policy writes back, for that may be what
/// gets memory; otherwise the policy starts when memory is not short.
const POLICY_HEAP: usize = 5 << 20;

/// What it allocates more when it writes back: the buffers of those who wait, a batch.
const BACKING_HEAP: usize = 3 << 20;

/// Threads that a server starts beside those that compress.
const THREADS: usize = 7;

/// Those that it starts more when it writes back: those that fetch, one that looks at the device.
const BACKING_THREADS: usize = FETCHERS + 1;

/// Threads of a device that wait for its backing device.
const FETCHERS: usize = 4;

/// How often a server that stands by looks at what the store has become.
const MEANWHILE: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

/// How long a change of mounts is waited for until it is looked whether to stop.
const LOOK: Duration = Duration::from_millis(100);

pub(crate) fn run(args: &ServeArgs, inherited: Option<&Inherited>) -> anyhow::Result<()> {
    let settings = Settings::new(args.codec, args.level)?;
    offload::check(args)?;
    if inherited.is_none() {
        control::check(args)?;
        swap::ignore_size_signal()?;
    } else {
        // Until it listens to its supervisor, which knows what comes first.
        swap::ignore_signals()?;
    }
    // While reading a file cannot mean waiting for ourselves.
    let idle = supervise::policy_settings(args, inherited)?;
    if args.swap {
        say_untaken(swap::own());
    }
    let alone = inherited.is_none();
    let supervisor = Arc::new(Supervisor::new(!alone)?);
    let mut inherited = inherited.cloned().unwrap_or_default();
    let disk_left = backing::inherit(&inherited);
    let mut ahead = None;
    if inherited.standby {
        let (backing, threads, fetchers) = match &disk_left {
            Some(disk) => {
                let heap = POLICY_HEAP + BACKING_HEAP + backing::table(disk);
                (heap, BACKING_THREADS, FETCHERS)
            }
            None => (0, 0, 0),
        };
        let all = compressing(args, fetchers);
        let low = settings.codec() == codec::Codec::Zstd && settings.level() <= 3;
        let contexts = all * if low { LOW_CONTEXT } else { CONTEXT };
        let connections =
            if args.nbd.is_some() { supervise::swap_connections(args) * CONNECTION } else { 0 };
        let trains = supervise::trains(args, &idle);
        let dictionaries = if trains { dictionary_heap(settings.level(), all) } else { 0 };
        swap::warm(HEAP + contexts + connections + backing + dictionaries, THREADS + all + threads)
            .context("cannot get memory to stand by")?;
        let mut mapped = Ahead::map(descriptor(inherited.store)?.as_fd())?;
        mapped.touch();
        let go = supervisor.wait_for_go(|| {
            mapped.touch();
        })?;
        ahead = Some(mapped);
        match go {
            Some(device) => inherited.device = device,
            // Never needed.
            None => return Ok(()),
        }
    }
    // First what others may have already, if nobody has claimed it for this server.
    let claims = alone.then(|| Claims::make(args)).transpose()?;
    let ways = claims.as_ref().map_or_else(|| Ways::inherited(&inherited), Claims::ways)?;
    let left = claims::Left::of(args);
    let without = |what: &str, error: &dyn Display| {
        say(&format!("no {what}: {error}; what is stored is served without"));
    };

    let options = supervise::store_options(args);
    let store = match (ahead, supervisor.is_there()) {
        (Some(ahead), _) => Store::attach_ahead(ahead, options)?,
        (None, true) => Store::attach(descriptor(inherited.store)?.as_fd(), options)?,
        (None, false) => Store::create(supervise::pages(args)?, options)?,
    };
    let (refused, new) = backing::attach(&idle, &store, (!alone).then_some(disk_left), args.swap)?;
    // In a debug build it ends the process when it allocates, like a thread that does requests.
    let keeper =
        Keeper::start_in(&store, IoPath::enter).context("cannot start the store's keeper")?;
    if args.swap {
        say_untaken(swap::prefer("store-keeper").err());
    }
    // Without one it serves all the same.
    let trains = supervise::trains(args, &idle);
    let trainer = trainer(&supervisor, trains, settings).unwrap_or_else(|error| {
        say(&format!("no dictionaries are trained: {error:#}"));
        None
    });
    let mut options =
        DeviceOptions { settings, dictionaries: trainer.is_some(), ..DeviceOptions::default() };
    if let Some(workers) = args.workers {
        options.workers = usize::from(workers);
    }
    let device = Arc::new(Device::new(&store, &options)?);
    if args.swap {
        // The kernel takes memory for what they ask of the backing device.
        say_untaken(swap::prefer("fetch").err());
    }
    let offload = Offload::begin(args, &device, inherited.replaces)?;
    let connections = usize::from(args.connections);
    let options =
        ServerOptions { name: args.name.clone(), connections, ..ServerOptions::default() };
    let nbd = Arc::new(Server::new(Arc::clone(&device), options).context("NBD server")?);

    let disk = args.ublk.then(|| disk(args, &inherited, &device, &supervisor)).transpose()?;
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let mount = |path: &Path| fuse::Server::mount(&*device, path, threads);
    let file = match args.fuse.as_deref().map(mount) {
        // Somebody has taken its place meanwhile: what is stored stays until that is free again.
        Some(Err(_)) if inherited.replaces => None,
        file => file.transpose()?,
    };
    let place = file.as_ref().map(|file| file.path().to_owned()).or_else(|| args.fuse.clone());

    let policy = Arc::new(OnceLock::new());
    let status = {
        let policy = Arc::clone(&policy);
        let (name, device, nbd) = (args.name.clone(), Arc::clone(&device), Arc::clone(&nbd));
        let address = args.nbd.as_ref().map(ToString::to_string);
        let one =
            |kind: &str, address: String| Transport { kind: kind.into(), address, connections: 1 };
        let ublk = disk.as_ref().map(|disk| one("ublk", disk.disk().display().to_string()));
        let file = place.as_ref().map(|place| one("fuse", place.display().to_string()));
        let client = inherited.disk.clone().map(|disk| one("kernel-nbd", disk));
        move || {
            let connections = nbd.connections();
            let nbd = address.clone().map(|address| Transport {
                kind: "nbd".into(),
                address,
                connections,
            });
            let disks = ublk.clone().into_iter().chain(client.clone()).chain(file.clone());
            let ways = disks.chain(nbd);
            let refused = refused.get().map(String::as_str);
            let mut status = Status::of(&name, &device, ways.collect(), policy.get(), refused);
            // The supervisor, which has made the store, is no server.
            status.platen.generation -= u64::from(!alone);
            status
        }
    };
    let answer = status.clone();
    let asked = Arc::clone(&policy);
    let (generation, enabled) = (store.generation(), idle.enabled);
    let control = Control::start(ways.control, move |question| match question.split_once(' ') {
        None if question == "stat" => {
            Some(serde_json::to_string(&answer()).expect("numbers and strings"))
        }
        Some(("writeback", what)) => Some(writeback::ask(asked.get(), enabled, generation, what)),
        Some(("written", ticket)) => Some(writeback::told(asked.get(), generation, ticket)),
        _ => None,
    });
    let control = match control {
        Err(error) if inherited.replaces => {
            without("control socket", &error);
            None
        }
        control => Some(control?),
    };
    let metrics = match ways.metrics.map(|listener| Metrics::start(listener, status)) {
        Some(Err(error)) if inherited.replaces => {
            without("metrics", &error);
            None
        }
        metrics => metrics.transpose()?,
    };
    let stopping = Arc::new(AtomicBool::new(false));
    let own = disk.as_ref().map(|disk| disk.disk().display().to_string());
    let own = own.or_else(|| inherited.disk.clone());
    let client = inherited.disk.clone().map(|disk| Client {
        disk,
        nbd: Arc::clone(&nbd),
        stopping: Arc::clone(&stopping),
    });
    let watch = Watch::start(&device, client)?;
    supervisor.listen(own, {
        let (nbd, stopping) = (Arc::clone(&nbd), Arc::clone(&stopping));
        move || {
            stopping.store(true, Ordering::Release);
            nbd.stop();
        }
    })?;

    let served_on = [
        args.nbd.as_ref().map(ToString::to_string),
        disk.as_ref().map(|disk| disk.disk().display().to_string()),
        place.as_ref().map(|place| place.display().to_string()),
    ];
    say(&format!(
        "device {} of {} on {}, codec {}{}",
        args.name,
        args.size,
        served_on.into_iter().flatten().collect::<Vec<_>>().join(" and "),
        settings.codec(),
        if settings.level() == 0 { String::new() } else { format!(" level {}", settings.level()) },
    ));
    supervisor.tell("ready");
    if let Some(new) = new {
        new.keep();
    }
    // On a thread of its own: it asks for memory, which may have to be written to this very device
    // first.
    let starting = idle.enabled.then(|| {
        let (store, policy) = (Arc::clone(&store), Arc::clone(&policy));
        let stopping = Arc::clone(&stopping);
        // What stood by has its memory ready only if it writes back.
        let waits = inherited.replaces && !store.has_backing();
        thread::Builder::new().name("policy-start".into()).spawn(move || {
            while waits && store.is_short() {
                if stopping.load(Ordering::Acquire) {
                    return;
                }
                thread::sleep(Duration::from_secs(1));
            }
            match Policy::start_with(&store, &idle, trainer) {
                Ok(started) => drop(policy.set(started)),
                Err(error) => {
                    say(&format!("idle pages stay as they are: {:#}", anyhow::Error::from(error)));
                }
            }
        })
    });
    let starting = match starting {
        Some(Err(error)) if inherited.replaces => {
            without("policy", &error);
            None
        }
        starting => starting.transpose().context("cannot start the policy")?,
    };
    let served = match place {
        Some(place) => serve_file(&place, file, mount, ways.nbd, &nbd, &stopping),
        None => serve(args, ways.nbd, &nbd, disk, &stopping),
    };
    // Nobody may ask what is being taken down.
    drop((control, metrics, watch));
    // For a policy that waits for memory.
    stopping.store(true, Ordering::Release);
    if let Some(starting) = starting {
        // Its panic ended the process.
        let _ = starting.join();
    }
    drop(policy);
    offload.end();
    drop((nbd, device, keeper));
    if !alone && supervisor.has_gone() {
        left.clear();
    }
    served
}

/// What a server allocates more for dictionaries of this level: tables of all that may come, and a
/// context for each thread that compresses.
fn dictionary_heap(level: i32, threads: usize) -> usize {
    let tables = store::DICTIONARIES * Dictionary::memory_for(Some(level));
    tables + threads * Dictionary::context_memory(level)
}

/// Threads of a server that compress, the policy's among them.
fn compressing(args: &ServeArgs, fetchers: usize) -> usize {
    let workers = args.workers.map_or(DeviceOptions::default().workers, usize::from);
    let queues = if args.ublk { supervise::ublk_options(args).geometry.queues.into() } else { 0 };
    let connections = match (&args.nbd, args.swap) {
        (None, _) => 0,
        (Some(_), false) => usize::from(args.connections),
        // Of those that swapping depends on.
        (Some(_), true) => supervise::swap_connections(args),
    };
    workers + queues + connections + fetchers + 1
}

/// Who starts processes that train dictionaries: the supervisor, if there is one, and they are to
/// be trained.
fn trainer(
    supervisor: &Supervisor,
    trains: bool,
    settings: Settings,
) -> anyhow::Result<Option<Trainer>> {
    let Some(stream) = supervisor.stream.as_ref().filter(|_| trains) else { return Ok(None) };
    let (start, stop) = (stream.try_clone()?, stream.try_clone()?);
    // Neither waits nor allocates. Who is not heard has no trainer, and sees the other end of the
    // socket go.
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let start = Box::new(move |channel: OwnedFd| {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let channel = [channel.as_fd()];
        if control.push(SendAncillaryMessage::ScmRights(&channel)) {
            let _ = sendmsg(&start, &[IoSlice::new(b"train\n")], &mut control, flags);
        }
    });
    let stop = Box::new(move || {
        let _ = rustix::net::send(&stop, b"enough\n", flags);
    });
    Ok(Some(Trainer { settings, start, stop }))
}

/// Serves until it is told to stop, or cannot go on.
fn serve(
    args: &ServeArgs,
    listener: Option<UnixListener>,
    nbd: &Server<Device>,
    disk: Option<ublk::Server>,
    stopping: &AtomicBool,
) -> anyhow::Result<()> {
    let by_nbd = |listener: UnixListener| nbd.run(&listener, say).context("serving NBD");
    let Some(disk) = disk else {
        if args.swap {
            // Answers take memory of the kernel's: whoever sends them must not wait for what they
            // bring about.
            say_untaken(swap::prefer_this().err());
        }
        return by_nbd(listener.context("no transport")?);
    };
    thread::scope(|scope| {
        let other = listener.map(|listener| scope.spawn(|| by_nbd(listener)));
        let ended = loop {
            if let Some(ended) = disk.wait(Duration::from_millis(200)) {
                break Some(ended);
            }
            if stopping.load(Ordering::Acquire) {
                break None;
            }
        };
        nbd.stop();
        let other = other.map_or(Ok(()), |other| other.join().expect("its panic ends the process"));
        match ended {
            None => {
                disk.stop().with_context(|| format!("device {}", args.name))?;
                other
            }
            // Somebody else has taken the disk away.
            Some((_, Ok(()))) => bail!("{} is gone", disk.disk().display()),
            Some((queue, Err(error))) => {
                Err(error).with_context(|| format!("{}, queue {queue}", disk.disk().display()))
            }
        }
    })
}

/// The same with a file of FUSE's, which is mounted again when somebody unmounts it: what the
/// device holds is to be there until it is told to end, and that is another word. The same when it
/// cannot be mounted at first.
fn serve_file(
    path: &Path,
    file: Option<fuse::Server>,
    mount: impl Fn(&Path) -> Result<fuse::Server, fuse::MountError>,
    listener: Option<UnixListener>,
    nbd: &Server<Device>,
    stopping: &AtomicBool,
) -> anyhow::Result<()> {
    let name = path.display();
    thread::scope(|scope| {
        let other = listener.map(|listener| scope.spawn(move || nbd.run(&listener, say)));
        let (mut file, mut told) = (file, false);
        let served = loop {
            if stopping.load(Ordering::Acquire) {
                break Ok(());
            }
            let there = |file: &mut fuse::Server| file.is_mounted(LOOK) && !file.has_ended();
            if file.as_mut().is_some_and(there) {
                continue;
            }
            match file.take() {
                // Those who have it open go on with that.
                Some(file) if !file.has_ended() => file.leave(),
                Some(file) => {
                    if let Err(error) = file.stop() {
                        break Err(error).with_context(|| format!("serving {name}"));
                    }
                }
                None => {}
            }
            match mount(path) {
                Ok(again) => {
                    let end = "SIGTERM to its server is what ends a device";
                    say(&format!("{name} was unmounted, and is mounted again: {end}"));
                    (file, told) = (Some(again), false);
                }
                // Somebody else has the place: what is stored stays, and has its other ways in.
                Err(error) => {
                    if !told {
                        let error = anyhow::Error::from(error);
                        say(&format!("{name} was unmounted; trying to mount it again: {error:#}"));
                    }
                    told = true;
                    thread::sleep(Duration::from_secs(1));
                }
            }
        };
        nbd.stop();
        let stopped = file.map_or(Ok(false), fuse::Server::stop);
        if let Some(other) = other {
            other.join().expect("its panic ends the process").context("serving NBD")?;
        }
        served?;
        if stopped.with_context(|| format!("cannot unmount {name}"))? {
            say(&format!("{name} was in use: who has it open gets errors from now on"));
        }
        Ok(())
    })
}

/// The ublk disk: a new one, or the one that another server had.
fn disk(
    args: &ServeArgs,
    inherited: &Inherited,
    device: &Device,
    supervisor: &Supervisor,
) -> anyhow::Result<ublk::Server> {
    let options = supervise::ublk_options(args);
    let buffers = inherited.buffers.map(descriptor).transpose()?;
    let told = |id: u32| supervisor.tell(&format!("device {id}"));
    let server = match inherited.device {
        None => ublk::Server::create(device, buffers, &options, told),
        Some(id) => ublk::Server::recover(id, device, buffers, &options, told),
    };
    Ok(server?)
}

/// A copy of a descriptor that the supervisor has left to us.
pub(super) fn descriptor(number: i32) -> anyhow::Result<OwnedFd> {
    // By its path rather than its number: no promise is needed that nobody else has it.
    let path = format!("/proc/self/fd/{number}");
    let file = std::fs::File::options().read(true).write(true).open(&path);
    let file = file.with_context(|| format!("the supervisor has not left descriptor {number}"))?;
    Ok(file.into())
}

/// The other end of standard input, if there is a supervisor.
struct Supervisor {
    stream: Option<UnixStream>,
    /// Whether there is none, any more or from the beginning.
    gone: Arc<AtomicBool>,
}

impl Supervisor {
    fn new(there: bool) -> anyhow::Result<Self> {
        let input: BorrowedFd<'_> = rustix::stdio::stdin();
        let stream = there.then(|| input.try_clone_to_owned()).transpose()?;
        Ok(Self { stream: stream.map(UnixStream::from), gone: Arc::new(AtomicBool::new(!there)) })
    }

    fn is_there(&self) -> bool {
        self.stream.is_some()
    }

    /// Whether it was seen to have ended, or was never there.
    fn has_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Waits until this server is needed: the ublk device that there is, if any. `None` if it never
    /// will be. Calls `meanwhile` every 10 s.
    fn wait_for_go(&self, mut meanwhile: impl FnMut()) -> anyhow::Result<Option<Option<u32>>> {
        let mut line = Vec::with_capacity(64);
        let mut byte = [0];
        // By the byte: what comes after the line is for whoever listens then.
        let mut stream = self.stream.as_ref().context("nobody to say go")?;
        loop {
            let mut fds = [PollFd::new(&stream, PollFlags::IN)];
            match poll(&mut fds, Some(&MEANWHILE)) {
                Ok(0) => meanwhile(),
                Err(Errno::INTR) => {}
                // An error is the read's to say.
                _ => break,
            }
        }
        while line.len() < 64 && stream.read(&mut byte)? == 1 {
            if byte[0] == b'\n' {
                let line = String::from_utf8_lossy(&line).into_owned();
                let word = line.strip_prefix("go ").with_context(|| format!("told {line:?}"))?;
                return Ok(Some(word.parse().ok()));
            }
            line.push(byte[0]);
        }
        Ok(None)
    }

    /// A line. One that is gone does not hear it.
    fn tell(&self, line: &str) {
        if let Some(stream) = &self.stream {
            let _ = rustix::io::write(stream, format!("{line}\n").as_bytes());
        }
    }

    /// Calls `stop` when it is time to end: when the supervisor says so. When the supervisor has
    /// been killed a server with a `disk` of the kernel's goes on, and follows signals, except
    /// while that is swapped to; others end.
    fn listen(
        &self,
        disk: Option<String>,
        stop: impl Fn() + Send + Sync + 'static,
    ) -> anyhow::Result<()> {
        let stop = Arc::new(stop);
        let alone = disk.is_some();
        let (stopped, seen) = (Arc::clone(&stop), Arc::clone(&self.gone));
        // A terminal and a service manager send signals to all: only the supervisor knows what
        // comes first.
        ctrlc::set_handler(move || {
            if seen.load(Ordering::Acquire) {
                match disk.as_ref().filter(|disk| swapped_to(disk)) {
                    Some(disk) => say(&format!("{disk} is swapped to: first `swapoff {disk}`")),
                    None => stopped(),
                }
            }
        })
        .context("cannot handle signals")?;
        let Some(stream) = &self.stream else { return Ok(()) };
        let gone = Arc::clone(&self.gone);
        let mut reader = BufReader::new(stream.try_clone()?);
        thread::Builder::new().name("supervisor".into()).spawn(move || {
            let mut line = String::new();
            while reader.read_line(&mut line).is_ok_and(|got| got > 0) {
                if line == "end\n" {
                    stop();
                }
                line.clear();
            }
            gone.store(true, Ordering::Release);
            if !alone {
                stop();
            }
        })?;
        Ok(())
    }
}

/// Whether the kernel swaps to this disk, or cannot be asked.
fn swapped_to(disk: &str) -> bool {
    !matches!(swap::area::in_use(Path::new(disk)), Ok(None))
}

/// The kernel's NBD client.
struct Client {
    disk: String,
    nbd: Arc<Server<Device>>,
    stopping: Arc<AtomicBool>,
}

impl Client {
    /// Whether it has given a connection up of which swapping depends. It does when a request is
    /// not answered for some time, has it done by another connection, and asks for no new one.
    fn is_lost(&self) -> bool {
        self.nbd.simple_ended() > 0
            && !self.stopping.load(Ordering::Acquire)
            && swapped_to(&self.disk)
    }
}

/// Prints the first damage that an I/O thread finds: they do not print. Ends the process when the
/// kernel's client is lost: only with a new server does it get new connections, and what lies in
/// the old ones is done by nobody.
struct Watch {
    stop: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Watch {
    fn start(device: &Arc<Device>, client: Option<Client>) -> anyhow::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let (device, stopped) = (Arc::downgrade(device), Arc::clone(&stop));
        let thread = thread::Builder::new().name("watch".into()).spawn(move || {
            let mut told = false;
            while !stopped.load(Ordering::Acquire) {
                thread::park_timeout(Duration::from_secs(1));
                if let Some(client) = client.as_ref().filter(|client| client.is_lost()) {
                    say(&format!("the kernel has given up a connection of {}", client.disk));
                    std::process::exit(swap::supervisor::CLIENT_LOST.into());
                }
                let Some(device) = device.upgrade() else { return };
                if let Some(damage) = device.damage().filter(|_| !told) {
                    told = true;
                    say(&format!("{damage}; failed reads are counted in `platen device stat`"));
                }
            }
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // Its panic was shown.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stands_by_has_the_memory_for_dictionaries_of_its_level() {
        for level in [-5, 1, 3, 9, 19] {
            let options = store::Options { reserve: 0, ..store::Options::default() };
            let store = Store::create(64, options).unwrap();
            let settings = Settings::new(codec::Codec::Zstd, Some(level)).unwrap();
            let options =
                DeviceOptions { settings, workers: 0, dictionaries: true, ..Default::default() };
            let device = Device::new(&store, &options).unwrap();
            let tables = device.dictionaries().memory();
            let (one, five) = (dictionary_heap(level, 1), dictionary_heap(level, 5));
            assert_eq!(one, tables + Dictionary::context_memory(level), "{level}");
            assert_eq!(five - one, 4 * Dictionary::context_memory(level), "{level}");
        }
        assert!(dictionary_heap(3, 4) > dictionary_heap(1, 4));
    }
}
