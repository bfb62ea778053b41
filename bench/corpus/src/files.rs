//! Finds the real corpus, unpacks it once, and reads it.

use std::env;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{flock, FlockOperation};

/// The directory with the unpacked files, or the reason why there is none.
pub(crate) fn locate() -> Result<PathBuf, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    if let Some(asked) = env::var_os("PLATEN_CORPORA") {
        let asked = PathBuf::from(asked);
        let found = from(&asked, &root);
        return Ok(found.unwrap_or_else(|why| panic!("PLATEN_CORPORA={}: {why}", asked.display())));
    }
    from(&root.join("../shared/corpora"), &root)
}

/// The sets in an unpacked directory: the guest first, then the process, then the others by name.
pub(crate) fn sets_in(directory: &Path) -> Vec<(String, PathBuf)> {
    const NAMED: [(&str, &str); 14] = [
        ("guest", "guest-a.t0.bin"),
        ("guest-10s", "guest-a.t1.bin"),
        ("changed-10s-before", "guest-a.d10s.before.bin"),
        ("changed-10s-after", "guest-a.d10s.after.bin"),
        ("changed-60s-before", "guest-a.d60s.before.bin"),
        ("changed-60s-after", "guest-a.d60s.after.bin"),
        ("redis", "redis.bin"),
        ("text", "silesia-dickens"),
        ("chemistry", "silesia-nci"),
        ("code", "silesia-ooffice"),
        ("database", "silesia-osdb"),
        ("source", "silesia-samba"),
        ("image", "silesia-x-ray"),
        ("xml", "silesia-xml"),
    ];
    let mut sets: Vec<_> = NAMED
        .iter()
        .map(|(name, file)| ((*name).to_owned(), directory.join(file)))
        .filter(|(_, path)| path.is_file())
        .collect();
    let mut others: Vec<PathBuf> = [directory.to_owned(), directory.join("calgary")]
        .iter()
        .flat_map(|folder| fs::read_dir(folder).into_iter().flatten().flatten())
        .map(|entry| entry.path())
        .filter(|path| path.is_file() && !NAMED.iter().any(|(_, file)| path.ends_with(file)))
        // Files of page numbers and lists hold no pages.
        .filter(|path| !matches!(path.extension().and_then(OsStr::to_str), Some("u32" | "txt")))
        .collect();
    others.sort();
    for path in others {
        let name = path.strip_prefix(directory).unwrap_or(&path).display().to_string();
        sets.push((name, path));
    }
    sets
}

pub(crate) fn read(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap_or_else(|error| panic!("corpus file {}: {error}", path.display()))
}

fn from(directory: &Path, root: &Path) -> Result<PathBuf, String> {
    if is_unpacked(directory) {
        return Ok(directory.to_owned());
    }
    let script = directory.join("unpack");
    if !script.is_file() {
        return Err("neither corpus files nor their unpack script are there".to_owned());
    }
    let sums = fs::read(directory.join("SHA256SUMS")).map_err(|error| error.to_string())?;
    let target = root.join("target");
    fs::create_dir_all(&target).map_err(|error| error.to_string())?;
    // Named by a hash of the checksums, so that another corpus gets another directory.
    let done =
        target.join("corpora").join(format!("{:016x}", twox_hash::XxHash3_64::oneshot(&sums)));
    if is_unpacked(&done) {
        return Ok(done);
    }
    unpack(&script, &done).map_err(|error| format!("cannot unpack: {error}"))?;
    Ok(done)
}

/// Whether the sets that every corpus has exist.
fn is_unpacked(directory: &Path) -> bool {
    ["guest-a.t0.bin", "redis.bin", "silesia-dickens", "silesia-ooffice"]
        .iter()
        .all(|file| directory.join(file).is_file())
}

/// Unpacks beside `done` and renames the result, under a lock: a second process waits and then
/// finds it complete, and a process that is killed leaves no incomplete directory there.
fn unpack(script: &Path, done: &Path) -> Result<(), String> {
    let text = |error: std::io::Error| error.to_string();
    let parent = done.parent().expect("it is target/corpora");
    fs::create_dir_all(parent).map_err(text)?;
    let lock = File::create(parent.join("lock")).map_err(text)?;
    flock(&lock, FlockOperation::LockExclusive).map_err(|errno| errno.to_string())?;
    if is_unpacked(done) {
        return Ok(());
    }
    let half = done.with_extension("unpacking");
    let _ = fs::remove_dir_all(&half); // A killed process may have left it.
    eprintln!("corpus: unpacking 335 MiB, once");
    let output = Command::new("sh")
        .arg(script)
        .arg(&half)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .output()
        .map_err(text)?;
    if !output.status.success() {
        let _ = std::io::stderr().write_all(&output.stderr);
        let _ = fs::remove_dir_all(&half);
        return Err(format!("its script ended with {}", output.status));
    }
    fs::rename(&half, done).map_err(text)
}
