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
        // No data can arrive: nothing is read beyond the record that ends the handshake, and early
        // data is off.
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

/// Runs the handshake and takes the keys. `explain` words rustls's errors.
pub(crate) fn run<C: Handshake>(
    mut connection: C,
    socket: &TcpStream,
    peer: &str,
    deadline: Instant,
    explain: impl Fn(&Error) -> String,
) -> Result<Channel, TlsError> {
    let refused = |reason: String| TlsError::Refused { peer: peer.into(), reason };
    let mut incoming = Vec::new();
    let mut outgoing = Vec::new();
    loop {
        let (used, step) = connection.step(&mut incoming, &mut outgoing);
        incoming.drain(..used);
        match step {
            Step::Again => {}
            Step::Send => {
                send(socket, &mut outgoing, deadline).map_err(|error| refused(lost(&error)))?;
            }
            Step::Receive => {
                if incoming.len() > MAX_WAITING {
                    return Err(refused("its handshake has no end".into()));
                }
                if let Err(error) = receive(socket, &mut incoming, deadline) {
                    return Err(match error {
                        Received::Plain => TlsError::Plain { peer: peer.into() },
                        Received::Foreign => refused("it does not speak TLS".into()),
                        Received::Lost(error) => refused(lost(&error)),
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
    // 64 KiB at most: a peer that sends more does not wait for our alert.
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

fn lost(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            "its half of the handshake did not come in time".into()
        }
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
            "it closed the connection during the handshake (was it started with --insecure?)".into()
        }
        _ => error.to_string(),
    }
}

fn time_left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::ErrorKind::TimedOut.into());
    }
    Ok(left)
}

fn send(mut socket: &TcpStream, outgoing: &mut Vec<u8>, deadline: Instant) -> io::Result<()> {
    socket.set_write_timeout(Some(time_left(deadline)?))?;
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

fn fill(mut socket: &TcpStream, out: &mut [u8], deadline: Instant) -> io::Result<()> {
    let mut done = 0;
    while done < out.len() {
        socket.set_read_timeout(Some(time_left(deadline)?))?;
        match socket.read(&mut out[done..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => done += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::{Acceptor, Authority, Channel, Connector, Credentials, TlsError};
    use std::io::{Read, Write};
    use std::net::{Shutdown, TcpListener, TcpStream};
    use std::path::Path;
    use std::thread;
    use std::time::{Duration, Instant};

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (client, listener.accept().unwrap().0)
    }

    fn ends() -> (tempfile::TempDir, Connector, Acceptor) {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::at(folder.path());
        authority.init(false).unwrap();
        let load = |dir: &Path| {
            let file = |name: &str| dir.join(name);
            Credentials::load(&file("ca.pem"), &file("cert.pem"), &file("key.pem")).unwrap()
        };
        let [a, b] = ["a.example", "b.example"]
            .map(|name| load(&authority.issue(&[name.into()], 9, false).unwrap().dir));
        let connector = Connector::new(&a, "b.example").unwrap();
        (folder, connector, Acceptor::new(&b, &[]).unwrap())
    }

    /// Forwards records in one direction, each through `change`.
    fn pass(mut from: TcpStream, mut to: TcpStream, mut change: impl FnMut(Vec<u8>) -> Vec<u8>) {
        let mut record = vec![0; 5];
        while from.read_exact(&mut record[..5]).is_ok() {
            let length = usize::from(u16::from_be_bytes([record[3], record[4]]));
            record.resize(5 + length, 0);
            if from.read_exact(&mut record[5..]).is_err() || to.write_all(&change(record)).is_err()
            {
                break;
            }
            record = vec![0; 5];
        }
        let _ = to.shutdown(Shutdown::Write);
        let _ = from.shutdown(Shutdown::Read);
    }

    type Ends = (Result<Channel, TlsError>, Result<Channel, TlsError>);

    /// Both handshakes with a proxy in between.
    fn through(
        connector: &Connector,
        acceptor: &Acceptor,
        forth: impl FnMut(Vec<u8>) -> Vec<u8> + Send,
        back: impl FnMut(Vec<u8>) -> Vec<u8> + Send,
        patience: u64,
    ) -> Ends {
        let ((client, near), (far, server)) = (pair(), pair());
        let limit = Instant::now() + Duration::from_millis(patience);
        thread::scope(|scope| {
            let (from, to) = (near.try_clone().unwrap(), far.try_clone().unwrap());
            scope.spawn(move || pass(from, to, forth));
            scope.spawn(move || pass(far, near, back));
            let serving = scope.spawn(move || acceptor.accept(&server, "client", limit));
            let connecting = scope.spawn(move || connector.connect(&client, "server", limit));
            (connecting.join().unwrap(), serving.join().unwrap())
        })
    }

    #[test]
    fn a_hello_in_many_small_records_is_a_hello() {
        let (_folder, connector, acceptor) = ends();
        let cut = |record: Vec<u8>| {
            if record[0] != 22 {
                return record;
            }
            let piece = |body: &[u8]| {
                let length = u16::try_from(body.len()).unwrap().to_be_bytes();
                [&[22, 3, 3, length[0], length[1]][..], body].concat()
            };
            record[5..].chunks(100).flat_map(piece).collect()
        };
        let (client, server) = through(&connector, &acceptor, cut, cut, 60_000);
        client.unwrap();
        server.unwrap();
    }

    #[test]
    fn handshakes_that_are_damaged_anywhere_are_refused_and_never_panic() {
        let (_folder, connector, acceptor) = ends();
        let mut state = 0x2545_f491_4f6c_dd1du64;
        let mut next = move |below: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            usize::try_from(state >> 33).unwrap() % below
        };
        for round in 0..150 {
            // One record of the handshake, which has five or six, is changed, truncated, doubled,
            // or followed by noise.
            let (which, how, seed) = (next(6), next(5), next(1 << 20));
            let mut seen = 0;
            let harm = move |mut record: Vec<u8>| {
                seen += 1;
                if seen != which % 3 + 1 {
                    return record;
                }
                let at = seed % record.len();
                match how {
                    0 => record[at] ^= 1 << (seed % 8),
                    1 => record.truncate(at),
                    2 => record = record.repeat(2),
                    3 => record.extend([22, 3, 3, 0, 4, 1, 0, 0, 9]),
                    _ => {
                        // Still a record, but its message states another length.
                        let at = (5 + seed % 4).min(record.len() - 1);
                        record[at] ^= 1 << (seed % 8);
                    }
                }
                record
            };
            let same = |record: Vec<u8>| record;
            let (client, server) = match which < 3 {
                true => through(&connector, &acceptor, harm, same, 250),
                false => through(&connector, &acceptor, same, harm, 250),
            };
            // A change of the outer version, or behind the handshake, may go unnoticed; a
            // disagreement about keys may not.
            if let (Ok(client), Ok(server)) = (client, server) {
                assert_eq!(client.peer.names, ["b.example"], "round {round}");
                assert_eq!(server.peer.names, ["a.example"], "round {round}");
            }
        }
    }

    #[test]
    fn keys_are_renewed_before_they_wear_out() {
        let (_folder, connector, acceptor) = ends();
        let (client, server) = pair();
        let limit = Instant::now() + Duration::from_secs(60);
        let serving = thread::spawn(move || (acceptor.accept(&server, "client", limit), server));
        let mut channel = connector.connect(&client, "server", limit).unwrap();
        channel.writer.renew_after(3);
        let (accepted, server) = serving.join().unwrap();
        let mut accepted = accepted.unwrap();
        let sent: Vec<u8> = (0..2_000_000u32).map(|i| i.to_le_bytes()[1]).collect();
        let expected = sent.clone();
        let reading = thread::spawn(move || {
            let mut got = vec![0; expected.len()];
            let mut done = 0;
            while done < got.len() {
                match accepted.reader.read(&server, &mut got[done..]) {
                    Ok(0) => panic!("it ended after {done} bytes"),
                    Ok(n) => done += n,
                    Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                    Err(error) => panic!("{error}"),
                }
            }
            assert!(got == expected);
        });
        for piece in sent.chunks(100_000) {
            channel.writer.write_all(&client, &[piece], |_| false).unwrap();
            assert!(channel.writer.records_under_key() <= 3);
        }
        reading.join().unwrap();
    }
}
