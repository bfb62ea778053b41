//! A cgroup without swap and without a limit.

use std::fs;
use std::io;
use std::path::Path;

/// Moves this process to a cgroup of its own below `root`, unless it has one without swap. A cgroup
/// of a systemd unit is not touched: the unit configures it.
pub(super) fn own_cgroup(root: &Path) -> io::Result<()> {
    let current = fs::read_to_string("/proc/self/cgroup")?;
    let Some(path) = current.lines().find_map(|line| line.strip_prefix("0::")) else {
        return Err(io::Error::other("there is no unified cgroup hierarchy"));
    };
    let current = root.join(path.trim_start_matches('/'));
    if fs::read_to_string(current.join("memory.swap.max")).is_ok_and(|max| max.trim() == "0") {
        return Ok(());
    }
    if path != "/" {
        return Err(io::Error::other(format!(
            "cgroup {path} is somebody's, and has swap: start platen as a service whose unit has MemorySwapMax=0 (docs/memory.md has one), or by `systemd-run -p MemorySwapMax=0`"
        )));
    }
    // The controller may be on already. If it is refused, the files below do not exist.
    let _ = set(&root.join("cgroup.subtree_control"), "+memory");
    let own = root.join(format!("platen-{}", std::process::id()));
    fs::create_dir_all(&own)?;
    let made =
        set(&own.join("memory.swap.max"), "0").and_then(|()| set(&own.join("cgroup.procs"), "0"));
    if made.is_err() {
        // The folder is empty.
        let _ = fs::remove_dir(&own);
    }
    made
}

/// Removes the cgroup that [`inherited`](crate::inherited) made; this process moves to the root
/// cgroup. Call it at the end.
pub fn leave_cgroup() {
    let root = Path::new("/sys/fs/cgroup");
    let own = root.join(format!("platen-{}", std::process::id()));
    if own.exists() && set(&root.join("cgroup.procs"), "0").is_ok() {
        // Fails if another process is still in it; then it stays.
        let _ = fs::remove_dir(own);
    }
}

/// Writes to an existing file of the kernel. Around cgroup v1 hierarchies there is an ordinary
/// folder, in which creating a file would succeed without effect.
fn set(file: &Path, value: &str) -> io::Result<()> {
    io::Write::write_all(&mut fs::File::options().write(true).open(file)?, value.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An ordinary folder, as around cgroup v1 hierarchies.
    #[test]
    fn no_cgroup_is_made_of_a_folder() {
        let root = tempfile::tempdir().unwrap();
        let made = own_cgroup(root.path());
        assert!(made.is_err());
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    }
}
