use super::*;
use image::{Options, RamBlock, State, Writer};
use std::io::Write;

#[test]
fn a_qemu_that_neither_loads_its_devices_nor_requests_a_page_is_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("i");
    let mut writer = Writer::create(&path, Options::default()).unwrap();
    let block = RamBlock { name: "ram".into(), len: 64 * 4096, host_page: 0 };
    writer.blocks(4096, &[block]).unwrap();
    writer.finish(&State::default()).unwrap().link().unwrap();
    let image = Arc::new(Image::open(&path).unwrap());
    let player = Player::new(&image, PlayOptions { threads: 1, rate: None }).unwrap();
    let (here, mut there) = UnixStream::pair().unwrap();
    let mut playing = Playing::new(player, here).unwrap();
    // A request of page 3.
    let mut request = vec![0, 3, 0, 16];
    request.extend([0, 0, 0, 0, 0, 0, 0x30, 0, 0, 0, 0x10, 0, 3]);
    there.write_all(&[&request, &b"ram"[..]].concat()).unwrap();
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
