//! The steps of opening a link that every server takes: pass, TLS, the checks of a hello, and
//! answers.

use codec::Codec;
use rustix::net::{recv, RecvFlags};
use session::{
    write_preamble, Grants, Hello, Link, Pass, SessionError, Welcome, MAX_LINKS, PASS_BYTES,
};
use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::time::{Duration, Instant};
use tls::{Acceptor, TlsError};

/// The shortest time-out of a socket: zero would mean no time-out.
const A_MOMENT: Duration = Duration::from_millis(1);

const DECODED: [Codec; 5] = [Codec::Raw, Codec::Lz4, Codec::Zlib, Codec::Zstd, Codec::DeflateQz];

/// Makes the next read of `socket` end at `deadline`.
pub(super) fn limit(socket: &TcpStream, deadline: Instant) -> std::io::Result<()> {
    let left = deadline.saturating_duration_since(Instant::now());
    socket.set_read_timeout(Some(left.max(A_MOMENT)))
}

/// Whether the connection begins with the first byte of a pass. False also if no byte comes by
/// `deadline`: the handshake then finds the cause.
pub(super) fn may_have_pass(socket: &TcpStream, deadline: Instant) -> bool {
    let mut first = [0; 1];
    let got = limit(socket, deadline).and_then(|()| socket.peek(&mut first));
    matches!(got, Ok(1)) && Pass::may_begin_with(first[0])
}

/// Reads the pass in front of a TLS handshake, if there is one (W5a).
pub(super) fn read_pass(
    socket: &TcpStream,
    peer: &str,
    deadline: Instant,
) -> Result<Option<Pass>, SessionError> {
    if !may_have_pass(socket, deadline) {
        return Ok(None);
    }
    let bad = |detail: String| SessionError::Hello { peer: peer.into(), detail };
    let mut bytes = [0; PASS_BYTES];
    let mut done = 0;
    while done < PASS_BYTES {
        done += match read_by(socket, &mut bytes[done..], deadline) {
            Ok(got @ 1..) => got,
            Err(error) if error.kind() == ErrorKind::Interrupted => 0,
            _ => {
                return Err(bad(format!(
                    "only {done} of the {PASS_BYTES} bytes of its pass came in time"
                )))
            }
        };
    }
    let pass = Pass::from_bytes(&bytes);
    pass.map(Some).ok_or_else(|| bad("it begins with neither a pass nor a handshake".into()))
}

/// Reads until `deadline`. Behind it, reads what waits in the socket: this host may have stood
/// still since those bytes came. A wait for more would let a peer that sends byte by byte never be
/// late.
fn read_by(mut socket: &TcpStream, out: &mut [u8], deadline: Instant) -> std::io::Result<usize> {
    if Instant::now() < deadline {
        limit(socket, deadline)?;
        return socket.read(out);
    }
    Ok(recv(socket, out, RecvFlags::DONTWAIT)?.1)
}

/// Runs the TLS handshake, unless this end was started without TLS.
pub(super) fn secure(
    acceptor: Option<&Acceptor>,
    socket: TcpStream,
    peer: &str,
    deadline: Instant,
) -> Result<Link, SessionError> {
    let Some(acceptor) = acceptor else { return Ok(socket.into()) };
    match acceptor.accept(&socket, peer, deadline) {
        Ok(channel) => Ok(Link::secured(socket, channel)),
        Err(error) => {
            if matches!(error, TlsError::Plain { .. }) {
                let reason = "this end takes TLS only: start the other without --insecure, with certificates \
                              of this end's CA (`platen cert`)";
                refuse(&mut socket.into(), peer, reason);
            }
            Err(error.into())
        }
    }
}

/// Answers a peer whose hello could not be read, if the peer understands an answer. A peer of
/// another version understands one, and so does a peer that starts with TLS although this end has
/// none.
pub(super) fn answer_unreadable(link: &mut Link, peer: &str, error: SessionError) -> SessionError {
    if matches!(
        &error,
        SessionError::Version { .. } | SessionError::Magic { first: [22, 3, ..], .. }
    ) {
        refuse(link, peer, &error.to_string());
    }
    error
}

/// Refuses a hello that cannot open a session; the error is a message for the peer.
pub(super) fn check_opening(hello: &Hello, page_size: u32) -> Result<(), String> {
    if hello.page_size != page_size {
        return Err(format!(
            "the source has page size {}, this end {page_size}: give both the same --page-size, that of the guest",
            hello.page_size
        ));
    }
    if hello.ask || hello.link != 0 || hello.links == 0 || hello.links > MAX_LINKS {
        return Err(format!("link {} of {} cannot open a session", hello.link, hello.links));
    }
    if hello.session.len() != 32 || !hello.session.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return Err("the session identifier is not made of 32 hex digits".into());
    }
    match hello.codecs.iter().find(|name| !DECODED.iter().any(|codec| codec.name() == **name)) {
        Some(name) => Err(format!("this end does not know the codec '{name}'")),
        None => Ok(()),
    }
}

/// The welcome of a session; `pass`: this end takes passes (W5a).
pub(super) fn welcome(grants: Grants, token: &str, pass: bool) -> Welcome {
    Welcome {
        token: token.to_string(),
        pass,
        pong: true,
        channel_deltas: true,
        chunk_bytes: u32::try_from(grants.chunk_bytes).unwrap_or(u32::MAX),
        stream_frames: grants.stream_frames,
        shared_frames: grants.shared_frames,
        codecs: DECODED.iter().map(|codec| codec.name().to_string()).collect(),
        ..Welcome::default()
    }
}

/// Sends a peer the reason of its refusal.
pub(super) fn refuse(link: &mut Link, peer: &str, reason: &str) {
    let welcome = Welcome { error: Some(reason.to_string()), ..Welcome::default() };
    // The peer may have closed the connection.
    let _ = write_preamble(link, peer, &welcome);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::net::TcpListener;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (client, listener.accept().unwrap().0)
    }

    fn pass() -> [u8; PASS_BYTES] {
        let mut bytes = [7; PASS_BYTES];
        bytes[..8].copy_from_slice(b"RELINK\r\n");
        bytes
    }

    /// As after a time for which this host stood still.
    #[test]
    fn a_pass_that_has_come_is_read_when_its_time_is_over() {
        let (mut client, socket) = pair();
        client.write_all(&pass()).unwrap();
        while socket.peek(&mut [0; PASS_BYTES]).unwrap() < PASS_BYTES {}
        let got = read_pass(&socket, "the client", Instant::now()).unwrap();
        assert_eq!(got, Pass::from_bytes(&pass()));
    }

    #[test]
    fn a_pass_that_has_come_in_part_is_not_waited_for() {
        let (mut client, socket) = pair();
        client.write_all(&pass()[..20]).unwrap();
        while socket.peek(&mut [0; PASS_BYTES]).unwrap() < 20 {}
        let error = read_pass(&socket, "the client", Instant::now()).unwrap_err().to_string();
        assert!(error.contains("20 of the 64 bytes"), "{error}");
    }
}
