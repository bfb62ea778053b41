//! A disk that returns EIO for parts of an image.

use super::hung::with_held;
use super::*;

use seccompiler::{
    apply_filter, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule,
};
use std::ops::Range;

/// Runs `work` on a thread for which, and for whose processes, reads at these offsets of any file
/// fail with EIO. The kernel's filter cannot tell files apart.
fn with_bad_disk<T: Send>(offsets: Range<u64>, work: impl FnOnce() -> T + Send) -> T {
    let offset = |operator, value| {
        SeccompCondition::new(3, SeccompCmpArgLen::Qword, operator, value).unwrap()
    };
    let bad = vec![offset(SeccompCmpOp::Ge, offsets.start), offset(SeccompCmpOp::Lt, offsets.end)];
    let rules = [(libc::SYS_pread64, vec![SeccompRule::new(bad).unwrap()])];
    let eio = SeccompAction::Errno(u32::try_from(libc::EIO).unwrap());
    let here = std::env::consts::ARCH.try_into().unwrap();
    let rules = rules.into_iter().collect();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, eio, here).unwrap();
    let filter: BpfProgram = filter.try_into().unwrap();
    let filtered = || {
        apply_filter(&filter).unwrap();
        work()
    };
    thread::scope(|scope| scope.spawn(filtered).join().unwrap())
}

/// The offsets of all units of an image but the first `sound` ones, by its index.
fn units(image: &str, sound: usize) -> Range<u64> {
    let image = image::Image::open(Path::new(image)).unwrap();
    let units = &image.index().units;
    let last = units.last().unwrap();
    units[sound].offset..last.offset + u64::from(last.len)
}

const ERRNO: &str = "Input/output error (os error 5)";

#[test]
fn a_disk_that_fails_before_the_vm_runs_is_named_and_nothing_runs() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, image)) = saved_paused(folder) else { return };
    drop(source);
    let bad = units(&image, 1);
    let first = bad.start;
    let waits = |name| Qemu::start(folder, name, &[&MACHINE[..], &WAITS].concat()).unwrap();
    for (name, flag) in [("loads", "--load"), ("verifies", "--verify")] {
        let waiting = waits(name);
        let words = ["restore", &image, "--qmp", &waiting.address(), flag];
        let (output, report) = with_bad_disk(bad.clone(), || platen(folder, &words));
        let text = said(&output);
        let named = format!("image {image}: cannot read unit 1 at byte {first}: {ERRNO}");
        assert!(!output.status.success() && text.contains(&named), "{flag}: {text}");
        if flag == "--verify" {
            assert_eq!(waiting.monitor().query_status().unwrap().status, "inmigrate");
        } else {
            assert_eq!(report["status"], "failed");
        }
    }
}

/// The disk fails once the VM may run: QEMU gets nothing of what could not be read, and waits. With
/// a disk that works again the VM gets all of its memory, each byte as it was saved.
#[test]
fn a_vm_waits_for_what_the_disk_does_not_return_and_goes_on_later() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, image)) = saved_paused(folder) else { return };
    drop(source);
    let expected = block(&image, "pc.ram");
    let bad = units(&image, 1);
    let first = bad.start;
    // A player whose disk fails before QEMU has obeyed RUN ends QEMU. After the first unit the
    // background waits for longer each time, so that some attempt comes late enough.
    for (nth, rate) in ["65536", "16384", "4096", "512"].into_iter().enumerate() {
        let waiting =
            Qemu::start(folder, &format!("waits{nth}"), &[&MACHINE[..], &WAITS].concat()).unwrap();
        let words = ["restore", &image, "--qmp", &waiting.address(), "--push-rate", rate];
        let (output, report) = with_bad_disk(bad.clone(), || platen(folder, &words));
        let text = said(&output);
        let named = format!("image {image}: cannot read unit ");
        assert!(!output.status.success() && text.contains(&named), "{text}");
        assert!(text.contains(ERRNO), "{text}");
        assert_eq!(report["status"], "failed");
        let not_run = ["before the VM ran", "has ended", "the VM may have run"];
        if not_run.iter().any(|words| text.contains(words)) {
            println!("{rate} bytes a second were too fast: {text}");
            continue;
        }
        assert!(text.contains(&format!("cannot read unit 1 at byte {first}: ")), "{text}");
        assert!(text.contains("The VM waits for the pages that it lacks"), "{text}");
        assert!(text.contains("--recover"), "{text}");
        waiting.wait_paused();
        assert_eq!(killed::migration(&waiting), "postcopy-paused");
        // As long as the disk fails, another attempt changes nothing.
        let again = ["restore", &image, "--qmp", &waiting.address(), "--recover"];
        let (output, _) = with_bad_disk(bad.clone(), || platen(folder, &again));
        assert!(!output.status.success() && said(&output).contains(ERRNO), "{}", said(&output));
        works(folder, &again);
        let saved = folder.join("saved").display().to_string();
        works(folder, &["save", &saved, "--qmp", &waiting.address(), "--then", "quit"]);
        assert!(block(&saved, "pc.ram") == expected);
        return;
    }
    panic!("the disk failed before the VM ran, in every attempt");
}

/// Runs `work` on a thread for which, and for whose processes, no file can be made durable, as on a
/// disk or a server that notices late that it has no room.
fn with_full_disk_at_fsync<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let rules = [(libc::SYS_fsync, Vec::new())];
    let edquot = SeccompAction::Errno(u32::try_from(libc::EDQUOT).unwrap());
    let here = std::env::consts::ARCH.try_into().unwrap();
    let rules = rules.into_iter().collect();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, edquot, here).unwrap();
    let filter: BpfProgram = filter.try_into().unwrap();
    let filtered = || {
        apply_filter(&filter).unwrap();
        work()
    };
    thread::scope(|scope| scope.spawn(filtered).join().unwrap())
}

/// A file that lacks pages would load as a VM with zeros in their place.
#[test]
fn a_disk_that_is_full_at_the_end_is_noticed_and_no_file_stays() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, image)) = saved(folder) else { return };
    let file = folder.join("file").display().to_string();
    for flag in [&["--mapped-ram"][..], &[]] {
        let words = [&["image", "export", &image, &file][..], flag].concat();
        let (output, _) = with_full_disk_at_fsync(|| platen(folder, &words));
        let text = said(&output);
        assert!(!output.status.success() && text.contains("quota"), "{flag:?}: {text}");
        assert!(!Path::new(&file).exists(), "{flag:?}");
        works(folder, &words);
        fs::remove_file(&file).unwrap();
    }
    // The output is a file here.
    let mut export = Command::new(env!("CARGO_BIN_EXE_platen"));
    export.args(["image", "export", &image, "-"]).stdout(File::create(&file).unwrap());
    assert!(!with_full_disk_at_fsync(|| export.status().unwrap()).success());
    for then in ["continue", "pause", "quit"] {
        let words = ["save", &file, "--qmp", &source.address(), "--then", then];
        fs::remove_file(&file).unwrap_or_default();
        let (output, report) = with_full_disk_at_fsync(|| platen(folder, &words));
        let text = said(&output);
        assert!(!output.status.success() && text.contains("no image was made"), "{then}: {text}");
        assert_eq!(report["status"], "failed", "{then}");
        assert!(!Path::new(&file).exists(), "{then}");
        comes_to(&source, &["running"]);
    }
}

/// Regression: an export that was killed left a part of the file at its name. libvirt's head, which
/// comes first, says that the file is complete.
#[test]
fn an_export_that_is_killed_leaves_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some((source, image)) = saved(folder) else { return };
    drop(source);
    let xml = folder.join("xml");
    fs::write(
        &xml,
        "<domain><name>vm</name><uuid>00000000-0000-4000-8000-000000000001</uuid></domain>",
    )
    .unwrap();
    let out = folder.join("exported");
    fs::create_dir(&out).unwrap();
    let xml = xml.to_str().unwrap();
    for flags in [&[][..], &["--libvirt", xml], &["--mapped-ram"]] {
        let mut export = Command::new(env!("CARGO_BIN_EXE_platen"));
        export.args(["image", "export", &image]).arg(out.join("file")).args(flags);
        export.stderr(Stdio::null());
        let calls = vec![(libc::SYS_fsync, Vec::new())];
        let (mut export, hung) = with_held(calls, || export.spawn().unwrap());
        assert!(hung.wait(), "{flags:?}: the file is not made durable");
        export.kill().unwrap();
        export.wait().unwrap();
        drop(hung);
        assert!(!out.join("file").exists(), "{flags:?}");
    }
}
