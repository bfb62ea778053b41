//! Hosts made of files.

use super::*;
use fake::fake;
use proptest::prelude::*;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::sync::Arc;

#[path = "../../../../accel/qpl/tests/fake/mod.rs"]
#[expect(dead_code, reason = "other tests use the rest")]
mod fake;

struct Tree(tempfile::TempDir);

impl Tree {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn at(&self, path: &str) -> PathBuf {
        let path = self.0.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        path
    }

    fn file(self, path: &str, text: &str) -> Self {
        std::fs::write(self.at(path), text).unwrap();
        self
    }

    fn link(self, path: &str, target: &str) -> Self {
        symlink(target, self.at(path)).unwrap();
        self
    }

    fn look(&self) -> Host {
        Host::look(self.0.path())
    }
}

#[test]
fn an_empty_host_has_nothing_and_is_no_error() {
    let host = Tree::new().look();
    assert_eq!((host.cpus, host.load, &host.memory), (None, None, &Memory::default()));
    assert!(host.nics.is_empty() && host.accelerators.iaa.is_empty());
    assert_eq!(host.accelerators.usable_qat(), 0);
    assert_eq!(host.kernel, Kernel::default());
}

#[test]
fn a_host_is_what_its_files_say() {
    let host = Tree::new()
        .file("proc/cpuinfo", "processor : 0\nmodel name\t: Fast CPU\n")
        .file("sys/devices/system/cpu/online", "0-3,8\n")
        .file("proc/loadavg", "0.50 1.25 2.00 1/99 1234\n")
        .file("proc/meminfo", "MemTotal: 1024 kB\nMemAvailable: 512 kB\nSwapTotal: 0 kB\n")
        .file("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "3\n")
        .file("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "1\n")
        .file("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
        .look();
    assert_eq!(host.processor.as_deref(), Some("Fast CPU"));
    assert_eq!((host.cpus, host.load), (Some(5), Some([0.5, 1.25, 2.0])));
    let memory = &host.memory;
    assert_eq!((memory.total, memory.available), (Some(1 << 20), Some(1 << 19)));
    assert_eq!((memory.huge_pages, memory.huge_pages_free), (6 << 20, 2 << 20));
    assert_eq!(memory.transparent.as_deref(), Some("madvise"));
}

#[test]
fn interfaces_with_a_device_count_and_unknown_speeds_do_not() {
    let tree = Tree::new()
        .file("sys/class/net/eth0/speed", "25000\n")
        .file("sys/class/net/eth0/operstate", "up\n")
        .link("sys/class/net/eth0/device/driver", "../../drivers/mlx5_core")
        .file("sys/class/net/eth1/speed", "-1\n")
        .file("sys/class/net/eth1/operstate", "down\n")
        .file("sys/class/net/eth1/device/vendor", "0x1\n")
        .file("sys/class/net/docker0/speed", "10000\n");
    let nics = tree.look().nics;
    assert_eq!(nics.len(), 2, "{nics:?}");
    assert_eq!((nics[0].speed, nics[0].up), (Some(25_000), true));
    assert_eq!(nics[0].driver.as_deref(), Some("mlx5_core"));
    assert_eq!((nics[1].speed, nics[1].up), (None, false));
}

#[test]
fn features_are_there_or_modules_or_absent() {
    let kernel = Tree::new()
        .file("proc/sys/kernel/osrelease", "6.18.0\n")
        .file("dev/ublk-control", "")
        .file("lib/modules/6.18.0/modules.dep", "kernel/drivers/block/nbd.ko.xz: a.ko\n")
        .file("lib/modules/6.18.0/modules.builtin", "kernel/fs/notfuse.ko\n")
        .look()
        .kernel;
    assert_eq!(kernel.ublk, Feature::Ready);
    assert_eq!((kernel.nbd, kernel.fuse), (Feature::Module, Feature::Absent));
    // A release that leads elsewhere.
    let tree = Tree::new().file("proc/sys/kernel/osrelease", "../../etc\n");
    assert_eq!(tree.look().kernel.release, None);
}

#[test]
fn accelerators_are_found_with_their_drivers() {
    let pci = "sys/bus/pci/devices";
    let tree = Tree::new()
        .file(&format!("{pci}/0000:6a:02.0/vendor"), "0x8086\n")
        .file(&format!("{pci}/0000:6a:02.0/device"), "0x0cfe\n")
        .file(&format!("{pci}/0000:6a:02.0/iax1/state"), "enabled\n")
        .file(&format!("{pci}/0000:6a:02.0/iax1/pasid_enabled"), "1\n")
        .link(&format!("{pci}/0000:6a:02.0/driver"), "../../drivers/idxd")
        .file(&format!("{pci}/0000:6b:00.0/vendor"), "0x8086\n")
        .file(&format!("{pci}/0000:6b:00.0/device"), "0x4940\n")
        .file(&format!("{pci}/0000:00:01.0/vendor"), "0x1af4\n");
    let found = tree.look().accelerators;
    assert_eq!(found.iaa.len(), 1);
    assert_eq!((found.iaa[0].enabled, found.shared_memory()), (Some(true), Some(true)));
    assert_eq!(found.iaa[0].driver.as_deref(), Some("idxd"));
    assert_eq!((found.qat.len(), found.qat[0].part.as_str()), (1, "4xxx"));
    // Its driver and much else are missing.
    assert!(found.usable_qat() == 0 && !found.qat_lacks.is_empty());
}

/// A host with all that QAT needs of the kernel, and an IAA device that is not enabled.
#[test]
fn an_accelerator_counts_only_with_its_library_and_enabled() {
    let pci = "sys/bus/pci/devices";
    let tree = Tree::new()
        .file(&format!("{pci}/0000:6b:00.0/vendor"), "0x8086\n")
        .file(&format!("{pci}/0000:6b:00.0/device"), "0x4940\n")
        .file(&format!("{pci}/0000:6b:00.0/qat/cfg_services"), "dc\n")
        .link(&format!("{pci}/0000:6b:00.0/driver"), "../../drivers/4xxx")
        .file(&format!("{pci}/0000:6b:00.1/vendor"), "0x8086\n")
        .file(&format!("{pci}/0000:6b:00.1/device"), "0x4941\n")
        .link(&format!("{pci}/0000:6b:00.1/driver"), "../../drivers/vfio-pci")
        .file("sys/kernel/iommu_groups/7/type", "DMA\n")
        .file("dev/vfio/vfio", "")
        .file("dev/vfio/7", "")
        .file("proc/self/limits", "Max locked memory unlimited unlimited bytes\n");
    let found = |load: Result<(), String>| Accelerators::look(tree.0.path(), || load);
    assert_eq!(found(Ok(())).usable_qat(), 1);
    let without = found(Err("cannot load libusdm.so.0".into()));
    assert_eq!(without.usable_qat(), 0);
    assert!(without.qat_lacks[0].contains("libusdm.so.0"), "{:?}", without.qat_lacks);

    let one = |address: &str, enabled: Option<bool>| Iaa {
        address: address.into(),
        driver: None,
        enabled,
        shared_memory: None,
    };
    let iaa = vec![one("a", Some(true)), one("b", Some(false)), one("c", None)];
    let found = Accelerators { iaa, ..Accelerators::default() };
    let mut library = fake();
    assert_eq!(found.usable_iaa(None), 0);
    library.hardware = Ok(4096);
    let qpl = qpl::Qpl::open(Arc::new(library), qpl::Options::default()).unwrap();
    assert_eq!(found.usable_iaa(Some(&qpl)), 1);
    let qpl = qpl::Qpl::open(Arc::new(fake()), qpl::Options::default()).unwrap();
    assert_eq!(found.usable_iaa(Some(&qpl)), 0, "in software");
}

#[test]
fn what_is_no_file_is_not_read() {
    let tree = Tree::new().link("proc/loadavg", "/dev/zero");
    std::fs::create_dir_all(tree.at("proc/meminfo/x")).unwrap();
    let host = tree.look();
    assert_eq!((host.load, host.memory.total), (None, None));
}

proptest! {
    /// Whatever the files hold.
    #[test]
    fn garbage_is_no_error(
        bytes in prop::collection::vec(any::<u8>(), 0..200), digits in "[0-9,-]{0,40}",
    ) {
        let tree = Tree::new();
        for path in [
            "proc/cpuinfo", "proc/loadavg", "proc/meminfo", "proc/sys/kernel/osrelease",
            "sys/class/net/e/speed", "sys/class/net/e/device/x",
            "sys/kernel/mm/hugepages/hugepages-9kB/nr_hugepages",
            "sys/bus/pci/devices/a/vendor", "sys/bus/pci/devices/a/device",
        ] {
            std::fs::write(tree.at(path), &bytes).unwrap();
        }
        let tree = tree
            .file("sys/devices/system/cpu/online", &digits)
            .file("sys/kernel/mm/hugepages/hugepages-99999999999999999kB/nr_hugepages", &digits);
        tree.look();
    }
}
