//! A path whose round trip changes while connections use it, with one bottleneck for all of them
//! and for bytes of others: for kernels without netem.
//!
//! ```text
//! source relay ═══ near socket ─► bottleneck (rate, short queue) ─► half the round trip ─► far socket
//!                              ◄───────────── half the round trip ◄──────────────────────
//! ```
//!
//! It ends and makes TCP connections, so that their own congestion control sees two short paths,
//! and what is measured is the relays' window. The sockets beside it hold little.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use anyhow::Result;
use rustix::net::sockopt::set_socket_recv_buffer_size;

use crate::net::{Net, Side};

/// Bytes that travel together: at 20 MB/s less than a millisecond.
const PIECE: usize = 16 << 10;
/// The queue before the bottleneck, as long as a switch port's.
const QUEUE: Duration = Duration::from_millis(10);
/// The buffer of a socket from which it reads.
const BUFFER: usize = 64 << 10;

/// A listening socket beside the source whose connections go the long way to the destination.
#[derive(Debug)]
pub struct LongPath {
    /// The argument of `--peer`.
    pub address: SocketAddr,
    state: Arc<State>,
}

#[derive(Debug)]
struct State {
    /// Bytes per second.
    rate: f64,
    round_trip_us: AtomicU64,
    /// When the bottleneck will have sent what it has.
    free: Mutex<Instant>,
    /// The connections, until they are cut.
    sockets: Mutex<Vec<TcpStream>>,
}

/// Bytes of others that use the bottleneck, until it is dropped.
#[derive(Debug)]
pub struct Bulk(Arc<AtomicBool>);

impl Drop for Bulk {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl LongPath {
    /// Starts one at `side`, on the way to `to`, with this many bytes per second that way. Its
    /// threads live as long as the process: they hold nothing but sockets.
    ///
    /// # Errors
    /// When no address is to be had.
    pub fn start(net: &Net, side: Side, to: SocketAddr, rate: f64) -> Result<Self> {
        let (listen, _) = net.meeting_point(side)?;
        let listener: TcpListener = net.listen_at(side, listen)?;
        set_socket_recv_buffer_size(&listener, BUFFER)?;
        let (round_trip_us, free) = (AtomicU64::new(0), Mutex::new(Instant::now()));
        let sockets = Mutex::default();
        let state = Arc::new(State { rate, round_trip_us, free, sockets });
        let (enter, of_thread) = (net.way_to(side)?, Arc::clone(&state));
        std::thread::spawn(move || {
            if let Err(error) = enter() {
                return eprintln!("the long path cannot start: {error}");
            }
            for near in listener.incoming().flatten() {
                // No process listens there: closing is what the client would see without us.
                let Ok(far) = TcpStream::connect(to) else { continue };
                let _ = (near.set_nodelay(true), far.set_nodelay(true));
                let (Ok(near2), Ok(far2)) = (near.try_clone(), far.try_clone()) else { continue };
                if let (Ok(near), Ok(far)) = (near.try_clone(), far.try_clone()) {
                    of_thread.lock_sockets().extend([near, far]);
                }
                of_thread.carry(near, far, true);
                of_thread.carry(far2, near2, false);
            }
        });
        Ok(Self { address: listen, state })
    }

    /// Changes the round trip of the bytes that enter from now on.
    pub fn set_round_trip(&self, time: Duration) {
        let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.state.round_trip_us.store(us, Ordering::Relaxed);
    }

    /// Cuts all connections; those made from now on find the path as it is then.
    pub fn cut(&self) {
        for socket in self.state.lock_sockets().drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    /// A flow that always has bytes for the bottleneck.
    pub fn compete(&self) -> Bulk {
        let ends = Arc::new(AtomicBool::new(false));
        let (ended, state) = (Arc::clone(&ends), Arc::downgrade(&self.state));
        std::thread::spawn(move || {
            while let (false, Some(state)) = (ended.load(Ordering::Relaxed), Weak::upgrade(&state))
            {
                state.pass(PIECE);
            }
        });
        Bulk(ends)
    }
}

impl State {
    /// Carries bytes one way until either side closes.
    fn carry(self: &Arc<Self>, mut from: TcpStream, mut to: TcpStream, bottleneck: bool) {
        let (sender, receiver) = channel::<(Instant, Vec<u8>)>();
        std::thread::spawn(move || {
            for (due, piece) in receiver {
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
                if to.write_all(&piece).is_err() {
                    break;
                }
            }
            let _ = to.shutdown(Shutdown::Both);
        });
        let state = Arc::clone(self);
        std::thread::spawn(move || {
            let mut piece = vec![0; PIECE];
            // An error or the end of it: the other thread sees the channel close.
            while let Ok(len @ 1..) = from.read(&mut piece) {
                let sent = if bottleneck { state.pass(len) } else { Instant::now() };
                let way = Duration::from_micros(state.round_trip_us.load(Ordering::Relaxed) / 2);
                if sender.send((sent + way, piece[..len].to_vec())).is_err() {
                    break;
                }
            }
            let _ = from.shutdown(Shutdown::Read);
        });
    }

    fn lock_sockets(&self) -> std::sync::MutexGuard<'_, Vec<TcpStream>> {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the bottleneck's queue takes so many bytes; returns when they have left it.
    fn pass(&self, bytes: usize) -> Instant {
        #[expect(clippy::cast_precision_loss, reason = "a piece")]
        let takes = Duration::from_secs_f64(bytes as f64 / self.rate);
        let left = {
            let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
            *free = (*free).max(Instant::now()) + takes;
            *free
        };
        std::thread::sleep(left.saturating_duration_since(Instant::now() + QUEUE));
        left
    }
}
