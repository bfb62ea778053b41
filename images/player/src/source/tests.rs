use super::*;
use image::{Options, RamBlock, State, Writer};
use std::io::{Read, Write};
use std::path::Path;

/// A player of an image with three units, each with pages of its own, and QEMU's end.
fn playing(folder: &Path) -> (Playing, UnixStream) {
    let path = folder.join("i");
    let mut writer = Writer::create(&path, Options::default()).unwrap();
    let block = RamBlock { name: "ram".into(), len: 96 * 4096, host_page: 0 };
    writer.blocks(4096, &[block]).unwrap();
    for page in 0..96_u64 {
        let bytes: Vec<u8> = (0..512_u64).flat_map(|at| (at * at + page).to_le_bytes()).collect();
        writer.page(0, page, &bytes).unwrap();
    }
    writer.finish(&State::default()).unwrap().link().unwrap();
    let image = Arc::new(Image::open(&path).unwrap());
    let player = Player::new(&image, PlayOptions { threads: 1, rate: None }).unwrap();
    let (here, there) = UnixStream::pair().unwrap();
    (Playing::new(player, here).unwrap(), there)
}

/// QEMU's request of a page.
fn request(page: u8) -> Vec<u8> {
    let head = [0, 3, 0, 16, 0, 0, 0, 0, 0, 0, page << 4, 0, 0, 0, 0x10, 0, 3];
    [&head, &b"ram"[..]].concat()
}

#[test]
fn the_background_waits_while_the_guest_begins_unless_it_is_hot() {
    let folder = tempfile::tempdir().unwrap();
    let (mut playing, mut qemu) = playing(folder.path());
    playing.hold_back();
    assert_eq!(playing.due_in(), Duration::ZERO, "the guest does not run");
    // The guest begins to run in an hour, so that no pause of this thread ends the wait.
    playing.running = Some(Duration::from_secs(3600));
    playing.hold_back();
    assert!(playing.calm <= Instant::now() + CALM);
    playing.calm += Duration::from_secs(3600);
    assert!(playing.due_in() > Duration::ZERO);
    playing.player.ahead.begin_with([1]);
    assert_eq!(playing.due_in(), Duration::ZERO, "unit 1 is hot");
    (32..64).for_each(|page| assert!(playing.player.server.pending.take(0, page)));
    assert!(playing.due_in() > Duration::ZERO, "unit 1 is sent");
    // A request holds the background back, too, and so does the start of the guest.
    playing.calm = playing.begin;
    qemu.write_all(&request(3)).unwrap();
    while !playing.messages(&mut |_| {}).unwrap() {
        playing.socket.wait(Duration::from_secs(600)).unwrap();
        playing.socket.read().unwrap();
    }
    assert!(playing.calm > playing.begin);
    (playing.calm, playing.running) = (playing.begin, None);
    qemu.write_all(&[0, 2, 0, 4, 0, 0, 0, 3]).unwrap();
    while playing.running.is_none() {
        playing.socket.wait(Duration::from_secs(600)).unwrap();
        playing.socket.read().unwrap();
        playing.messages(&mut |_| {}).unwrap();
    }
    assert!(playing.calm > playing.begin);
    // It has run for longer than BEGINS.
    (playing.begin, playing.running) = (Instant::now() - BEGINS, Some(Duration::ZERO));
    playing.hold_back();
    assert_eq!(playing.due_in(), Duration::ZERO);
}

/// Pages that QEMU has not requested arrive once the wait is over, and not before.
#[test]
fn nothing_is_sent_in_the_background_before_its_time() {
    let folder = tempfile::tempdir().unwrap();
    let (mut playing, mut qemu) = playing(folder.path());
    playing.running = Some(Duration::ZERO);
    playing.calm = Instant::now() + Duration::from_secs(3600);
    let wait = Wait::begin(DEVICES);
    let player = std::thread::spawn(move || playing.run(&wait, &mut |_| {}).map(drop));
    // Long enough for a background that does not wait.
    qemu.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let early = qemu.read(&mut [0]).map_err(|error| error.kind());
    assert_eq!(early, Err(std::io::ErrorKind::WouldBlock));
    // After a request the wait is that of a guest which has long begun.
    qemu.set_read_timeout(Some(Duration::from_secs(600))).unwrap();
    std::thread::sleep(BEGINS);
    qemu.write_all(&request(3)).unwrap();
    let mut pages = vec![0; 96 * 4096];
    qemu.read_exact(&mut pages).unwrap();
    drop(qemu);
    assert!(player.join().unwrap().is_err(), "QEMU has not confirmed the end");
}

#[test]
fn a_qemu_that_neither_loads_its_devices_nor_requests_a_page_is_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let (mut playing, mut there) = playing(folder.path());
    there.write_all(&request(3)).unwrap();
    playing.socket.wait(Duration::from_secs(600)).unwrap();
    // The answer takes its time from here on, and counts as no silence.
    let before = Instant::now();
    while !playing.messages(&mut |_| {}).unwrap() {
        playing.socket.read().unwrap();
    }
    assert!(playing.heard > before);
    playing.silence = Duration::from_millis(100);
    let wait = Wait::begin(DEVICES);
    let error = playing.run(&wait, &mut |_| {}).err().unwrap().to_string();
    assert!(error.contains("has not sent PONG 3") && wait.check().is_ok(), "{error}");
    drop(there);
}
