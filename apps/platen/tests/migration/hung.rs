//! A codec thread in a call of the QAT device's library that never returns.

use super::*;
use std::thread::JoinHandle;
use stream::synth::{Configuration, MainStream, Section};

/// Longest time from the message about a call that does not return to the end of its process, on a
/// machine that stands still for a while. The call takes for ever.
pub(super) const ENDS: Duration = Duration::from_secs(180);

/// The environment of a process with this script of the simulated device.
pub(super) fn simulated(script: &str) -> String {
    format!("PLATEN_QAT_SIM='{script}'; export PLATEN_QAT_SIM;")
}

/// A relay that compresses with codec qatzip on one thread.
pub(super) fn relay(rig: &Rig, script: &str, accelerator: &str) -> Platen {
    let (listen, json) = (unix(&rig.at("src")), path(&rig.at("relay.json")));
    let libraries = path(&qat_sim::libraries());
    Platen::start(
        &simulated(script),
        &["relay", "--insecure", "--peer", &rig.address, "--listen", &listen]
            .into_iter()
            .chain(["--json", &json, "--codec", "qatzip", "--accelerator", accelerator])
            .chain(["--qat-libraries", &libraries, "--compress-threads", "1"])
            .collect::<Vec<_>>(),
    )
}

/// The beginning of a stream, with `len` bytes that compress.
pub(super) fn stream(len: usize) -> Vec<u8> {
    let words = (0_u32..).flat_map(|word| format!("what QEMU sends, {word}. ").into_bytes());
    STREAM[..8].iter().copied().chain(words.take(len)).collect()
}

/// Writes the stream from a thread, which returns when the relay has closed the connection, as a
/// source QEMU notices that its migration has failed.
fn write(rig: &Rig, stream: Vec<u8>) -> JoinHandle<()> {
    let mut source = UnixStream::connect(rig.at("src")).unwrap();
    std::thread::spawn(move || {
        let _ = source.write_all(&stream);
        let _ = source.read(&mut [0]);
    })
}

/// Reads from a thread what the destination QEMU gets, if it gets a connection.
fn read(listener: UnixListener) -> Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut got = Vec::new();
        if let Ok((mut destination, _)) = listener.accept() {
            // The relay resets the connection.
            let _ = destination.read_to_end(&mut got);
        }
        let _ = sender.send(got);
    });
    receiver
}

/// Waits for the end of a process that has said why it ends.
pub(super) fn ends_soon(process: Platen) -> String {
    let start = Instant::now();
    let (status, said) = process.ends();
    assert_eq!(status, Some(1), "{said}");
    assert!(start.elapsed() < ENDS, "it ended after {:?}: {said}", start.elapsed());
    said
}

/// Nothing but this message ends such a migration: its chunk never comes back from the codec
/// thread. `script` is that of the source's device, and `call` the call that does not return.
fn a_source_ends(script: &str, call: &str) {
    let rig = Rig::new("");
    let got = read(UnixListener::bind(rig.at("dst")).unwrap());
    let mut relay = relay(&rig, &format!("instances 1; {script}"), "qat");
    relay.says("listening on");
    let sent = stream(8 << 20);
    let source = write(&rig, sent.clone());
    let words = relay.says("has not returned for");
    assert!(words.contains(call) && words.contains("--accelerator none"), "{words}");
    ends_soon(relay);
    source.join().unwrap();
    let Rig { folder, receive, .. } = rig;
    let said = ends_soon(receive);
    assert!(said.contains("ended the migration") && said.contains(call), "{said}");
    // If the receiver has made no connection, the listener still waits for one.
    drop(UnixStream::connect(folder.path().join("dst")));
    let got = got.recv_timeout(WATCHDOG).unwrap();
    assert!(sent.starts_with(&got), "{} bytes that were not sent", got.len());
}

#[test]
fn a_source_whose_submission_spins_for_ever_ends_with_its_cause() {
    a_source_ends("at 20 spin submit", "cpaDcCompressData2");
}

#[test]
fn a_source_whose_submission_blocks_for_ever_ends_with_its_cause() {
    a_source_ends("at 1 block submit", "cpaDcCompressData2");
}

#[test]
fn a_source_whose_poll_blocks_for_ever_ends_with_its_cause() {
    a_source_ends("at 20 block poll", "icp_sal_DcPollInstance");
}

/// The calls that open the device, when the peer has its session already. That session ends, too.
#[test]
fn a_source_whose_device_never_starts_ends_with_its_cause() {
    let rig = Rig::new("");
    for call in ["block", "spin"] {
        let mut hung = relay(&rig, &format!("instances 1; now {call} start"), "qat");
        let words = hung.says("has not returned for");
        assert!(words.contains("cpaDcStartInstance") && words.contains("--accelerator none"));
        ends_soon(hung);
    }
    let mut next = relay(&rig, "absent", "none");
    next.says("listening on");
}

#[test]
fn a_receiver_whose_device_never_starts_ends_with_its_cause() {
    let folder = tempfile::tempdir().unwrap();
    let (deliver, libraries) = (unix(&folder.path().join("dst")), path(&qat_sim::libraries()));
    let mut hung = Platen::start(
        &simulated("instances 1; now block start"),
        &["receive", "--insecure", "--listen", "127.80.76.3:0", "--deliver", &deliver]
            .into_iter()
            .chain(["--accelerator", "qat", "--qat-libraries", &libraries])
            .collect::<Vec<_>>(),
    );
    let words = hung.says("has not returned for");
    assert!(words.contains("cpaDcStartInstance") && words.contains("--accelerator none"));
    ends_soon(hung);
}

/// As above; `script` is that of the destination's device.
fn a_destination_ends(script: &str, call: &str) {
    let libraries = path(&qat_sim::libraries());
    let options = ["--accelerator", "qat", "--qat-libraries", &libraries];
    let mut rig = Rig::with(
        &simulated(&format!("instances 1; {script}")),
        &[&options[..], &["--decompress-threads", "1"]].concat(),
    );
    let got = read(UnixListener::bind(rig.at("dst")).unwrap());
    let mut relay = relay(&rig, "absent", "none");
    relay.says("listening on");
    let sent = stream(32 << 20);
    let source = write(&rig, sent.clone());
    let words = rig.receive.says("has not returned for");
    assert!(words.contains(call) && words.contains("--accelerator none"), "{words}");
    let said = ends_soon(relay);
    assert!(said.contains("ended the migration") && said.contains(call), "{said}");
    source.join().unwrap();
    let Rig { folder, receive, .. } = rig;
    ends_soon(receive);
    drop(UnixStream::connect(folder.path().join("dst")));
    let got = got.recv_timeout(WATCHDOG).unwrap();
    assert!(sent.starts_with(&got), "{} bytes that were not sent", got.len());
}

#[test]
fn a_destination_whose_submission_spins_for_ever_ends_with_its_cause() {
    a_destination_ends("at 20 spin submit", "cpaDcDecompressData");
}

#[test]
fn a_destination_whose_submission_blocks_for_ever_ends_with_its_cause() {
    a_destination_ends("at 1 block submit", "cpaDcDecompressData");
}

pub(super) const PAGE: usize = 4096;

/// The stream of a source that turns to postcopy, up to its first page there, and many pages that
/// follow.
fn postcopy() -> (Vec<u8>, Vec<u8>) {
    let mut main = MainStream::new(PAGE);
    let configuration = Configuration { machine: "pc-q35-10.0", ..Configuration::default() };
    main.file_header().configuration(&configuration).command(1, &[]).command(2, &[0, 0, 0, 1]);
    main.advise_postcopy(PAGE as u64);
    main.section(Section::Start).block_table(&[("pc.ram", 1 << 30)]).end_of_section();
    // A PING, which is answered once the state is loaded.
    main.packaged(&[7; 7000]).command(2, &[0, 0, 0, 4]);
    main.section(Section::Part).page("pc.ram", 0, &[3; PAGE]);
    let head = main.take();
    for (number, page) in (1_u64..).zip(stream(16 << 20).chunks_exact(PAGE)) {
        main.page("pc.ram", number * PAGE as u64, page);
    }
    (head, main.take())
}

/// Has the made QEMUs migrate to postcopy and beyond. Gives the stream, the thread of the source
/// QEMU, and what the destination QEMU gets from there on.
fn beyond(rig: &Rig, listener: &UnixListener) -> (Vec<u8>, JoinHandle<()>, Receiver<Vec<u8>>) {
    let (head, rest) = postcopy();
    let mut source = UnixStream::connect(rig.at("src")).unwrap();
    source.write_all(&head).unwrap();
    let (mut destination, _) = listener.accept().unwrap();
    let mut got = vec![0; head.len()];
    destination.read_exact(&mut got).unwrap();
    assert!(got == head, "other bytes than were sent");
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut got = Vec::new();
        let _ = destination.read_to_end(&mut got);
        let _ = sender.send(got);
    });
    let sent = rest.clone();
    let source = std::thread::spawn(move || {
        let _ = source.write_all(&rest);
        let _ = source.read(&mut [0]);
    });
    (sent, source, receiver)
}

/// Submissions behind those of the bytes before postcopy, and before those of the last page.
const IN_POSTCOPY: &str = "at 100 block submit";

/// Both QEMUs pause, because their sockets close.
#[test]
fn a_source_that_hangs_in_postcopy_lets_both_ends_pause() {
    // The receiver answers the source for twice this time and 10 s.
    let rig = Rig::with("", &["--resume-timeout", "1"]);
    let listener = UnixListener::bind(rig.at("dst")).unwrap();
    let mut relay = relay(&rig, &format!("instances 1; {IN_POSTCOPY}"), "qat");
    relay.says("listening on");
    let (sent, source, got) = beyond(&rig, &listener);
    let words = relay.says("has not returned for");
    assert!(words.contains("interrupted in postcopy"), "{words}");
    ends_soon(relay);
    source.join().unwrap();
    let got = got.recv_timeout(WATCHDOG).unwrap();
    assert!(got.len() < sent.len() && sent.starts_with(&got), "{} other bytes", got.len());
    ends_soon(rig.receive);
}

#[test]
fn a_destination_that_hangs_in_postcopy_lets_both_ends_pause() {
    let libraries = path(&qat_sim::libraries());
    let options = ["--accelerator", "qat", "--qat-libraries", &libraries];
    let mut rig = Rig::with(&simulated(&format!("instances 1; {IN_POSTCOPY}")), &options);
    let listener = UnixListener::bind(rig.at("dst")).unwrap();
    let mut relay = relay(&rig, "absent", "none");
    relay.says("listening on");
    let (sent, source, got) = beyond(&rig, &listener);
    rig.receive.says("has not returned for");
    let words = relay.says("has not returned for");
    assert!(words.contains("interrupted in postcopy"), "{words}");
    ends_soon(relay);
    source.join().unwrap();
    let got = got.recv_timeout(WATCHDOG).unwrap();
    assert!(got.len() < sent.len() && sent.starts_with(&got), "{} other bytes", got.len());
    ends_soon(rig.receive);
}
