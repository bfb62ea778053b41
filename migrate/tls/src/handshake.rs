//! The handshake on a blocking socket, one record at a time, until a deadline.

use crate::channel::Channel;
use crate::error::TlsError;
use crate::peer::Peer;
use crate::record::{KeySource, MAX_RECORD_BODY, RECORD_HEADER};
use rustls::client::{ClientConnectionData, UnbufferedClientConnection};
use rustls::kernel::KernelConnection;
use rustls::server::{ServerConnectionData, UnbufferedServerConnection};
use rustls::unbuffered::{ConnectionState, EncodeError, UnbufferedStatus};
use rustls::{CommonState, ConnectionTrafficSecrets, Error, ExtractedSecrets};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

/// Bytes of an incomplete handshake message; certificate chains are the largest.
const MAX_WAITING: usize = 128 << 10;
/// How long an alert may take to reach a peer that is still sending.
const FAREWELL: Duration = Duration::from_millis(500);
/// The least time for a write, which a host that stood still may begin behind the deadline.
const LEAST_WRITE: Duration = Duration::from_millis(1);

/// The interface common to client and server connections.
pub(crate) trait Handshake: Sized {
    type Keys: KeySource + 'static;

    /// Processes `incoming`; returns the number of bytes consumed and the next step. Appends bytes
    /// for the peer to `outgoing`.
    fn step(&mut self, incoming: &mut [u8], outgoing: &mut Vec<u8>) -> (usize, Step);
    fn common(&self) -> &CommonState;
    fn take_keys(self) -> Result<(ExtractedSecrets, Self::Keys), Error>;
}

pub(crate) enum Step {
    Again,
    Send,
    Receive,
    Done,
    Closed,
    Failed(Error),
}

fn take<Data>(status: UnbufferedStatus<'_, '_, Data>, outgoing: &mut Vec<u8>) -> (usize, Step) {
    let step = match status.state {
        Err(error) => Step::Failed(error),
        Ok(ConnectionState::EncodeTlsData(mut state)) => {
            let from = outgoing.len();
            let size = match state.encode(&mut []) {
                Err(EncodeError::InsufficientSize(size)) => size.required_size,
                _ => 0,
            };
            outgoing.resize(from + size, 0);
            match state.encode(&mut outgoing[from..]) {
                Ok(written) => {
                    outgoing.truncate(from + written);
                    Step::Again
                }
                Err(error) => Step::Failed(Error::General(error.to_string())),
            }
        }
        Ok(ConnectionState::TransmitTlsData(state)) => {
            state.done();
            Step::Send
        }
        Ok(ConnectionState::BlockedHandshake) => Step::Receive,
        Ok(ConnectionState::WriteTraffic(_)) => Step::Done,
        // No data can have arrived: nothing is read beyond the record that ends the handshake, and
        // early data is off.
        Ok(_) => Step::Closed,
    };
    (status.discard, step)
}

impl Handshake for UnbufferedClientConnection {
    type Keys = KernelConnection<ClientConnectionData>;

    fn step(&mut self, incoming: &mut [u8], outgoing: &mut Vec<u8>) -> (usize, Step) {
        take(self.process_tls_records(incoming), outgoing)
    }

    fn common(&self) -> &CommonState {
        self
    }

    fn take_keys(self) -> Result<(ExtractedSecrets, Self::Keys), Error> {
        self.dangerous_into_kernel_connection()
    }
}

impl Handshake for UnbufferedServerConnection {
    type Keys = KernelConnection<ServerConnectionData>;

    fn step(&mut self, incoming: &mut [u8], outgoing: &mut Vec<u8>) -> (usize, Step) {
        take(self.process_tls_records(incoming), outgoing)
    }

    fn common(&self) -> &CommonState {
        self
    }

    fn take_keys(self) -> Result<(ExtractedSecrets, Self::Keys), Error> {
        self.dangerous_into_kernel_connection()
    }
}

impl<Side: Send> KeySource for KernelConnection<Side> {
    fn next_tx(&mut self) -> Result<(u64, ConnectionTrafficSecrets), Error> {
        self.update_tx_secret()
    }

    fn next_rx(&mut self) -> Result<(u64, ConnectionTrafficSecrets), Error> {
        self.update_rx_secret()
    }
}

/// Runs the handshake and takes the keys. `explain` describes rustls's errors.
pub(crate) fn run<C: Handshake>(
    mut connection: C,
    socket: &TcpStream,
    peer: &str,
    deadline: Instant,
    explain: impl Fn(&Error) -> String,
) -> Result<Channel, TlsError> {
    let refused = |reason: String| TlsError::Refused { peer: peer.into(), reason };
    let lost = |error: &io::Error| lost(peer, error);
    let mut incoming = Vec::new();
    let mut outgoing = Vec::new();
    loop {
        let (used, step) = connection.step(&mut incoming, &mut outgoing);
        incoming.drain(..used);
        match step {
            Step::Again => {}
            Step::Send => {
                send(socket, &mut outgoing, deadline).map_err(|error| lost(&error))?;
            }
            Step::Receive => {
                if incoming.len() > MAX_WAITING {
                    return Err(refused("its handshake has no end".into()));
                }
                if let Err(error) = receive(socket, &mut incoming, deadline) {
                    return Err(match error {
                        Received::Plain => TlsError::Plain { peer: peer.into() },
                        Received::Foreign => refused("it does not speak TLS".into()),
                        Received::Lost(error) => lost(&error),
                    });
                }
            }
            Step::Done => break,
            Step::Closed => return Err(refused("it closed the handshake".into())),
            Step::Failed(error) => {
                let reason = explain(&error);
                send_alert(&mut connection, socket, outgoing);
                return Err(refused(reason));
            }
        }
    }
    let certificate = connection.common().peer_certificates().and_then(<[_]>::first);
    let certificate = certificate.ok_or_else(|| refused("it shows no certificate".into()))?;
    let identity = Peer::new(certificate);
    let suite = connection.common().negotiated_cipher_suite().and_then(|suite| suite.tls13());
    let limit = suite.map_or(0, |suite| suite.common.confidentiality_limit);
    let (secrets, keys) = connection.take_keys().map_err(|error| refused(error.to_string()))?;
    Channel::new(secrets, Box::new(keys), limit, &incoming, identity)
        .map_err(|error| refused(error.to_string()))
}

/// Sends the alert to the peer and waits until the peer can have read it: closing a socket with
/// unread bytes resets the connection, and an alert under way is lost.
fn send_alert<C: Handshake>(connection: &mut C, socket: &TcpStream, mut outgoing: Vec<u8>) {
    // Only while an alert waits to be encoded: rustls must not process the refused bytes again,
    // since it expects those that it has asked to discard.
    while connection.common().wants_write() {
        let (_, Step::Again) = connection.step(&mut [], &mut outgoing) else { break };
    }
    let deadline = Instant::now() + FAREWELL;
    if send(socket, &mut outgoing, deadline).is_err() || socket.shutdown(Shutdown::Write).is_err() {
        return;
    }
    linger(socket, deadline);
}

/// Reads and drops the peer's remaining bytes, until it closes.
fn linger(mut socket: &TcpStream, deadline: Instant) {
    let mut rest = [0; 4096];
    // At most 64 KiB: a peer that sends more does not wait for the alert.
    for _ in 0..16 {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || socket.set_read_timeout(Some(left)).is_err() {
            return;
        }
        if !matches!(socket.read(&mut rest), Ok(1..)) {
            return;
        }
    }
}

fn lost(peer: &str, error: &io::Error) -> TlsError {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, TimedOut, UnexpectedEof, WouldBlock};
    let peer = peer.to_string();
    match error.kind() {
        WouldBlock | TimedOut => TlsError::Late { peer },
        UnexpectedEof | ConnectionReset | BrokenPipe => TlsError::Cut { peer },
        _ => TlsError::Refused { peer, reason: error.to_string() },
    }
}

fn time_left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

fn send(mut socket: &TcpStream, outgoing: &mut Vec<u8>, deadline: Instant) -> io::Result<()> {
    socket.set_write_timeout(Some(time_left(deadline).max(LEAST_WRITE)))?;
    // A handshake's flight always fits into the socket's buffer, so one timeout bounds it all.
    socket.write_all(outgoing)?;
    outgoing.clear();
    Ok(())
}

enum Received {
    /// The first bytes of a platen without TLS.
    Plain,
    /// Bytes that are not a TLS record.
    Foreign,
    Lost(io::Error),
}

impl From<io::Error> for Received {
    fn from(error: io::Error) -> Self {
        Self::Lost(error)
    }
}

/// Appends one record to `incoming`, and no more, so that the bytes behind the handshake stay in
/// the socket.
fn receive(socket: &TcpStream, incoming: &mut Vec<u8>, deadline: Instant) -> Result<(), Received> {
    let mut head = [0; RECORD_HEADER];
    fill(socket, &mut head, deadline)?;
    if head == *b"PLATE" {
        return Err(Received::Plain);
    }
    let length = usize::from(u16::from_be_bytes([head[3], head[4]]));
    if !(20..=23).contains(&head[0]) || head[1] != 3 || length > MAX_RECORD_BODY {
        return Err(Received::Foreign);
    }
    incoming.extend_from_slice(&head);
    let from = incoming.len();
    incoming.resize(from + length, 0);
    Ok(fill(socket, &mut incoming[from..], deadline)?)
}

/// Reads until `deadline`. Behind it, reads what waits in the socket: this host may have stood
/// still since those bytes came. A wait for more would let a peer that sends byte by byte never be
/// late.
fn read(mut socket: &TcpStream, out: &mut [u8], deadline: Instant) -> io::Result<usize> {
    let left = time_left(deadline);
    if !left.is_zero() {
        socket.set_read_timeout(Some(left))?;
        return socket.read(out);
    }
    socket.set_nonblocking(true)?;
    let got = socket.read(out);
    socket.set_nonblocking(false)?;
    got
}

fn fill(socket: &TcpStream, out: &mut [u8], deadline: Instant) -> io::Result<()> {
    let mut done = 0;
    while done < out.len() {
        match read(socket, &mut out[done..], deadline) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => done += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
