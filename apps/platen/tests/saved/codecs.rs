//! Saves with `--codec auto`, and with a simulated QAT device.

use super::*;

/// The report of a save with a simulated QAT device.
fn saved_with_a_device(folder: &Path, words: &[&str]) -> Value {
    let json = folder.join("report");
    let output = Command::new(env!("CARGO_BIN_EXE_platen"))
        .args(["qat", "sim", "--libraries"])
        .arg(qat_sim::libraries())
        .arg("--")
        .arg(env!("CARGO_BIN_EXE_platen"))
        .args(words)
        .arg("--json")
        .arg(&json)
        .output()
        .unwrap();
    assert!(output.status.success(), "{words:?}: {}", said(&output));
    serde_json::from_str(&fs::read_to_string(&json).unwrap()).unwrap()
}

#[test]
fn a_vm_saved_with_adapted_levels_or_by_a_device_is_restored() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some(source) = Qemu::start(folder, "source", &MACHINE) else { return };
    for (name, flags) in [
        ("auto", &["--codec", "auto"][..]),
        ("device", &["--codec", "qatzip", "--accelerator", "qat"]),
    ] {
        let image = folder.join(name).display().to_string();
        let address = source.address();
        let words = [&["save", &image, "--qmp", &address][..], flags].concat();
        // A unit that waits 100 ms for the device is compressed in software: on a busy machine that
        // may be all of them.
        let deadline = Instant::now() + LONG;
        loop {
            let report = saved_with_a_device(folder, &words);
            let counts = report["accelerators"].as_array().unwrap();
            let by_device: u64 = counts.iter().filter_map(|of| of["by_device"].as_u64()).sum();
            if (by_device > 0) == (name == "device") {
                assert!(report["stopped-ms"].is_u64(), "{report}");
                break;
            }
            assert!(name == "device" && Instant::now() < deadline, "{report}");
            fs::remove_file(&image).unwrap();
        }
        assert!(works(folder, &["image", "verify", &image]).0.contains("sound"));
        let waiting =
            Qemu::start(folder, &format!("{name}-waits"), &[&MACHINE[..], &WAITS].concat());
        let words = ["restore", &image, "--qmp", &waiting.as_ref().unwrap().address()];
        let (_, report) = works(folder, &words);
        assert_eq!((&report["mode"], &report["vm"]), (&json!("instant"), &json!("running")));
    }
    let image = folder.join("none").display().to_string();
    let words = ["save", &image, "--qmp", &source.address(), "--codec", "auto"];
    fails(folder, &[&words[..], &["--accelerator", "qat"]].concat(), "goes with --codec qatzip");
    let words = ["save", &image, "--qmp", &source.address(), "--codec", "qpl"];
    fails(folder, &words, "is for migrations");
}

/// Nothing but this ends such a save: the unit never comes back from its thread.
#[test]
fn a_save_whose_device_hangs_ends_with_its_cause_and_the_vm_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some(source) = Qemu::start(folder, "source", &MACHINE) else { return };
    let before = settings(&source);
    let image = folder.join("image").display().to_string();
    // Each call hangs for 10 s; the one that takes the CPU as long is left to `make proof`.
    let most = if std::env::var_os("PLATEN_QUICK").is_some() { 3 } else { 4 };
    for (script, call, flags) in [
        ("now block start", "cpaDcStartInstance", &[][..]),
        ("at 1 block submit", "cpaDcCompressData2", &[]),
        ("at 5 block poll", "icp_sal_DcPollInstance", &["--snapshot"]),
        ("at 5 spin submit", "cpaDcCompressData2", &["--then", "pause"]),
    ]
    .into_iter()
    .take(most)
    {
        let output = Command::new(env!("CARGO_BIN_EXE_platen"))
            .args(["save", &image, "--qmp", &source.address(), "--codec", "qatzip"])
            .args(["--accelerator", "qat", "--compress-threads", "1"])
            .arg("--qat-libraries")
            .arg(qat_sim::libraries())
            .args(flags)
            .env("PLATEN_QAT_SIM", format!("instances 1; {script}"))
            .output()
            .unwrap();
        let said = said(&output);
        assert_eq!(output.status.code(), Some(1), "{script}: {said}");
        assert!(said.contains("has not returned for") && said.contains(call), "{script}: {said}");
        assert!(said.contains("--accelerator none"), "{script}: {said}");
        assert!(!Path::new(&image).exists(), "{script}: {said}");
        assert_eq!(comes_to(&source, &["running"]), "running", "{script}: {said}");
        settings_come_back(&source, &before);
    }
    let words = ["save", &image, "--qmp", &source.address()];
    let (_, report) = works(folder, &words);
    assert_eq!(report["status"], json!("completed"));
}
