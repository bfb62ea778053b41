//! Connections of disks beside a migration.

use super::*;

#[test]
fn a_disk_s_client_does_not_wait_for_its_silence_to_last() {
    let rig = Rig::new("");
    let _services = (rig.start(A), rig.start(B));
    let server = rig.listen_as_server(B, 49153);
    // As QEMU does for its NBD server.
    rustix::net::listen(&server, 4096).unwrap();
    let allowed = std::fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap();
    if allowed.trim().parse::<u32>().unwrap() <= 512 {
        return println!("skipped: net.core.somaxconn is {}: both look alike", allowed.trim());
    }
    // Without the answer of the other host each takes 2 s and more. On a busy machine some do with
    // it, and a whole migration too.
    until(|| {
        let begin = Instant::now();
        migrates(&rig, A, 49152);
        let limit = begin.elapsed().max(Duration::from_secs(2));
        let begin = Instant::now();
        let client = rig.connect_as_qemu(A, 49153);
        let (mut there, _) = rig.accept(&server);
        let took = begin.elapsed();
        there.write_all(b"NBDMAGIC").unwrap();
        assert_eq!(read_exactly(&client, 8), b"NBDMAGIC");
        took < limit
    });
}

/// The bytes that a disk's connection carries in this test: blocks with something and zeros.
fn blocks() -> Vec<u8> {
    let byte = |at: u32| if at % 5000 < 2500 { (at / 7).to_le_bytes()[0] } else { 0 };
    (0..8 << 20).map(byte).collect()
}

#[test]
fn a_disk_s_connection_goes_beside_its_migration_and_outlives_services_and_links() {
    let rig = Rig::with_proxy("codec = \"zstd\"\n");
    let (mut a, mut b) = (rig.start(A), rig.start(B));
    let server = rig.listen_as_server(B, 49153);
    let client = rig.connect_as_qemu(A, 49153);
    let (mut there, _) = rig.accept(&server);
    there.write_all(b"NBDMAGICIHAVEOPT").unwrap();
    assert_eq!(read_exactly(&client, 16), b"NBDMAGICIHAVEOPT");
    // A second disk at the same port, and the VM.
    let second = rig.connect_as_qemu(A, 49153);
    let (mut second_there, _) = rig.accept(&server);
    second_there.write_all(b"NBDMAGIC").unwrap();
    assert_eq!(read_exactly(&second, 8), b"NBDMAGIC");
    migrates(&rig, A, 49152);
    let blocks = blocks();
    let (half, rest) = blocks.split_at(blocks.len() / 2);
    let writer = rig::write_all(&client, half.to_vec());
    assert!(read_exactly(&there, half.len()) == half, "a wrong byte");
    writer.join().unwrap();
    a.kill();
    b.kill();
    rig.cut_links();
    let (_a, _b) = (rig.start(A), rig.start(B));
    let writer = rig::write_all(&client, rest.to_vec());
    assert!(read_exactly(&there, rest.len()) == rest, "a wrong byte");
    writer.join().unwrap();
    there.write_all(b"answer").unwrap();
    assert_eq!(read_exactly(&client, 6), b"answer");
    drop((client, second));
    assert_eq!((read_all(&there), read_all(&second_there)), (Vec::new(), Vec::new()));
    drop((there, second_there));
    for host in [A, B] {
        rig.ended(host, 3);
        let status = rig.status(host);
        let disks: Vec<_> = status["history"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|record| record["what"] == "disk")
            .collect();
        assert_eq!(disks.len(), 2, "{status}");
        for record in &disks {
            assert_eq!(record["status"], "completed", "{record}");
            assert_eq!((&record["port"], &record["holds-port"]), (&49153.into(), &false.into()));
        }
        let sent = |record: &&&serde_json::Value| record["plain"].as_u64().unwrap();
        let record = disks.iter().max_by_key(sent).unwrap();
        let (plain, network) = (sent(&record), record["transferred"].as_u64().unwrap());
        assert!(plain >= blocks.len() as u64 && network * 2 < plain, "{record}");
    }
}

#[test]
fn a_killed_carrier_of_a_disk_ends_its_connection_at_both() {
    for victim in [A, B] {
        let rig = Rig::new("resume_timeout = 1\n");
        let _services = (rig.start(A), rig.start(B));
        let server = rig.listen_as_server(B, 49153);
        let client = rig.connect_as_qemu(A, 49153);
        let (mut there, _) = rig.accept(&server);
        there.write_all(b"NBDMAGIC").unwrap();
        assert_eq!(read_exactly(&client, 8), b"NBDMAGIC");
        let pid = rig.list(victim)["running"][0]["pid"].as_u64().unwrap();
        let killed = Command::new("kill").args(["-KILL", &pid.to_string()]).status().unwrap();
        assert!(killed.success());
        assert_eq!((read_all(&client), read_all(&there)), (Vec::new(), Vec::new()));
        drop((client, there));
        for host in [A, B] {
            let record = rig.ended(host, 1);
            assert_eq!((&record["what"], &record["status"]), (&"disk".into(), &"failed".into()));
        }
    }
}
