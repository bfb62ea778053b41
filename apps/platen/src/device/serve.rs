//! `platen device serve`: a device and its ways in, until interrupted.

use super::args::ServeArgs;
use super::control::{self, Control};
use super::metrics::Metrics;
use super::size::Size;
use super::status::{Status, Transport};
use anyhow::{ensure, Context};
use codec::Settings;
use device::{Device, DeviceOptions, PAGE};
use nbd::{Server, ServerOptions};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use store::{Keeper, Options, Store};

pub(crate) fn run(args: &ServeArgs) -> anyhow::Result<()> {
    let settings = Settings::new(args.codec, args.level)?;
    let page = PAGE as u64;
    let Size(size) = args.size;
    ensure!(
        size > 0 && size.is_multiple_of(page),
        "--size: {size} bytes are not a number of pages of {page} bytes"
    );
    let address = args.nbd.clone().context("no transport: say --nbd unix:PATH")?;
    // First what others may have already.
    let folder = control::folder(args.control.run_dir.as_deref())?;
    let control = control::listen(&folder, &args.name)?;
    let listening = address.listen()?;

    let options =
        Options { mem_limit: args.mem_limit.map_or(0, |Size(limit)| limit), ..Options::default() };
    let store = Store::create(size / page, options)?;
    let keeper = Keeper::start(&store).context("cannot start the store's keeper")?;
    let mut options = DeviceOptions { settings, ..DeviceOptions::default() };
    if let Some(workers) = args.workers {
        options.workers = usize::from(workers);
    }
    let device = Arc::new(Device::new(&store, &options)?);
    let connections = usize::from(args.connections);
    let options =
        ServerOptions { name: args.name.clone(), connections, ..ServerOptions::default() };
    let server = Arc::new(Server::new(Arc::clone(&device), options).context("NBD server")?);

    let status = {
        let (name, device, server) = (args.name.clone(), Arc::clone(&device), Arc::clone(&server));
        let address = address.to_string();
        move || {
            let connections = server.connections();
            let nbd = Transport { kind: "nbd".into(), address: address.clone(), connections };
            Status::of(&name, &device, vec![nbd])
        }
    };
    let answer = status.clone();
    let control = Control::start(control, move || {
        serde_json::to_string(&answer()).expect("numbers and strings")
    })?;
    let metrics = args.prometheus.map(|address| Metrics::start(address, status)).transpose()?;
    let watch = Watch::start(&device)?;
    let stopper = Arc::clone(&server);
    ctrlc::set_handler(move || stopper.stop()).context("cannot handle signals")?;

    eprintln!(
        "platen: device {} of {} on {address}, codec {}{}",
        args.name,
        args.size,
        settings.codec(),
        if settings.level() == 0 { String::new() } else { format!(" level {}", settings.level()) },
    );
    let served = server.run(&listening.listener, |line| eprintln!("platen: {line}"));
    // Nobody may ask what is being taken down.
    drop((control, metrics, watch, listening));
    drop((server, device, keeper));
    served.with_context(|| format!("serving NBD on {address}"))
}

/// Prints the first damage that an I/O thread finds: they do not print.
struct Watch {
    stop: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Watch {
    fn start(device: &Arc<Device>) -> anyhow::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let (device, stopped) = (Arc::downgrade(device), Arc::clone(&stop));
        let thread = thread::Builder::new().name("watch".into()).spawn(move || {
            while !stopped.load(Ordering::Acquire) {
                thread::park_timeout(Duration::from_secs(1));
                let Some(device) = device.upgrade() else { return };
                if let Some(damage) = device.damage() {
                    eprintln!("platen: {damage}; failed reads are counted in `platen device stat`");
                    return;
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
