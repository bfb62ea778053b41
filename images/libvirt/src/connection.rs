//! A connection to libvirt's daemon: calls, and their answers.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::xdr::{Arguments, Results};
use crate::LibvirtError;

/// The largest message, bytes, with its head.
const MAX_MESSAGE: usize = 8 << 20;
/// Length of the head after the length field: six numbers.
const HEAD: usize = 24;
/// The daemon's program for calls about domains, and its version.
const PROGRAM: u32 = 0x2000_8086;
const VERSION: u32 = 1;
/// Kinds of messages.
const CALL: u32 = 0;
const ANSWER: u32 = 1;
/// How an answer ends.
const OK: u32 = 0;
const FAILED: u32 = 1;
/// Time limit for the daemon to take a call's bytes.
const TAKES: Duration = Duration::from_secs(60);
/// Time limit for each answer of [`Connection::open`]. virsh has none: a host short of CPU may take
/// long.
const GREETS: Duration = Duration::from_secs(60);

/// Calls of the program.
pub(crate) const OPEN: u32 = 1;
pub(crate) const CAPABILITIES: u32 = 7;
pub(crate) const LOGINS: u32 = 66;
pub(crate) const STATE: u32 = 212;
pub(crate) const PREPARE: u32 = 303;
pub(crate) const FINISH: u32 = 306;

/// A connection to libvirt's daemon, on which one call is made at a time.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
    serial: u32,
}

impl Connection {
    /// Connects to the daemon at `path`, and opens the driver `uri` (`qemu:///system`).
    ///
    /// # Errors
    ///
    /// No daemon listens there, or it requires a login, or it lacks that driver.
    pub fn open(path: &Path, uri: &str) -> Result<Self, LibvirtError> {
        let stream = UnixStream::connect(path)
            .map_err(|source| LibvirtError::Connect { path: path.to_owned(), source })?;
        Self::over(stream, uri)
    }

    /// Opens the driver `uri` over a connected socket.
    ///
    /// # Errors
    ///
    /// The errors of [`Connection::open`].
    pub fn over(stream: UnixStream, uri: &str) -> Result<Self, LibvirtError> {
        stream.set_write_timeout(Some(TAKES)).map_err(LibvirtError::write)?;
        let mut connection = Self { stream, serial: 0 };
        // For root the daemon waives the login that it requires of other users when it answers this
        // call.
        let none = connection.call(LOGINS, &Arguments::default(), Some(GREETS), |results| {
            let mut none = false;
            for _ in 0..results.number()?.min(32) {
                none |= results.number()? == 0;
            }
            Ok(none)
        })?;
        if !none {
            return Err(LibvirtError::Login);
        }
        let arguments = Arguments::default().optional(Some(uri)).number(0);
        connection.call(OPEN, &arguments, Some(GREETS), |_| Ok(()))?;
        Ok(connection)
    }

    /// Makes a call, and passes its results to `results`. `limit` is the time limit for the answer.
    pub(crate) fn call<T>(
        &mut self,
        procedure: u32,
        arguments: &Arguments,
        limit: Option<Duration>,
        results: impl FnOnce(&mut Results<'_>) -> Result<T, LibvirtError>,
    ) -> Result<T, LibvirtError> {
        self.serial += 1;
        let head = [PROGRAM, VERSION, procedure, CALL, self.serial, OK];
        let len = 4 + HEAD + arguments.bytes().len();
        let mut message = u32::try_from(len).unwrap_or(u32::MAX).to_be_bytes().to_vec();
        head.iter().for_each(|number| message.extend(number.to_be_bytes()));
        message.extend(arguments.bytes());
        self.stream.write_all(&message).map_err(LibvirtError::write)?;
        let until = limit.map(|limit| (limit, Instant::now() + limit));
        loop {
            let message = self.message(until)?;
            let mut rest = Results(&message);
            let mut number = || rest.number();
            let [program, _, called, kind, serial, status] =
                [number()?, number()?, number()?, number()?, number()?, number()?];
            // Skips events, and messages of other programs such as the keep-alive query.
            if program != PROGRAM || kind != ANSWER {
                continue;
            }
            if (called, serial) != (procedure, self.serial) {
                return Err(LibvirtError::Answer("it answers another call"));
            }
            return match status {
                OK => results(&mut rest),
                FAILED => Err(said(&mut rest)?),
                _ => Err(LibvirtError::Answer("neither results nor an error")),
            };
        }
    }

    /// Reads a message after its length. Memory grows with the bytes that arrive.
    fn message(&mut self, until: Option<(Duration, Instant)>) -> Result<Vec<u8>, LibvirtError> {
        let mut len = Vec::new();
        self.read(4, &mut len, until)?;
        let len = u32::from_be_bytes(len.try_into().expect("4 bytes"));
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        if !(4 + HEAD..=MAX_MESSAGE).contains(&len) {
            return Err(LibvirtError::Answer("a length that no message has"));
        }
        let mut message = Vec::new();
        self.read(len - 4, &mut message, until)?;
        Ok(message)
    }

    fn read(
        &mut self,
        len: usize,
        into: &mut Vec<u8>,
        until: Option<(Duration, Instant)>,
    ) -> Result<(), LibvirtError> {
        let mut chunk = [0; 16 << 10];
        while into.len() < len {
            let mut left = None;
            if let Some((limit, until)) = until {
                let rest = until.saturating_duration_since(Instant::now());
                if rest.is_zero() {
                    return Err(LibvirtError::Silent { seconds: limit.as_secs() });
                }
                left = Some(rest);
            }
            self.stream.set_read_timeout(left).map_err(LibvirtError::read)?;
            let most = chunk.len().min(len - into.len());
            match self.stream.read(&mut chunk[..most]) {
                Ok(0) => return Err(LibvirtError::Closed),
                Ok(read) => into.extend_from_slice(&chunk[..read]),
                Err(error)
                    if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
                Err(error) => return Err(LibvirtError::read(error)),
            }
        }
        Ok(())
    }
}

/// Reads the daemon's error: number, origin, message, and further fields that are not needed.
fn said(results: &mut Results<'_>) -> Result<LibvirtError, LibvirtError> {
    let (code, _) = (results.signed()?, results.signed()?);
    let message = results.optional()?.unwrap_or("an error without a message");
    let message = message.chars().take(4096);
    let message = message.map(|sign| if sign.is_control() { ' ' } else { sign }).collect();
    Ok(LibvirtError::Said { code, message })
}
