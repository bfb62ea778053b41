use super::*;
use crate::hello::{Hello, Setup};
use std::net::{Shutdown, TcpListener, TcpStream};

fn hello() -> Hello {
    let setup = Some(Setup { channels: 2, postcopy: true, ..Setup::with_return_path() });
    let codecs = vec!["zstd".into()];
    Hello { links: 4, setup, codecs, again: true, ..Hello::of_one_link(4096).unwrap() }
}

/// Length of a hello that is cut short and followed by silence.
const SILENT: usize = 30;

/// The server's result for `bytes` from a client that then closes, or stays silent.
fn served(bytes: &[u8], close: bool) -> Result<Hello, SessionError> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let mut link = Link::from(listener.accept().unwrap().0);
    client.write_all(bytes).unwrap();
    if close {
        client.shutdown(Shutdown::Write).unwrap();
    }
    // Silence ends only at the limit.
    let limit = if bytes.len() == SILENT { 300 } else { 60_000 };
    read_preamble(&mut link, "the client", Duration::from_millis(limit))
}

fn recorded() -> Vec<u8> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut client = Link::from(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
    let (mut link, _) = listener.accept().unwrap();
    write_preamble(&mut client, "x", &hello()).unwrap();
    drop(client);
    let mut bytes = Vec::new();
    link.read_to_end(&mut bytes).unwrap();
    bytes
}

#[test]
fn bytes_at_hand_are_read_as_those_of_a_link() {
    let mut bytes = recorded();
    let got: Hello = decode_preamble("x", &bytes).unwrap();
    assert_eq!(encode_preamble("x", &got).unwrap(), bytes);
    for cut in 0..bytes.len() {
        assert!(decode_preamble::<Hello>("x", &bytes[..cut]).is_err(), "cut at {cut}");
    }
    bytes.push(1);
    assert_eq!(decode_preamble::<Hello>("x", &bytes).unwrap(), got);
}

#[test]
fn a_hello_that_is_too_long_is_not_sent() {
    let long = Hello { name: Some("x".repeat(MAX_JSON)), ..hello() };
    let error = encode_preamble("the server", &long).unwrap_err().to_string();
    assert!(error.contains("limit 8192"), "{error}");
}

#[test]
fn a_hello_survives_the_wire() {
    let bytes = recorded();
    let got = served(&bytes, false).unwrap();
    assert_eq!(got.setup, hello().setup);
    assert_eq!(got.session.len(), 32);
}

#[test]
fn cut_anywhere_it_is_refused_in_bounded_time() {
    let bytes = recorded();
    for cut in (0..bytes.len()).step_by(7) {
        assert!(served(&bytes[..cut], true).is_err(), "cut at {cut}");
    }
    assert!(served(&bytes[..SILENT], false).unwrap_err().to_string().contains("in time"));
}

/// As after a time for which this host stood still.
#[test]
fn a_hello_that_has_come_is_read_when_its_time_is_over() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (socket, _) = listener.accept().unwrap();
    let bytes = recorded();
    client.write_all(&bytes).unwrap();
    while socket.peek(&mut vec![0; bytes.len()]).unwrap() < bytes.len() {}
    read_preamble::<Hello>(&mut Link::from(socket), "the client", Duration::ZERO).unwrap();
}

#[test]
fn strangers_old_versions_and_long_hellos_are_named() {
    assert!(matches!(served(b"GET / HTTP/1.1\r\n", false), Err(SessionError::Magic { .. })));
    let mut old = recorded();
    old[9] = 9;
    assert!(served(&old, false).unwrap_err().to_string().contains("version 9"));
    let mut giant = recorded();
    giant[12] = 0xff;
    assert!(served(&giant, false).unwrap_err().to_string().contains("limit 8192"));
    let mut flipped = recorded();
    flipped[40] ^= 1;
    assert!(served(&flipped, false).unwrap_err().to_string().contains("checksum"));
}
