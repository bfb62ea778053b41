//! The transports of a device, served until the server is stopped.

use super::supervisor::Supervisor;
use crate::device::inherited::{descriptor, Inherited};
use crate::device::plan::Plan;
use crate::say::{say, say_untaken};
use anyhow::{anyhow, Context};
use device::Device;
use nbd::Server;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;
use swap::supervisor::words;

/// Longest wait for a change of mounts before the next check whether to stop.
const LOOK: Duration = Duration::from_millis(100);

/// Creates the ublk disk, or takes over an earlier server's.
pub(super) fn disk(
    plan: &Plan<'_>,
    inherited: &Inherited,
    device: &Device,
    supervisor: &Supervisor,
) -> anyhow::Result<ublk::Server> {
    let mut options = plan.ublk_options();
    // The arguments may mean fewer pages than the store has: see `Options::grow_to`.
    options.geometry.size = device.store().pages() * device::PAGE as u64;
    options.owner = supervisor.owner();
    options.recovers = supervisor.is_there();
    let buffers = inherited.buffers.map(descriptor).transpose()?;
    let told = |id: u32| supervisor.tell(&format!("device {id}"));
    let Some(id) = inherited.device else {
        return Ok(ublk::Server::create(device, buffers, &options, &told)?);
    };
    let mut server = ublk::Server::recover(id, device, buffers, &options, &told)?;
    if let Err(error) = server.grow() {
        let name = server.disk().display().to_string();
        say(&format!("{name} keeps its size: {:#}", anyhow::Error::from(error)));
    }
    Ok(server)
}

/// Serves NBD, the ublk disk or both until `stopping` is set or a transport fails.
pub(super) fn serve(
    plan: &Plan<'_>,
    inherited: &Inherited,
    listener: Option<UnixListener>,
    nbd: &Server<Device>,
    disk: Option<ublk::Server>,
    stopping: &AtomicBool,
    supervisor: &Supervisor,
) -> anyhow::Result<()> {
    let by_nbd = |listener: UnixListener| nbd.serve(&listener, say).context("serving NBD");
    let Some(mut disk) = disk else {
        let listener = listener.context("no transport")?;
        if plan.args.swap {
            // Replies need kernel memory. A thread that sends them must not wait for the writeback
            // that they make possible.
            say_untaken(swap::prefer_this().err());
        }
        return with_client(plan, inherited, nbd, stopping, supervisor, || by_nbd(listener));
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
            if disk.is_disturbed() {
                break Some((0, Ok(())));
            }
        };
        let path = disk.disk();
        let name = path.display();
        let failed = ended.map(|(queue, result)| match result {
            Ok(()) if disk.is_there() => {
                anyhow!("the driver has ended requests of {name}, which is there")
            }
            // Another process has removed the disk.
            Ok(()) => anyhow!("{name} is gone"),
            Err(error) => anyhow::Error::from(error).context(format!("{name}, queue {queue}")),
        });
        let stop = || disk.stop().with_context(|| format!("device {}", plan.args.name));
        let end = move || {
            nbd.stop();
            other.map_or(Ok(()), |other| other.join().expect("its panic ends the process"))
        };
        if let Some(error) = failed {
            supervisor.give_up_disk(&error, stop);
            // The disk's error is the one to report.
            let _ = end();
            return Err(error);
        }
        let other = end();
        stop()?;
        other
    })
}

/// Connects the kernel's NBD client again, if this server replaces another, while `serve` runs.
fn with_client(
    plan: &Plan<'_>,
    inherited: &Inherited,
    nbd: &Server<Device>,
    stopping: &AtomicBool,
    supervisor: &Supervisor,
    serve: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let disk = inherited.disk.as_deref().filter(|_| inherited.replaces);
    let Some(disk) = disk else { return serve() };
    let connect = || {
        let notice = |error: &std::io::Error| {
            // It may last.
            nbd.admit_others();
            say(&format!("cannot connect {disk} again: {error}"));
        };
        let stop = || stopping.load(Ordering::Acquire);
        let connections = plan.swap_connections();
        let disk = Path::new(disk);
        let taken = supervisor.backend().map(|name| {
            swap::nbd::reconnect(|| nbd.dial(), &name, disk, connections, stop, notice)
        });
        nbd.admit_others();
        let taken = taken.unwrap_or_else(|error| {
            say(&format!("cannot connect {} again: {error:#}", disk.display()));
            false
        });
        if taken {
            supervisor.tell(words::CONNECTED);
        } else if !stop() {
            say(&format!("{} has taken no connection of this server", disk.display()));
            supervisor.tell(words::UNCONNECTED);
        }
    };
    thread::scope(|scope| {
        // Without the thread nobody serves the disk: the next server tries.
        let thread = thread::Builder::new().name("reconnect".into());
        thread.spawn_scoped(scope, connect).context("cannot start a thread")?;
        let served = serve();
        stopping.store(true, Ordering::Release);
        served
    })
}

/// Serves the file by FUSE, and NBD if there is a listener, until `stopping` is set. Mounts the
/// file again if it was unmounted or could not be mounted at first: only a signal ends a device.
pub(super) fn serve_file(
    path: &Path,
    file: Option<fuse::Server>,
    mount: impl Fn(&Path) -> Result<fuse::Server, fuse::MountError>,
    listener: Option<UnixListener>,
    nbd: &Server<Device>,
    stopping: &AtomicBool,
) -> anyhow::Result<()> {
    let name = path.display();
    thread::scope(|scope| {
        let other = listener.map(|listener| scope.spawn(move || nbd.serve(&listener, say)));
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
                // Processes that have the file open continue to use it.
                Some(file) if !file.has_ended() => file.abandon(),
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
                // Another file system is mounted there. The device and its other transports
                // continue.
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
            say(&format!("{name} was in use: processes that have it open get errors from now on"));
        }
        Ok(())
    })
}
