//! Guests that swap: Linux 6.12, or another one, under QEMU 10, with the binary under test inside.
//!
//! ```text
//!   this process ── console ── guest: /init (a script) ─► `guest swap console` ─► sh -c COMMAND
//!                                      platen, redis-server, busybox, modules in an initramfs
//! ```
//!
//! The initramfs is a tmpfs, so that even programs and libraries are in memory that can be swapped
//! out: platen's own pages stay in memory only because it has locked them. A hung task, an oops and
//! an end of the init are panics; QEMU ends with one, and the error has the end of the console's
//! output.

mod guest;

pub use guest::{number, tail, Guest, Stage, SwapOn, LONG, SHORT};

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{bail, ensure, Context, Result};

use crate::cleanup::Ticket;
use crate::console::Console;
use crate::image::{self, Archive};
use crate::lab::Qemu;
use crate::process::Proc;
use crate::scratch;

/// How long a task of a guest may make no progress before that is a hang, which is a panic. The
/// kernel's own 120 s would be 120 s of the host's clock, in which a guest under TCG on a busy
/// machine does a tenth of what a real machine does.
const HUNG_SECONDS: u32 = 300;

/// Kernel modules that the guest loads, without their dependencies.
const MODULES: [&str; 4] = ["ublk_drv", "nbd", "zram", "virtio_blk"];

/// Kernel modules that a scenario can load from `/modules`: codecs for zswap. Newer kernels have
/// them built in.
const SPARE_MODULES: [&str; 2] = ["lz4", "zstd"];

/// Where `scripts/fetch-linux612` has put things.
fn linux() -> PathBuf {
    image::folder().with_file_name("linux612")
}

/// Where the guests' kernel and its modules are: `PLATEN_SWAP_LINUX` is the folder of another
/// kernel than 6.12, such as `target/linux7`.
fn kernel() -> PathBuf {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    std::env::var_os("PLATEN_SWAP_LINUX").map_or_else(linux, |folder| repository.join(folder))
}

/// Why no such guest can be started here; `None` if one can.
pub fn missing() -> Option<String> {
    if !kernel().join("vmlinuz").exists() && kernel() != linux() {
        return Some(format!("{} has no kernel (PLATEN_SWAP_LINUX)", kernel().display()));
    }
    if !linux().join(".complete").exists() {
        return Some("Linux 6.12 is not there (scripts/fetch-linux612 says why)".into());
    }
    if !Qemu::Ten.is_there() {
        return Some("QEMU 10 is not there (scripts/fetch-qemu 10 says why)".into());
    }
    None
}

/// The contents of a guest's initramfs, besides what all have.
#[derive(Debug, Clone, Default)]
pub struct Contents {
    files: BTreeMap<String, PathBuf>,
    folders: Vec<PathBuf>,
}

impl Contents {
    /// Adds a program of this machine and its libraries, without debugging information.
    ///
    /// # Errors
    /// When its libraries cannot be found.
    pub fn program(&mut self, path: &Path, name: &str) -> Result<()> {
        for (place, file) in libraries(path)? {
            self.files.insert(place, file);
        }
        self.files.insert(format!("bin/{name}"), path.to_owned());
        Ok(())
    }

    /// Adds a library under this name; programs bring those that it needs itself.
    pub fn library(&mut self, path: &Path, name: &str) {
        self.files.insert(format!("lib/{name}"), path.to_owned());
    }

    /// redis-server.
    ///
    /// # Errors
    /// As [`Self::program`].
    pub fn redis(&mut self) -> Result<()> {
        self.program(&linux().join("root/usr/bin/redis-server"), "redis-server")
    }

    /// An empty folder.
    pub fn folder(&mut self, path: &str) {
        self.folders.push(path.into());
    }
}

/// The paths of `program`'s libraries here, by their paths in the guest.
fn libraries(program: &Path) -> Result<Vec<(String, PathBuf)>> {
    let fetched = linux().join("root/usr/lib/x86_64-linux-gnu");
    let output = Command::new("ldd").env("LD_LIBRARY_PATH", &fetched).arg(program).output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        // A program without libraries.
        ensure!(text.contains("static"), "ldd {} says {text}", program.display());
        return Ok(Vec::new());
    }
    let mut found = Vec::new();
    for line in text.lines().map(str::trim) {
        let (name, rest) = line.split_once(" => ").unwrap_or((line, line));
        let Some(path) = rest.split(" (").next().filter(|path| path.starts_with('/')) else {
            ensure!(!line.contains("not found"), "{}: {line}", program.display());
            continue;
        };
        // The loader has a path, the others have names to be searched for.
        let place = match name.strip_prefix('/') {
            Some(place) => place.split(" (").next().unwrap_or(place).to_owned(),
            None => format!("lib/{name}"),
        };
        found.push((place, PathBuf::from(path)));
    }
    Ok(found)
}

/// Name and contents.
type Module = (String, Vec<u8>);

/// Names and contents of modules, each after its dependencies, and the number that the guest loads.
fn modules() -> Result<(Vec<Module>, usize)> {
    let mut files = BTreeMap::new();
    index_modules(&kernel().join("modules/kernel"), &mut files)?;
    let mut order = Vec::new();
    for module in MODULES {
        add_module(module, &files, &mut order)?;
    }
    let loaded = order.len();
    for module in SPARE_MODULES.into_iter().filter(|module| files.contains_key(*module)) {
        add_module(module, &files, &mut order)?;
    }
    Ok((order, loaded))
}

/// Modules by name, in which the dashes of file names are underscores.
fn index_modules(folder: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            index_modules(&path, files)?;
        } else if let Some((name, _)) = name.split_once(".ko") {
            files.insert(name.replace('-', "_"), path);
        }
    }
    Ok(())
}

fn add_module(
    name: &str,
    files: &BTreeMap<String, PathBuf>,
    order: &mut Vec<Module>,
) -> Result<()> {
    if order.iter().any(|(there, _)| there == name) {
        return Ok(());
    }
    let file = files.get(name).with_context(|| format!("the kernel has no module {name}"))?;
    let bytes = if file.extension().is_some_and(|end| end == "xz") {
        let output = Command::new("xz").arg("-dc").arg(file).output().context("xz")?;
        ensure!(output.status.success(), "cannot unpack {}", file.display());
        output.stdout
    } else {
        std::fs::read(file)?
    };
    // Its dependencies are a NUL-terminated string in it.
    const KEY: &[u8] = b"\0depends=";
    let needs =
        bytes.windows(KEY.len()).position(|at| at == KEY).map(|at| &bytes[at + KEY.len()..]);
    let needs = needs.and_then(|rest| rest.split(|&byte| byte == 0).next()).unwrap_or_default();
    let needs = String::from_utf8_lossy(needs).into_owned();
    for needed in needs.split(',').filter(|needed| !needed.is_empty()) {
        add_module(&needed.replace('-', "_"), files, order)?;
    }
    order.push((name.to_owned(), bytes));
    Ok(())
}

/// The init program that the kernel starts.
fn init(modules: &[String]) -> String {
    format!(
        "#!/bin/sh\n\
         /bin/busybox --install -s /bin\n\
         mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev\n\
         mount -t cgroup2 cgroup /sys/fs/cgroup; mount -t debugfs debug /sys/kernel/debug\n\
         for module in {}; do insmod /modules/$module || echo cannot load $module; done\n\
         ip link set lo up; ulimit -n 4096\n\
         exec /bin/guest swap console\n",
        modules.join(" ")
    )
}

/// Writes the initramfs of a guest with `contents` to `path`.
///
/// # Errors
/// When a piece is missing, or the archive cannot be written.
pub fn write_initramfs(path: &Path, contents: &Contents) -> Result<()> {
    let mut archive = Archive::create(path)?;
    for folder in
        ["bin", "dev", "lib", "lib64", "modules", "proc", "sys", "tmp", "run", "etc", "var", "root"]
    {
        archive.folder(folder)?;
    }
    for folder in &contents.folders {
        archive.folder(&folder.display().to_string())?;
    }
    archive.device("dev/console", (5, 1))?;
    archive.device("dev/ttyS0", (4, 64))?;
    let mut names = Vec::new();
    let (modules, loaded) = modules()?;
    for (name, bytes) in modules {
        archive.file(&format!("modules/{name}.ko"), &bytes, false)?;
        names.push(format!("{name}.ko"));
    }
    archive.file("init", init(&names[..loaded]).as_bytes(), true)?;
    let busybox = [linux().join("root/bin/busybox"), linux().join("root/usr/bin/busybox")];
    let busybox = busybox.iter().find(|path| path.exists()).context("busybox was not fetched")?;
    archive.file("bin/busybox", &std::fs::read(busybox)?, true)?;
    archive.link("bin/sh", "busybox")?;
    archive.file(
        "bin/guest",
        &std::fs::read(image::present(image::folder().join("guest"))?)?,
        true,
    )?;
    for (place, file) in &contents.files {
        archive.file(place, &stripped(file)?, true)?;
    }
    archive.finish()
}

/// A program's bytes without debugging information, which would take memory in the guest.
fn stripped(file: &Path) -> Result<Vec<u8>> {
    let (folder, _ticket) = scratch::folder()?;
    let out = folder.join("stripped");
    let done = Command::new("strip").arg("-o").arg(&out).arg(file).status();
    let bytes = match done {
        Ok(status) if status.success() => std::fs::read(&out),
        // Without strip it is just larger.
        _ => std::fs::read(file),
    };
    std::fs::remove_dir_all(&folder)?;
    bytes.with_context(|| format!("cannot read {}", file.display()))
}

/// A running guest.
#[derive(Debug)]
pub struct SwapVm {
    console: Console,
    process: Proc,
    folder: PathBuf,
    _ticket: Ticket,
}

impl SwapVm {
    /// Boots a guest of `memory_mib` MiB and `cpus` CPUs from the initramfs, with an empty disk
    /// `/dev/vda` of `disk_mib` MiB if that is not 0, and these further settings of the kernel.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn boot(
        name: &str,
        initramfs: &Path,
        memory_mib: u64,
        cpus: u32,
        disk_mib: u64,
        settings: &str,
    ) -> Result<Self> {
        let (folder, ticket) = scratch::folder()?;
        let tty = folder.join("tty");
        let disk = folder.join("disk");
        let mut drive = Vec::new();
        if disk_mib > 0 {
            std::fs::File::create(&disk)?.set_len(disk_mib << 20)?;
            let file = format!("file={},format=raw,if=virtio,cache=writeback", disk.display());
            drive = vec!["-drive".to_owned(), file];
        }
        let mut argv: Vec<String> = [
            &Qemu::Ten.program().display().to_string(),
            "-name",
            name,
            "-machine",
            "q35",
            "-accel",
            "tcg,thread=multi",
            "-cpu",
            "max,la57=off",
            "-smp",
            &cpus.to_string(),
            "-m",
            &format!("{memory_mib}M"),
            "-nodefaults",
            "-no-reboot",
            "-display",
            "none",
            "-kernel",
            &kernel().join("vmlinuz").display().to_string(),
            "-initrd",
            &initramfs.display().to_string(),
            "-append",
            // The timer check counts ticks while it spins, and a busy host does not deliver them in
            // time.
            &format!(
                "console=ttyS0 quiet loglevel=3 panic_print=32 panic=-1 oops=panic \
                 softlockup_panic=1 watchdog_thresh=60 hung_task_panic=1 \
                 sysctl.kernel.hung_task_timeout_secs={HUNG_SECONDS} mitigations=off nokaslr audit=0 \
                 no_timer_check rdinit=/init {settings}"
            ),
            "-chardev",
            &format!("socket,id=console,path={},server=on,wait=off", tty.display()),
            "-serial",
            "chardev:console",
        ]
        .map(String::from)
        .to_vec();
        argv.extend(drive);
        let mut process = Proc::spawn(name, &[], &argv, &folder)?;
        let begun = Console::connect(name, &tty, LONG).and_then(|mut console| {
            console.wait_ready(LONG)?;
            Ok(console)
        });
        match begun {
            Ok(console) => Ok(Self { console, process, folder, _ticket: ticket }),
            Err(error) => {
                let _ = process.kill();
                Err(error.context(process.tail()))
            }
        }
    }

    /// Runs a command in the guest's shell; returns its status and output.
    ///
    /// # Errors
    /// If the guest is silent for `limit` or has panicked: the error has the end of the console's
    /// output.
    pub fn try_sh(&mut self, command: &str, limit: Duration) -> Result<(i32, String)> {
        ensure!(!command.contains('\n'), "a command is one line");
        let said = self
            .console
            .command(&format!("run {command}"), limit)
            .with_context(|| self.process.tail())?;
        let (status, output) = said.split_once(' ').unwrap_or((&said, ""));
        Ok((
            status.parse().with_context(|| format!("status {said:?}"))?,
            output.replace('\x1f', "\n"),
        ))
    }

    /// Runs a command that must succeed; returns its output.
    ///
    /// # Errors
    /// When it fails, with its output; as [`Self::try_sh`].
    pub fn sh(&mut self, command: &str, limit: Duration) -> Result<String> {
        let (status, output) = self.try_sh(command, limit)?;
        if status != 0 {
            bail!("`{command}` ends with status {status}: {output}");
        }
        Ok(output)
    }

    /// The guest's QEMU.
    pub fn process(&self) -> &Proc {
        &self.process
    }
}

impl Drop for SwapVm {
    fn drop(&mut self) {
        if let Err(error) = self.process.kill() {
            eprintln!("cannot stop {}: {error}", self.process.name());
        }
        // On an error the rest stays in the temporary folder.
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
