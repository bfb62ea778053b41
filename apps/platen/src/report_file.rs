//! The file of a report: `--json`.

use anyhow::{ensure, Context};
use serde_json::Value;
use std::fs::File;
use std::io::{Error, ErrorKind, Read, Write};
use std::path::Path;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// Longest wait for the disk, or for the reader of standard output, that a report is written to.
const TAKEN: Duration = Duration::from_secs(30);
/// The message about a report that was not written in that time.
pub(crate) const NOT_TAKEN: &str =
    "the report is not written yet: its disk, or the reader of standard output, takes nothing";

/// Writes a report by `work`, on a thread of its own; `None` if that is not over in [`TAKEN`]. A
/// migration is over then, and its monitor, settings and target must not wait for a disk or a
/// reader.
pub(crate) fn aside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (done, over) = channel();
    let work = Arc::new(Mutex::new(Some(work)));
    let theirs = Arc::clone(&work);
    let body = move || {
        let work = theirs.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Nobody waits for a late one.
        let _ = work.map(|work| done.send(work()));
    };
    if thread::Builder::new().name("report".into()).spawn(body).is_err() {
        // The system refuses the thread, and the report would be lost.
        let work = work.lock().unwrap_or_else(PoisonError::into_inner).take();
        return work.map(|work| work());
    }
    over.recv_timeout(TAKEN).ok()
}

/// Writes a file completely or not at all. Anything but a regular file (a pipe, a device) is
/// written directly.
pub(crate) fn write_whole(path: &Path, text: &str) -> std::io::Result<()> {
    if std::fs::metadata(path).is_ok_and(|found| !found.is_file()) {
        return std::fs::write(path, text);
    }
    refuse_another_file(path)?;
    // Resolve a symbolic link, so that it stays one.
    let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let mut file = tempfile::Builder::new()
        .prefix(".platen-")
        .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644))
        .tempfile_in(folder.unwrap_or(Path::new(".")))?;
    file.write_all(text.as_bytes())?;
    file.persist(path).map(drop).map_err(|error| error.error)
}

/// Writes a report that is the command's only result, as one line of JSON.
///
/// # Errors
///
/// The report is not written.
pub(crate) fn write_result(path: Option<&Path>, report: &Value) -> anyhow::Result<()> {
    let Some(path) = path else { return Ok(()) };
    write_whole(path, &format!("{report}\n"))
        .with_context(|| format!("cannot write the report to {}", path.display()))
}

/// Refuses a file that has other contents than a report: an image under a mistyped `--json` would
/// be lost, and with it a VM.
fn refuse_another_file(path: &Path) -> std::io::Result<()> {
    let mut first = [0];
    let read = match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        opened => opened?.read(&mut first)?,
    };
    if read == 0 || first == *b"{" {
        return Ok(());
    }
    let text = "a file of this name exists, and it is no report: it stays as it is";
    Err(Error::new(ErrorKind::AlreadyExists, text))
}

/// Checks, before anything is done, that a report can be put at `path`.
///
/// # Errors
///
/// The file there is no report, or its folder does not exist.
pub(crate) fn check_file(path: Option<&Path>) -> anyhow::Result<()> {
    let Some(path) = path else { return Ok(()) };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let found = folder.map_or(Ok(()), |folder| folder.metadata().map(drop));
    ensure!(
        !found.is_err_and(|error| error.kind() == ErrorKind::NotFound),
        "--json {}: its folder does not exist, so make it first",
        path.display()
    );
    if !path.is_file() {
        return Ok(());
    }
    refuse_another_file(path)
        .with_context(|| format!("--json {}: name another file", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_no_report_stays_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("image"), "PLATENVM and a VM").unwrap();
        assert_eq!(write_whole(&at("image"), "{}\n").unwrap_err().kind(), ErrorKind::AlreadyExists);
        let error = format!("{:#}", check_file(Some(&at("image"))).unwrap_err());
        assert!(error.contains("name another file") && error.contains("no report"), "{error}");
        assert_eq!(std::fs::read_to_string(at("image")).unwrap(), "PLATENVM and a VM");
        std::fs::write(at("empty"), "").unwrap();
        for name in ["new", "empty", "new"] {
            check_file(Some(&at(name))).unwrap();
            write_whole(&at(name), "{}\n").unwrap();
            assert_eq!(std::fs::read_to_string(at(name)).unwrap(), "{}\n");
        }
    }

    #[test]
    fn a_result_that_is_not_written_is_an_error() {
        let report = serde_json::json!({});
        let error = write_result(Some(Path::new("/dev/full")), &report).unwrap_err();
        assert!(format!("{error:#}").contains("/dev/full: No space left"), "{error:#}");
        write_result(None, &report).unwrap();
    }

    #[test]
    fn a_missing_folder_is_found_before_anything_is_done() {
        let dir = tempfile::tempdir().unwrap();
        let error = check_file(Some(&dir.path().join("missing/report"))).unwrap_err().to_string();
        assert!(error.contains("its folder does not exist"), "{error}");
        check_file(Some(Path::new("report"))).unwrap();
        check_file(None).unwrap();
    }
}
