//! The memory limits of the cgroups of this process.

use std::fs;
use std::path::Path;

/// The least `memory.max` of this process's cgroup and those above it, in bytes; `None` if none has
/// a limit.
pub fn memory_limit() -> Option<u64> {
    let cgroups = fs::read_to_string("/proc/self/cgroup").ok()?;
    least(Path::new("/sys/fs/cgroup"), &cgroups)
}

/// Of the cgroup that a text as in `/proc/self/cgroup` names, below `root`.
fn least(root: &Path, cgroups: &str) -> Option<u64> {
    let path = cgroups.lines().find_map(|line| line.strip_prefix("0::"))?;
    let own = root.join(path.trim_start_matches('/'));
    let limit =
        |path: &Path| fs::read_to_string(path.join("memory.max")).ok()?.trim().parse::<u64>().ok();
    own.ancestors().take_while(|path| path.starts_with(root)).filter_map(limit).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_limit_of_all_cgroups_above_counts() {
        let root = tempfile::tempdir().unwrap();
        let unit = root.path().join("system.slice/swap.service");
        fs::create_dir_all(&unit).unwrap();
        let own = "0::/system.slice/swap.service\n";
        assert_eq!(least(root.path(), own), None);
        fs::write(unit.join("memory.max"), "max\n").unwrap();
        assert_eq!(least(root.path(), own), None);
        fs::write(root.path().join("system.slice/memory.max"), "50331648\n").unwrap();
        assert_eq!(least(root.path(), own), Some(50_331_648));
        fs::write(unit.join("memory.max"), "60000000\n").unwrap();
        assert_eq!(least(root.path(), own), Some(50_331_648));
        assert_eq!(least(root.path(), "1:memory:/x\n"), None);
    }
}
