//! A network between the relays that is cut at a chosen message, in a chosen way, and then works
//! again.

use session::{FrameType, HEADER_BYTES};
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The type of a HEARTBEAT.
const HEARTBEAT: u8 = FrameType::Heartbeat as u8;

/// The direction whose messages are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    Forth,
    Back,
}

/// When and what to cut.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan {
    pub(crate) way: Way,
    /// Messages that pass before the cut, over all links.
    pub(crate) after: usize,
    /// Bytes of the next message that still pass.
    pub(crate) inside: usize,
    /// Cut every link, or only the one that carries the message.
    pub(crate) all: bool,
    /// How often to cut, each time after `after` more messages.
    pub(crate) times: usize,
}

#[derive(Default)]
struct State {
    passed: usize,
    cuts: usize,
    held: bool,
    /// The next connection is the last one admitted.
    once: bool,
    swallows: bool,
    /// Answers to hellos do not arrive, and their connections stay open.
    mutes: bool,
    muted: usize,
    to: Option<SocketAddr>,
    sockets: Vec<TcpStream>,
    doubled: bool,
    links: usize,
    carried: Vec<Carried>,
    back: Back,
}

/// The traffic from server to client so far.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Back {
    /// Bytes of frames, headers included.
    pub(crate) bytes: u64,
    /// Bytes of the return paths.
    pub(crate) plain: u64,
}

/// A DATA frame sent from client to server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Carried {
    /// The link, numbered in the order of connection.
    pub(crate) link: usize,
    pub(crate) stream: u16,
}

struct Shared {
    state: Mutex<State>,
    plan: Option<Plan>,
    /// Every message from client to server is sent twice.
    double: bool,
}

pub(crate) struct Cutter {
    pub(crate) address: SocketAddr,
    shared: Arc<Shared>,
}

impl Cutter {
    pub(crate) fn new(to: SocketAddr, plan: Option<Plan>) -> Self {
        Self::with(to, plan, false)
    }

    /// A network that sends every DATA frame twice.
    pub(crate) fn doubling(to: SocketAddr) -> Self {
        Self::with(to, None, true)
    }

    fn with(to: SocketAddr, plan: Option<Plan>, double: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared { state: Mutex::default(), plan, double });
        let of_thread = shared.clone();
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let mut state = of_thread.state.lock().unwrap();
                if state.held || (state.mutes && state.muted > 0) {
                    continue;
                }
                state.held = std::mem::take(&mut state.once);
                let to = state.to.unwrap_or(to);
                let (Ok(client), Ok(server)) = (client, TcpStream::connect(to)) else { return };
                for socket in [&client, &server] {
                    socket.set_nodelay(true).unwrap();
                    state.sockets.push(socket.try_clone().unwrap());
                }
                let link = state.links;
                state.links += 1;
                drop(state);
                for way in [Way::Forth, Way::Back] {
                    let shared = of_thread.clone();
                    let (client, server) =
                        (client.try_clone().unwrap(), server.try_clone().unwrap());
                    std::thread::spawn(move || {
                        let (from, to) = match way {
                            Way::Forth => (&client, &server),
                            Way::Back => (&server, &client),
                        };
                        let _ = shared.pass(from, to, way, link);
                        shared.stand_while_mute();
                        let _ = to.shutdown(Shutdown::Write);
                    });
                }
            }
        });
        Self { address, shared }
    }

    /// How often the network was cut so far.
    pub(crate) fn cuts(&self) -> usize {
        self.shared.state.lock().unwrap().cuts
    }

    /// Whether a message was sent twice.
    pub(crate) fn has_doubled(&self) -> bool {
        self.shared.state.lock().unwrap().doubled
    }

    /// The DATA frames sent from client to server, in order.
    pub(crate) fn carried(&self) -> Vec<Carried> {
        self.shared.state.lock().unwrap().carried.clone()
    }

    /// The traffic from server to client so far.
    pub(crate) fn back(&self) -> Back {
        self.shared.state.lock().unwrap().back
    }

    /// Cuts every link and admits no new one.
    pub(crate) fn hold(&self) {
        let mut state = self.shared.state.lock().unwrap();
        state.held = true;
        (state.swallows, state.mutes) = (false, false);
        state.cut();
    }

    /// Reads everything and forwards nothing but heartbeats, until links are cut: a silent link is
    /// lost after some seconds, which a slow machine may need for its frames.
    pub(crate) fn swallow(&self) {
        self.shared.state.lock().unwrap().swallows = true;
    }

    /// Admits one link again: its hello arrives, and the answer does not. Neither end notices,
    /// until [`Cutter::release`].
    pub(crate) fn mute(&self) {
        let mut state = self.shared.state.lock().unwrap();
        (state.held, state.mutes) = (false, true);
    }

    /// Whether an answer was kept back.
    pub(crate) fn has_muted(&self) -> bool {
        self.shared.state.lock().unwrap().muted > 0
    }

    /// Directs new links to `to`.
    pub(crate) fn lead_to(&self, to: SocketAddr) {
        self.shared.state.lock().unwrap().to = Some(to);
    }

    /// Admits one connection.
    pub(crate) fn release_one(&self) {
        let mut state = self.shared.state.lock().unwrap();
        (state.held, state.once) = (false, true);
    }

    /// Admits links again.
    pub(crate) fn release(&self) {
        let mut state = self.shared.state.lock().unwrap();
        (state.held, state.mutes) = (false, false);
    }
}

impl State {
    fn cut(&mut self) {
        for socket in self.sockets.drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Cutter {
    fn drop(&mut self) {
        self.hold();
    }
}

impl Shared {
    /// Keeps an end from noticing that the other one has closed, while answers are kept back.
    fn stand_while_mute(&self) {
        while self.state.lock().unwrap().mutes {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn pass(
        &self,
        mut from: &TcpStream,
        mut to: &TcpStream,
        way: Way,
        link: usize,
    ) -> io::Result<()> {
        let mut head = [0; 20];
        from.read_exact(&mut head)?;
        let mut json = vec![0; u32::from_be_bytes(head[12..16].try_into().unwrap()) as usize];
        from.read_exact(&mut json)?;
        if way == Way::Back {
            let mut state = self.state.lock().unwrap();
            if state.mutes {
                state.muted += 1;
                return Ok(());
            }
        }
        to.write_all(&[&head[..], &json].concat())?;
        loop {
            let mut frame = vec![0; HEADER_BYTES];
            from.read_exact(&mut frame)?;
            let length = u32::from_be_bytes(frame[4..8].try_into().unwrap()) as usize;
            frame.resize(HEADER_BYTES + length, 0);
            from.read_exact(&mut frame[HEADER_BYTES..])?;
            let mut state = self.state.lock().unwrap();
            if state.swallows {
                drop(state);
                if frame[0] == HEARTBEAT {
                    to.write_all(&frame)?;
                }
                continue;
            }
            if let Some(plan) = self.plan.filter(|plan| plan.way == way) {
                if state.cuts < plan.times && state.passed == plan.after {
                    state.cuts += 1;
                    state.passed = 0;
                    let _ = to.write_all(&frame[..plan.inside.min(frame.len() - 1)]);
                    if plan.all {
                        state.cut();
                    }
                    let _ = from.shutdown(Shutdown::Both);
                    let _ = to.shutdown(Shutdown::Both);
                    return Ok(());
                }
                state.passed += 1;
            }
            let is_data = way == Way::Forth && frame[0] == 2;
            if is_data {
                let stream = u16::from_be_bytes([frame[2], frame[3]]);
                state.carried.push(Carried { link, stream });
            }
            let double = self.double && is_data;
            state.doubled |= double;
            drop(state);
            to.write_all(&frame)?;
            if double {
                to.write_all(&frame)?;
            }
            if way == Way::Back {
                let back = &mut self.state.lock().unwrap().back;
                back.bytes += frame.len() as u64;
                // 0 in every frame but DATA.
                back.plain += u64::from(u32::from_be_bytes(frame[24..28].try_into().unwrap()));
            }
        }
    }
}
