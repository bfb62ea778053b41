//! A link of a given rate, which blocks its writer as a socket does.

use std::thread;
use std::time::{Duration, Instant};

/// Copies bytes as the kernel would, and makes the sender sleep when it is ahead of the rate by
/// more than a socket buffer.
pub(super) struct Link {
    /// 0 for an infinitely fast link.
    bytes_per_second: f64,
    began: Instant,
    /// When the last byte will have been sent, seconds since `began`.
    drained: f64,
    buffer: Vec<u8>,
    at: usize,
    sent: u64,
}

/// About the size to which Linux grows a TCP socket's buffer on such a path.
const BUFFER: usize = 1 << 20;

impl Link {
    pub(super) fn new(gbit: f64) -> Self {
        Self {
            bytes_per_second: gbit * 1e9 / 8.0,
            began: Instant::now(),
            drained: 0.0,
            buffer: vec![0; BUFFER],
            at: 0,
            sent: 0,
        }
    }

    pub(super) fn send(&mut self, bytes: &[u8]) {
        if bytes.len() > BUFFER - self.at {
            self.at = 0;
        }
        self.buffer[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
        self.sent += bytes.len() as u64;
        if self.bytes_per_second > 0.0 {
            let now = self.began.elapsed().as_secs_f64();
            self.drained = self.drained.max(now) + bytes.len() as f64 / self.bytes_per_second;
            let buffered = BUFFER as f64 / self.bytes_per_second;
            if self.drained - now > buffered {
                // A socket wakes its writer when a third of the buffer is free.
                thread::sleep(Duration::from_secs_f64(self.drained - now - buffered * 0.67));
            }
        }
    }

    /// Waits until the last byte has been sent, and returns their number.
    pub(super) fn finish(self) -> u64 {
        let left = self.drained - self.began.elapsed().as_secs_f64();
        if self.bytes_per_second > 0.0 && left > 0.0 {
            thread::sleep(Duration::from_secs_f64(left));
        }
        self.sent
    }
}
