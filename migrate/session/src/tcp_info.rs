//! What a link has delivered and whether bytes wait for it, by what the kernel says of its socket.
//!
//! Two things can hold bytes up. Where the peer's window or congestion control does not let them
//! go, they are *not sent*. Where the narrow place is in the network, they are sent and stand in a
//! queue there, for which the round trip is longer than the shortest one seen.

#![expect(unsafe_code, reason = "nothing safe wraps TCP_INFO")]

use std::net::TcpStream;
use std::os::fd::AsRawFd;

/// Bytes that a writer has only just put there say nothing; a frame of half a chunk does.
const NOT_SENT: u32 = 64 << 10;
/// A round trip longer than the shortest by this, us, is a queue: the session keeps 15 ms of bytes
/// on their way beyond what the pipe holds, and they stand where it is narrow.
const QUEUE_US: u32 = 4000;

/// What the kernel says of a link.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Whether bytes wait for it now.
    pub(crate) waits: bool,
    /// Bytes that the peer's kernel has acknowledged. Unlike what was written, none of them stand
    /// in a queue.
    pub(crate) acked: u64,
}

/// How the link of `socket` is doing; nothing when the kernel does not say.
pub(crate) fn progress(socket: &TcpStream) -> Progress {
    // SAFETY: `tcp_info` is integers alone, for which zeros are a value.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let size = std::mem::size_of_val(&info);
    let Ok(mut len) = libc::socklen_t::try_from(size) else { return Progress::default() };
    // SAFETY: the descriptor is open as long as `socket` is borrowed; the kernel writes at most
    // `len` bytes to `info`, which has as many, and how many it wrote to `len`. An older kernel
    // writes fewer, and zeros stay in what it lacks.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut len,
        )
    };
    if result != 0 {
        return Progress::default();
    }
    let queue = (info.tcpi_min_rtt / 16).max(QUEUE_US);
    let stands = info.tcpi_unacked > 0
        && info.tcpi_min_rtt > 0
        && info.tcpi_rtt > info.tcpi_min_rtt.saturating_add(queue);
    Progress { waits: info.tcpi_notsent_bytes >= NOT_SENT || stands, acked: info.tcpi_bytes_acked }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::time::{Duration, Instant};

    #[test]
    fn bytes_wait_while_the_peer_does_not_read() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut peer, _) = listener.accept().unwrap();
        socket.write_all(b"a word").unwrap();
        peer.read_exact(&mut [0; 6]).unwrap();
        assert!(!progress(&socket).waits);
        socket.set_nonblocking(true).unwrap();
        let mut sent = 0;
        while let Ok(n) = socket.write(&[7; 1 << 16]) {
            sent += n;
        }
        let full = progress(&socket);
        assert!(
            full.waits && full.acked < 6 + sent as u64,
            "{sent} bytes are on their way: {full:?}"
        );
        // All that is there is read: nothing waits any more, once that is acknowledged.
        peer.read_exact(&mut vec![0; sent]).unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        // The first of a connection's sequence numbers counts as well.
        while progress(&socket) != (Progress { waits: false, acked: 7 + sent as u64 }) {
            assert!(Instant::now() < until, "after {sent} bytes: {:?}", progress(&socket));
            std::thread::yield_now();
        }
    }
}
