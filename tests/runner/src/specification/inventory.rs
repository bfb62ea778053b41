//! The existing tests: found in the sources of crates, and listed by the whole-VM programs.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{ensure, Context, Result};

use crate::cargo;

/// The command that runs a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// `make test`, and with it `make proof`.
    Test,
    /// Only `make proof`.
    Proof,
}

/// All tests by name.
#[derive(Debug, Default)]
pub(crate) struct Inventory {
    /// Of crates: `crate/file/module` and the function's name.
    functions: Vec<(String, String)>,
    scenarios: Vec<(String, Place)>,
    fuzz_targets: Vec<String>,
}

impl Inventory {
    /// The tests of the repository in the current folder.
    ///
    /// # Errors
    /// If sources cannot be read, or the scenarios cannot be listed.
    pub(crate) fn of_the_repository() -> Result<Self> {
        let mut all = Self::default();
        for folder in cargo::members()? {
            let name = crate_name(Path::new(&folder))?;
            for part in ["src", "tests"] {
                all.add_sources(&Path::new(&folder).join(part), &name)?;
            }
        }
        for entry in fs::read_dir("fuzz/fuzz_targets").context("fuzz/fuzz_targets")? {
            let path = entry?.path();
            if path.extension().is_some_and(|end| end == "rs") {
                all.fuzz_targets.push(stem(&path));
            }
        }
        for program in cargo::test_programs(&["--workspace"])? {
            if cargo::SCENARIOS.contains(&program.name.as_str()) {
                let quick = list(&program.path, &["--list", "--quick"])?;
                for name in list(&program.path, &["--list"])? {
                    let place = if quick.contains(&name) { Place::Test } else { Place::Proof };
                    all.scenarios.push((name, place));
                }
            }
        }
        Ok(all)
    }

    /// Whether this file, folder or crate has tests.
    pub(crate) fn has_location(&self, location: &str) -> bool {
        self.functions.iter().any(|(place, _)| lies_in(place, location))
    }

    /// Where the tests with this name run: one entry for each kind of place.
    pub(crate) fn find(&self, location: Option<&str>, name: &str) -> Vec<Place> {
        let mut found = Vec::new();
        let is_function = |(place, function): &(String, String)| match location {
            Some(location) => lies_in(place, location) && matches(name, function),
            None => lies_in(place, name),
        };
        if self.functions.iter().any(is_function) {
            found.push(Place::Test);
        }
        if location.is_none() {
            let scenarios = self.scenarios.iter().filter(|(scenario, _)| matches(name, scenario));
            found.extend(scenarios.map(|(_, place)| *place));
            if self.fuzz_targets.iter().any(|target| target == name) {
                // On its seeds, and instrumented.
                found.extend([Place::Test, Place::Proof]);
            }
            let models = name.strip_prefix("scripts/loom ");
            if models.is_some_and(|of| ["ring", "pipeline", "qat", "store", "device"].contains(&of))
            {
                found.push(Place::Proof);
            }
        }
        found
    }

    /// Adds the tests of a source file, or of all files below a folder.
    fn add_sources(&mut self, path: &Path, place: &str) -> Result<()> {
        if path.is_dir() {
            for entry in fs::read_dir(path).with_context(|| path.display().to_string())? {
                let path = entry?.path();
                let name = stem(&path);
                let is_root = ["lib", "main", "mod"].contains(&name.as_str()) && path.is_file();
                let place = if is_root { place.to_owned() } else { format!("{place}/{name}") };
                self.add_sources(&path, &place)?;
            }
        } else if path.extension().is_some_and(|end| end == "rs") {
            let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
            let names = functions(&text);
            self.functions.extend(names.into_iter().map(|name| (place.to_owned(), name)));
        }
        Ok(())
    }

    #[cfg(test)]
    pub(crate) fn example() -> Self {
        let function = |place: &str, name: &str| (place.to_owned(), name.to_owned());
        Self {
            functions: vec![function("ring/loom", "woken_once"), function("ring/loom", "full")],
            scenarios: vec![
                ("moves_idle".into(), Place::Test),
                ("moves_slow".into(), Place::Proof),
                ("slow_one".into(), Place::Proof),
            ],
            fuzz_targets: vec!["unpack".into()],
        }
    }
}

/// Names of the functions after `#[test]`.
fn functions(text: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut is_test = false;
    for line in text.lines().map(str::trim) {
        is_test |= line == "#[test]";
        if let (true, Some(rest)) = (is_test, line.strip_prefix("fn ")) {
            let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
            names.push(rest[..end].to_owned());
            is_test = false;
        }
    }
    names
}

fn crate_name(folder: &Path) -> Result<String> {
    let path = folder.join("Cargo.toml");
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let name = text.split('"').nth(1).with_context(|| format!("{} has no name", path.display()))?;
    Ok(name.to_owned())
}

fn stem(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// The scenarios that a whole-VM program lists.
fn list(program: &Path, arguments: &[&str]) -> Result<Vec<String>> {
    let output = Command::new(program).args(arguments).output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{}: {}", program.display(), said.trim());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
}

/// Whether a test in `place` is in `location`: the same, or below it.
fn lies_in(place: &str, location: &str) -> bool {
    place.strip_prefix(location).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Whether `name` matches `pattern`; `*` stands for any text.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else { return pattern == name };
    let Some(mut name) = name.strip_prefix(first) else { return false };
    let parts: Vec<&str> = rest.split('*').collect();
    let (last, middle) = parts.split_last().expect("split gives one part at least");
    for part in middle {
        let Some((_, after)) = name.split_once(part) else { return false };
        name = after;
    }
    name.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_stand_for_anything() {
        assert!(matches("qemu_*_cancel_in_*", "qemu_7_cancel_in_setup"));
        assert!(matches("moves_*", "moves_"));
        assert!(!matches("moves", "moves_x") && !matches("*_x_*", "a_y_b"));
    }

    #[test]
    fn tests_are_functions_behind_the_attribute() {
        let text =
            "#[test]\n#[should_panic]\nfn one() {}\nfn two() {}\n  #[test]\n  fn three(a in b) {\n";
        assert_eq!(functions(text), ["one", "three"]);
    }
}
