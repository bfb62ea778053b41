//! The program of a device's processes: `platen-device`, which has these commands only.
//!
//! A swap device locks its whole program in memory. `platen` with all its commands takes several
//! times as much memory. `platen-device` also leaves out what swap does not need: drivers of QAT
//! devices and FUSE. Devices with these are served by `platen`.

use super::args::{DeviceArgs, DeviceCommand, ServeArgs, UpgradeArgs};
use super::{control, offload, stat};
use crate::say::say;
use codec::Codec;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const NAME: &str = "platen-device";

/// Executes `platen-device` in this process if `args` ask for processes that stay, and if the
/// program lies beside this one and has the same version. Otherwise returns: this program can do
/// all of it.
pub(crate) fn use_small_one(args: &DeviceArgs) {
    let stays = match &args.command {
        // A supervisor starts servers with the program that it is itself.
        DeviceCommand::Serve(args) => {
            args.inherited.is_none() && args.adopt.is_none() && !needs_all(args)
        }
        // The supervisor takes the program of the process that asks.
        DeviceCommand::Upgrade(args) => !needs_all_as_served(args).unwrap_or(true),
        _ => false,
    };
    let Some(program) = stays.then(beside).flatten() else { return };
    if let Err(why) = fits(&program) {
        say(&format!("{} is not used: {why}", program.display()));
        return;
    }
    let mut command = Command::new(&program);
    let error = command.arg0("platen").args(std::env::args_os().skip(1)).exec();
    say(&format!("{} is not used: {error}", program.display()));
}

/// Whether a device with these arguments needs code that `platen-device` leaves out.
fn needs_all(args: &ServeArgs) -> bool {
    args.fuse.is_some() || offload::needs_drivers(args)
}

/// Whether a device that is served needs that code; `None` if the device does not answer.
fn needs_all_as_served(args: &UpgradeArgs) -> Option<bool> {
    let folder = control::folder(args.control.run_dir.as_deref()).ok()?;
    let status = stat::ask(control::address(&folder, &args.name).path()).ok()?;
    let by_fuse = status.transports.iter().any(|transport| transport.kind == "fuse");
    Some(by_fuse || status.codec == Codec::DeflateQz.name())
}

/// The file beside this program, if there is one.
fn beside() -> Option<PathBuf> {
    let own = std::env::current_exe().ok()?;
    let program = own.with_file_name(NAME);
    (own.file_name()? != NAME && program.exists()).then_some(program)
}

/// Checks that `program` has this version.
fn fits(program: &Path) -> Result<(), String> {
    let asked = Command::new(program).arg("--version").stdin(Stdio::null()).output();
    let output = asked.map_err(|error| error.to_string())?;
    let said = String::from_utf8_lossy(&output.stdout);
    let expected = concat!("platen-device ", env!("CARGO_PKG_VERSION"));
    if output.status.success() && said.trim_end() == expected {
        return Ok(());
    }
    let said: String = said.trim_end().chars().take(80).collect();
    Err(format!("its version is {said:?}, expected {expected:?}: install both from one package"))
}
