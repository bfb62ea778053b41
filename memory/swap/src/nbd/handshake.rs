//! A connection to the server, with its handshake.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::net::sockopt::socket_peercred;

use super::netlink::invalid;

/// How long the server may take for each part of the handshake, on a busy machine.
const GREETING: Duration = Duration::from_secs(60);

/// A server's description of its disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Export {
    pub(super) size: u64,
    pub(super) flags: u16,
}

/// Connects to the server, and completes the handshake of each connection.
pub(super) fn dial(
    socket: &Path,
    listener: u32,
    number: usize,
) -> io::Result<(Vec<UnixStream>, Export)> {
    const MULTI_CONN: u16 = 1 << 8;
    let (first, export) = dial_one(socket, listener)?;
    let mut sockets = vec![first];
    while sockets.len() < number && export.flags & MULTI_CONN != 0 {
        let (stream, now) = dial_one(socket, listener)?;
        if now != export {
            return Err(invalid(format!("the server's disk was {export:?}, and now is {now:?}")));
        }
        sockets.push(stream);
    }
    Ok((sockets, export))
}

/// Connects to the server, and completes the handshake.
fn dial_one(socket: &Path, listener: u32) -> io::Result<(UnixStream, Export)> {
    let stream = UnixStream::connect(socket)?;
    // The credentials of a connection are those of the process that called listen(2).
    let found = socket_peercred(&stream)?.pid.as_raw_pid();
    if u32::try_from(found) != Ok(listener) {
        let path = socket.display();
        return Err(invalid(format!("process {found} listens at {path}, and not {listener}")));
    }
    greeted(stream)
}

/// Completes the handshake of a connection.
pub(super) fn greeted(mut stream: UnixStream) -> io::Result<(UnixStream, Export)> {
    stream.set_read_timeout(Some(GREETING))?;
    let export = handshake(&mut stream)?;
    stream.set_read_timeout(None)?;
    if export.size == 0 || export.size % 4096 != 0 {
        return Err(invalid(format!(
            "the server's disk has {} bytes, no whole pages",
            export.size
        )));
    }
    Ok((stream, export))
}

/// Performs the fixed newstyle handshake for the server's default export.
pub(super) fn handshake(stream: &mut (impl Read + Write)) -> io::Result<Export> {
    const OPTION: &[u8; 8] = b"IHAVEOPT";
    const EXPORT_NAME: u32 = 1;
    const NO_ZEROES: u16 = 2;
    let mut hello = [0; 18];
    stream.read_exact(&mut hello)?;
    if &hello[..8] != b"NBDMAGIC" || &hello[8..16] != OPTION {
        return Err(invalid("the server does not speak newstyle NBD".into()));
    }
    let offered = u16::from_be_bytes([hello[16], hello[17]]);
    let flags = u32::from(offered & 3);
    let mut ask = Vec::with_capacity(20);
    ask.extend(flags.to_be_bytes());
    ask.extend(OPTION);
    ask.extend(EXPORT_NAME.to_be_bytes());
    ask.extend(0_u32.to_be_bytes());
    stream.write_all(&ask)?;
    let mut answer = [0; 10];
    stream.read_exact(&mut answer)?;
    if offered & NO_ZEROES == 0 {
        stream.read_exact(&mut [0; 124])?;
    }
    let [size @ .., high, low] = answer;
    Ok(Export { size: u64::from_be_bytes(size), flags: u16::from_be_bytes([high, low]) })
}
