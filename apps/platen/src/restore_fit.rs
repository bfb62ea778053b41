//! Checks whether an image fits the QEMU that waits for it, before anything is changed.

use anyhow::bail;
use image::Image;
use qmp::{Qmp, QmpError};
use serde_json::{json, Value};
use std::path::Path;

/// QEMU's machine type, if it differs from the image's.
pub(crate) fn machine_differs(qmp: &mut Qmp, image: &Image) -> Result<Option<String>, QmpError> {
    let Some(saved) = image.state().machine() else { return Ok(None) };
    let kind = get(qmp, "/machine", "type")?;
    let kind = kind.as_str().unwrap_or_default();
    let here = kind.strip_suffix("-machine").unwrap_or(kind);
    Ok((!here.is_empty() && saved != here).then(|| here.to_owned()))
}

/// A RAM block whose length differs from the image's, its length in the image, and its length here,
/// bytes. QEMU would end when it reads the block table.
pub(crate) fn ram_differs(
    qmp: &mut Qmp,
    image: &Image,
) -> Result<Option<(String, u64, u64)>, QmpError> {
    let backends = qmp.execute("query-memdev", None)?;
    for backend in backends.as_array().into_iter().flatten() {
        let (Some(id), Some(here)) = (backend["id"].as_str(), backend["size"].as_u64()) else {
            continue;
        };
        let is_of_it = |name: &str| name == id || name.strip_prefix("/objects/") == Some(id);
        let Some(block) = image.index().blocks.iter().find(|block| is_of_it(&block.name)) else {
            continue;
        };
        let page = image.shape().page_size() as u64;
        let saved = block.pages * page;
        if differ(saved, here, page.max(rustix::param::page_size() as u64)) {
            return Ok(Some((block.name.escape_default().to_string(), saved, here)));
        }
    }
    Ok(None)
}

/// Whether two lengths differ, bytes. QEMU rounds both up to the host's pages.
fn differ(saved: u64, here: u64, page: u64) -> bool {
    saved.next_multiple_of(page) != here.next_multiple_of(page)
}

/// Whether the VM was paused when it was saved.
pub(crate) fn was_paused(image: &Image) -> bool {
    was_running(image) == Some(false)
}

/// Whether the VM ran when it was saved, and the device state says otherwise: libvirt pauses a VM
/// before QEMU saves it.
pub(crate) fn is_paused_by_its_state_alone(image: &Image) -> bool {
    let is_paused = image.state().run_state().is_some_and(|state| state != "running");
    was_running(image) == Some(true) && is_paused
}

fn was_running(image: &Image) -> Option<bool> {
    let facts: Value = serde_json::from_slice(&image.state().facts).unwrap_or_default();
    facts["running"].as_bool()
}

/// The possible reason why a VM in this state is paused though it ran when it was saved. QEMU does
/// not report the reason on its monitor.
pub(crate) fn why_paused(state: &str, image: &Image) -> Option<&'static str> {
    (state == "paused" && !was_paused(image)).then_some(
        "the VM is paused: its QEMU was started with -S, or could not take a disk, for example because another VM \
         writes to it (see QEMU's log). cont resumes the VM, or names the reason",
    )
}

/// The reason why the image itself cannot be loaded while the VM runs.
pub(crate) fn image_not_instant(image: &Image) -> Option<String> {
    let size = image.shape().page_size();
    if size != 4096 {
        return Some(format!("the guest has pages of {size} bytes"));
    }
    let block = image.index().blocks.iter().find(|block| block.host_page > 4096)?;
    Some(format!("RAM block {} has huge pages", block.name.escape_default()))
}

/// The reason why RAM cannot be loaded while the VM runs; `None` if no reason is known. (QEMU
/// itself refuses the capability if its host does not provide userfaultfd.)
pub(crate) fn why_not_instant(qmp: &mut Qmp, image: &Image) -> Result<Option<String>, QmpError> {
    if let Some(reason) = image_not_instant(image) {
        return Ok(Some(reason));
    }
    let backends = qmp.execute("query-memdev", None)?;
    for backend in backends.as_array().into_iter().flatten() {
        let Some(id) = backend["id"].as_str() else { continue };
        let path = format!("/objects/{id}");
        match get(qmp, &path, "type")?.as_str() {
            Some("memory-backend-file") => {
                return Ok(Some(format!(
                    "memory backend {id} is a file, and postcopy needs memory of QEMU's own"
                )));
            }
            Some("memory-backend-memfd") if get(qmp, &path, "hugetlb")? == true => {
                return Ok(Some(format!("memory backend {id} has huge pages")));
            }
            _ => {}
        }
    }
    Ok(None)
}

/// Whether QEMU has allocated RAM in advance, and discarding it would undo that.
pub(crate) fn is_preallocated(qmp: &mut Qmp) -> Result<bool, QmpError> {
    let backends = qmp.execute("query-memdev", None)?;
    let backends = backends.as_array();
    Ok(backends.is_none_or(|all| all.iter().any(|backend| backend["prealloc"] != false)))
}

/// Name of the socket at which QEMU listens for player number `nth` of this image. QEMU reports the
/// sockets on which it has listened, so `restore --recover` can tell which image its VM comes from.
pub(crate) fn socket_name(image: &Image, nth: u32) -> String {
    format!("{}{nth}.sock", socket_prefix(image))
}

fn socket_prefix(image: &Image) -> String {
    format!("{:016x}-", image.identity() >> 64)
}

/// Refuses to continue a VM that was restored from another image: it would get wrong pages.
pub(crate) fn refuse_another_image(qmp: &mut Qmp, image: &Image) -> anyhow::Result<()> {
    let info = qmp.execute("query-migrate", None)?;
    if info["status"] == "completed" {
        bail!("this VM has all of its RAM: there is nothing to recover");
    }
    let sockets = info["socket-address"].as_array();
    let mut names = sockets
        .into_iter()
        .flatten()
        .filter_map(|address| Path::new(address["path"].as_str()?).file_name()?.to_str());
    let prefix = socket_prefix(image);
    if names.any(|name| name.starts_with(&prefix)) {
        return Ok(());
    }
    bail!(
        "the VM at this QEMU was not restored from this image by platen (QEMU has listened on {}): give the image \
         that it was restored from, or a copy",
        info["socket-address"]
    )
}

/// Reads a property of a QOM object; null if QEMU refuses.
pub(crate) fn get(qmp: &mut Qmp, path: &str, property: &str) -> Result<Value, QmpError> {
    let arguments = json!({ "path": path, "property": property });
    match qmp.execute("qom-get", Some(arguments)) {
        Err(QmpError::Refused { .. }) => Ok(Value::Null),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_compared_in_whole_pages_of_the_host() {
        // -m in KiB: a backend of 100,001 KiB has 25,001 pages.
        assert!(!differ(25_001 << 12, 100_001 << 10, 4096));
        // Saved on a host with smaller pages.
        assert!(!differ(25_001 << 12, 100_001 << 10, 65_536));
        assert!(differ(16 << 20, (16 << 20) + 1, 4096));
        assert!(differ(16 << 20, 24 << 20, 4096));
    }
}
