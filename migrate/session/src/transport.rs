//! One connection between the relays, with or without TLS; hides the difference from the crate.

use crate::overhead::Overhead;
use crate::tcp_info;
use rustix::fd::{AsFd, BorrowedFd};
use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use tls::{Channel, Peer};

/// A connection that exchanges hellos and then becomes a link.
#[derive(Debug)]
pub struct Link {
    socket: TcpStream,
    /// Boxed, since both halves hold the cipher's state.
    channel: Option<Box<Channel>>,
}

impl From<TcpStream> for Link {
    /// A link without TLS.
    fn from(socket: TcpStream) -> Self {
        Self { socket, channel: None }
    }
}

impl Link {
    /// A link over `socket`, which `channel` secures.
    pub fn secured(socket: TcpStream, channel: Channel) -> Self {
        Self { socket, channel: Some(Box::new(channel)) }
    }

    /// The socket, for setting options and shutting it down.
    pub fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// The authenticated identity of the other end; `None` without TLS.
    pub fn peer(&self) -> Option<&Peer> {
        self.channel.as_ref().map(|channel| &channel.peer)
    }

    /// Whether the other end's host has acknowledged all bytes written, over a connection that
    /// still stands.
    pub fn is_acknowledged(&self) -> bool {
        tcp_info::is_acknowledged(&self.socket)
    }

    /// Splits the link for its two threads.
    pub(crate) fn split(self) -> io::Result<(LinkReader, LinkWriter)> {
        let socket = self.socket.try_clone()?;
        let (reader, writer) = match self.channel {
            None => (None, None),
            Some(channel) => (Some(channel.reader), Some(channel.writer)),
        };
        Ok((
            LinkReader { socket, secured: reader, wire: 0 },
            LinkWriter { socket: self.socket, secured: writer },
        ))
    }
}

impl Read for Link {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        match &mut self.channel {
            None => self.socket.read(out),
            Some(channel) => channel.reader.read(&self.socket, out),
        }
    }
}

impl Write for Link {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.channel {
            None => self.socket.write(bytes),
            Some(channel) => {
                channel.writer.write_all(&self.socket, &[bytes], |_| false)?;
                Ok(bytes.len())
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The reading half of a link.
#[derive(Debug)]
pub(crate) struct LinkReader {
    pub(crate) socket: TcpStream,
    secured: Option<tls::Reader>,
    wire: u64,
}

impl LinkReader {
    /// Reads as a socket does; 0 once the other end has closed in order. `Interrupted` means that
    /// bytes arrived, but not enough to be decrypted yet.
    pub(crate) fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        match &mut self.secured {
            None => {
                let n = self.socket.read(out)?;
                self.wire += n as u64;
                Ok(n)
            }
            Some(reader) => {
                let result = reader.read(&self.socket, out);
                self.wire = reader.wire_bytes();
                result
            }
        }
    }

    /// Bytes read from the socket so far.
    pub(crate) fn wire(&self) -> u64 {
        self.wire
    }
}

/// The writing half of a link.
#[derive(Debug)]
pub(crate) struct LinkWriter {
    pub(crate) socket: TcpStream,
    secured: Option<tls::Writer>,
}

impl AsFd for LinkWriter {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl LinkWriter {
    /// The bytes on the network for bytes of this link.
    pub(crate) fn overhead(&self) -> Overhead {
        Overhead::of(&self.socket, self.secured.is_some())
    }

    /// Sends all of up to three `parts`; returns the number of bytes on the wire. `go_on` decides
    /// whether to continue after an error of the socket (a timeout).
    pub(crate) fn write_all(
        &mut self,
        parts: [&[u8]; 3],
        mut go_on: impl FnMut(&io::Error) -> bool,
    ) -> io::Result<u64> {
        if let Some(writer) = &mut self.secured {
            return writer.write_all(&self.socket, &parts, go_on);
        }
        let mut slices = parts.map(IoSlice::new);
        let mut rest = &mut slices[..];
        let mut total = 0;
        IoSlice::advance_slices(&mut rest, 0);
        while !rest.is_empty() {
            match self.socket.write_vectored(rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => {
                    total += n as u64;
                    IoSlice::advance_slices(&mut rest, n);
                }
                Err(error) if go_on(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(total)
    }

    /// Announces the end of the data, if the transport can.
    pub(crate) fn close(&mut self) {
        if let Some(writer) = &mut self.secured {
            writer.close(&self.socket);
        }
    }
}
