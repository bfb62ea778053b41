//! A link in user space that delays, reorders and cuts: for kernels without netem.
//!
//! It carries TCP connections, so what it reorders is what a relay could ever see reordered: the
//! connections of one session against each other. Each piece waits a time of its own; a connection
//! may stand still for a while, and after so many bytes one is cut.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{sync_channel, Receiver};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::net::{Net, Side};

/// Bytes that travel together.
const PIECE: usize = 16 << 10;
/// Pieces on their way in one direction of a connection: so few that a sender has to use its other
/// connections.
const ON_THE_WAY: usize = 12;

/// How wild it is.
#[derive(Debug, Clone, Copy)]
pub struct Habits {
    /// Every piece waits this long, milliseconds...
    pub delay: u64,
    /// ...and up to this much more.
    pub jitter: u64,
    /// One piece in so many waits half a second.
    pub stall_every: u64,
    /// One connection is cut after so many bytes of all together; 0 for never.
    pub cut_every: u64,
}

/// A listening socket beside the source whose connections go the wild way to the destination.
#[derive(Debug)]
pub struct WildLink {
    /// The argument of `--peer`.
    pub address: SocketAddr,
    state: Arc<State>,
}

#[derive(Debug)]
struct State {
    habits: Habits,
    passed: AtomicU64,
    cuts: AtomicU64,
    noise: AtomicU64,
}

impl WildLink {
    /// Starts one at `side`, on the way to `to`. Its threads live as long as the process: they hold
    /// nothing but sockets.
    ///
    /// # Errors
    /// When no address is to be had.
    pub fn start(net: &Net, side: Side, to: SocketAddr, habits: Habits) -> Result<Self> {
        let (listen, _) = net.meeting_point(side)?;
        let listener = net.listen_at(side, listen)?;
        let state = Arc::new(State {
            habits,
            passed: AtomicU64::new(0),
            cuts: AtomicU64::new(0),
            noise: AtomicU64::new(0x9e37_79b9_7f4a_7c15),
        });
        let (enter, of_thread) = (net.way_to(side)?, state.clone());
        std::thread::spawn(move || {
            if let Err(error) = enter() {
                return eprintln!("the wild link cannot start: {error}");
            }
            for near in listener.incoming().flatten() {
                // No process listens there: closing is what the client would see without us.
                let Ok(far) = TcpStream::connect(to) else { continue };
                let (Ok(near2), Ok(far2)) = (near.try_clone(), far.try_clone()) else { continue };
                of_thread.carry(near, far);
                of_thread.carry(far2, near2);
            }
        });
        Ok(Self { address: listen, state })
    }

    /// Connections it has cut so far.
    pub fn cuts(&self) -> u64 {
        self.state.cuts.load(Ordering::Relaxed)
    }
}

impl State {
    /// Carries bytes one way until either side closes.
    fn carry(self: &Arc<Self>, mut from: TcpStream, to: TcpStream) {
        let (sender, receiver) = sync_channel(ON_THE_WAY);
        let state = self.clone();
        std::thread::spawn(move || state.deliver(&receiver, to));
        let state = self.clone();
        std::thread::spawn(move || {
            let mut piece = vec![0; PIECE];
            // An error or the end of it: the other thread sees the channel close.
            while let Ok(len @ 1..) = from.read(&mut piece) {
                let due = Instant::now() + state.wait();
                if sender.send((due, piece[..len].to_vec())).is_err() {
                    break;
                }
            }
            let _ = from.shutdown(Shutdown::Read);
        });
    }

    fn deliver(&self, pieces: &Receiver<(Instant, Vec<u8>)>, mut to: TcpStream) {
        for (due, piece) in pieces {
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            let len = piece.len() as u64;
            let before = self.passed.fetch_add(len, Ordering::Relaxed);
            let every = self.habits.cut_every;
            if every > 0 && before / every != (before + len) / every {
                self.cuts.fetch_add(1, Ordering::Relaxed);
                // In the middle of a piece, both ways.
                let _ = to.write_all(&piece[..piece.len() / 2]);
                let _ = to.shutdown(Shutdown::Both);
                return;
            }
            if to.write_all(&piece).is_err() {
                let _ = to.shutdown(Shutdown::Both);
                return;
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    }

    fn wait(&self) -> Duration {
        // A step of a linear congruence; the order of concurrent steps does not matter.
        let noise = self.noise.load(Ordering::Relaxed);
        let noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        self.noise.store(noise, Ordering::Relaxed);
        let Habits { delay, jitter, stall_every, .. } = self.habits;
        let stall = if (noise >> 20).is_multiple_of(stall_every) { 500 } else { 0 };
        Duration::from_millis(delay + (noise >> 33) % (jitter + 1) + stall)
    }
}
