//! One client's session: its admission, its handshake and its requests.

use std::cell::Cell;
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use device::Backend;

use super::clients::Client;
use super::room::{self, Reserved};
use super::{hung_up, Server, Stranded};
use crate::connection::{connection_memory, serve, ConnectionError, Sizes};
use crate::handshake::{Handshake, Progress, Refusal, INPUT};
use crate::wire::Session;

/// Why a client was refused or lost.
#[derive(Debug, thiserror::Error)]
pub(super) enum Ended {
    #[error("no handshake: {0}")]
    Refused(#[from] Refusal),
    #[error("handshake not done in time")]
    Late,
    #[error("cannot open a queue: {0}")]
    Queue(io::Error),
    #[error("{}", with_cause(.0))]
    Connection(#[from] ConnectionError),
}

fn with_cause(error: &ConnectionError) -> String {
    match error {
        ConnectionError::Io(source) => format!("{error}: {source}"),
        other => other.to_string(),
    }
}

impl<B: Backend> Server<B> {
    /// Counts a connection in and reserves its memory, or says why it is refused. Its thread's
    /// stack needs `stack` bytes.
    pub(super) fn enter(
        &self,
        number: u64,
        stream: &UnixStream,
        dialled: bool,
        stack: usize,
    ) -> Result<Option<Reserved>, String> {
        stream.set_nonblocking(false).map_err(|error| error.to_string())?;
        let needed = connection_memory(self.options.compact) + QUEUE_MEMORY;
        let reserve = || {
            room::reserve(needed, stack)
                .ok_or_else(|| format!("no {} KiB of memory for it", needed >> 10))
        };
        let reserved = self.options.check_memory.then(reserve).transpose()?;
        let copy = stream.try_clone().map_err(|error| error.to_string())?;
        let mut open = self.open();
        let mut taken = open.streams.len();
        if !dialled {
            let others = open.streams.values().filter(|client| !client.dialled).count();
            taken = taken.max(others + self.options.dialled);
        }
        if open.stopped || taken >= self.options.connections {
            let kept = match taken - open.streams.len() {
                0 => String::new(),
                kept => format!(", and {kept} places are kept for the kernel's client"),
            };
            return Err(format!("{} connections are open{kept}", open.streams.len()));
        }
        open.streams
            .insert(number, Client { stream: copy, simple: false, dialled, kernel: dialled });
        Ok(reserved)
    }

    pub(super) fn client(
        &self,
        number: u64,
        stream: &UnixStream,
        reserved: Option<Reserved>,
    ) -> Result<(), Ended> {
        let deadline = Instant::now() + self.options.handshake;
        // Before the handshake, which the attaching process waits for: later it may have exited.
        let kernel = self.is_of_kernel(number, stream);
        let Some((session, rest)) = self.greet(stream, deadline)? else { return Ok(()) };
        let io = |error: io::Error| Ended::Connection(error.into());
        stream.set_read_timeout(None).map_err(io)?;
        stream.set_write_timeout(None).map_err(io)?;
        // The allocations from here on take its place.
        drop(reserved);
        let mut queue = self.backend.open().map_err(Ended::Queue)?;
        if !session.structured {
            if let Some(client) = self.open().streams.get_mut(&number) {
                client.simple = true;
                self.simple.fetch_add(1, Ordering::AcqRel);
            }
        }
        let structured = session.structured;
        let has_memory = Cell::new(false);
        let others = || {
            if !has_memory.replace(true) {
                self.has_memory(number);
            }
            match structured {
                true => hung_up(stream, Duration::ZERO),
                false => self.wait_for_others(number, kernel, stream),
            }
        };
        let leave = || self.may_strand();
        let sizes = Sizes::new(self.options.compact);
        let (served, lent) = serve(stream, &mut queue, session, sizes, &rest, &others, &leave);
        if let Some(slices) = lent {
            let mut all = self.stranded.lock().unwrap_or_else(PoisonError::into_inner);
            all.push(Stranded { queue, slices });
        }
        if kernel {
            self.kernel_ended.fetch_add(1, Ordering::AcqRel);
        }
        Ok(served?)
    }

    /// Does the handshake: returns the bytes received after it, or `None` if the client has ended.
    fn greet(
        &self,
        stream: &UnixStream,
        deadline: Instant,
    ) -> Result<Option<(Session, Vec<u8>)>, Ended> {
        let io = |error: io::Error| match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => Ended::Late,
            _ => Ended::Connection(error.into()),
        };
        let limit = || {
            let left = deadline.saturating_duration_since(Instant::now());
            (!left.is_zero()).then_some(left).ok_or(Ended::Late)
        };
        let (mut reader, mut writer) = (stream, stream);
        writer.set_write_timeout(Some(limit()?)).map_err(io)?;
        writer.write_all(&Handshake::greeting()).map_err(io)?;
        let mut handshake = Handshake::new(&self.export);
        let mut input = Vec::with_capacity(INPUT);
        let mut chunk = [0; 4096];
        loop {
            let mut answer = Vec::new();
            let (taken, progress) = handshake.advance(&input, &mut answer)?;
            input.drain(..taken);
            writer.set_write_timeout(Some(limit()?)).map_err(io)?;
            writer.write_all(&answer).map_err(io)?;
            match progress {
                Progress::Again => {}
                Progress::Serve(session) => return Ok(Some((session, input))),
                Progress::End => return Ok(None),
                Progress::More => {
                    stream.set_read_timeout(Some(limit()?)).map_err(io)?;
                    let got = match reader.read(&mut chunk) {
                        Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                        other => other.map_err(io)?,
                    };
                    // A client that only checks for a server.
                    if got == 0 {
                        return Ok(None);
                    }
                    input.extend_from_slice(&chunk[..got]);
                }
            }
        }
    }
}

/// Memory of a backend's queue in bytes: codec contexts, and buffers.
const QUEUE_MEMORY: usize = 2 << 20;
