//! Cargo builds, and the paths of the test programs.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{bail, ensure, Context, Result};
use serde_json::Value;

/// The test programs that list and run scenarios, and not functions.
pub(crate) const SCENARIOS: [&str; 3] = ["vm-tests/vm", "vm-tests/swap", "libvirt-tests/libvirt"];

/// A test program.
#[derive(Debug, Clone)]
pub(crate) struct Program {
    /// `crate` for the tests in its sources, `crate/file` for those of `tests/file.rs`.
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    /// The crate's folder, where cargo runs it.
    pub(crate) folder: PathBuf,
}

/// Builds everything, and returns the test programs; `arguments` as for `cargo build`. cargo's
/// progress goes to standard error.
///
/// # Errors
/// If the build fails.
pub(crate) fn test_programs(arguments: &[&str]) -> Result<Vec<Program>> {
    // `cargo test --no-run` builds no library that only C programs use. A second command for these
    // would choose other features of the dependencies, and build most of them again. Of the
    // examples only `manuals` is used by tests; `make check` compiles the others.
    let output = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()))
        .args(["build", "--lib", "--bins", "--tests", "--example", "manuals"])
        .arg("--message-format=json-render-diagnostics")
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .and_then(std::process::Child::wait_with_output)
        .context("cargo")?;
    ensure!(output.status.success(), "cargo build {} failed", arguments.join(" "));
    let mut programs: Vec<Program> =
        String::from_utf8_lossy(&output.stdout).lines().filter_map(program).collect();
    programs.sort_by(|a, b| a.name.cmp(&b.name));
    // Two jobs of one name would write one log.
    if let Some(pair) = programs.windows(2).find(|pair| pair[0].name == pair[1].name) {
        bail!(
            "{} and {} are both called {}",
            pair[0].path.display(),
            pair[1].path.display(),
            pair[0].name
        );
    }
    Ok(programs)
}

/// The test program in a line of cargo's messages.
fn program(line: &str) -> Option<Program> {
    let message: Value = serde_json::from_str(line).ok()?;
    if message["reason"] != "compiler-artifact" || message["profile"]["test"] != true {
        return None;
    }
    let path = PathBuf::from(message["executable"].as_str()?);
    let folder = PathBuf::from(message["manifest_path"].as_str()?).parent()?.to_owned();
    // path+file:///a/b/engine/ring#0.1.0, or ...#name@0.1.0 if folder and crate differ in name.
    let (place, version) = message["package_id"].as_str()?.rsplit_once('#')?;
    let package = match version.split_once('@') {
        Some((name, _)) => name,
        None => place.rsplit('/').next()?,
    };
    let target = message["target"]["name"].as_str()?;
    let name = match message["target"]["kind"][0].as_str()? {
        "test" => format!("{package}/{target}"),
        "bin" if target != package => format!("{package}/{target}"),
        // Its library has the crate's name.
        "bin" if folder.join("src/lib.rs").exists() => format!("{package}/main"),
        _ => package.to_owned(),
    };
    Some(Program { name, path, folder })
}

/// The folders of the workspace's crates.
///
/// # Errors
/// If Cargo.toml cannot be read, or has no list of members.
pub(crate) fn members() -> Result<Vec<String>> {
    let text = fs::read_to_string("Cargo.toml").context("Cargo.toml")?;
    let list = text.split_once("members = [").and_then(|(_, rest)| rest.split_once(']'));
    let (list, _) = list.context("Cargo.toml has no list of members")?;
    Ok(list.split('"').skip(1).step_by(2).map(str::to_owned).collect())
}
