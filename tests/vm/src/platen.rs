//! Starts the binary under test: `platen migrate`, `platen relay` and `platen receive`.
//!
//! The binaries are those beside this program (`target/release/platen`, `platen-device`), or
//! `PLATEN_BIN` and the one beside it.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{bail, Context, Result};
use serde_json::Value;

use crate::lab::Lab;
use crate::net::Side;
use crate::process::{Ended, Proc};
use crate::qemu::{Vm, CONVERGES};

/// A `platen` process that writes a report.
#[derive(Debug)]
pub struct Platen {
    /// The process.
    pub process: Proc,
    json: PathBuf,
}

/// A `platen receive`, and its address.
#[derive(Debug)]
pub struct Receive {
    /// The process.
    pub platen: Platen,
    /// The address by which the other side reaches it.
    pub peer: SocketAddr,
}

const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// Whether `scripts/fetch-qpl` has unpacked Intel's libqpl. `--codec qpl` then runs with it.
pub fn has_qpl() -> bool {
    Path::new(REPOSITORY).join("target/qpl/.complete").exists()
}

/// The time limit of a relay's start.
const LISTENS: Duration = Duration::from_secs(300);

/// The binary under test.
///
/// # Errors
/// When it has not been built.
pub fn binary() -> Result<PathBuf> {
    built("platen")
}

/// The small binary under test, which has the commands of a device only.
///
/// # Errors
/// When it has not been built.
pub fn device_binary() -> Result<PathBuf> {
    built("platen-device")
}

fn built(name: &str) -> Result<PathBuf> {
    let path = match std::env::var_os("PLATEN_BIN") {
        Some(path) => PathBuf::from(path).with_file_name(name),
        None => {
            let me = std::env::current_exe()?;
            // target/release/demo, or target/release/deps/vm-0123456789abcdef.
            let folder = me.parent().context("this program lies in no folder")?;
            let folder = if folder.ends_with("deps") { folder.join("..") } else { folder.into() };
            folder.join(name)
        }
    };
    if !path.exists() {
        bail!(
            "{} is missing: cargo build --release -p platen (make does), or set PLATEN_BIN",
            path.display()
        );
    }
    Ok(path)
}

/// Starts `platen receive` for one VM, with that VM's monitor, until the end of its migration.
///
/// # Errors
/// If it does not start to listen.
pub fn receive(lab: &Lab, vm: &Vm, extra: &[&str]) -> Result<Receive> {
    let deliver = format!("unix:{}", vm.incoming_socket().display());
    let qmp = format!("unix:{}", vm.platen_monitor().display());
    let flags = ["--deliver", &deliver, "--qmp", &qmp, "--once"];
    receive_with(lab, vm.side(), &[flags.as_slice(), extra].concat())
}

/// The TLS flags of a relay at `side`, unless `flags` has others (`--insecure`, `--tls-...`).
fn security(lab: &Lab, side: Side, flags: &[&str]) -> Result<Vec<String>> {
    if flags.iter().any(|flag| *flag == "--insecure" || flag.starts_with("--tls-")) {
        return Ok(Vec::new());
    }
    Ok(vec!["--tls-dir".into(), lab.certificates()?.of(side).display().to_string()])
}

/// Starts `platen receive` with these flags beside `--listen`, `--tls-dir` and `--json`.
///
/// # Errors
/// When it does not come to listen.
pub fn receive_with(lab: &Lab, side: Side, flags: &[&str]) -> Result<Receive> {
    let (listen, peer) = lab.net.meeting_point(side)?;
    let listen = listen.to_string();
    let words = [&["receive", "--listen", &listen], flags].concat();
    let mut platen = Platen::secured(lab, "receive", side, &words)?;
    platen.process.wait_for_output("listening on", LISTENS)?;
    Ok(Receive { platen, peer })
}

/// A `platen serve-images`.
#[derive(Debug)]
pub struct Served {
    /// The process.
    pub process: Proc,
    /// Its folder.
    pub folder: PathBuf,
    /// The address on which it listens.
    pub listen: SocketAddr,
    /// The address by which the other side reaches it.
    pub peer: SocketAddr,
}

/// Starts `platen serve-images` at `side`, on a new address unless `listen` has one.
///
/// # Errors
/// When it does not come to listen.
pub fn serve_images(
    lab: &Lab,
    side: Side,
    folder: &Path,
    listen: Option<SocketAddr>,
) -> Result<Served> {
    let (listen, peer) = match listen {
        Some(listen) => (listen, listen),
        None => lab.net.meeting_point(side)?,
    };
    let at = listen.to_string();
    let words = ["serve-images", &folder.display().to_string(), "--listen", &at];
    let security = security(lab, side, &words)?;
    let mut argv = vec![binary()?.display().to_string()];
    argv.extend(words.iter().map(|word| String::from(*word)).chain(security));
    let mut process = lab.spawn("serve-images", side, &argv)?;
    process.wait_for_output("serving the images", LISTENS)?;
    Ok(Served { process, folder: folder.to_owned(), listen, peer })
}

/// Starts a restore of the image `name` of a server at the other side.
///
/// # Errors
/// When it cannot be started.
pub fn restore_from(
    lab: &Lab,
    vm: &Vm,
    from: &Served,
    name: &str,
    extra: &[&str],
) -> Result<Platen> {
    let qmp = format!("unix:{}", vm.platen_monitor().display());
    let image = format!("platen://{}/{name}", from.peer);
    let words = [&["restore", "--qmp", &qmp, &image], extra].concat();
    Platen::secured(lab, "restore", vm.side(), &words)
}

/// Starts `platen migrate` beside the VM.
///
/// # Errors
/// When it cannot be started.
pub fn migrate(lab: &Lab, vm: &Vm, peer: SocketAddr, extra: &[&str]) -> Result<Platen> {
    let qmp = format!("unix:{}", vm.platen_monitor().display());
    let peer = peer.to_string();
    let words = [&["migrate", "--qmp", &qmp, "--peer", &peer], extra].concat();
    Platen::secured(lab, "migrate", vm.side(), &words)
}

/// Starts `platen evacuate` with these flags beside `--tls-dir` and `--json`.
///
/// # Errors
/// When it cannot be started.
pub fn evacuate(lab: &Lab, side: Side, flags: &[&str]) -> Result<Platen> {
    Platen::secured(lab, "evacuate", side, &[&["evacuate"], flags].concat())
}

/// Starts `platen relay`, listening at `socket` for the source QEMU.
///
/// # Errors
/// When the socket does not appear.
pub fn relay(
    lab: &Lab,
    side: Side,
    socket: &Path,
    peer: SocketAddr,
    extra: &[&str],
) -> Result<Platen> {
    let mut platen = start_relay(lab, side, socket, peer, extra)?;
    platen.process.wait_for_output("listening on", LISTENS)?;
    Ok(platen)
}

/// Starts `platen relay` without waiting for its socket.
///
/// # Errors
/// When it cannot be started.
pub fn start_relay(
    lab: &Lab,
    side: Side,
    socket: &Path,
    peer: SocketAddr,
    extra: &[&str],
) -> Result<Platen> {
    let listen = format!("unix:{}", socket.display());
    let peer = peer.to_string();
    let words = [&["relay", "--listen", &listen, "--peer", &peer], extra].concat();
    Platen::secured(lab, "relay", side, &words)
}

impl Platen {
    /// As [`Self::start`], with the certificate of `side` unless the arguments name another.
    fn secured(lab: &Lab, what: &str, side: Side, words: &[&str]) -> Result<Self> {
        let security = security(lab, side, words)?;
        let security: Vec<&str> = security.iter().map(String::as_str).collect();
        Self::start(lab, what, side, &[words, &security].concat())
    }

    /// Starts `platen` with these arguments and a report file; `what` names its log.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(lab: &Lab, what: &str, side: Side, words: &[&str]) -> Result<Self> {
        let json = lab.scratch("report");
        let mut argv = Vec::new();
        if words.windows(2).any(|pair| *pair == ["--codec", "qpl"]) && has_qpl() {
            argv.push(format!("{REPOSITORY}/scripts/with-qpl"));
        }
        argv.push(binary()?.display().to_string());
        argv.extend(words.iter().map(|word| String::from(*word)));
        argv.extend(["--json".into(), json.display().to_string()]);
        Ok(Self { process: lab.spawn(what, side, &argv)?, json })
    }

    /// Waits for its end, which must be a success.
    ///
    /// # Errors
    /// If it fails or takes longer than `limit`; the error has its output.
    pub fn succeed(&mut self, limit: Duration) -> Result<Ended> {
        let ended = self.process.wait(limit)?;
        if !ended.status.success() {
            bail!("{} ended with {}; {}", self.process.name(), ended.status, self.process.tail());
        }
        Ok(ended)
    }

    /// Waits for the success of a migration of `vm`, which may have a longer downtime after a while
    /// (see [`Vm::wait_migration_end`]).
    ///
    /// # Errors
    /// As [`Self::succeed`].
    pub fn arrive(&mut self, vm: &mut Vm, limit: Duration) -> Result<Ended> {
        self.ends(vm, limit)?;
        self.succeed(limit)
    }

    /// The same for a migration that may fail.
    ///
    /// # Errors
    /// When it takes longer than `limit`.
    pub fn ends(&mut self, vm: &mut Vm, limit: Duration) -> Result<Ended> {
        if limit > CONVERGES && !self.process.ends_within(CONVERGES)? {
            vm.must_converge();
        }
        self.process.wait(limit)
    }

    /// Waits for its end, which must be a failure that it reports with a message; returns the
    /// result of [`Self::complaints`].
    ///
    /// # Errors
    /// When it succeeds, crashes, says nothing or takes longer than `limit`.
    pub fn fail(&mut self, limit: Duration) -> Result<String> {
        let ended = self.process.wait(limit)?;
        let said = self.process.output();
        if ended.status.success() {
            bail!("{} reports success; it said: {said}", self.process.name());
        }
        if let Some(signal) = ended.killed_by() {
            bail!("{} was ended by signal {signal}; it said: {said}", self.process.name());
        }
        if said.contains("panicked") {
            bail!("{} panicked: {said}", self.process.name());
        }
        let complaints = self.complaints();
        if complaints.is_empty() {
            bail!(
                "{} ended with {} and does not say why: {said}",
                self.process.name(),
                ended.status
            );
        }
        Ok(complaints)
    }

    /// Its error messages: its output without the report, and without the messages about its start.
    pub fn complaints(&self) -> String {
        let output = self.process.output();
        let lines = output.lines().filter(|line| {
            line.starts_with("platen: ")
                && !line.starts_with("platen: listening on ")
                && !line.ends_with(" begins")
        });
        lines.collect::<Vec<_>>().join("\n")
    }

    /// The report it wrote when it ended.
    ///
    /// # Errors
    /// When there is none, or it is not JSON.
    pub fn report(&self) -> Result<Value> {
        let text = std::fs::read_to_string(&self.json).with_context(|| {
            format!("{} wrote no report; {}", self.process.name(), self.process.tail())
        })?;
        serde_json::from_str(&text).with_context(|| format!("report {text:?}"))
    }
}
