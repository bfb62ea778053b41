//! Memory of a device beside its store, by part, as the kernel counts it.

use super::family::family;
use policy::Field;
use serde::{Deserialize, Serialize};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Memory in bytes. Program and libraries are in memory once for all processes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Footprint {
    /// Private memory of the supervisor.
    pub(crate) supervisor: u64,
    /// Private memory of the server.
    pub(crate) server: u64,
    /// Private memory of the stand-by servers.
    pub(crate) stand_by: u64,
    /// The server's heap, which its successor uses after it.
    pub(crate) heap: u64,
    /// Resident pages of the program and its libraries.
    pub(crate) text: u64,
    /// Buffers of the ublk disk's requests.
    pub(crate) buffers: u64,
    /// Tables of the store for `disksize`; a part of `mem_used_total`.
    pub(crate) tables: u64,
}

impl Footprint {
    /// Measures the device that `server` serves. Parts that the kernel does not report are 0.
    pub(super) fn of(proc: &Path, server: u32, disksize: u64) -> Option<Self> {
        let own = family(proc, server).ok()?;
        let private = |pid: u32| size(proc, pid, "RssAnon:");
        let first = own.supervisor.unwrap_or(server);
        Some(Self {
            supervisor: own.supervisor.map_or(0, private),
            server: private(server),
            stand_by: own.standby.iter().copied().map(private).sum(),
            heap: memfd(proc, first, "/memfd:platen-heap"),
            // A supervisor maps nothing else; a program on a tmpfs is shared memory.
            text: match own.supervisor {
                Some(pid) => size(proc, pid, "RssFile:") + size(proc, pid, "RssShmem:"),
                None => size(proc, server, "RssFile:"),
            },
            buffers: memfd(proc, first, "/memfd:platen-buffers"),
            // 8 bytes for each page.
            tables: disksize / device::PAGE as u64 * 8,
        })
    }

    fn private(&self) -> u64 {
        self.supervisor + self.server + self.stand_by
    }

    /// The counters, in the form of [`super::status::MmStat::fields`].
    pub(crate) fn fields(&self) -> [Field; 8] {
        let beside = self.private() + self.heap + self.text + self.buffers;
        [
            ("beside_store", beside, "Memory beside the store: all of these but tables", false),
            ("supervisor", self.supervisor, "Private memory of the supervisor, bytes", false),
            ("server", self.server, "Private memory of the server, bytes", false),
            ("stand_by", self.stand_by, "Private memory of the stand-by server, bytes", false),
            ("heap", self.heap, "Heap of the server and of its successor, bytes", false),
            ("text", self.text, "Program and libraries, once for all processes, bytes", false),
            ("buffers", self.buffers, "Buffers of the ublk disk's requests, bytes", false),
            ("tables", self.tables, "Slot table, a part of mem_used_total, bytes", false),
        ]
    }
}

/// Reads a size from `/proc/PID/status`.
fn size(proc: &Path, pid: u32, name: &str) -> u64 {
    let status = fs::read_to_string(proc.join(format!("{pid}/status"))).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

/// Memory of a process's memfd of this name; 0 without permission to look.
fn memfd(proc: &Path, pid: u32, name: &str) -> u64 {
    let all = fs::read_dir(proc.join(format!("{pid}/fd")));
    let named =
        |path: &Path| fs::read_link(path).is_ok_and(|to| to.to_string_lossy().starts_with(name));
    let paths = all.into_iter().flatten().flatten().map(|entry| entry.path());
    let found = paths.into_iter().find(|path| named(path));
    found.and_then(|path| Some(fs::metadata(path).ok()?.blocks() * 512)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_parts_match_the_kernel_s_counts() {
        let proc = tempfile::tempdir().unwrap();
        for (pid, parent, anon, argument) in
            [(5, 1, 900, "serve"), (6, 5, 7000, "--inherited"), (9, 5, 5000, "--inherited")]
        {
            let folder = proc.path().join(pid.to_string());
            fs::create_dir(&folder).unwrap();
            let shared = if pid == 5 { 8 } else { 70_000 };
            let status = format!(
                "PPid:\t{parent}\nRssAnon:\t    {anon} kB\nRssFile:\t 12000 kB\n\
                 RssShmem:\t {shared} kB\n"
            );
            fs::write(folder.join("status"), status).unwrap();
            fs::write(folder.join("cmdline"), format!("platen\0{argument}\0")).unwrap();
            std::os::unix::fs::symlink("/bin/platen", folder.join("exe")).unwrap();
        }
        let found = Footprint::of(proc.path(), 6, 1 << 30).unwrap();
        let expected = Footprint {
            supervisor: 900 << 10,
            server: 7000 << 10,
            stand_by: 5000 << 10,
            heap: 0,
            text: 12_008 << 10,
            buffers: 0,
            tables: 2 << 20,
        };
        assert_eq!(found, expected);
        assert_eq!(found.fields()[0].1, 24_908 << 10);
        assert_eq!(Footprint::of(proc.path(), 77, 1), None);
        // A real memfd of this process.
        let name = format!("platen-buffers-{}", std::process::id());
        let fd = rustix::fs::memfd_create(&name, rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&fd, &[1; 8192]).unwrap();
        let name = format!("/memfd:{name}");
        assert_eq!(memfd(Path::new("/proc"), std::process::id(), &name), 8192);
        assert!(size(Path::new("/proc"), std::process::id(), "RssAnon:") > 0);
    }
}
