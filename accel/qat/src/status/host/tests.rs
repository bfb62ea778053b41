use super::*;
use std::os::unix::fs::symlink;

/// A made-up tree of files.
struct Tree(tempfile::TempDir);

impl Tree {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn file(self, path: &str, contents: &str) -> Self {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, contents).unwrap();
        self
    }

    fn function(self, address: &str, device: &str, driver: Option<&str>) -> Self {
        let folder = format!("sys/bus/pci/devices/{address}");
        let tree = self.file(&format!("{folder}/vendor"), "0x8086\n");
        let tree = tree.file(&format!("{folder}/device"), &format!("{device}\n"));
        if let Some(driver) = driver {
            let link = tree.0.path().join(folder).join("driver");
            symlink(format!("../../../bus/pci/drivers/{driver}"), link).unwrap();
        }
        tree
    }

    fn working(self) -> Self {
        self.function("0000:6b:00.0", "0x4940", Some("4xxx"))
            .function("0000:6b:00.1", "0x4941", Some("vfio-pci"))
            .file("sys/bus/pci/devices/0000:6b:00.0/sriov_numvfs", "16\n")
            .file("sys/bus/pci/devices/0000:6b:00.0/qat/cfg_services", "dc\n")
            .file("sys/kernel/iommu_groups/7/type", "DMA\n")
            .file("dev/vfio/vfio", "")
            .file("dev/vfio/7", "")
            .file(
                "proc/self/limits",
                "Limit Soft Hard Units\nMax locked memory         unlimited            unlimited            bytes\n",
            )
    }

    fn missing(&self) -> Vec<String> {
        Host::look(self.0.path()).missing().into_iter().map(|missing| missing.what).collect()
    }
}

#[test]
fn a_working_host_lacks_no_step() {
    let tree = Tree::new().working();
    assert_eq!(tree.missing(), Vec::<String>::new());
    let host = Host::look(tree.0.path());
    assert_eq!(host.functions[0].virtual_functions, Some(16));
    assert_eq!(host.functions[1].driver.as_deref(), Some("vfio-pci"));
    assert!(!host.functions[0].is_virtual && host.functions[1].is_virtual);
    assert_eq!((host.vfio, host.vfio_groups, host.vfio_usable), (true, 1, 1));
}

#[test]
fn a_host_without_a_device_lacks_only_the_device() {
    let tree = Tree::new().function("0000:00:00.0", "0x1237", None);
    assert_eq!(tree.missing(), ["a QAT device on PCI"]);
}

#[test]
fn an_older_device_is_recognised() {
    let missing = Tree::new().function("0000:1a:00.0", "0x37c8", Some("c6xx")).missing();
    assert_eq!(missing, ["a device that qatlib drives (found c62x)"]);
}

#[test]
fn each_step_of_the_set_up_is_named_until_it_is_done() {
    let tree = Tree::new()
        .function("0000:6b:00.0", "0x4944", None)
        .file("sys/bus/pci/devices/0000:6b:00.0/qat/cfg_services", "sym;asym\n")
        .file(
            "proc/self/limits",
            "Max locked memory         8388608              8388608              bytes\n",
        );
    let missing = tree.missing().join("\n");
    for part in [
        "a driver for 0000:6b:00.0 (402xx)",
        "sym;asym",
        "IOMMU",
        "virtual functions",
        "/dev/vfio",
        "8192 KiB",
    ] {
        assert!(missing.contains(part), "{part} not in:\n{missing}");
    }
    let tree = tree.function("0000:6b:00.1", "0x4945", Some("qat_vfio_pci"));
    assert!(tree.missing().join("\n").contains("bound to vfio-pci"));
}

#[test]
fn telemetry_is_read_and_values_that_are_no_numbers_are_omitted() {
    let tree = Tree::new().file(
        "sys/kernel/debug/qat_4xxx_0000:6b:00.0/telemetry/device_data",
        "sample_cnt 54\nutil_cpr0 97\nlat_acc_avg 593\nbroken\nutil_cpr1 x\n",
    );
    let host = Host::look(tree.0.path());
    let data = &host.telemetry["qat_4xxx_0000:6b:00.0"];
    assert_eq!(
        data.iter().map(|(name, &value)| (name.as_str(), value)).collect::<Vec<_>>(),
        [("lat_acc_avg", 593), ("sample_cnt", 54), ("util_cpr0", 97)]
    );
}
