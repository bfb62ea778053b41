//! `platen qat`, and the QAT device for a migration.

use crate::qat_args::{Accelerator, QatArgs, QatCommand, QatLibraries, SimArgs, SourceAccelerator};
use crate::qat_status;
use crate::say::say;
use anyhow::{bail, ensure, Context};
use codec::{Codec, Settings};
use qat::{Libraries, Location, Qat, StartError, StartOptions};
use rustix::process::{kill_process, Pid, Signal};
use std::ffi::OsString;
use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

impl QatLibraries {
    pub(crate) fn location(&self) -> Location {
        self.qat_libraries.clone().map_or(Location::System, Location::Folder)
    }

    /// `required`: codec threads that cannot use the device are an error.
    fn start(&self, required: bool) -> anyhow::Result<Arc<Qat>> {
        let libraries = Libraries::load(&self.location())?;
        Ok(Qat::start(&libraries, &StartOptions { required, ..StartOptions::default() })?)
    }
}

/// Prints what the codec threads lacked when they claimed instances of the device.
pub(crate) fn say_problems(device: Option<Arc<Qat>>) {
    for problem in device.into_iter().flat_map(|device| device.problems()) {
        say(&format!("QAT device: {problem}"));
    }
}

const NO_DEVICE: &str =
    "--accelerator qat: no QAT device (`platen qat status` lists the missing parts)";

/// Starts the device for a source, if it is wanted and available. Reports on stderr if software has
/// to do the work.
pub(crate) fn accelerator(
    wanted: SourceAccelerator,
    libraries: &QatLibraries,
    settings: Option<Settings>,
) -> anyhow::Result<Option<Arc<Qat>>> {
    if let Some(settings) = settings.filter(|settings| settings.codec() != Codec::DeflateQz) {
        let codec = settings.name();
        ensure!(
            wanted != SourceAccelerator::Qat,
            "--accelerator qat goes with --codec auto or qatzip, not with {codec}"
        );
        return Ok(None);
    }
    match wanted {
        // These are refused with codec qpl's checks, unless qpl is the codec.
        SourceAccelerator::None | SourceAccelerator::Iaa => Ok(None),
        SourceAccelerator::Auto => match libraries.start(false) {
            Ok(qat) => Ok(Some(qat)),
            // With codec auto a device would only be one more choice, but a host whose device
            // hangs has a fault.
            Err(error) if settings.is_none() => {
                if let Some(StartError::Hang(hang)) = error.downcast_ref() {
                    say(&format!("no QAT device: {hang}"));
                }
                Ok(None)
            }
            Err(error) => {
                say(&format!("codec qatzip in software: {error}"));
                Ok(None)
            }
        },
        SourceAccelerator::Qat => Ok(Some(libraries.start(true).context(NO_DEVICE)?)),
    }
}

/// Starts the device for a receiver, in the same way.
pub(crate) fn receiver(
    wanted: Accelerator,
    libraries: &QatLibraries,
) -> anyhow::Result<Option<Arc<Qat>>> {
    match wanted {
        Accelerator::None => Ok(None),
        Accelerator::Auto => match libraries.start(false) {
            Ok(qat) => Ok(Some(qat)),
            Err(error) => {
                say(&format!("codec qatzip will be decompressed in software: {error}"));
                Ok(None)
            }
        },
        Accelerator::Qat => Ok(Some(libraries.start(true).context(NO_DEVICE)?)),
    }
}

/// Runs the command; its exit status is that of the command that runs on the simulated device.
pub(crate) fn run(args: QatArgs) -> anyhow::Result<ExitCode> {
    match args.command {
        QatCommand::Status(args) => qat_status::run(&args).map(|()| ExitCode::SUCCESS),
        QatCommand::Sim(args) => simulate(&args),
    }
}

/// Cargo's file names of the simulated libraries, and the SONAMEs that programs load.
const SIMULATED: [(&str, &str); 2] =
    [("libqat_sim_libqat.so", qat::QAT), ("libqat_sim_libusdm.so", qat::USDM)];

fn simulate(args: &SimArgs) -> anyhow::Result<ExitCode> {
    let private = tempfile::Builder::new()
        .prefix("platen-qat-sim-")
        .tempdir()
        .context("cannot make a private folder")?;
    let folder = simulated_libraries(args.simulated.as_deref(), private.path())?;
    let mut search = OsString::from(&folder);
    if let Some(rest) = std::env::var_os("LD_LIBRARY_PATH").filter(|rest| !rest.is_empty()) {
        search.push(":");
        search.push(rest);
    }
    let Some((program, rest)) = args.command.split_first() else { bail!("no command to run") };
    let mut command = Command::new(program);
    command.args(rest).env("LD_LIBRARY_PATH", search);
    if let Some(script) = &args.script {
        ensure!(script.is_file(), "script {}: no such file", script.display());
        command.env("PLATEN_QAT_SIM", script);
    }
    if let Some(report) = &args.report {
        command.env("PLATEN_QAT_SIM_REPORT", report);
    }
    // The command handles Ctrl-C and SIGTERM; here they would leave the private folder behind.
    let (interrupted, running) = (Arc::new(AtomicBool::new(false)), Arc::new(OnceLock::new()));
    let (seen, pid) = (interrupted.clone(), running.clone());
    let tell = |pid: &Pid| {
        // The command may have ended already.
        let _ = kill_process(*pid, Signal::TERM);
    };
    ctrlc::set_handler(move || {
        seen.store(true, Ordering::SeqCst);
        if let Some(pid) = pid.get() {
            tell(pid);
        }
    })
    .context("cannot handle signals")?;
    let mut child =
        command.spawn().with_context(|| format!("cannot run {}", program.to_string_lossy()))?;
    let pid = running.get_or_init(|| Pid::from_child(&child));
    if interrupted.load(Ordering::SeqCst) {
        tell(pid);
    }
    let status = child.wait().context("cannot wait for the command")?;
    let code = status.code().or(status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)))
}

/// Makes a folder with the simulated libraries under their SONAMEs.
fn simulated_libraries(named: Option<&Path>, private: &Path) -> anyhow::Result<PathBuf> {
    let beside = std::env::current_exe().context("cannot tell where platen is")?;
    let beside = beside.parent().unwrap_or(Path::new("."));
    let installed = [beside.join("qat-sim"), beside.join("../lib/platen/qat-sim")];
    let folders = named.map(Path::to_owned).into_iter().chain(installed);
    for folder in folders {
        if SIMULATED.iter().all(|(_, name)| folder.join(name).is_file()) {
            return folder.canonicalize().with_context(|| folder.display().to_string());
        }
        ensure!(
            named.is_none(),
            "{} does not hold {} and {}",
            folder.display(),
            qat::QAT,
            qat::USDM
        );
    }
    if !SIMULATED.iter().all(|(built, _)| beside.join(built).is_file()) {
        bail!(
            "the simulated libraries are not beside {}: `make build` makes them, or name their folder with --libraries",
            beside.display()
        );
    }
    for (built, name) in SIMULATED {
        symlink(beside.join(built), private.join(name))?;
    }
    Ok(private.to_owned())
}
