//! The QAT device of a served device: asked for when a server starts, or while it serves already.

use super::args::{PageAccelerator, ServeArgs};
use crate::say::say;
use anyhow::{ensure, Context};
use codec::Codec;
use device::{Device, OffloadOptions};
use qat::{Libraries, Location, Qat, StartOptions};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

/// Whether what was asked for goes together.
pub(super) fn check(args: &ServeArgs) -> anyhow::Result<()> {
    ensure!(
        args.accelerator != PageAccelerator::Qat || args.codec == Codec::DeflateQz,
        "--accelerator qat goes with --codec qatzip, not with {}",
        args.codec
    );
    Ok(())
}

/// What looks for a QAT device meanwhile, if anything does.
pub(super) struct Offload(Option<JoinHandle<()>>);

impl Offload {
    /// Has the device's pages compressed by a QAT device, if that is wanted and there. A server
    /// that `replaces` another one serves in software until then: to start a device asks for
    /// memory, which may have to be written here first, and without one what is stored is as good.
    pub(super) fn begin(
        args: &ServeArgs,
        device: &Arc<Device>,
        replaces: bool,
    ) -> anyhow::Result<Self> {
        if args.codec != Codec::DeflateQz || args.accelerator == PageAccelerator::None {
            return Ok(Self(None));
        }
        let location = args.qat_libraries.clone().map_or(Location::System, Location::Folder);
        let mut options = OffloadOptions::default();
        if let Some(threads) = args.qat_threads {
            options.threads = usize::from(threads);
        }
        if replaces {
            let device = Arc::clone(device);
            let starting = thread::Builder::new().name("qat-start".into());
            let starting = starting.spawn(move || match start(&location, &device, &options) {
                Ok(threads) => say(&format!("QAT: {threads} threads with an instance each")),
                Err(error) => say(&format!("codec qatzip in software: {error:#}")),
            });
            if let Err(error) = &starting {
                say(&format!("codec qatzip in software: no thread: {error}"));
            }
            return Ok(Self(starting.ok()));
        }
        match start(&location, device, &options) {
            Ok(threads) => say(&format!("QAT: {threads} threads with an instance each")),
            Err(error) if args.accelerator == PageAccelerator::Auto => {
                say(&format!("codec qatzip in software: {error:#}"));
            }
            Err(error) => {
                return Err(error).context(
                    "--accelerator qat: no QAT device (`platen qat status` says what is missing)",
                )
            }
        }
        Ok(Self(None))
    }

    /// Waits for what is still looking.
    pub(super) fn end(self) {
        if let Some(starting) = self.0 {
            // Its panic ended the process.
            let _ = starting.join();
        }
    }
}

fn start(location: &Location, device: &Device, options: &OffloadOptions) -> anyhow::Result<usize> {
    let libraries = Libraries::load(location)?;
    let qat = Qat::start(&libraries, &StartOptions::default())?;
    Ok(device.offload(&qat, options)?)
}
