//! A link's progress, and whether bytes wait for it, from the kernel's `TCP_INFO`.
//!
//! Bytes can wait in two places. When the peer's window or congestion control holds them back, they
//! are *not sent*. When the bottleneck is in the network, they are sent and wait in a queue there,
//! which makes the round trip longer than the shortest one seen.

#![expect(unsafe_code, reason = "nothing safe wraps TCP_INFO")]

use std::net::TcpStream;
use std::os::fd::AsRawFd;

/// Fewer unsent bytes may just have been written by a writer. Half a chunk shows that bytes wait.
const NOT_SENT: u32 = 64 << 10;
/// A round trip that exceeds the shortest one by this many microseconds shows a queue: the session
/// has 15 ms of bytes in flight beyond the capacity of the path, and they wait at the bottleneck.
const QUEUE_US: u32 = 4000;

/// The kernel's report on a link.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Whether bytes wait for the link now.
    pub(crate) waits: bool,
    /// Bytes that the peer's kernel has acknowledged. Unlike bytes written, none of them wait in a
    /// queue.
    pub(crate) acked: u64,
}

/// The progress of the link of `socket`; zero if the kernel does not report it. `most` is the
/// number of unsent bytes at which the kernel makes a writer wait.
pub(crate) fn progress(socket: &TcpStream, most: u32) -> Progress {
    let Some(info) = info(socket) else { return Progress::default() };
    let queue = (info.tcpi_min_rtt / 16).max(QUEUE_US);
    let stands = info.tcpi_unacked > 0
        && info.tcpi_min_rtt > 0
        && info.tcpi_rtt > info.tcpi_min_rtt.saturating_add(queue);
    let waits = info.tcpi_notsent_bytes >= NOT_SENT.min(most / 2) || stands;
    Progress { waits, acked: info.tcpi_bytes_acked }
}

/// Whether bytes written now wait behind others that the kernel has not sent. False if the kernel
/// does not report it.
pub(crate) fn has_unsent(socket: &TcpStream) -> bool {
    info(socket).is_some_and(|info| info.tcpi_notsent_bytes >= NOT_SENT)
}

/// Whether the peer's kernel has acknowledged all bytes written, over a connection that still
/// stands. True if the kernel does not report it.
pub(crate) fn is_acknowledged(socket: &TcpStream) -> bool {
    /// Open, or closed by the peer only. A connection that was reset has nothing in flight either.
    const STANDS: [u8; 2] = [1, 8];
    info(socket).is_none_or(|info| {
        STANDS.contains(&info.tcpi_state) && info.tcpi_unacked == 0 && info.tcpi_notsent_bytes == 0
    })
}

/// The kernel's report on `socket`.
fn info(socket: &TcpStream) -> Option<libc::tcp_info> {
    // SAFETY: `tcp_info` consists of integers, for which zeros are valid.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let size = std::mem::size_of_val(&info);
    let mut len = libc::socklen_t::try_from(size).ok()?;
    // SAFETY: the descriptor is open while `socket` is borrowed. The kernel writes at most `len`
    // bytes to `info`, which has as many, and the number written to `len`. An older kernel writes
    // fewer; the other fields stay zero.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut len,
        )
    };
    (result == 0).then_some(info)
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
        let until = Instant::now() + Duration::from_secs(60);
        // The peer may have the bytes before their acknowledgement is here.
        while progress(&socket, u32::MAX).waits {
            assert!(Instant::now() < until, "{:?}", progress(&socket, u32::MAX));
            std::thread::yield_now();
        }
        socket.set_nonblocking(true).unwrap();
        let mut sent = 0;
        // The kernel enlarges the socket's buffer with each acknowledgement: it may be full once
        // before the peer's window is.
        let mut before = Progress::default();
        let full = loop {
            while let Ok(n) = socket.write(&[7; 1 << 16]) {
                sent += n;
            }
            let now = progress(&socket, u32::MAX);
            if now.waits && now == before {
                break now;
            }
            assert!(Instant::now() < until, "{now:?}");
            before = now;
            std::thread::sleep(Duration::from_millis(20));
        };
        assert!(!is_acknowledged(&socket));
        assert!(
            full.waits && full.acked < 6 + sent as u64,
            "{sent} bytes are on their way: {full:?}"
        );
        // All bytes are read: once that is acknowledged, nothing waits any more.
        peer.read_exact(&mut vec![0; sent]).unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        // The SYN takes one sequence number, which counts too.
        while progress(&socket, u32::MAX) != (Progress { waits: false, acked: 7 + sent as u64 }) {
            assert!(
                Instant::now() < until,
                "after {sent} bytes: {:?}",
                progress(&socket, u32::MAX)
            );
            std::thread::yield_now();
        }
        assert!(is_acknowledged(&socket));
    }

    #[test]
    fn bytes_of_a_connection_that_is_reset_are_not_acknowledged() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (peer, _) = listener.accept().unwrap();
        socket.write_all(b"unread").unwrap();
        assert_eq!(peer.peek(&mut [0]).unwrap(), 1);
        // With bytes unread: a reset.
        drop(peer);
        let _ = socket.read(&mut [0]);
        assert!(!is_acknowledged(&socket));
    }
}
