//! The files of the records.

use crate::error::HostError;
use crate::listener::make_passage;
use crate::record::{now, Record};
use std::fs::{self, DirBuilder};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// The largest record that is read.
const MAX_RECORD: u64 = 64 << 10;

/// Makes a new identifier; later identifiers sort behind earlier ones.
pub fn new_id() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed) % 1000;
    format!("{:013}-{}-{count:03}", now(), std::process::id())
}

/// The path of a carrier's socket.
pub(crate) fn socket_of(folder: &Path, id: &str) -> PathBuf {
    folder.join(format!("{id}.sock"))
}

/// Writes a record whole or not at all.
pub(crate) fn write_record(folder: &Path, record: &Record) -> io::Result<()> {
    let mut file = tempfile::Builder::new().prefix(".record-").tempfile_in(folder)?;
    file.write_all(&serde_json::to_vec(record)?)?;
    file.persist(folder.join(format!("{}.json", record.id))).map(drop).map_err(|error| error.error)
}

pub(super) fn read_record(path: &Path) -> Option<Record> {
    let size = fs::metadata(path).ok().filter(fs::Metadata::is_file)?.len();
    (size <= MAX_RECORD)
        .then(|| fs::read(path).ok())?
        .and_then(|text| serde_json::from_slice(&text).ok())
}

/// The folder of the records below `run_dir`. It is made if it is missing, for this user alone.
///
/// # Errors
/// The folder cannot be made, or belongs to another user.
pub(crate) fn folder(run_dir: &Path) -> Result<PathBuf, HostError> {
    let folder = run_dir.join("migrations");
    // Others must be able to pass through the folders above: the unix sockets for QEMU's users are
    // in a folder beside `run_dir`.
    if let Some(above) = run_dir.parent() {
        make_passage(above)
            .map_err(HostError::system(format!("cannot make the folder {}", above.display())))?;
    }
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&folder)
        .map_err(HostError::system(format!("cannot make the folder {}", folder.display())))?;
    let found = fs::metadata(&folder)
        .map_err(HostError::system(format!("cannot look at {}", folder.display())))?;
    let user = rustix::process::geteuid().as_raw();
    if found.uid() != user || found.mode() & 0o022 != 0 {
        let what = format!(
            "{} belongs to user {} with mode {:o}, and this is user {user}: give the service a run_dir \
             of its own",
            folder.display(),
            found.uid(),
            found.mode() & 0o7777
        );
        return Err(HostError::system(what)(io::ErrorKind::PermissionDenied.into()));
    }
    Ok(folder)
}
