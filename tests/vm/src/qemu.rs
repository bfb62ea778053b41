//! A VM: one QEMU process with the harness's monitor, a second monitor for platen, and the guest's
//! console.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use serde_json::json;

use crate::console::Console;
use crate::lab::VmSpec;
use crate::monitor::Monitor;
use crate::net::Side;
use crate::process::Proc;

/// The purpose of a QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Boot the guest.
    Boot,
    /// Wait for it (`-incoming defer`).
    Incoming,
}

/// A QEMU and the harness's connections to it.
///
/// The fields are public, because each scenario needs others.
#[derive(Debug)]
pub struct Vm {
    /// The guest's init. Only useful at the QEMU in which the guest runs.
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
            // quiet: the console is the harness's channel, and shows kernel messages only of a
            // panic. init_on_free: the unpacked initramfs is zeroed when freed, or every corpus
            // page would be in the guest twice. no_timer_check: on a busy host the timer's
            // interrupts come too late for a kernel that counts them, and it panics.
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
        argv.extend(spec.memory.arguments(spec.memory_kib));
        if spec.prealloc {
            argv.push("-mem-prealloc".into());
        }
        if role == Role::Incoming {
            argv.extend(["-incoming", "defer"].map(String::from));
        }
        let mut process = Proc::spawn(name, prefix, &argv, folder)?;
        let limit = Duration::from_secs(300);
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

    /// Its side.
    pub fn side(&self) -> Side {
        self.side
    }

    /// Its configuration.
    pub fn spec(&self) -> &VmSpec {
        &self.spec
    }

    /// The monitor socket for platen.
    pub fn platen_monitor(&self) -> PathBuf {
        self.folder.join(format!("{}.platen", self.name))
    }

    /// The address on which this QEMU is to listen for its migration.
    pub fn incoming_socket(&self) -> PathBuf {
        self.folder.join(format!("{}.in", self.name))
    }

    /// Sends a waiting QEMU the address to listen on.
    ///
    /// # Errors
    /// As [`Monitor::execute`].
    pub fn listen(&mut self, uri: &str) -> Result<()> {
        self.monitor.execute("migrate-incoming", json!({"uri": uri})).map(|_| ())
    }

    /// Checks that the VM runs here and the guest is alive.
    ///
    /// # Errors
    /// If not.
    pub fn assert_running(&mut self) -> Result<()> {
        self.runs().map_err(|error| {
            // A guest that arrives corrupted panics, and QEMU ends with it: the console has the
            // reason.
            error.context(format!("{}; {}", self.process.tail(), self.guest.remaining_output()))
        })
    }

    fn runs(&mut self) -> Result<()> {
        // A source whose migration was cancelled, and a destination whose migration is complete,
        // both start the VM a moment after they have reported that.
        let deadline = Instant::now() + Duration::from_secs(300);
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

/// QEMU's default, in milliseconds.
pub(crate) const DOWNTIME_LIMIT: u64 = 300;

/// How long a migration may take to converge by itself.
pub(crate) const CONVERGES: Duration = Duration::from_secs(45);

/// Control of a migration's duration, so that it lasts as long as a test needs on machines of any
/// speed.
impl Vm {
    /// Makes a migration from here, running or about to start, continue as long as the guest
    /// dirties more than QEMU sends in a millisecond. (A limit of 0 does the opposite: QEMU then
    /// never looks for dirty pages, and hands over at the end of the first pass.)
    ///
    /// # Errors
    /// As [`Monitor::execute`].
    pub fn is_reluctant(&mut self) -> Result<()> {
        self.monitor.execute("migrate-set-parameters", json!({"downtime-limit": 1})).map(drop)
    }

    /// Holds a running migration: QEMU sends at most `mib` MiB of memory a second, and with less
    /// than 4 hands over only when it finds no dirty page at all.
    ///
    /// # Errors
    /// As [`Monitor::execute`].
    pub fn hold_migration(&mut self, mib: u64) -> Result<()> {
        let parameters = json!({"max-bandwidth": mib << 20, "downtime-limit": 1});
        self.monitor.execute("migrate-set-parameters", parameters).map(drop)
    }

    /// Waits until `mover` has made QEMU start a migration. (Until then, a QEMU to which a VM was
    /// migrated reports that migration as completed.) On a busy machine the VM may have been
    /// stopped by then.
    ///
    /// # Errors
    /// When `mover` ends before that, or nothing begins.
    pub fn wait_active(&mut self, mover: &mut Proc) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(120);
        let begun = ["active", "pre-switchover", "device"];
        while !begun.contains(&self.monitor.migration_status()?.as_str()) {
            if mover.poll()?.is_some() || Instant::now() > deadline {
                bail!("no migration of {} has begun; {}", self.name, mover.tail());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Undoes [`Self::is_reluctant`] and [`Self::hold_migration`].
    ///
    /// # Errors
    /// As [`Monitor::execute`].
    pub fn let_migrate(&mut self) -> Result<()> {
        let parameters = json!({"max-bandwidth": 0, "downtime-limit": DOWNTIME_LIMIT});
        self.monitor.execute("migrate-set-parameters", parameters).map(drop)
    }

    /// Waits until the migration is in one of `ends`. If the guest dirties its memory faster than a
    /// slow machine transfers it, the migration would never end; so after a while QEMU may stop the
    /// guest for longer.
    ///
    /// # Errors
    /// When it has come to none within `limit`, or the monitor closes.
    pub fn wait_migration_end(&mut self, ends: &[&str], limit: Duration) -> Result<String> {
        let begin = Instant::now();
        match self.monitor.wait_migration(ends, CONVERGES) {
            Err(_) if limit > CONVERGES && begin.elapsed() >= CONVERGES => {
                self.must_converge();
                self.monitor.wait_migration(ends, limit)
            }
            result => result,
        }
    }

    /// Waits until this QEMU, whose migration has completed, reports the VM's state, which it does
    /// a moment later.
    ///
    /// # Errors
    /// When it is not that it has left.
    pub fn wait_left(&mut self) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(300);
        loop {
            let left = self.monitor.run_state()?;
            if left == "postmigrate" {
                return Ok(());
            }
            if left != "finish-migrate" || Instant::now() > deadline {
                bail!("the VM left behind is {left}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Allows QEMU any downtime.
    pub(crate) fn must_converge(&mut self) {
        println!("  {}: not over after {CONVERGES:?}; its downtime is not limited now", self.name);
        // A QEMU that is just handing over does not answer, and a dead one never will: the caller's
        // wait reports that.
        let _ = self.monitor.execute("migrate-set-parameters", json!({"downtime-limit": 600_000}));
    }
}
