//! A disk that does not answer while a VM is restored from it.

use super::hung::{with_held, Hung};
use super::*;

use seccompiler::{SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompRule};

/// Runs `work` on a thread for which, and for whose processes, the reads of a unit wait, in the
/// image as in its copies. The kernel's filter cannot tell files apart.
fn with_held_unit<T: Send>(offset: u64, work: impl FnOnce() -> T + Send) -> (T, Hung) {
    let at = SeccompCondition::new(3, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, offset).unwrap();
    with_held(vec![(libc::SYS_pread64, vec![SeccompRule::new(vec![at]).unwrap()])], work)
}

/// Number and offset of the last unit with pages of the guest's RAM, and the address of one of
/// them.
fn last_of_ram(image: &str) -> (u64, u64, u64) {
    let image = image::Image::open(Path::new(image)).unwrap();
    let ram = image.index().blocks.iter().find(|block| block.name == "pc.ram").unwrap();
    let slots = ram.extents.iter().filter_map(|extent| match extent.content {
        image::Content::Slot(slot) => {
            Some((slot + extent.pages - 1, extent.first + extent.pages - 1))
        }
        _ => None,
    });
    let (slot, page) = slots.max().unwrap();
    let unit = slot / image.shape().unit_pages();
    (unit, image.index().units[usize::try_from(unit).unwrap()].offset, page * 4096)
}

/// A paused VM of which most of the RAM has data, and its image.
fn saved_with_data(folder: &Path) -> Option<(Vec<String>, String)> {
    let filler = folder.join("filler");
    let mut state = 1_u64;
    let bytes = std::iter::repeat_with(|| {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (state >> 56) as u8
    });
    fs::write(&filler, bytes.take(12 << 20).collect::<Vec<u8>>()).unwrap();
    let loads = format!("loader,file={},addr=0x200000,force-raw=on", filler.display());
    let machine = [&MACHINE[..], &["-device", &loads]].concat();
    let source = Qemu::start(folder, "source", &machine)?;
    source.stop();
    let source = source.save(folder, "paused");
    drop(source);
    let machine = machine.iter().chain(&WAITS).map(|&word| word.to_owned()).collect();
    Some((machine, folder.join("image").display().to_string()))
}

fn waiting(folder: &Path, name: &str, machine: &[String]) -> Qemu {
    let words: Vec<&str> = machine.iter().map(String::as_str).collect();
    Qemu::start(folder, name, &words).unwrap()
}

/// QEMU reads a byte of the guest's RAM, as a device may, and waits for its page. Until then it
/// answers no other command of this monitor.
fn read_byte(qemu: &Qemu, address: u64, to: &Path) {
    let mut monitor = Qmp::connect(&second_monitor(&qemu.socket), LONG).unwrap();
    let filename = to.display().to_string();
    let what = json!({ "val": address, "size": 1, "filename": filename });
    monitor.execute("pmemsave", Some(what)).unwrap();
}

/// Regression: nothing was printed, for ever.
#[test]
fn a_disk_that_does_not_answer_is_reported_and_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((machine, image)) = saved_with_data(folder) else { return };
    let (unit, offset, address) = last_of_ram(&image);
    let named = format!("image {image}: unit {unit} at byte {offset} has not been read for 1");
    let answers = format!("image {image}: the read of unit {unit} at byte {offset} has returned");

    let qemu = waiting(folder, "at-once", &machine);
    // With one thread few units are read ahead.
    let (mut restore, hung) =
        with_held_unit(offset, || Restore::held(&image, &qemu, &["--decompress-threads", "1"]));
    thread::scope(|scope| {
        let reads = scope.spawn(|| read_byte(&qemu, address, &folder.join("byte")));
        restore.wait_for(&named);
        hung.pass();
        restore.wait_for(&answers);
        reads.join().unwrap();
    });
    let player = restore.player();
    drop(restore);
    kill(player, &image);
    works(folder, &["restore", &image, "--qmp", &qemu.address(), "--recover"]);
    clones::has_ram_of(folder, &qemu, &image);

    let qemu = waiting(folder, "load", &machine);
    let load = || {
        let mut restore = Command::new(env!("CARGO_BIN_EXE_platen"));
        restore.args(["restore", &image, "--qmp", &qemu.address(), "--load"]);
        restore.stderr(Stdio::piped()).spawn().unwrap()
    };
    let (mut child, hung) = with_held_unit(offset, load);
    let lines = std::io::BufReader::new(child.stderr.take().unwrap());
    let mut restore = Restore { child, lines, text: String::new() };
    restore.wait_for(&named);
    hung.pass();
    restore.wait_for("loaded in");
    assert!(restore.child.wait().unwrap().success());
    clones::has_ram_of(folder, &qemu, &image);
}

/// Regression: `export` and `verify` waited and printed nothing.
#[test]
fn a_disk_that_does_not_answer_is_reported_by_the_commands_for_images() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((_, image)) = saved_with_data(folder) else { return };
    let (unit, offset, _) = last_of_ram(&image);
    let part = format!("unit {unit} at byte {offset}");
    let stream = folder.join("stream").display().to_string();
    for words in [&["verify", &image][..], &["export", &image, &stream]] {
        let reads = || {
            let mut command = Command::new(env!("CARGO_BIN_EXE_platen"));
            command.arg("image").args(words).stdout(Stdio::null()).stderr(Stdio::piped());
            command.spawn().unwrap()
        };
        let (mut child, hung) = with_held_unit(offset, reads);
        let lines = std::io::BufReader::new(child.stderr.take().unwrap());
        let mut command = Restore { child, lines, text: String::new() };
        command.wait_for(&format!("{part} has not been read for 1"));
        assert!(command.text.contains("; this command waits, and goes on"), "{}", command.text);
        hung.pass();
        assert!(command.child.wait().unwrap().success());
    }
}

/// An operator can make QEMU leave a player that nobody can end.
#[test]
fn a_vm_can_be_made_to_leave_a_player_whose_disk_does_not_answer() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((machine, image)) = saved_with_data(folder) else { return };
    let copy = folder.join("copy").display().to_string();
    fs::copy(&image, &copy).unwrap();
    // One of those that are read ahead.
    let offset = image::Image::open(Path::new(&image)).unwrap().index().units[2].offset;
    let qemu = waiting(folder, "waits", &machine);
    let flags = ["--decompress-threads", "1"];
    let (mut restore, hung) = with_held_unit(offset, || Restore::held(&image, &qemu, &flags));
    restore.wait_for(&format!("image {image}: unit 2 at byte {offset} has not been read"));
    let player = restore.player();
    drop(restore);
    let mut monitor = Qmp::connect_out_of_band(&qemu.socket, LONG).unwrap();
    monitor.execute_out_of_band("migrate-pause", None).unwrap();
    drop(monitor);
    assert!(Path::new(&format!("/proc/{player}")).exists());
    works(folder, &["restore", &copy, "--qmp", &qemu.address(), "--recover"]);
    drop(hung);
    clones::has_ram_of(folder, &qemu, &copy);
}
