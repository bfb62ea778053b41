//! One connection between the relays, secured or not; the rest of the crate need not know.

use rustix::fd::{AsFd, BorrowedFd};
use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use tls::{Channel, Peer};

/// A connection on which hellos are exchanged, and that then becomes a link.
#[derive(Debug)]
pub struct Link {
    socket: TcpStream,
    /// Boxed, as its halves hold the cipher's state.
    channel: Option<Box<Channel>>,
}

impl From<TcpStream> for Link {
    /// A link without TLS.
    fn from(socket: TcpStream) -> Self {
        Self { socket, channel: None }
    }
}

impl Link {
    /// A link over `socket`, on which `channel` was made.
    pub fn secured(socket: TcpStream, channel: Channel) -> Self {
        Self { socket, channel: Some(Box::new(channel)) }
    }

    /// The socket, for its options and to shut it.
    pub fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// Who is at the other end, if that was proved.
    pub fn peer(&self) -> Option<&Peer> {
        self.channel.as_ref().map(|channel| &channel.peer)
    }

    /// For the two threads of a link.
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

/// What the reading thread of a link holds.
#[derive(Debug)]
pub(crate) struct LinkReader {
    pub(crate) socket: TcpStream,
    secured: Option<tls::Reader>,
    wire: u64,
}

impl LinkReader {
    /// Like a socket's; 0 once the other end has closed in order. `Interrupted` says that something
    /// came, but not enough to be read yet.
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

    /// Bytes taken from the socket so far.
    pub(crate) fn wire(&self) -> u64 {
        self.wire
    }
}

/// What the writing thread of a link holds.
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
    /// Sends all of up to three `parts`; gives the number of bytes on the wire. `go_on` says
    /// whether an error of the socket (a timeout) is no reason to stop.
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

    /// Says that nothing more comes, where the transport has words for it.
    pub(crate) fn close(&mut self) {
        if let Some(writer) = &mut self.secured {
            writer.close(&self.socket);
        }
    }
}
