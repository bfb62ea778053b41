//! Peers that speak another protocol.

use super::*;

/// A ClientHello of TLS 1.2 as OpenSSL makes it: no supported_versions.
fn old_client_hello() -> Vec<u8> {
    let mut body = vec![3, 3];
    body.extend([0x42; 32]);
    body.push(0);
    body.extend([0, 4, 0xc0, 0x2f, 0xc0, 0x2b]);
    body.extend([1, 0]);
    let extensions: &[u8] = &[
        0, 10, 0, 4, 0, 2, 0, 29, // supported_groups: x25519
        0, 11, 0, 2, 1, 0, // ec_point_formats
        0, 13, 0, 6, 0, 4, 4, 3, 8, 4, // signature_algorithms
    ];
    body.extend(u16::try_from(extensions.len()).unwrap().to_be_bytes());
    body.extend(extensions);
    let length = u32::try_from(body.len()).unwrap().to_be_bytes();
    let message = [&[1, length[1], length[2], length[3]][..], &body].concat();
    let length = u16::try_from(message.len()).unwrap().to_be_bytes();
    [&[22, 3, 1, length[0], length[1]][..], &message].concat()
}

/// The server's error for a peer that sends `bytes` and closes, or waits if `stay`; and the bytes
/// that the peer receives.
fn stranger(bytes: &[u8], stay: bool) -> (String, Vec<u8>) {
    let hosts = Hosts::new();
    let acceptor = Acceptor::new(&hosts.credentials("b.example"), &[]).unwrap();
    let (mut client, server) = sockets();
    let silent = bytes.is_empty();
    let serving = thread::spawn(move || {
        let limit = if silent { Instant::now() + Duration::from_millis(700) } else { soon() };
        acceptor.accept(&server, "client", limit).unwrap_err().to_string()
    });
    // The server may refuse and close before it has all of it.
    let _ = client.write_all(bytes);
    if !stay {
        let _ = client.shutdown(Shutdown::Write);
    }
    let mut answer = Vec::new();
    let _ = client.read_to_end(&mut answer);
    (serving.join().unwrap(), answer)
}

#[test]
fn peers_of_another_protocol_are_named() {
    let (said, answer) = stranger(&old_client_hello(), false);
    assert!(said.contains("no TLS 1.3"), "{said}");
    assert_eq!(answer, [21, 3, 3, 0, 2, 2, 70], "a fatal alert: protocol_version");
    let (said, _) = stranger(b"PLATEN\r\n\0\x01\0\0\0\0\0\x02 {}", true);
    assert!(said.contains("--insecure"), "{said}");
    let (said, _) = stranger(b"GET / HTTP/1.1\r\n\r\n", false);
    assert!(said.contains("does not speak TLS"), "{said}");
    let (said, _) = stranger(&[22, 3, 1, 0xff, 0xff], false);
    assert!(said.contains("does not speak TLS"), "a record of 65535 bytes: {said}");
    let (said, _) = stranger(&old_client_hello()[..20], false);
    assert!(said.contains("closed the connection during the handshake"), "{said}");
    let (said, _) = stranger(b"", true);
    assert!(said.contains("did not come in time"), "{said}");
    // A handshake message of 64 KiB, in endless pieces.
    let piece = [&[22, 3, 1, 0x40, 0][..], &[1, 0, 0xff, 0xff], &[0; 0x4000 - 4]].concat();
    let (said, _) = stranger(&piece.repeat(12), false);
    assert!(said.contains("no TLS with client"), "{said}");
}
