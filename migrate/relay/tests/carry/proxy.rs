//! A TCP proxy that cuts, stops or corrupts the bytes that it forwards.

use session::HEADER_BYTES;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};

/// The change to the frames from client to server.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tamper {
    Nothing,
    /// Flip one bit in the payload of this DATA frame (0 is the first).
    Flip(usize),
    /// Drop this DATA frame.
    Drop(usize),
}

#[derive(Default)]
struct State {
    frozen: bool,
    /// The first connection forwards nothing to the server.
    first_frozen: bool,
    cut: bool,
    data_frames: usize,
    sockets: Vec<TcpStream>,
}

struct Shared {
    state: Mutex<State>,
    thawed: Condvar,
    tamper: Tamper,
}

pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    shared: Arc<Shared>,
}

impl Proxy {
    pub(crate) fn new(to: SocketAddr, tamper: Tamper) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            state: Mutex::new(State::default()),
            thawed: Condvar::new(),
            tamper,
        });
        let of_thread = shared.clone();
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (Ok(client), Ok(server)) = (client, TcpStream::connect(to)) else { return };
                let mut state = of_thread.state.lock().unwrap();
                if state.cut {
                    return;
                }
                let is_first = state.sockets.is_empty();
                state.sockets.push(client.try_clone().unwrap());
                state.sockets.push(server.try_clone().unwrap());
                drop(state);
                let (a, b) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                let shared = of_thread.clone();
                std::thread::spawn(move || {
                    let _ = shared.forward(client, &server, is_first);
                    let _ = server.shutdown(Shutdown::Write);
                });
                let shared = of_thread.clone();
                std::thread::spawn(move || {
                    let _ = shared.backward(b, &a);
                    let _ = a.shutdown(Shutdown::Write);
                });
            }
        });
        Self { address, shared }
    }

    /// Ends every connection at once.
    pub(crate) fn cut(&self) {
        let mut state = self.shared.state.lock().unwrap();
        state.cut = true;
        for socket in &state.sockets {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    /// Stops forwarding from the client on its first connection, and closes nothing.
    pub(crate) fn freeze_first(&self) {
        self.shared.state.lock().unwrap().first_frozen = true;
    }

    /// Stops forwarding in both directions, and closes nothing.
    pub(crate) fn freeze(&self) {
        self.shared.state.lock().unwrap().frozen = true;
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.cut();
        {
            let mut state = self.shared.state.lock().unwrap();
            (state.frozen, state.first_frozen) = (false, false);
        }
        self.shared.thawed.notify_all();
        let _ = TcpStream::connect(self.address);
    }
}

impl Shared {
    fn pause(&self, is_first: bool) {
        let state = self.state.lock().unwrap();
        let is_frozen = |state: &mut State| state.frozen || (is_first && state.first_frozen);
        drop(self.thawed.wait_while(state, is_frozen).unwrap());
    }

    fn forward(&self, mut from: TcpStream, mut to: &TcpStream, is_first: bool) -> io::Result<()> {
        let mut head = [0; 20];
        from.read_exact(&mut head)?;
        let mut json = vec![0; u32::from_be_bytes(head[12..16].try_into().unwrap()) as usize];
        from.read_exact(&mut json)?;
        to.write_all(&[&head[..], &json].concat())?;
        loop {
            let mut frame = vec![0; HEADER_BYTES];
            from.read_exact(&mut frame)?;
            let length = u32::from_be_bytes(frame[4..8].try_into().unwrap()) as usize;
            frame.resize(HEADER_BYTES + length, 0);
            from.read_exact(&mut frame[HEADER_BYTES..])?;
            self.pause(is_first);
            let mut times = 1;
            if frame[0] == 2 {
                let mut state = self.state.lock().unwrap();
                let number = state.data_frames;
                state.data_frames += 1;
                match self.tamper {
                    // Behind the unit's header of 20 bytes, in the middle of the compressed bytes.
                    Tamper::Flip(which) if which == number => {
                        let at = HEADER_BYTES + 20 + (length - 20) / 2;
                        frame[at] ^= 0x10;
                    }
                    Tamper::Drop(which) if which == number => times = 0,
                    _ => {}
                }
            }
            for _ in 0..times {
                to.write_all(&frame)?;
            }
        }
    }

    fn backward(&self, mut from: TcpStream, mut to: &TcpStream) -> io::Result<()> {
        let mut bytes = vec![0; 65536];
        loop {
            let got = from.read(&mut bytes)?;
            if got == 0 {
                return Ok(());
            }
            self.pause(false);
            to.write_all(&bytes[..got])?;
        }
    }
}
