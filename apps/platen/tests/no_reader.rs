//! Output without a reader: standard error is a pipe whose reader has gone, or that is full;
//! standard output cannot be written.

use rustix::net::{
    self, sendmsg, AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketFlags, SocketType,
};
use std::fs::File;
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

fn platen() -> Command {
    Command::new(env!("CARGO_BIN_EXE_platen"))
}

/// A pipe for standard error that takes nothing more: its reader has gone, or reads nothing.
fn without_reader(full: bool) -> (Stdio, Option<OwnedFd>) {
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    if full {
        rustix::io::ioctl_fionbio(&writer, true).unwrap();
        while rustix::io::write(&writer, &[b'x'; 4096]).is_ok() {}
        rustix::io::ioctl_fionbio(&writer, false).unwrap();
    }
    (Stdio::from(writer), full.then_some(reader))
}

/// A port for a process that is to listen there, and a socket that keeps others from having it.
/// The socket does not listen: a process that another test is starting has a copy of it until its
/// exec, and a second listener would be refused.
fn reserve() -> (String, OwnedFd) {
    let socket =
        net::socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None);
    let socket = socket.unwrap();
    net::sockopt::set_socket_reuseaddr(&socket, true).unwrap();
    net::bind(&socket, &SocketAddrV4::new(Ipv4Addr::new(127, 80, 76, 6), 0)).unwrap();
    let bound = SocketAddrV4::try_from(net::getsockname(&socket).unwrap()).unwrap();
    (bound.to_string(), socket)
}

fn wait(child: &mut Child) -> Option<i32> {
    let deadline = Instant::now() + Duration::from_secs(120);
    while Instant::now() < deadline {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status.code().unwrap_or(-1));
        }
        sleep(Duration::from_millis(10));
    }
    child.kill().unwrap();
    None
}

/// A relay's keeper reports that it holds QEMU's socket, and holds it whether its output is read or
/// not.
#[test]
fn a_socket_of_qemu_s_is_held_when_standard_error_has_no_reader() {
    for full in [false, true] {
        let (stderr, _reader) = without_reader(full);
        let (control, theirs) = UnixStream::pair().unwrap();
        let (mut qemu, relay) = UnixStream::pair().unwrap();
        let mut command = platen();
        let command = command.arg("keep").stdin(OwnedFd::from(theirs)).stdout(Stdio::null());
        let mut keeper = command.stderr(stderr).spawn().unwrap();
        // Hold it; this is no postcopy.
        let message = [&[1][..], &[0xff; 8]].concat();
        let fds = [relay.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(&fds));
        sendmsg(&control, &[IoSlice::new(&message)], &mut ancillary, SendFlags::NOSIGNAL).unwrap();
        // The relay is killed.
        drop(relay);
        drop(control);
        qemu.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        // With a timeout a read ends with EINTR when the process was stopped meanwhile.
        let held = loop {
            match qemu.read(&mut [0]) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                held => break held,
            }
        };
        assert!(matches!(&held, Err(error) if error.kind() == ErrorKind::WouldBlock), "{held:?}");
        drop(qemu);
        assert_eq!(wait(&mut keeper), Some(0), "full: {full}");
    }
}

#[test]
fn a_receiver_serves_when_standard_error_has_no_reader() {
    for full in [false, true] {
        let (stderr, _reader) = without_reader(full);
        let folder = tempfile::tempdir().unwrap();
        let deliver = format!("unix:{}", folder.path().join("qemu").display());
        let (port, _reserved) = reserve();
        let mut receiver = platen()
            .args(["receive", "--insecure", "--listen", &port, "--deliver", &deliver])
            .stdout(Stdio::null())
            .stderr(stderr)
            .spawn()
            .unwrap();
        // It listens, turns a client away, and continues.
        for _ in 0..2 {
            let deadline = Instant::now() + Duration::from_secs(120);
            let mut stranger = loop {
                match std::net::TcpStream::connect(&port) {
                    Ok(stream) => break stream,
                    Err(error) => assert!(Instant::now() < deadline, "full: {full}: {error}"),
                }
                assert_eq!(receiver.try_wait().unwrap(), None, "full: {full}");
                sleep(Duration::from_millis(10));
            };
            // One that gets no CPU for long is turned away before it has written.
            let _ = stranger.write_all(b"GET / HTTP/1.0\r\n\r\n");
            stranger.set_read_timeout(Some(Duration::from_secs(240))).unwrap();
            let end = stranger.read_to_end(&mut Vec::new());
            let waits = end.is_err_and(|error| error.kind() == ErrorKind::WouldBlock);
            assert!(!waits, "full: {full}: it is not turned away");
        }
        rustix::process::kill_process(
            rustix::process::Pid::from_child(&receiver),
            rustix::process::Signal::INT,
        )
        .unwrap();
        let status = wait(&mut receiver);
        assert!(matches!(status, Some(0 | 1)), "full: {full}: {status:?}");
    }
}

/// A closed standard output is no error; a full disk is an error with a name.
#[test]
fn output_without_a_reader_causes_no_panic() {
    let run = |out: Stdio| -> Output {
        let mut command = platen();
        let command = command.args(["qat", "status", "--no-start"]).stdout(out);
        command.stderr(Stdio::piped()).spawn().unwrap().wait_with_output().unwrap()
    };
    let (closed, _) = without_reader(false);
    let output = run(closed);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let output = run(File::options().write(true).open("/dev/full").unwrap().into());
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.starts_with("platen: cannot write to standard output: No space left"), "{said}");
}
