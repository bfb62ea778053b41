//! The lab, from which everything is started: the network, the scratch folder, names and images.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::boot_state;
use crate::certificates::Certificates;
use crate::cleanup::Ticket;
use crate::image;
use crate::net::{Net, Side};
use crate::process::Proc;
use crate::qemu::{Role, Vm};
use crate::scratch;

/// A VM's QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Qemu {
    /// The system's.
    System,
    /// The QEMU 10 that `scripts/fetch-qemu 10` has unpacked.
    Ten,
    /// The QEMU 11 that `scripts/fetch-qemu 11` has unpacked.
    Eleven,
}

impl Qemu {
    /// The program to start.
    pub(crate) fn program(self) -> PathBuf {
        match self {
            Self::System => PathBuf::from("qemu-system-x86_64"),
            Self::Ten => image::folder().with_file_name("qemu10").join("qemu-system-x86_64"),
            Self::Eleven => image::folder().with_file_name("qemu11").join("qemu-system-x86_64"),
        }
    }

    /// The number by which `scripts/fetch-qemu` knows it; `None` for the system's.
    pub fn number(self) -> Option<u32> {
        match self {
            Self::System => None,
            Self::Ten => Some(10),
            Self::Eleven => Some(11),
        }
    }

    /// Whether it can be started here.
    pub fn is_there(self) -> bool {
        self == Self::System || self.program().exists()
    }
}

/// A machine type that QEMU 7.2 and all later versions have.
pub const MACHINE_7_2: &str = "pc-q35-7.2";

/// The newest machine type of the QEMU that `scripts/fetch-qemu 10` fetches.
pub const MACHINE_10: &str = "pc-q35-10.0";

/// The newest machine type of the QEMU that `scripts/fetch-qemu 11` fetches.
pub const MACHINE_11: &str = "pc-q35-11.1";

/// The kind of a VM's RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// Anonymous memory, QEMU's default.
    Anonymous,
    /// A memfd that other processes can map, as for vhost-user devices.
    Memfd,
    /// The same, with huge pages of 2 MiB.
    Huge,
}

impl Memory {
    /// QEMU's arguments for `kib` KiB of it, besides `-m`.
    pub(crate) fn arguments(self, kib: u64) -> Vec<String> {
        let huge = match self {
            Self::Anonymous => return Vec::new(),
            Self::Memfd => "",
            Self::Huge => ",hugetlb=on,hugetlbsize=2M",
        };
        let object = format!("memory-backend-memfd,id=pc.ram,size={kib}K,share=on{huge}");
        ["-object", &object, "-machine", "memory-backend=pc.ram"].map(String::from).to_vec()
    }
}

/// A VM's configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmSpec {
    /// RAM in KiB. Not a multiple of 256 KiB: QEMU before 9.0 under TCG then loses dirty bits, and
    /// a dirtying guest arrives with stale pages, whatever migrates it.
    pub memory_kib: u64,
    /// MiB of distinct corpus pages in its page cache, from which its memory is filled.
    pub corpus_mib: u32,
    /// Random pages instead, which are incompressible.
    pub random: bool,
    /// Virtual CPUs. Each verifies a part of the memory, at the same time as the others.
    pub cpus: u32,
    /// The QEMU that runs it.
    pub qemu: Qemu,
    /// The machine type, which determines about half of the contents of QEMU's device state.
    pub machine: &'static str,
    /// Whether QEMU touches all of the RAM at its start, as with huge pages or locked memory.
    pub prealloc: bool,
    /// The kind of its RAM.
    pub memory: Memory,
}

impl VmSpec {
    /// The scenarios' default: 384 MiB + 8 KiB.
    pub fn small() -> Self {
        Self {
            memory_kib: (384 << 10) + 8,
            corpus_mib: 32,
            random: false,
            cpus: 1,
            qemu: Qemu::System,
            machine: MACHINE_7_2,
            prealloc: false,
            memory: Memory::Anonymous,
        }
    }

    /// For scenarios about the course of a migration and not its size: 128 MiB + 8 KiB.
    pub fn tiny(qemu: Qemu, machine: &'static str) -> Self {
        Self { memory_kib: (128 << 10) + 8, corpus_mib: 8, qemu, machine, ..Self::small() }
    }

    /// For the demo and the benchmark: room for 700 MiB of data.
    pub fn large() -> Self {
        Self { memory_kib: (1200 << 10) + 8, corpus_mib: 128, ..Self::small() }
    }
}

/// The environment of the scenarios.
#[derive(Debug)]
pub struct Lab {
    /// The link between the two ends.
    pub net: Net,
    folder: PathBuf,
    count: AtomicU32,
    /// By MiB of corpus and `random`; packing one takes a second or two.
    archives: Mutex<HashMap<(u32, bool), PathBuf>>,
    certificates: OnceLock<Certificates>,
    _ticket: Ticket,
}

/// The host name in the certificate of an end.
pub(crate) fn certified_name(side: Side) -> &'static str {
    match side {
        Side::Source => "source.test",
        Side::Destination => "destination.test",
    }
}

impl Lab {
    /// Makes the network and a scratch folder.
    ///
    /// # Errors
    /// If neither namespaces nor loopback work, or there is no room for temporary files.
    pub fn new() -> Result<Self> {
        scratch::remove_stale();
        let (folder, ticket) = scratch::folder()?;
        let (count, archives, certificates) = Default::default();
        Ok(Self { net: Net::new()?, folder, count, archives, certificates, _ticket: ticket })
    }

    /// The scratch folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// A path in the scratch folder that was not returned before.
    pub fn scratch(&self, what: &str) -> PathBuf {
        self.folder.join(self.fresh_name(what))
    }

    /// A CA and a certificate for each end, by its address and its name; made at the
    /// first call.
    ///
    /// # Errors
    /// When `platen cert` fails.
    pub fn certificates(&self) -> Result<&Certificates> {
        if self.certificates.get().is_none() {
            let [source, destination] = self.net.addresses();
            let [source_name, destination_name] =
                [Side::Source, Side::Destination].map(certified_name);
            let ends = [&[source_name, &source][..], &[destination_name, &destination][..]];
            let made = Certificates::new(&self.scratch("ca"), ends)?;
            // If another thread was faster, its set is as good.
            let _ = self.certificates.set(made);
        }
        self.certificates.get().context("just set")
    }

    fn fresh_name(&self, what: &str) -> String {
        format!("{what}{}", self.count.fetch_add(1, Ordering::Relaxed))
    }

    /// Starts a process at `side`; its output goes to a file of the scratch folder.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn(&self, what: &str, side: Side, argv: &[String]) -> Result<Proc> {
        Proc::spawn(&self.fresh_name(what), &self.net.prefix(side), argv, &self.folder)
    }

    /// Boots a guest at the source and fills `fill_mib` MiB of it with known pages, in two parts.
    ///
    /// # Errors
    /// When it does not boot or has not the memory.
    pub fn boot(&self, spec: &VmSpec, fill_mib: u64) -> Result<Vm> {
        let mut vm = self.start(spec, Role::Boot, Side::Source)?;
        vm.guest.wait_ready(Duration::from_secs(300)).map_err(|e| e.context(vm.process.tail()))?;
        vm.guest.fill(fill_mib, u64::from(spec.cpus).max(2))?;
        Ok(vm)
    }

    /// The same guest from a saved state, which is made if it does not exist.
    ///
    /// # Errors
    /// As [`Self::boot`]; if the state cannot be saved or loaded.
    pub fn boot_or_load(&self, spec: &VmSpec, fill_mib: u64) -> Result<Vm> {
        let state = boot_state::path(spec, fill_mib, &self.initramfs(spec)?)?;
        if !state.exists() {
            let mut booted = self.boot(spec, fill_mib)?;
            boot_state::save(&mut booted, fill_mib, &state)?;
        }
        let mut vm = self.start(spec, Role::Incoming, Side::Source)?;
        boot_state::load(&mut vm, &state)?;
        Ok(vm)
    }

    /// Starts a QEMU at the other side that waits for `vm`.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn incoming_for(&self, vm: &Vm) -> Result<Vm> {
        self.incoming_with(vm, vm.spec())
    }

    /// Starts a QEMU at the other side with `spec`, which may differ from that of `vm`.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn incoming_with(&self, vm: &Vm, spec: &VmSpec) -> Result<Vm> {
        self.start(spec, Role::Incoming, vm.side().other())
    }

    /// Starts a QEMU at `side`.
    fn start(&self, spec: &VmSpec, role: Role, side: Side) -> Result<Vm> {
        let initramfs = self.initramfs(spec)?;
        let kernel = image::kernel()?;
        let images = (kernel.as_path(), initramfs.as_path());
        let name = self.fresh_name("vm");
        let prefix = self.net.prefix(side);
        Vm::start(&name, spec, role, (side, &prefix), images, &self.folder)
    }
}

impl Lab {
    fn initramfs(&self, spec: &VmSpec) -> Result<PathBuf> {
        let kind = (spec.corpus_mib, spec.random);
        let mut archives = self.archives.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(path) = archives.get(&kind) {
            return Ok(path.clone());
        }
        let path = image::initramfs(spec.corpus_mib, spec.random)?;
        archives.insert(kind, path.clone());
        Ok(path)
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.folder) {
            eprintln!("cannot remove {}: {error}", self.folder.display());
        }
    }
}
