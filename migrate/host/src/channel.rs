//! Messages between the service and its carriers: JSON in packets, each perhaps with a descriptor.

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::sockopt::Timeout;
use rustix::net::{
    accept_with, bind, connect, listen, recvmsg, sendmsg, socket_with, socketpair, AddressFamily,
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use serde::{de::DeserializeOwned, Serialize};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::path::Path;
use std::time::Duration;

/// The largest message, bytes. A configuration of 64 hosts has some 20 KiB.
const MOST: usize = 128 << 10;
/// Services that may wait until a carrier answers them.
const BACKLOG: i32 = 8;

/// One end of a connection of type `SOCK_SEQPACKET`.
#[derive(Debug)]
pub struct Channel(OwnedFd);

impl From<OwnedFd> for Channel {
    fn from(fd: OwnedFd) -> Self {
        Self(fd)
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Channel {
    /// Creates a connection and returns both ends.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn pair() -> io::Result<(Self, OwnedFd)> {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        Ok((Self(ours), theirs))
    }

    /// Connects to a [`Post`].
    ///
    /// # Errors
    /// No process listens there.
    pub(crate) fn connect(path: &Path) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        rustix::io::ioctl_fionbio(&socket, false)?;
        Ok(Self(socket))
    }

    /// Makes [`receive`](Self::receive) wait no longer than this for each message.
    ///
    /// # Errors
    /// The kernel's error.
    pub(crate) fn set_patience(&self, patience: Option<Duration>) -> io::Result<()> {
        rustix::net::sockopt::set_socket_timeout(&self.0, Timeout::Recv, patience)?;
        Ok(())
    }

    /// Sends a message without waiting.
    ///
    /// # Errors
    /// The other end has gone, does not read, or the message is too long.
    pub fn send<T: Serialize>(
        &self,
        message: &T,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> io::Result<()> {
        let bytes = serde_json::to_vec(message)?;
        if bytes.len() > MOST {
            let what = format!("a message of {} bytes, limit {MOST}", bytes.len());
            return Err(io::Error::new(ErrorKind::InvalidInput, what));
        }
        let fds = descriptor.map(|fd| [fd]);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if let Some(fds) = &fds {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut control, flags)?;
        Ok(())
    }

    /// Ends both directions, at both ends.
    pub fn close(&self) {
        let _ = rustix::net::shutdown(&self.0, rustix::net::Shutdown::Both);
    }

    /// Waits for a message; `None` when the other end has gone.
    ///
    /// # Errors
    /// The kernel's error; `WouldBlock` after the time of `set_patience`; `InvalidData` for a
    /// message that cannot be parsed. Other messages may follow it.
    pub fn receive<T: DeserializeOwned>(&self) -> io::Result<Option<(T, Option<OwnedFd>)>> {
        let mut bytes = vec![0; MOST];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let (len, descriptor) = loop {
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let mut into = [IoSliceMut::new(&mut bytes)];
            let got = match recvmsg(&self.0, &mut into, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
                Err(Errno::INTR) => continue,
                Err(Errno::CONNRESET) => return Ok(None),
                got => got?,
            };
            if got.flags.contains(ReturnFlags::TRUNC) {
                return Err(io::Error::new(ErrorKind::InvalidData, "a message is too long"));
            }
            let mut descriptor = None;
            for message in ancillary.drain() {
                if let RecvAncillaryMessage::ScmRights(fds) = message {
                    descriptor = fds.last().or(descriptor);
                }
            }
            break (got.bytes, descriptor);
        };
        if len == 0 {
            return Ok(None);
        }
        let message = serde_json::from_slice(&bytes[..len]);
        let message = message.map_err(|error| io::Error::new(ErrorKind::InvalidData, error))?;
        Ok(Some((message, descriptor)))
    }
}

/// The listening socket at which a carrier can be reached.
#[derive(Debug)]
pub(crate) struct Post(OwnedFd);

impl Post {
    /// Listens at a path that does not exist.
    ///
    /// # Errors
    /// The kernel's error.
    pub(crate) fn listen(path: &Path) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        bind(&socket, &SocketAddrUnix::new(path)?)?;
        listen(&socket, BACKLOG)?;
        Ok(Self(socket))
    }

    /// Waits for a service.
    ///
    /// # Errors
    /// The kernel's error.
    pub(crate) fn accept(&self) -> io::Result<Channel> {
        loop {
            match accept_with(&self.0, SocketFlags::CLOEXEC) {
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                accepted => return Ok(Channel(accepted?)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Write};

    #[test]
    fn messages_arrive_whole_and_with_their_descriptors() {
        let (ours, theirs) = Channel::pair().unwrap();
        let theirs = Channel::from(theirs);
        let (read, write) = rustix::pipe::pipe().unwrap();
        ours.send(&"first", None).unwrap();
        ours.send(&"second", Some(write.as_fd())).unwrap();
        drop(write);
        let (text, none): (String, _) = theirs.receive().unwrap().unwrap();
        assert_eq!((text.as_str(), none.is_none()), ("first", true));
        let (text, fd): (String, _) = theirs.receive().unwrap().unwrap();
        assert_eq!(text, "second");
        File::from(fd.unwrap()).write_all(b"through").unwrap();
        let mut got = String::new();
        File::from(read).read_to_string(&mut got).unwrap();
        assert_eq!(got, "through");
        drop(ours);
        assert!(theirs.receive::<String>().unwrap().is_none());
    }

    #[test]
    fn one_that_does_not_read_is_not_waited_for() {
        let (ours, _theirs) = Channel::pair().unwrap();
        let long = "x".repeat(10_000);
        let error = (0..100_000).find_map(|_| ours.send(&long, None).err()).unwrap();
        assert_eq!(error.kind(), ErrorKind::WouldBlock);
        let error = ours.send(&"x".repeat(MOST), None).unwrap_err();
        assert!(error.to_string().contains("limit"), "{error}");
    }

    #[test]
    fn a_carrier_is_reached_at_its_path() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sock");
        let post = Post::listen(&path).unwrap();
        let service = Channel::connect(&path).unwrap();
        let carrier = post.accept().unwrap();
        carrier.send(&7, None).unwrap();
        assert_eq!(service.receive::<u8>().unwrap().unwrap().0, 7);
        drop((post, carrier));
        assert!(service.receive::<u8>().unwrap().is_none());
        assert!(Channel::connect(&path).is_err());
    }
}
