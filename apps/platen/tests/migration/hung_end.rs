//! The end of a process with a QAT library that never returns from a call.

use super::hung::{ends_soon, relay, simulated, stream, ENDS, PAGE};
use super::*;
use ::stream::synth::{Configuration, MainStream, Section};

/// More than the codec thread takes for the few chunks of this test, many times over.
const SPUN: Duration = Duration::from_millis(200);

/// CPU time of the thread of `process` with this name.
fn cpu_time(process: u32, name: &str) -> Duration {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let times = tasks.flatten().filter_map(|task| {
        let read = |file: &str| std::fs::read_to_string(task.path().join(file)).ok();
        (read("comm")?.trim_end() == name).then_some(())?;
        read("schedstat")?.split(' ').next()?.parse::<u64>().ok()
    });
    Duration::from_nanos(times.sum())
}

/// A stream of 1 MiB in `folder`, and the path of an image that does not exist.
pub(super) fn to_import(folder: &Path) -> [String; 2] {
    let mut main = MainStream::new(PAGE);
    main.file_header().configuration(&Configuration { machine: "pc", ..Configuration::default() });
    main.section(Section::Start).block_table(&[("pc.ram", 1 << 20)]).end_of_section();
    main.section(Section::Part);
    for (number, page) in (0_u64..).zip(stream(1 << 20).chunks_exact(PAGE)) {
        main.page("pc.ram", number * PAGE as u64, page);
    }
    main.end_of_section().section(Section::End).end_of_section().device_tail(400);
    let [from, image] = ["stream", "image"].map(|name| path(&folder.join(name)));
    std::fs::write(&from, main.take()).unwrap();
    [from, image]
}

/// An import that compresses with codec qatzip, with this script of the device.
pub(super) fn import([from, image]: &[String; 2], script: &str) -> Platen {
    let libraries = path(&qat_sim::libraries());
    Platen::start(
        &simulated(&format!("instances 1; {script}")),
        &["image", "import", from, image, "--codec", "qatzip", "--accelerator", "qat"]
            .into_iter()
            .chain(["--qat-libraries", &libraries, "--compress-threads", "1"])
            .collect::<Vec<_>>(),
    )
}

/// Nothing but this message ends such an import: the unit never comes back from its thread.
#[test]
fn an_import_whose_device_hangs_ends_with_its_cause_and_leaves_no_image() {
    let folder = tempfile::tempdir().unwrap();
    let paths = to_import(folder.path());
    // Each call hangs for 10 s. `make test` sets this: those that take the CPU as long are
    // left to `make proof`.
    let most = if std::env::var_os("PLATEN_QUICK").is_some() { 3 } else { 5 };
    for (script, call) in [
        ("at 1 block submit", "cpaDcCompressData2"),
        ("now block start", "cpaDcStartInstance"),
        ("at 3 block poll", "icp_sal_DcPollInstance"),
        ("at 3 spin submit", "cpaDcCompressData2"),
        ("now spin start", "cpaDcStartInstance"),
    ]
    .into_iter()
    .take(most)
    {
        let mut import = import(&paths, script);
        let words = import.says("has not returned for");
        assert!(words.contains(call) && words.contains("--accelerator none"), "{words}");
        ends_soon(import);
        let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().flatten().collect();
        assert_eq!(left.len(), 1, "{script}: {left:?}");
    }
}

/// The work is done, and nothing is left to wait for.
#[test]
fn a_library_that_never_stops_delays_no_end() {
    let folder = tempfile::tempdir().unwrap();
    let paths = to_import(folder.path());
    let [_, image] = &paths;
    for call in ["block", "spin"] {
        let start = Instant::now();
        let import = import(&paths, &format!("now {call} stop forever"));
        let (status, said) = import.ends();
        assert_eq!(status, Some(0), "{said}");
        assert!(start.elapsed() < ENDS, "it ended after {:?}", start.elapsed());
        std::fs::remove_file(image).expect("the image is there");
    }
}

/// A relay may leave the stop to the exit of its process.
#[test]
fn a_library_that_never_stops_delays_no_relay() {
    for call in ["block", "spin"] {
        let rig = Rig::new("");
        let listener = UnixListener::bind(rig.at("dst")).unwrap();
        let mut relay = relay(&rig, &format!("instances 1; now {call} stop forever"), "qat");
        migrate(&rig, &mut relay, &listener, "src");
        relay.says("no return path");
        let start = Instant::now();
        let (status, said) = relay.ends();
        assert_eq!(status, Some(3), "{said}");
        assert!(start.elapsed() < ENDS, "it ended after {:?}", start.elapsed());
        assert!(rig.report("relay.json").contains(r#""status":"unconfirmed""#));
        assert_eq!(rig.receive.ends().0, Some(3));
    }
}

/// An interrupt waits for nothing, and not for the message above either.
#[test]
fn interrupts_end_a_migration_whose_codec_thread_never_returns() {
    // On a busy machine the message may come first.
    assert!((0..5).any(|_| is_interrupted()), "no interrupt was in time in any of five runs");
}

/// Whether the interrupts were in time.
fn is_interrupted() -> bool {
    let rig = Rig::new("");
    let listener = UnixListener::bind(rig.at("dst")).unwrap();
    let mut relay = relay(&rig, "instances 1; at 1 spin submit", "qat");
    relay.says("listening on");
    let mut source = UnixStream::connect(rig.at("src")).unwrap();
    let text: Vec<u8> = b"what QEMU sends. ".iter().copied().cycle().take(256 << 10).collect();
    source.write_all(&[&STREAM[..8], &text].concat()).unwrap();
    let start = Instant::now();
    while cpu_time(relay.child.id(), "compress0") < SPUN {
        assert!(start.elapsed() < WATCHDOG, "no thread spins");
        if relay.child.try_wait().unwrap().is_some() {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    // Without a return path the relay knows nothing of the destination, and asks once more.
    kill_process(Pid::from_child(&relay.child), Signal::INT).unwrap();
    let asks = "interrupt again to end this relay";
    if !relay.says_one_of(&[asks, "has not returned for"]).contains(asks) {
        return false;
    }
    kill_process(Pid::from_child(&relay.child), Signal::INT).unwrap();
    let (status, said) = relay.ends();
    assert_eq!(status, Some(1), "{said}");
    if said.contains("has not returned for") {
        return false;
    }
    // The receiver connects when the first chunk has come.
    listener.set_nonblocking(true).unwrap();
    assert!(listener.accept().is_err(), "the chunk has come");
    let (status, said) = rig.receive.ends();
    assert_eq!(status, Some(1), "{said}");
    true
}
