//! Adds lines to libvirt's qemu.conf. They make this host known by its door address and give it
//! ports of its own.

use crate::error::HostError;
use std::fs;
use std::io::Write;
use std::net::Ipv4Addr;
use std::ops::RangeInclusive;
use std::os::unix::fs::{chown, MetadataExt};
use std::path::Path;

/// The path of libvirt's configuration of QEMU.
pub const QEMU_CONF: &str = "/etc/libvirt/qemu.conf";
/// The settings: the address that this host's libvirt announces to others, the address at which its
/// QEMUs listen, and the first and the last of the ports from which libvirt chooses.
const KEYS: [&str; 4] =
    ["migration_host", "migration_address", "migration_port_min", "migration_port_max"];
/// The comment in front of platen's lines.
const MARK: &str =
    "# Written by `platen host doors on`; `platen host doors off` takes these lines out.";

/// The lines that this host needs.
fn wanted(door: Ipv4Addr, ports: &RangeInclusive<u16>) -> [(&'static str, String); KEYS.len()] {
    let address = format!("\"{door}\"");
    let [host, own, first, last] = KEYS;
    let (least, most) = (ports.start().to_string(), ports.end().to_string());
    [(host, address.clone()), (own, address), (first, least), (last, most)]
}

/// Whether the text has the mark of [`doors_on`].
pub fn has_doors(text: &str) -> bool {
    text.lines().any(|line| line.trim_end() == MARK)
}

/// Returns the lines for `door` and `ports` that the file lacks.
///
/// # Errors
/// The file cannot be read, or another line of it sets one of these settings.
pub fn doors_missing(
    path: &Path,
    door: Ipv4Addr,
    ports: &RangeInclusive<u16>,
) -> Result<Vec<String>, HostError> {
    let missing = missing(path, &read(path)?, wanted(door, ports))?;
    Ok(missing.into_iter().map(|(key, value)| format!("{key} = {value}")).collect())
}

/// Returns those of `lines` that the text lacks.
fn missing(
    path: &Path,
    text: &str,
    lines: [(&'static str, String); KEYS.len()],
) -> Result<Vec<(&'static str, String)>, HostError> {
    let mut missing = lines.to_vec();
    for (number, line) in text.lines().enumerate() {
        let Some((key, value)) = setting(line) else { continue };
        let Some((_, wanted)) = lines.iter().find(|(known, _)| *known == key) else { continue };
        if value != wanted {
            let (key, value, path) = (key.into(), value.into(), path.into());
            let wanted = wanted.clone();
            return Err(HostError::Taken { path, line: number + 1, key, value, wanted });
        }
        missing.retain(|(known, _)| *known != key);
    }
    Ok(missing)
}

/// The value of a setting in the text of the file, if a line sets it.
pub fn setting_of<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    // The last such line counts.
    let found = text.lines().rev().filter_map(setting).find(|(known, _)| *known == key);
    found.map(|(_, value)| value)
}

/// Adds the lines for `door` and `ports`. Returns true if that changed the file; then libvirtd has
/// to be restarted.
///
/// # Errors
/// The file cannot be read or written, or another line of it sets one of these settings.
pub fn doors_on(
    path: &Path,
    door: Ipv4Addr,
    ports: &RangeInclusive<u16>,
) -> Result<bool, HostError> {
    let before = read(path)?;
    let mut text = without_ours(&before);
    // Somebody else may have written the same lines.
    let missing = missing(path, &text, wanted(door, ports))?;
    if !missing.is_empty() {
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        text.push_str(MARK);
        text.push('\n');
        for (key, value) in missing {
            text.push_str(&format!("{key} = {value}\n"));
        }
    }
    write(path, &before, &text)
}

/// Removes the lines. Returns true if that changed the file.
///
/// # Errors
/// The file cannot be read or written.
pub fn doors_off(path: &Path) -> Result<bool, HostError> {
    let before = read(path)?;
    write(path, &before, &without_ours(&before))
}

fn read(path: &Path) -> Result<String, HostError> {
    fs::read_to_string(path).map_err(HostError::system(format!("cannot read {}", path.display())))
}

/// `KEY = VALUE` of a line that is no comment.
fn setting(line: &str) -> Option<(&str, &str)> {
    let (key, value) = line.split_once('=')?;
    let key = key.trim();
    let value = value.split('#').next().unwrap_or_default().trim();
    (!key.starts_with('#')).then_some((key, value))
}

/// The text without the mark and the settings right behind it.
fn without_ours(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut ours = false;
    for line in text.split_inclusive('\n') {
        let is_setting = setting(line).is_some_and(|(key, _)| KEYS.contains(&key));
        ours = line.trim_end() == MARK || (ours && is_setting);
        if !ours {
            out.push_str(line);
        }
    }
    out
}

/// Replaces the whole file or changes nothing. Owner and mode stay.
fn write(path: &Path, before: &str, after: &str) -> Result<bool, HostError> {
    if before == after {
        return Ok(false);
    }
    let failed = || HostError::system(format!("cannot write {}", path.display()));
    // A symbolic link stays a link.
    let path = &fs::canonicalize(path).map_err(failed())?;
    let found = fs::metadata(path).map_err(failed())?;
    let folder = path.parent().unwrap_or(Path::new("/"));
    let mut file =
        tempfile::Builder::new().prefix(".platen-").tempfile_in(folder).map_err(failed())?;
    file.write_all(after.as_bytes())
        .and_then(|()| file.as_file().set_permissions(found.permissions()))
        .and_then(|()| chown(file.path(), Some(found.uid()), Some(found.gid())))
        .and_then(|()| file.as_file().sync_all())
        .map_err(failed())?;
    file.persist(path).map_err(|error| failed()(error.error))?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    const DOOR: Ipv4Addr = Ipv4Addr::new(127, 80, 0, 2);
    const PORTS: RangeInclusive<u16> = 49216..=49279;

    #[test]
    fn the_lines_come_and_go_and_all_others_stay() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qemu.conf");
        for text in ["", "user = \"root\"\n", "#migration_host = \"x\"\nuser = \"root\"\n"] {
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
            assert!(doors_on(&path, DOOR, &PORTS).unwrap());
            let on = fs::read_to_string(&path).unwrap();
            assert!(on.starts_with(text), "{on}");
            let lines = "migration_host = \"127.80.0.2\"\nmigration_address = \"127.80.0.2\"\n\
                         migration_port_min = 49216\nmigration_port_max = 49279\n";
            assert!(on.ends_with(lines), "{on}");
            assert!(has_doors(&on) && !has_doors(text));
            assert!(!doors_on(&path, DOOR, &PORTS).unwrap(), "once is enough");
            assert_eq!(fs::read_to_string(&path).unwrap(), on);
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
            // Another door takes the place of the first.
            assert!(doors_on(&path, Ipv4Addr::new(127, 80, 0, 3), &PORTS).unwrap());
            assert_eq!(fs::read_to_string(&path).unwrap(), on.replace("0.2\"", "0.3\""));
            // Lines that come behind ours stay.
            fs::write(&path, format!("{on}group = \"root\"\n")).unwrap();
            assert!(doors_off(&path).unwrap());
            assert_eq!(fs::read_to_string(&path).unwrap(), format!("{text}group = \"root\"\n"));
            assert!(!doors_off(&path).unwrap());
        }
    }

    #[test]
    fn a_line_that_says_otherwise_is_named_and_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qemu.conf");
        let text = "user = \"root\"\n  migration_address = \"10.0.0.1\"  # ours\n";
        fs::write(&path, text).unwrap();
        let error = doors_on(&path, DOOR, &PORTS).unwrap_err().to_string();
        assert!(error.contains("line 2") && error.contains("10.0.0.1"), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
        // One that says the same is not written a second time.
        fs::write(&path, "migration_address = \"127.80.0.2\"").unwrap();
        assert!(doors_on(&path, DOOR, &PORTS).unwrap());
        let on = fs::read_to_string(&path).unwrap();
        assert_eq!(on.matches("migration_address").count(), 1, "{on}");
        assert!(on.contains("\nmigration_host = "), "{on}");
        assert!(doors_on(Path::new("/nonexistent/qemu.conf"), DOOR, &PORTS).is_err());
    }
}
