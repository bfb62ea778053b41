//! Ports that several migrations have, one after the other.

use super::*;
use std::os::unix::net::UnixStream;

/// libvirt gives the port of a QEMU that has ended to the next one, whose VM is another.
#[test]
fn a_qemu_that_takes_the_port_of_another_one_gets_no_byte_of_its_vm() {
    let rig = Rig::new("");
    let _b = rig.start(B);
    let first = rig.listen_as_qemu(B, 49152);
    // Its session is open, and its migration begins later, as after an outage.
    let mut relay = rig.relay_to(B, "door:49152");
    relay.says("listening on");
    let path = relay.last().split("unix:").nth(1).unwrap().split([',', ' ', ';']).next().unwrap();
    let mut source = UnixStream::connect(path).unwrap();
    drop(first);
    let second = rig.listen_as_qemu(B, 49152);
    second.set_nonblocking(true).unwrap();
    // The relay may end meanwhile.
    let _ = source.write_all(&rig::main_stream(10));
    until(|| {
        let reached = second.accept().is_ok();
        assert!(!reached, "another VM's QEMU is reached");
        !rig.status(B)["history"].as_array().unwrap().is_empty()
    });
    let cause = rig.ended(B, 1)["cause"].as_str().unwrap().to_owned();
    assert!(cause.contains("another process listens at"), "{cause}");
    drop((source, relay));
    let _a = rig.start(A);
    drop(second);
    migrates(&rig, A, 49152);
}
