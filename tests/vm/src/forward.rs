//! A TCP forwarder that throttles and counts: the link on a machine without namespaces.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::net::Rate;

/// The speed of both directions and the bytes in each, shared by all connections.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// Megabits a second; 0 is unlimited.
    mbit: AtomicU32,
    /// Whether the link is down.
    down: AtomicBool,
    forth: Way,
    back: Way,
}

#[derive(Debug, Default)]
struct Way {
    bytes: AtomicU64,
    /// When the bytes so far will have passed at the set speed.
    free_at: Mutex<Option<Instant>>,
}

impl Pace {
    pub(crate) fn set(&self, rate: Rate) {
        let mbit = match rate {
            Rate::Unlimited => 0,
            Rate::Mbit(mbit) => mbit,
        };
        self.mbit.store(mbit, Ordering::Relaxed);
    }

    pub(crate) fn set_up(&self, up: bool) {
        self.down.store(!up, Ordering::Relaxed);
    }

    /// Bytes in each direction.
    pub(crate) fn counted(&self) -> u64 {
        self.forth.bytes.load(Ordering::Relaxed) + self.back.bytes.load(Ordering::Relaxed)
    }

    /// Counts `len` bytes and sleeps until the link would have transferred them.
    fn pass(&self, way: &Way, len: usize) {
        while self.down.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(5));
        }
        way.bytes.fetch_add(len as u64, Ordering::Relaxed);
        let mbit = self.mbit.load(Ordering::Relaxed);
        if mbit == 0 {
            return;
        }
        let now = Instant::now();
        let until = {
            let mut free_at = way.free_at.lock().unwrap_or_else(PoisonError::into_inner);
            let from = free_at.map_or(now, |at| at.max(now));
            let until = from + Duration::from_nanos(len as u64 * 8000 / u64::from(mbit));
            *free_at = Some(until);
            until
        };
        std::thread::sleep(until.saturating_duration_since(now));
    }
}

/// A listening socket whose connections are forwarded to a fixed address.
#[derive(Debug)]
pub(crate) struct Forwarder {
    address: SocketAddr,
}

impl Forwarder {
    /// Listens on a free loopback port. Its threads live as long as the process: they hold only
    /// sockets.
    pub(crate) fn start(to: SocketAddr, pace: Arc<Pace>) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = listener.local_addr()?;
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                // Nothing listens at the address: close, as without the forwarder.
                let Ok(far) = TcpStream::connect(to) else { continue };
                let (Ok(near2), Ok(far2)) = (near.try_clone(), far.try_clone()) else { continue };
                let (forth, back) = (Arc::clone(&pace), Arc::clone(&pace));
                std::thread::spawn(move || pump(near, far, &forth, |pace| &pace.forth));
                std::thread::spawn(move || pump(far2, near2, &back, |pace| &pace.back));
            }
        });
        Ok(Self { address })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }
}

/// Forwards bytes in one direction until either side closes.
fn pump(mut from: TcpStream, mut to: TcpStream, pace: &Pace, way: fn(&Pace) -> &Way) {
    let mut buffer = vec![0; 32 << 10];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => {
                let _ = to.shutdown(Shutdown::Write);
                return;
            }
            Ok(len) => {
                pace.pass(way(pace), len);
                if to.write_all(&buffer[..len]).is_err() {
                    // The reader is gone: the writer must see that too.
                    let _ = from.shutdown(Shutdown::Both);
                    return;
                }
            }
            Err(_) => {
                let _ = to.shutdown(Shutdown::Both);
                return;
            }
        }
    }
}
