//! The files that a QEMU writes to, as its monitor names them.

use crate::restore_fit::get;
use qmp::{Qmp, QmpError};
use serde_json::{json, Value};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::PathBuf;

/// A file, device or remote image that a VM may write to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Writable {
    /// QEMU's name of the file, device or image.
    pub(crate) name: String,
    pub(crate) place: Place,
}

/// The place of the bytes. Equal places hold the same bytes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Place {
    /// Numbers of the file system and the inode.
    File(u64, u64),
    /// Number of a block or character device.
    Device(u64),
    /// QEMU's own name, for an image that is no file of this host.
    Name(String),
    /// A descriptor that QEMU was given: its file is unknown.
    Unknown,
}

/// Everything that the VM of this QEMU may write to: disks, flash memory, RAM in shared files.
pub(crate) fn writable(qmp: &mut Qmp) -> Result<Vec<Writable>, QmpError> {
    let pid = qmp.peer_pid();
    let nodes = qmp.execute("query-named-block-nodes", Some(json!({ "flat": true })))?;
    let mut all = Vec::new();
    for node in nodes.as_array().into_iter().flatten() {
        if node["ro"] == true {
            continue;
        }
        let Some(place) = node["file"].as_str().and_then(|file| place(file, pid)) else { continue };
        let name = node["file"].as_str().unwrap_or_default().to_owned();
        all.push(Writable { name, place });
    }
    let backends = qmp.execute("query-memdev", None)?;
    for backend in backends.as_array().into_iter().flatten() {
        let Some(id) = backend["id"].as_str() else { continue };
        let path = format!("/objects/{id}");
        if get(qmp, &path, "type")? != "memory-backend-file" || get(qmp, &path, "share")? != true {
            continue;
        }
        let file = get(qmp, &path, "mem-path")?;
        let file = file.as_str().unwrap_or_default();
        // If the path is a folder, QEMU makes a file of its own there.
        if let Some(place @ Place::File(..)) = place(file, pid) {
            if !real(file, pid).is_dir() {
                all.push(Writable { name: file.to_owned(), place });
            }
        }
    }
    // A format and the file below it have one name.
    all.sort_by(|a, b| (&a.place, &a.name).cmp(&(&b.place, &b.name)));
    all.dedup();
    Ok(all)
}

/// The place of the node that QEMU calls `file`; `None` for a node that keeps no bytes.
fn place(file: &str, pid: Option<i32>) -> Option<Place> {
    if let Some(described) = file.strip_prefix("json:") {
        let described: Value = serde_json::from_str(described).unwrap_or_default();
        return described_place(&described, pid);
    }
    let file = ["file:", "host_device:"]
        .iter()
        .find_map(|scheme| file.strip_prefix(scheme))
        .unwrap_or(file);
    if file.is_empty() || file.starts_with("null-co:") || file.starts_with("null-aio:") {
        return None;
    }
    // As in QEMU: a colon before the first slash ends the name of a protocol.
    let is_path = !file.split('/').next().unwrap_or_default().contains(':');
    if !is_path {
        return Some(Place::Name(file.to_owned()));
    }
    if file.starts_with("/dev/fdset/") {
        return Some(Place::Unknown);
    }
    Some(match real(file, pid).metadata() {
        Ok(of) if of.file_type().is_block_device() || of.file_type().is_char_device() => {
            Place::Device(of.rdev())
        }
        Ok(of) => Place::File(of.dev(), of.ino()),
        Err(_) => Place::Name(file.to_owned()),
    })
}

/// The place of the lowest node of a description in JSON.
fn described_place(mut node: &Value, pid: Option<i32>) -> Option<Place> {
    while node["file"].is_object() {
        node = &node["file"];
    }
    match (node["driver"].as_str(), node["filename"].as_str()) {
        (Some("null-co" | "null-aio"), _) => None,
        (Some("file" | "host_device" | "host_cdrom"), Some(path)) if !path.starts_with("json:") => {
            // The path may have any form: it has no protocol.
            let path = if path.contains('/') { path.to_owned() } else { format!("./{path}") };
            place(&path, pid)
        }
        _ => Some(Place::Name(node.to_string())),
    }
}

/// The path by which this process reaches a file of QEMU's, which may have another root and another
/// working directory.
fn real(file: &str, pid: Option<i32>) -> PathBuf {
    let own = PathBuf::from(file);
    let Some(pid) = pid else { return own };
    let base = if own.is_absolute() { "root" } else { "cwd" };
    let there = PathBuf::from(format!("/proc/{pid}/{base}")).join(file.trim_start_matches('/'));
    match there.exists() || own.is_relative() {
        true => there,
        // This process has no permission to look into QEMU's process.
        false => own,
    }
}

/// Whether the kernel's description of a descriptor (`/proc/PID/fdinfo`) has the lock that a QEMU
/// holds while its VM may write to the file.
pub(crate) fn is_written(info: &str) -> bool {
    // RAW_LOCK_PERM_BASE plus the bit of BLK_PERM_WRITE.
    const WRITE: u64 = 101;
    info.lines().filter(|line| line.starts_with("lock:") && !line.contains("FLOCK")).any(|line| {
        let mut last = line.split_whitespace().rev();
        let (end, begin) = (last.next(), last.next());
        let begin = begin.and_then(|begin| begin.parse::<u64>().ok());
        let end = end.map(|end| end.parse().unwrap_or(u64::MAX));
        matches!((begin, end), (Some(begin), Some(end)) if begin <= WRITE && WRITE <= end)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn names_of_one_file_have_one_place() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk").display().to_string();
        let link = dir.path().join("link").display().to_string();
        fs::write(&path, "").unwrap();
        fs::hard_link(&path, &link).unwrap();
        let pid = i32::try_from(std::process::id()).ok();
        let expected = place(&path, None);
        assert!(matches!(expected, Some(Place::File(..))));
        let described = |path: &str| {
            let file = json!({ "driver": "file", "filename": path, "locking": "off" });
            format!("json:{}", json!({ "driver": "qcow2", "file": file }))
        };
        for name in [&path, &link, &format!("file:{path}"), &described(&path), &described(&link)] {
            assert_eq!(place(name, None), expected, "{name}");
            assert_eq!(place(name, pid), expected, "{name}");
        }
        let other = dir.path().join("other").display().to_string();
        fs::write(&other, "").unwrap();
        assert_ne!(place(&other, pid), expected);
    }

    #[test]
    fn what_is_no_file_has_its_name() {
        let name = |text: &str| Some(Place::Name(text.to_owned()));
        assert_eq!(place("nbd+unix:///x?socket=/s", None), name("nbd+unix:///x?socket=/s"));
        assert_eq!(place("rbd:pool/image", None), name("rbd:pool/image"));
        assert_eq!(place("/nowhere/disk", None), name("/nowhere/disk"));
        assert_eq!(place("/dev/null", None), Some(Place::Device(0x103)));
        assert_eq!(place("/dev/fdset/3", None), Some(Place::Unknown));
        for nothing in ["null-co://", "", r#"json:{"driver":"null-aio"}"#] {
            assert_eq!(place(nothing, None), None, "{nothing}");
        }
        let nbd = |port: &str| {
            let server = json!({ "type": "inet", "host": "h", "port": port });
            format!(
                "json:{}",
                json!({ "driver": "raw", "file": { "driver": "nbd", "server": server } })
            )
        };
        assert_eq!(place(&nbd("1"), None), place(&nbd("1"), None));
        assert_ne!(place(&nbd("1"), None), place(&nbd("2"), None));
    }

    #[test]
    fn the_lock_of_a_writer_is_told_from_others() {
        let info = |lock: &str| format!("pos:\t0\nflags:\t02100002\nlock:\t1: {lock}\n");
        assert!(is_written(&info("OFDLCK  ADVISORY  READ -1 00:2f:123 100 101")));
        assert!(is_written(&info("POSIX  ADVISORY  READ 12 00:2f:123 101 101")));
        assert!(is_written(&info("OFDLCK  ADVISORY  READ -1 00:2f:123 0 EOF")));
        assert!(!is_written(&info("OFDLCK  ADVISORY  READ -1 00:2f:123 100 100")));
        assert!(!is_written(&info("OFDLCK  ADVISORY  READ -1 00:2f:123 201 203")));
        assert!(!is_written(&info("FLOCK  ADVISORY  WRITE 12 00:2f:123 0 EOF")));
        assert!(!is_written("pos:\t0\nflags:\t02100002\n"));
    }
}
