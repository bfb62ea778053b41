//! Opens the store, the device on it, and the transports; serves none of them yet.

use super::supervisor::Supervisor;
use super::transports;
use crate::device::backing::{self, NewFile, Refused};
use crate::device::inherited::{descriptor, Inherited};
use crate::device::offload::Offload;
use crate::device::plan::Plan;
use crate::say::{say, say_untaken};
use anyhow::Context;
use device::guard::IoPath;
use device::{Device, FETCH_THREAD};
use nbd::Server;
use policy::Trainer;
use pulse::Pulse;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::parent_id;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::thread;
use store::{Ahead, FileDisk, Keeper, Store};
use swap::supervisor::step;

/// An open device. Fields drop in the reverse order of opening.
pub(super) struct Opened {
    /// Path of the FUSE file, if requested.
    pub(super) place: Option<PathBuf>,
    /// The mounted file; `None` while another file system is mounted on its path.
    pub(super) file: Option<fuse::Server>,
    /// The ublk disk.
    pub(super) disk: Option<ublk::Server>,
    pub(super) nbd: Arc<Server<Device>>,
    pub(super) offload: Offload,
    pub(super) device: Arc<Device>,
    pub(super) trainer: Option<Trainer>,
    pub(super) keeper: Keeper,
    /// The backing file, if it was created for this device.
    pub(super) new_backing: Option<NewFile>,
    /// Why there is no backing device.
    pub(super) refused: Refused,
    pub(super) store: Arc<Store>,
}

impl Opened {
    pub(super) fn new(
        plan: &Plan<'_>,
        inherited: &Inherited,
        supervisor: &Supervisor,
        disk_left: Option<anyhow::Result<FileDisk>>,
        ahead: Option<Ahead>,
    ) -> anyhow::Result<Self> {
        let args = plan.args;
        let options = plan.store_options();
        let mapped = ahead.as_ref().map(Ahead::pages);
        let store = match (ahead, supervisor.is_there()) {
            (Some(ahead), _) => Store::attach_ahead(ahead, options)?,
            (None, true) => Store::attach(descriptor(inherited.store)?.as_fd(), options)?,
            (None, false) => Store::create(plan.pages, options)?,
        };
        if mapped.is_some_and(|pages| pages < store.pages()) {
            step("store grown");
        }
        let disk_left = supervisor.is_there().then_some(disk_left);
        let (refused, new_backing) = backing::attach(&plan.policy, &store, disk_left, args.swap)?;
        // A debug build exits if this thread allocates, as for threads that serve requests.
        let keeper =
            Keeper::start_in(&store, IoPath::enter).context("cannot start the store's keeper")?;
        if args.swap {
            say_untaken(swap::prefer(Keeper::THREAD).err());
        }
        let trainer = plan.trains().then(|| supervisor.trainer(plan.codec)).transpose();
        // The device works without a trainer.
        let trainer = trainer.map(Option::flatten).unwrap_or_else(|error| {
            say(&format!("no dictionaries are trained: {error:#}"));
            None
        });
        let pulse = match inherited.pulse {
            Some(number) => Pulse::open(&descriptor(number)?).context("signs of life")?,
            None => Pulse::private(),
        };
        let options = plan.device_options(trainer.is_some());
        let device = Arc::new(Device::with_pulse(&store, &options, Arc::new(pulse))?);
        if args.swap && store.has_backing() {
            // The kernel allocates memory for these threads' requests to the backing device.
            say_untaken(swap::prefer(FETCH_THREAD).err());
        }
        let offload = Offload::begin(args, &device, inherited)?;
        // As in `transports::with_client`.
        let again = inherited.disk.is_some() && inherited.replaces;
        let dialled = if again { plan.swap_connections() } else { 0 };
        // The supervisor's helper attaches the disk.
        let attacher = inherited.disk.is_some() && supervisor.is_there();
        let attacher = attacher.then(parent_id);
        let options = nbd::ServerOptions { dialled, attacher, ..plan.nbd_options() };
        let nbd = Server::new(Arc::clone(&device), options).context("NBD server")?;
        let nbd = Arc::new(nbd);
        let disk = args.ublk.then(|| transports::disk(plan, inherited, &device, supervisor));
        let disk = disk.transpose()?;
        let file = match args.fuse.as_deref().map(|path| mount(&device, path)) {
            // Another file system is mounted there now. The pages stay in the store, and
            // `transports::serve_file` tries again.
            Some(Err(_)) if inherited.replaces => None,
            file => file.transpose()?,
        };
        let place = file.as_ref().map(|file| file.path().to_owned()).or_else(|| args.fuse.clone());
        Ok(Self {
            place,
            file,
            disk,
            nbd,
            offload,
            device,
            trainer,
            keeper,
            new_backing,
            refused,
            store,
        })
    }
}

/// How this program mounts a device as a file, if it can.
static MOUNT: OnceLock<Mount> = OnceLock::new();

type Mount = fn(&Device, &Path, usize) -> Result<fuse::Server, fuse::MountError>;

/// Makes this program serve by FUSE. `platen-device` does not: see `device::use_small_one`.
pub(crate) fn with_fuse() {
    // Set once.
    let _ = MOUNT.set(fuse::Server::mount_device);
}

/// Mounts the device as a file.
pub(super) fn mount(device: &Device, path: &Path) -> Result<fuse::Server, fuse::MountError> {
    let Some(mount) = MOUNT.get() else {
        let why = "platen-device serves no FUSE: serve the device with platen";
        return Err(fuse::MountError::Mount { path: path.into(), source: io::Error::other(why) });
    };
    mount(device, path, thread::available_parallelism().map_or(1, usize::from))
}
