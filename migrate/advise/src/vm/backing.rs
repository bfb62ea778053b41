//! Whether a read of a guest's memory allocates memory of the host.
//!
//! Where the guest has touched nothing, a read of private anonymous memory finds the kernel's zero
//! page. A file of tmpfs or hugetlbfs has none: the kernel allocates a page for each hole that is
//! read, on hugetlbfs one of 2 MiB or 1 GiB.

use super::error::VmError;
use qmp::Qmp;
use serde_json::{json, Value};

/// Refuses memory of which QEMU would allocate what it reads.
///
/// # Errors
/// A backend has holes, or the monitor fails.
pub(super) fn refuse_holes(qmp: &mut Qmp) -> Result<(), VmError> {
    let backends = qmp.execute("query-memdev", None)?;
    let backends = backends.as_array().cloned().unwrap_or_default();
    if backends.iter().all(|backend| backend["prealloc"] == true) {
        return Ok(());
    }
    let objects = qmp.execute("qom-list", Some(json!({"path": "/objects"})))?;
    let objects = objects.as_array().cloned().unwrap_or_default();
    for backend in backends.iter().filter(|backend| backend["prealloc"] != true) {
        let object = objects.iter().find(|one| one["name"] == backend["id"]);
        if let Some(kind) = allocates(backend, object.unwrap_or(&Value::Null)) {
            let id = backend["id"].as_str().unwrap_or("RAM");
            let short = |text: &str| text.chars().take(64).collect();
            return Err(VmError::Holes { id: short(id), kind: short(kind) });
        }
    }
    Ok(())
}

/// The kind of memory in which a backend without `prealloc` lies, if a read allocates there.
fn allocates<'a>(backend: &Value, object: &'a Value) -> Option<&'a str> {
    let kind = object["type"].as_str().and_then(|kind| kind.strip_prefix("child<memory-backend-"));
    // Huge pages are those of a file or of a memfd.
    match kind.map_or("ram", |kind| kind.trim_end_matches('>')) {
        "ram" if backend["share"] == true => Some("shared memory"),
        "ram" => None,
        kind => Some(kind),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::Saved;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    /// A sample of a VM whose only backend is this; returns the error and the commands.
    fn sample(kind: &str, share: bool, prealloc: bool) -> (String, Vec<String>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let backend = json!([{"id": "pc.ram", "size": 1 << 30, "prealloc": prealloc,
            "share": share}]);
        let objects = json!([{"name": "pc.ram", "type": format!("child<memory-backend-{kind}>")}]);
        let monitor = std::thread::spawn(move || {
            let mut writer = theirs.try_clone().unwrap();
            let version = json!({"qemu": {"major": 9, "minor": 1, "micro": 0}});
            let _ = writeln!(writer, "{}", json!({"QMP": {"version": version}}));
            let mut heard = Vec::new();
            for line in BufReader::new(theirs).lines().map_while(Result::ok) {
                let asked: Value = serde_json::from_str(&line).unwrap();
                let command = asked["execute"].as_str().unwrap();
                let result = match command {
                    "query-memdev" => backend.clone(),
                    "qom-list" => objects.clone(),
                    "human-monitor-command" => json!("no map"),
                    _ => json!([]),
                };
                let _ = writeln!(writer, "{}", json!({"return": result, "id": asked["id"]}));
                heard.push(command.to_owned());
            }
            heard
        });
        let mut qmp = Qmp::over(ours, Duration::from_secs(300)).unwrap();
        let error = Saved::take(&mut qmp, &|| true).unwrap_err();
        drop(qmp);
        (error.to_string(), monitor.join().unwrap())
    }

    /// tmpfs and hugetlbfs have no zero page.
    #[test]
    fn memory_that_a_read_would_allocate_is_not_sampled() {
        for (kind, share) in [("memfd", true), ("memfd", false), ("file", true), ("ram", true)] {
            let (error, heard) = sample(kind, share, false);
            assert!(error.contains("pc.ram") && error.contains("prealloc"), "{kind}: {error}");
            assert!(!heard.iter().any(|command| command == "human-monitor-command"), "{heard:?}");
        }
    }

    #[test]
    fn memory_without_holes_is_sampled() {
        for (kind, share, prealloc) in
            [("memfd", true, true), ("file", false, true), ("ram", false, false)]
        {
            let (error, _) = sample(kind, share, prealloc);
            assert!(error.contains("info mtree"), "{kind}: {error}");
        }
    }
}
