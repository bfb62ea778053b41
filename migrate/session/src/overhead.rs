//! The bytes of a frame on the network, and the slices of a frame.
//!
//! The bytes count as a network interface counts them: with the headers of Ethernet, IP and TCP.
//! Segments that TCP sends again do not count.

use std::net::TcpStream;

use socket2::SockRef;

/// Bytes of a segment besides its data: Ethernet 14, IPv4 20 or IPv6 40, TCP with timestamps 32.
const HEADERS: (u64, u64) = (66, 86);
/// Bytes of a TLS record besides its data, and the most data of a record.
const RECORD: (u64, u64) = (22, 1 << 14);

/// Bytes on the network beside those of the frames.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Overhead {
    headers: u64,
    segment: u64,
    records: bool,
}

impl Overhead {
    /// The overhead of a connection. `records`: it carries TLS records.
    pub(crate) fn of(socket: &TcpStream, records: bool) -> Self {
        let is_v4 = socket.peer_addr().is_ok_and(|peer| peer.is_ipv4());
        // The kernel always knows the segment size; 536 is TCP's own default.
        let segment = SockRef::from(socket).tcp_mss().unwrap_or(0).max(536);
        let headers = if is_v4 { HEADERS.0 } else { HEADERS.1 };
        Self { headers, segment: u64::from(segment), records }
    }

    /// Bytes on the network for `bytes` of a frame.
    pub(crate) fn with(self, bytes: usize) -> u64 {
        let mut bytes = bytes as u64;
        if self.records {
            bytes += bytes.div_ceil(RECORD.1) * RECORD.0;
        }
        bytes + bytes.div_ceil(self.segment) * self.headers
    }
}

/// Takes at most `most` bytes off the front of `parts`.
pub(crate) fn take_slice<'a>(parts: &mut [&'a [u8]; 3], most: usize) -> [&'a [u8]; 3] {
    let mut left = most;
    parts.each_mut().map(|part| {
        let (front, rest) = part.split_at(left.min(part.len()));
        left -= front.len();
        *part = rest;
        front
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_cover_a_frame_in_order() {
        let (header, unit, body) = ([1; 48], [2; 20], [3; 5000]);
        for most in [1, 47, 48, 49, 68, 1024, 6000] {
            let mut parts: [&[u8]; 3] = [&header, &unit, &body];
            let mut all = Vec::new();
            loop {
                let slice = take_slice(&mut parts, most).concat();
                if slice.is_empty() {
                    break;
                }
                assert!(slice.len() <= most);
                all.extend(slice);
            }
            assert_eq!(all, [&header[..], &unit, &body].concat(), "{most}");
        }
    }

    #[test]
    fn headers_and_records_are_counted() {
        let plain = Overhead { headers: 66, segment: 1448, records: false };
        assert_eq!((plain.with(1448), plain.with(1449)), (1514, 1449 + 132));
        let secured = Overhead { records: true, ..plain };
        assert_eq!(secured.with(1400), 1422 + 66);
    }
}
