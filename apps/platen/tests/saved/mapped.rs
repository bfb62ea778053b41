//! QEMU's mapped-ram files, from and to images, with the QEMU 10 that `scripts/fetch-qemu 10` has
//! unpacked.

use super::*;

/// The RAM of these VMs: more than the blocks whose zero pages an export marks as stored. Not a
/// multiple of 256 KiB: QEMU before 9.0 under TCG then loses a guest's writes.
pub(super) const RAM: u64 = (100 << 20) + (128 << 10);

/// The QEMU of this major version that `scripts/fetch-qemu` has fetched; `None` where it is
/// missing. `make test` fetches 10, `make proof` also 11, unless the user does without it.
pub(super) fn fetched(version: u32) -> Option<String> {
    let qemu = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join(format!("../../target/qemu{version}/qemu-system-x86_64"))
        .canonicalize();
    match qemu {
        Ok(qemu) => Some(qemu.to_str().unwrap().to_owned()),
        Err(error) => {
            let left_out = std::env::var(format!("PLATEN_SKIP_QEMU{version}"));
            let text = format!("scripts/fetch-qemu {version} has fetched no QEMU: {error}");
            assert!(left_out.is_ok_and(|set| set == "1") || !is_set_up(version == 10), "{text}");
            println!("skipped: {text}");
            None
        }
    }
}

/// Starts a VM of QEMU 10; `None` where it is missing.
fn start(folder: &Path, name: &str, extra: &[&str]) -> Option<Qemu> {
    Qemu::start_of(&fetched(10)?, folder, name, &[&MACHINE[..], extra].concat())
}

/// Starts a VM of QEMU 10 as [`start_busy_of`] does; `None` where it is missing.
fn start_busy(folder: &Path) -> Option<Qemu> {
    start_busy_of(&fetched(10)?, folder)
}

/// Starts a VM whose guest writes to 111 pages from 0x20000 on for ever, in each second round zero.
/// It has pages of each kind from 64 MiB on.
pub(super) fn start_busy_of(program: &str, folder: &Path) -> Option<Qemu> {
    // mov bx, 0x2000; next: mov es, bx; inc ax; mov cx, ax; and cx, 1; neg cx; and cx, ax;
    // mov es:[0], cx; add bx, 0x100; cmp bx, 0x8f00; jb next; jmp to the beginning
    let code = b"\xbb\x00\x20\x8e\xc3\x40\x89\xc1\x83\xe1\x01\xf7\xd9\x21\xc1\x26\x89\x0e\0\0\
        \x81\xc3\x00\x01\x81\xfb\x00\x8f\x72\xe5\xeb\xe0";
    let mut disk = vec![0; 1_474_560];
    disk[..code.len()].copy_from_slice(code);
    disk[510..512].copy_from_slice(b"\x55\xaa");
    fs::write(folder.join("disk"), disk).unwrap();
    let page = |nth: u64| match nth % 4 {
        0 => vec![0; 4096],
        1 => (nth | 1 << 40).to_le_bytes().repeat(512),
        _ => (0..512).flat_map(|at| (nth * 1_000_003 + at * at).to_le_bytes()).collect(),
    };
    fs::write(folder.join("data"), (0..700).flat_map(page).collect::<Vec<u8>>()).unwrap();
    let data = folder.join("data").display().to_string();
    let data = format!("loader,file={data},addr=0x4000000,force-raw=on");
    let machine = machine(folder);
    let flags: Vec<&str> = machine.iter().map(String::as_str).chain(["-device", &data]).collect();
    let qemu = Qemu::start_of(program, folder, "busy", &[&MACHINE[..], &flags].concat())?;
    let deadline = Instant::now() + LONG;
    while memory(folder, &qemu, 0x8e000, 4096).iter().all(|&byte| byte == 0) {
        assert!(Instant::now() < deadline, "the guest does not run");
        thread::sleep(Duration::from_millis(20));
    }
    Some(qemu)
}

/// The options of both ends.
fn machine(folder: &Path) -> Vec<String> {
    let disk = folder.join("disk").display().to_string();
    let disk = format!("if=floppy,format=raw,readonly=on,file={disk}");
    ["-m", &format!("{}K", RAM >> 10), "-drive", &disk].map(str::to_owned).to_vec()
}

/// A part of the guest's memory.
pub(super) fn memory(folder: &Path, qemu: &Qemu, first: u64, len: u64) -> Vec<u8> {
    let file = folder.join("memory");
    let arguments = json!({ "val": first, "size": len, "filename": file });
    qemu.monitor().execute("pmemsave", Some(arguments)).unwrap();
    fs::read(file).unwrap()
}

/// Sets mapped-ram, and multifd with so many channels.
fn set(qemu: &Qemu, channels: u64) {
    let mut monitor = qemu.monitor();
    monitor.set_capabilities(&[("mapped-ram", true), ("multifd", channels > 0)]).unwrap();
    monitor.set_parameters(json!({ "multifd-channels": channels.max(1) })).unwrap();
}

/// Saves the VM in a mapped-ram file.
fn save(qemu: &Qemu, file: &str, channels: u64) {
    set(qemu, channels);
    qemu.monitor().migrate(&format!("file:{file}")).unwrap();
    completes(qemu);
}

/// Loads a mapped-ram file into a new VM, which stays paused.
fn load(folder: &Path, name: &str, flags: &[&str], file: &str, channels: u64) -> Qemu {
    let waiting = start(folder, name, &[flags, &WAITS, &["-S"]].concat()).unwrap();
    set(&waiting, channels);
    waiting.monitor().migrate_incoming(&format!("file:{file}")).unwrap();
    completes(&waiting);
    waiting
}

#[track_caller]
fn completes(qemu: &Qemu) {
    let deadline = Instant::now() + LONG;
    loop {
        let info = qemu.monitor().query_migrate().unwrap();
        if info.status() == "completed" {
            return;
        }
        assert!(info.status() != "failed" && Instant::now() < deadline, "{info:?}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// The length of a file and the bytes that it takes on disk.
fn sizes(file: &str) -> (u64, u64) {
    use std::os::unix::fs::MetadataExt;
    let meta = fs::metadata(file).unwrap();
    (meta.len(), meta.blocks() * 512)
}

/// A VM is saved by QEMU with its guest stopped, by several channels, and while the guest writes
/// and zeroes pages. The file is imported and exported again, and QEMU loads that file alone and
/// by several channels. The memory is the same everywhere.
#[test]
fn a_mapped_ram_file_of_qemu_comes_back_to_qemu_with_every_byte() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some(source) = start_busy(folder) else { return };
    let flags = machine(folder);
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    for (nth, (live, to_file, from_file)) in
        [(false, 0, 3), (false, 4, 0), (true, 0, 0), (true, 2, 2)].into_iter().enumerate()
    {
        let path = |what: &str| folder.join(format!("{what}{nth}")).display().to_string();
        let (file, image, out) = (path("file"), path("image"), path("out"));
        if !live {
            source.stop();
        }
        save(&source, &file, to_file);
        let saved = memory(folder, &source, 0, RAM);
        works(folder, &["image", "import", &file, &image]);
        assert!(works(folder, &["image", "verify", &image]).0.contains("sound"));
        works(folder, &["image", "export", &image, &out, "--mapped-ram"]);
        let (len, on_disk) = sizes(&out);
        assert!(RAM < len && on_disk < RAM / 10, "{on_disk} bytes of {len} on disk");
        let mode = fs::metadata(&out).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let loaded = load(folder, &format!("loaded{nth}"), &flags, &out, from_file);
        assert!(memory(folder, &loaded, 0, RAM) == saved, "{nth}: loaded");
        if nth == 0 {
            // This QEMU saves every block of the first image.
            let (again, second) = (path("again"), path("second"));
            save(&loaded, &again, 0);
            works(folder, &["image", "import", &again, &second]);
            for described in &image::Image::open(Path::new(&image)).unwrap().index().blocks {
                let name = &described.name;
                assert!(block(&image, name) == block(&second, name), "{name}");
            }
            let name = format!("restored{nth}");
            let restored = start(folder, &name, &[&flags[..], &WAITS, &["-S"]].concat()).unwrap();
            works(folder, &["restore", &image, "--qmp", &restored.address()]);
            assert!(memory(folder, &restored, 0, RAM) == saved, "{nth}: restored");
        }
        source.monitor().execute("cont", None).unwrap();
    }
}

#[test]
fn what_is_no_whole_mapped_ram_file_is_refused_and_leaves_no_image() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some(source) = start(folder, "source", &[]) else { return };
    let path = |name: &str| folder.join(name).display().to_string();
    let (file, none, out) = (path("file"), path("none"), path("out"));
    save(&source, &file, 0);
    let import = ["image", "import", &file, &none];
    let whole = fs::read(&file).unwrap();
    for (len, expected) in
        [(whole.len() - 1, "is cut off"), (1 << 20, "in its RAM"), (100, "cut off")]
    {
        File::options().write(true).open(&file).unwrap().set_len(len as u64).unwrap();
        fails(folder, &import, expected);
        assert!(!Path::new(&none).exists());
    }
    // A pipe has no fixed places.
    fs::write(&file, &whole).unwrap();
    let mut piped = Command::new(env!("CARGO_BIN_EXE_platen"))
        .args(["image", "import", "-", &none])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // It fails once platen has ended.
    let _ = piped.stdin.take().unwrap().write_all(&whole);
    let output = piped.wait_with_output().unwrap();
    assert!(said(&output).contains("give the name of the file"), "{}", said(&output));
    assert!(!output.status.success() && !Path::new(&none).exists());
    works(folder, &["image", "import", &file, &none]);
    works(folder, &["image", "export", &none, &out, "--mapped-ram"]);
    let export = ["image", "export", &none, &out, "--mapped-ram"];
    fails(folder, &export, "cannot create");
    let export = ["image", "export", &none, "-", "--mapped-ram"];
    fails(folder, &export, "give the name of a file");
    // QEMU refuses the file if its own mapped-ram is off.
    let waiting = start(folder, "off", &WAITS).unwrap();
    waiting.monitor().migrate_incoming(&format!("file:{out}")).unwrap();
    let mut waiting = waiting;
    assert!(!waiting.child.wait().unwrap().success());
}

/// libvirt's format `sparse`: its head, then the file, whose offsets are those of the whole.
#[test]
fn a_sparse_file_of_virsh_save_is_imported() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let Some(source) = start(folder, "source", &[]) else { return };
    source.stop();
    let path = |name: &str| folder.join(name).display().to_string();
    let (file, image) = (path("file"), path("image"));
    let mut head = recorder::head(b"<domain type='kvm'>", true).unwrap();
    // The number of the format.
    head[28] = 6;
    save(&source, &format!("{file},offset={}", head.len()), 0);
    let saved = memory(folder, &source, 0, 16 << 20);
    File::options().write(true).open(&file).unwrap().write_all_at(&head, 0).unwrap();
    works(folder, &["image", "import", &file, &image]);
    let info: Value =
        serde_json::from_str(&works(folder, &["image", "info", "--json", &image]).0).unwrap();
    assert_eq!(info["facts"]["running"], json!(true));
    let out = path("out");
    works(folder, &["image", "export", &image, &out, "--mapped-ram"]);
    let loaded = load(folder, "loaded", &[], &out, 2);
    assert!(memory(folder, &loaded, 0, 16 << 20) == saved);
}

/// QEMU does not touch a page that a mapped-ram file does not have. The file has the zero pages of
/// small blocks, which QEMU itself may have filled: here with a table that the saved VM had not.
#[test]
fn tables_that_qemu_has_made_do_not_survive_a_mapped_ram_file() {
    const TABLES: &str = "/rom@etc/acpi/tables";
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let path = |name: &str| folder.join(name).display().to_string();
    let (file, image, out) = (path("file"), path("image"), path("out"));
    let Some(source) = start(folder, "source", &[]) else { return };
    save(&source, &file, 0);
    drop(source);
    works(folder, &["image", "import", &file, &image]);
    works(folder, &["image", "export", &image, &out, "--mapped-ram"]);
    fs::write(path("table"), [0xaa; 30_000]).unwrap();
    let table = ["-acpitable", &format!("sig=TEST,data={}", path("table"))];
    let mut found = Vec::new();
    for (name, file) in [("platen", &out), ("qemu", &file)] {
        let loaded = load(folder, name, &table, file, 0);
        let (again, second) = (path(&format!("{name}.again")), path(&format!("{name}.image")));
        save(&loaded, &again, 0);
        works(folder, &["image", "import", &again, &second]);
        found.push(block(&second, TABLES) == block(&image, TABLES));
    }
    // QEMU's own file leaves them.
    assert_eq!(found, [true, false]);
}
