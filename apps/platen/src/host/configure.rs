//! The configuration that a host gets when it joins others.

use anyhow::{ensure, Context};
use host::{Config, HostError};
use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Writes the configuration, unless this host has one with hosts. Returns a sentence on the result.
pub(super) fn configure(text: Option<&str>, path: &Path) -> anyhow::Result<String> {
    let shown = path.display();
    let Some(text) = text else { return Ok(format!("{shown} is as it was.")) };
    let hosts = Config::parse(text).context("the configuration that came")?;
    ensure!(!hosts.host.is_empty(), "the configuration that came has no hosts");
    let former = match fs::read_to_string(path) {
        Ok(own) if own == text => return Ok(format!("{shown} is the same there and here.")),
        Ok(own) if !is_without_hosts(&own) => {
            return Ok(format!(
                "{shown} differs from that of the other host and is as it was: make them the same."
            ));
        }
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(error).with_context(|| shown.to_string());
        }
        own => own.ok().filter(|own| has_settings(own)),
    };
    let folder = path.parent().context("--config is no path of a file")?;
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let mut file = tempfile::Builder::new().prefix(".platen-").tempfile_in(folder)?;
    file.write_all(text.as_bytes())?;
    file.as_file().set_permissions(Permissions::from_mode(0o644))?;
    let mut kept = String::new();
    if former.is_some() {
        let old = (0_u32..).map(|nth| match nth {
            0 => format!("{shown}.old"),
            _ => format!("{shown}.old{nth}"),
        });
        let is_free = |name: &String| Path::new(name).symlink_metadata().is_err();
        let old = old.into_iter().find(is_free).context("no free name")?;
        fs::copy(path, &old).with_context(|| format!("cannot write {old}"))?;
        kept = format!(" The former one is {old}: compare them.");
    }
    file.persist(path).with_context(|| format!("cannot write {shown}"))?;
    Ok(format!("{shown} is that of the other host.{kept}"))
}

/// Whether a configuration sets anything: the example of a package has comments only.
fn has_settings(text: &str) -> bool {
    text.lines().map(str::trim).any(|line| !line.is_empty() && !line.starts_with('#'))
}

/// Whether this configuration lacks only its hosts, as the example of a package.
fn is_without_hosts(text: &str) -> bool {
    matches!(Config::parse(text), Err(HostError::Value { key, .. }) if key == "[[host]]")
        && !text.lines().any(|line| line.trim_start().starts_with("[[host]]"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const THERE: &str = "[[host]]\nname = \"a\"\ndoor = \"127.80.0.1\"\nports = \"100-109\"\n";

    /// Regression: settings of a configuration without hosts were lost.
    #[test]
    fn a_configuration_that_sets_something_is_kept_beside_the_one_that_came() {
        for (own, is_kept) in [("# speed\n\n", false), ("# speed\nlinks = 2\n", true)] {
            let folder = tempfile::tempdir().unwrap();
            let (path, old) = (folder.path().join("t.toml"), folder.path().join("t.toml.old"));
            fs::write(&path, own).unwrap();
            let said = configure(Some(THERE), &path).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), THERE);
            assert_eq!(said.contains("t.toml.old"), is_kept, "{said}");
            assert_eq!(fs::read_to_string(&old).ok().as_deref(), is_kept.then_some(own));
        }
    }
}
