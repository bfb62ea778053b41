//! A VM: one QEMU process with the harness's monitor, a second monitor for platen, and the guest's console.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use serde_json::json;

use crate::console::Console;
use crate::lab::VmSpec;
use crate::monitor::Monitor;
use crate::net::Side;
use crate::process::Proc;

/// What a QEMU is started for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// To boot the guest.
    Boot,
    /// To wait for it (`-incoming defer`).
    Incoming,
}

/// A QEMU and the harness's connections to it.
///
/// The fields are public because a test does with them whatever its scenario needs.
#[derive(Debug)]
pub struct Vm {
    /// The guest's init. Only useful where the guest runs.
    pub guest: Console,
    /// The harness's own monitor.
    pub monitor: Monitor,
    /// The process.
    pub process: Proc,
    name: String,
    side: Side,
    spec: VmSpec,
    folder: PathBuf,
}

impl Vm {
    pub(crate) fn start(
        name: &str,
        spec: &VmSpec,
        role: Role,
        (side, prefix): (Side, &[String]),
        images: (&Path, &Path),
        folder: &Path,
    ) -> Result<Self> {
        let socket = |what: &str| folder.join(format!("{name}.{what}"));
        let unix = |what: &str| format!("unix:{},server=on,wait=off", socket(what).display());
        let (kernel, initramfs) = images;
        let mut argv: Vec<String> = [
            &spec.qemu.program().display().to_string(),
            "-name",
            &format!("{name},debug-threads=on"),
            "-machine",
            spec.machine,
            "-accel",
            "tcg",
            "-smp",
            &spec.cpus.to_string(),
            "-m",
            &format!("size={}K", spec.memory_kib),
            "-nodefaults",
            "-no-reboot",
            "-display",
            "none",
            "-kernel",
            &kernel.display().to_string(),
            "-initrd",
            &initramfs.display().to_string(),
            // Quiet: the console is the harness's wire, but for a panic's words. init_on_free: the initramfs the kernel has
            // unpacked is zeroed when given back, or every corpus page would be in the guest twice. no_timer_check: on a
            // host that is busy the timer's interrupts come too late for a kernel that counts them, and it panics.
            "-append",
            "console=ttyS0 quiet loglevel=1 no_timer_check panic=-1 init_on_free=1 init_on_alloc=0 mitigations=off nokaslr audit=0 rdinit=/init",
            "-qmp",
            &unix("qmp"),
            "-qmp",
            &unix("platen"),
            "-chardev",
            &format!("socket,id=console,path={},server=on,wait=off", socket("tty").display()),
            "-serial",
            "chardev:console",
        ]
        .map(String::from)
        .to_vec();
        if role == Role::Incoming {
            argv.extend(["-incoming", "defer"].map(String::from));
        }
        let mut process = Proc::spawn(name, prefix, &argv, folder)?;
        let limit = Duration::from_secs(20);
        let connect = || -> Result<(Monitor, Console)> {
            Ok((
                Monitor::connect(name, &socket("qmp"), limit)?,
                Console::connect(name, &socket("tty"), limit)?,
            ))
        };
        match connect() {
            Ok((monitor, guest)) => {
                let (name, spec, folder) = (name.into(), spec.clone(), folder.into());
                Ok(Self { guest, monitor, process, name, side, spec, folder })
            }
            Err(error) => {
                let _ = process.kill();
                Err(error.context(process.tail()))
            }
        }
    }

    /// Its name, unique in the lab.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where it is.
    pub fn side(&self) -> Side {
        self.side
    }

    /// What it has.
    pub fn spec(&self) -> &VmSpec {
        &self.spec
    }

    /// The monitor socket that is left for platen.
    pub fn platen_monitor(&self) -> PathBuf {
        self.folder.join(format!("{}.platen", self.name))
    }

    /// Where this QEMU, started for a migration, is to listen for it.
    pub fn incoming_socket(&self) -> PathBuf {
        self.folder.join(format!("{}.in", self.name))
    }

    /// Tells a waiting QEMU where to listen.
    ///
    /// # Errors
    /// As [`Monitor::execute`].
    pub fn listen(&mut self, uri: &str) -> Result<()> {
        self.monitor.execute("migrate-incoming", json!({"uri": uri})).map(|_| ())
    }

    /// Checks that the VM runs here and the guest is alive.
    ///
    /// # Errors
    /// When it does not, or is not.
    pub fn assert_running(&mut self) -> Result<()> {
        self.runs().map_err(|error| {
            // A guest that arrived broken panics, and QEMU ends with it: the reason is on the console.
            error.context(format!("{}; {}", self.process.tail(), self.guest.last_words()))
        })
    }

    fn runs(&mut self) -> Result<()> {
        // A source whose migration was called off, and a destination whose migration is complete, both start the
        // VM a moment after they have said so.
        let deadline = Instant::now() + Duration::from_secs(5);
        loop {
            let state = self.monitor.run_state()?;
            if state == "running" {
                break;
            }
            if Instant::now() > deadline {
                bail!("the VM is {state} in {}, not running", self.name);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        self.guest.assert_alive().with_context(|| format!("the guest in {}", self.name))
    }

    /// Waits until this QEMU, whose migration has failed or been cancelled, runs the VM again.
    ///
    /// # Errors
    /// When the migration does not end that way within `limit`, or the VM does not run.
    pub fn wait_back(&mut self, states: &[&str], limit: Duration) -> Result<String> {
        let state = self.monitor.wait_migration(states, limit)?;
        self.assert_running()?;
        Ok(state)
    }
}
