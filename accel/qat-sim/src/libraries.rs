//! The two shared objects, built for a test.

#![expect(unsafe_code, reason = "flock; `File::lock` is younger than our oldest compiler")]

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Builds the simulated libraries, optimised, and returns the folder with `libqat.so.4` and
/// `libusdm.so.0`.
///
/// The first caller of a process builds; other processes wait for it. The files go to the target
/// folder of the running test. Nothing is built where `PLATEN_QAT_SIM_BUILT` names a folder that
/// has cargo's `libqat_sim_libqat.so` and `libqat_sim_libusdm.so` of these sources.
///
/// # Panics
/// If cargo fails: a test that needs the device cannot go on.
pub fn libraries() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(build).clone()
}

fn build() -> PathBuf {
    let target = target_folder();
    let folder = target.join("qat-sim");
    fs::create_dir_all(&folder).expect("the target folder can be written");
    // One build at a time, also between processes; closing the file unlocks it.
    let lock = File::create(folder.join("lock")).expect("the target folder can be written");
    // SAFETY: the descriptor is open.
    let locked = unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_EX) };
    assert_eq!(locked, 0, "a file of ours can be locked");

    let built = std::env::var_os("PLATEN_QAT_SIM_BUILT").map(PathBuf::from);
    let built = built.unwrap_or_else(|| compile(&target));
    install(&built.join("libqat_sim_libqat.so"), &folder, "libqat.so.4");
    install(&built.join("libqat_sim_libusdm.so"), &folder, "libusdm.so.0");
    folder
}

/// Makes cargo compile both libraries; returns the folder with its results.
fn compile(target: &Path) -> PathBuf {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["build", "--release", "-p", "qat-sim-libqat", "-p", "qat-sim-libusdm"]);
    command.arg("--target-dir").arg(target).current_dir(env!("CARGO_MANIFEST_DIR"));
    // A wrapped cargo (coverage, sanitizers) sets flags for its own builds.
    command.env_remove("CARGO_BUILD_TARGET").env_remove("CARGO_ENCODED_RUSTFLAGS");
    let output = command.output().expect("cargo runs");
    assert!(output.status.success(), "cargo build: {}", String::from_utf8_lossy(&output.stderr));
    target.join("release")
}

/// The target folder of the running test, from `TARGET/PROFILE/deps/TEST` or from the environment.
fn target_folder() -> PathBuf {
    let executable = std::env::current_exe().ok();
    let above = executable.as_deref().and_then(|path| path.ancestors().nth(3));
    let known = above.filter(|folder| folder.join("CACHEDIR.TAG").is_file()).map(Path::to_owned);
    let named = || std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    let workspace = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target");
    known.or_else(named).unwrap_or_else(workspace)
}

/// Copies a library to its real name by a rename, so that a process that has the old one open still
/// has it.
fn install(from: &Path, folder: &Path, name: &str) {
    let same = |left: &Path, right: &Path| match (fs::read(left), fs::read(right)) {
        (Ok(left), Ok(right)) => left == right,
        _ => false,
    };
    let to = folder.join(name);
    if same(from, &to) {
        return;
    }
    let new = folder.join(format!("{name}.{}", std::process::id()));
    fs::copy(from, &new).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
    fs::rename(&new, &to).unwrap_or_else(|error| panic!("{}: {error}", to.display()));
}
