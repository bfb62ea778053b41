//! The memory that a device may use, and its defaults.

/// A machine that swaps to the device and has less memory than this gets defaults that take less.
const SMALL: u64 = 1 << 30;

/// Memory of a device beside its store in a cgroup of its own, in bytes: the server with the
/// buffers of some connections, and the supervisor. Measured in a cgroup of 48 MiB: 13 MiB with
/// four connections.
const BESIDE_STORE: u64 = 24 << 20;

/// Memory that this process may use. A process that reaches the limit of its cgroup is killed, so
/// each default counts the lesser of both.
#[derive(Clone, Copy, Debug)]
pub(super) struct Memory {
    /// The host's memory, bytes.
    host: u64,
    /// The least limit of the cgroups, bytes; `None` without one.
    cgroup: Option<u64>,
}

impl Memory {
    pub(super) fn own() -> Self {
        let info = rustix::system::sysinfo();
        let host = info.totalram.saturating_mul(u64::from(info.mem_unit.max(1)));
        Self { host, cgroup: swap::memory_limit() }
    }

    #[cfg(test)]
    pub(super) fn of(host: u64, cgroup: Option<u64>) -> Self {
        Self { host, cgroup }
    }

    /// The limit of the cgroup, `u64::MAX` without one.
    pub(super) fn cgroup(self) -> u64 {
        self.cgroup.unwrap_or(u64::MAX)
    }

    fn available(self) -> u64 {
        self.host.min(self.cgroup())
    }

    pub(super) fn is_small(self) -> bool {
        self.available() < SMALL
    }

    /// 1/`part` of the memory, clamped to `least` to `most`.
    pub(super) fn share(self, part: u64, least: u64, most: u64) -> u64 {
        (self.available() / part).clamp(least, most)
    }

    /// The default memory limit of a store; `None` for no limit. For a host that `swaps`, 7/8 of
    /// the memory: the rest is for memory that is not swapped out. A host that swaps out more than
    /// fits sees a full swap area instead of a store that has taken all memory. In a cgroup that
    /// has only a device, without [`BESIDE_STORE`] if that is less, but half of a smaller cgroup.
    pub(super) fn default_limit(self, swaps: bool) -> Option<u64> {
        let most = |memory: u64| (memory / 8).saturating_mul(7);
        let of_cgroup = self
            .cgroup
            .map(|limit| most(limit).min(limit.saturating_sub(BESIDE_STORE)).max(limit / 2));
        let of_host = swaps.then(|| most(self.host));
        of_host.into_iter().chain(of_cgroup).min()
    }
}
