//! Requests to a device's supervisor, on its socket `NAME.supervisor`: one line in, one or more
//! lines of text out. The last line begins with `done` or `refused`.
//!
//! ```text
//!  upgrade                    serve the device with the program that the client runs
//!  set CHANGES                change settings; a descriptor sent along holds the policy's text
//!  state                      the supervisor's last message about its server, while none serves
//! ```
//!
//! The supervisor never waits for a client: a new connection replaces one that has sent nothing. It
//! carries out no request whose client has ended its side of the connection, or has gone.

use super::changes::Changes;
use super::control;
use anyhow::{bail, ensure, Context};
use relay::UnixAddress;
use rustix::cmsg_space;
use rustix::event::epoll;
use rustix::fs::{open, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{
    recv, recvmsg, send, sendmsg, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use std::fs::File;
use std::io::{ErrorKind, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

/// Maximum size of a request, in bytes.
const REQUEST: usize = 256;
/// Maximum size of an answer, in bytes.
pub(super) const ANSWER: u64 = 64 << 10;

pub(super) const DONE: &str = "done";
pub(super) const REFUSED: &str = "refused: ";

/// The address of the supervisor of the device `name`.
pub(super) fn address(folder: &Path, name: &str) -> UnixAddress {
    UnixAddress::from(folder.join(format!("{name}.supervisor")))
}

/// A request of a client.
#[derive(Debug)]
pub(super) enum Request {
    /// Serve the device with this program.
    Upgrade(File),
    Set(Changes, Option<OwnedFd>),
    State,
}

/// A client that has sent a request and waits for the answer.
#[derive(Debug)]
pub(super) struct Client(pub(super) OwnedFd);

impl Client {
    /// Sends a line without blocking, or drops it.
    pub(super) fn say(&self, line: &str) {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let _ = send(&self.0, format!("{line}\n").as_bytes(), flags);
    }

    pub(super) fn refuse(&self, why: &str) {
        self.say(&format!("{REFUSED}{why}"));
    }

    /// Whether the client has ended its side, or has gone. Both withdraw a request that had not
    /// been read: a stopped supervisor would carry it out when nobody expects that any more.
    fn has_withdrawn(&self) -> bool {
        let peeked = recv(&self.0, &mut [0_u8; 1][..], RecvFlags::PEEK | RecvFlags::DONTWAIT);
        !matches!(peeked, Ok((1.., _)) | Err(Errno::AGAIN | Errno::INTR))
    }
}

/// The listening socket, and the last connection that has sent no request yet.
#[derive(Debug)]
pub(super) struct Requests {
    epoll: OwnedFd,
    listener: UnixListener,
    asking: Option<UnixStream>,
}

impl Requests {
    pub(super) fn new(listener: &UnixListener) -> anyhow::Result<Self> {
        let listener = listener.try_clone()?;
        listener.set_nonblocking(true)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let this = Self { epoll, listener, asking: None };
        this.watch(this.listener.as_fd())?;
        Ok(this)
    }

    fn watch(&self, fd: BorrowedFd<'_>) -> Result<(), Errno> {
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)
    }

    /// A descriptor that is readable when there may be a request.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// The next request, if there is one.
    pub(super) fn take(&mut self) -> Option<(Request, Client)> {
        match self.listener.accept() {
            Ok((stream, _)) => {
                // The former client is dropped. Closing its socket removes it from the epoll set.
                self.asking = None;
                let watched =
                    stream.set_nonblocking(true).is_ok() && self.watch(stream.as_fd()).is_ok();
                self.asking = watched.then_some(stream);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            // No descriptor or no memory: the socket stays readable, and the supervisor, which has
            // real-time priority, must not spin.
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
        let received = receive(self.asking.as_ref()?);
        if matches!(received, Err(Errno::AGAIN | Errno::INTR)) {
            return None;
        }
        let stream = self.asking.take()?;
        // The socket stays open for the answer; no more requests are read from it.
        let _ = epoll::delete(&self.epoll, &stream);
        let client = Client(stream.into());
        let received = received.map_err(anyhow::Error::from);
        let parsed = received.and_then(|(line, sent)| parse(&line, sent, &client));
        // Last: a client that is there now is the process whose program was opened.
        let withdrawn = client.has_withdrawn();
        match parsed.and_then(|request| {
            ensure!(!withdrawn, "the client has withdrawn the request");
            Ok(request)
        }) {
            Ok(request) => Some((request, client)),
            Err(error) => {
                client.refuse(&format!("{error:#}"));
                None
            }
        }
    }
}

/// Receives a line, and the descriptor sent with it.
fn receive(stream: &UnixStream) -> Result<(String, Option<OwnedFd>), Errno> {
    let mut bytes = [0; REQUEST];
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let got = recvmsg(stream, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)?;
    let sent = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut all) => all.next(),
        _ => None,
    });
    Ok((String::from_utf8_lossy(&bytes[..got.bytes]).into_owned(), sent))
}

fn parse(line: &str, sent: Option<OwnedFd>, client: &Client) -> anyhow::Result<Request> {
    // A client sends its line in one message.
    let line = line.strip_suffix('\n').context("the request is not a line")?;
    match line.split_once(' ').unwrap_or((line, "")) {
        ("upgrade", "") => program_of(client).map(Request::Upgrade),
        ("state", "") => Ok(Request::State),
        ("set", changes) => Ok(Request::Set(changes.parse().map_err(anyhow::Error::msg)?, sent)),
        _ => bail!("this version of platen does not know the request {line:?}"),
    }
}

/// Opens the program that the client runs, even if its file has been moved or replaced.
fn program_of(client: &Client) -> anyhow::Result<File> {
    let peer = rustix::net::sockopt::socket_peercred(&client.0)?;
    let path = format!("/proc/{}/exe", peer.pid.as_raw_nonzero());
    let opened = open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
    let opened = opened.with_context(|| format!("cannot open {path}, the program to change to"))?;
    Ok(File::from(opened))
}

/// Sends a request, and waits for the whole answer, at most `patience` between two parts of it.
pub(super) fn ask(
    folder: &Path,
    name: &str,
    request: &str,
    patience: Duration,
) -> anyhow::Result<String> {
    let stream = begin(folder, name, request, None)?;
    stream.set_read_timeout(Some(patience))?;
    let mut answer = Vec::new();
    let read = (&stream).take(ANSWER).read_to_end(&mut answer);
    let answer = String::from_utf8_lossy(&answer).into_owned();
    read.with_context(|| format!("its supervisor gives no answer within {patience:?}: {answer}"))?;
    Ok(answer)
}

/// Sends a request, with a descriptor; the answer comes on the connection.
pub(super) fn begin(
    folder: &Path,
    name: &str,
    request: &str,
    with: Option<BorrowedFd<'_>>,
) -> anyhow::Result<UnixStream> {
    let address = address(folder, name);
    let stream = address.connect_now().map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => {
            let control = control::address(folder, name);
            let (control, own) = (control.path(), address.path().display());
            if control.exists() {
                anyhow::anyhow!(
                    "it is not served with a supervisor of this version: there is no {own}"
                )
            } else {
                anyhow::anyhow!("it is not served: there is no {}", control.display())
            }
        }
        _ => anyhow::Error::from(error)
            .context(format!("no supervisor answers on {}", address.path().display())),
    })?;
    let line = format!("{request}\n");
    ensure!(line.len() < REQUEST, "the request has more than {REQUEST} bytes");
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let with = with.map(|fd| [fd]);
    if let Some(with) = &with {
        control.push(SendAncillaryMessage::ScmRights(with));
    }
    sendmsg(&stream, &[IoSlice::new(line.as_bytes())], &mut control, SendFlags::NOSIGNAL)?;
    Ok(stream)
}
