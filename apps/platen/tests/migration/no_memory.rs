//! A QAT device for whose requests this process may not lock enough memory.

use super::hung::{relay, simulated};
use super::hung_end::{import, to_import};
use super::*;

/// Less than a slot.
const SHORT: &str = "usdm 64K; instances 1";

/// The user has asked for the device: software would take its place without a word.
fn is_refused(process: Platen) {
    let (status, said) = process.ends();
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("no codec thread can use the QAT device"), "{said}");
    assert!(said.contains("no pinned memory") && said.contains("memlock"), "{said}");
}

#[test]
fn a_required_device_without_memory_is_refused_by_the_source() {
    let rig = Rig::new("");
    is_refused(relay(&rig, SHORT, "qat"));
}

#[test]
fn a_required_device_without_memory_is_refused_by_the_receiver() {
    let folder = tempfile::tempdir().unwrap();
    let (deliver, libraries) = (unix(&folder.path().join("dst")), path(&qat_sim::libraries()));
    is_refused(Platen::start(
        &simulated(SHORT),
        &["receive", "--insecure", "--listen", "127.80.76.3:0", "--deliver", &deliver]
            .into_iter()
            .chain(["--accelerator", "qat", "--qat-libraries", &libraries])
            .collect::<Vec<_>>(),
    ));
}

#[test]
fn a_required_device_without_memory_is_refused_by_an_import_which_leaves_no_image() {
    let folder = tempfile::tempdir().unwrap();
    let paths = to_import(folder.path());
    is_refused(import(&paths, "usdm 64K"));
    assert!(!Path::new(&paths[1]).exists());
}

/// With `auto` software does the work, and the reason is printed.
#[test]
fn a_device_without_memory_is_named_where_software_may_take_its_place() {
    let rig = Rig::new("");
    let mut relay = relay(&rig, SHORT, "auto");
    let words = relay.says("no pinned memory");
    assert!(words.contains("memlock"), "{words}");
    relay.says("listening on");
}
