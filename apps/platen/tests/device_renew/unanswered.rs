//! A supervisor that is stopped, and clients that would stop it.

use super::*;
use rustix::net::{sendmsg, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;

/// The command waited for 20 minutes in silence, and the supervisor carried the request out
/// whenever it went on.
#[test]
fn a_request_that_a_stopped_supervisor_has_not_read_is_withdrawn() {
    let served = Served::start(&["--mem-limit", "64M"], None);
    let own = Path::new(env!("CARGO_BIN_EXE_platen"));
    let load = Load::start(served.disk(), nothing_written());
    let supervisor = Pid::from_child(&served.supervisor.lock().unwrap());
    let limit = || served.status()["mm_stat"]["mem_limit"].as_u64().unwrap() >> 20;
    let before = (served.status()["pid"].clone(), limit());
    kill_process(supervisor, Signal::STOP).unwrap();
    for words in [&["set", "--mem-limit", "48M"][..], &["upgrade"]] {
        let (done, said) = served.ask(own, words);
        assert!(!done, "{said}");
        let process = supervisor.as_raw_nonzero();
        for part in [
            format!(
                "process {process}, is stopped (SIGSTOP) and has not read the request: waiting"
            ),
            format!(
                "process {process}, is stopped (SIGSTOP), and has not read the request in 30 s"
            ),
            format!("`kill -CONT {process}`"),
        ] {
            assert!(said.contains(&part), "no '{part}': {said}");
        }
        load.goes_on();
    }
    // A client that was killed, as by Ctrl-C, expects nothing either.
    let mut gone = UnixStream::connect(served.path("run/renewed.supervisor")).unwrap();
    gone.write_all(b"set mem-limit=40M\n").unwrap();
    drop(gone);
    kill_process(supervisor, Signal::CONT).unwrap();
    // The supervisor reads requests in the order of their connections.
    let (done, said) = served.ask(own, &["set", "--mem-limit", "1K"]);
    assert!(!done && said.contains("superblock and slot table alone need"), "{said}");
    assert_eq!((served.status()["pid"].clone(), limit()), before);
    let (done, said) = served.ask(own, &["set", "--mem-limit", "48M"]);
    assert!(done, "{said}");
    assert_eq!(limit(), 48);
    drop(load.end());
    served.end();
}

/// The supervisor read from whatever it was sent, and so waited for the writer of a pipe.
#[test]
fn a_policy_in_a_pipe_or_a_file_on_a_disk_is_refused() {
    let served = Served::start(&[], None);
    let (pipe, _writer) = io::pipe().unwrap();
    let fifo = served.path("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let fifo = File::options().read(true).write(true).open(&fifo).unwrap();
    for (request, fd) in
        [("set level=2\n", pipe.as_fd()), ("set level=2\n", fifo.as_fd()), ("set \n", pipe.as_fd())]
    {
        let mut stream = UnixStream::connect(served.path("run/renewed.supervisor")).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = [fd];
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        let line = [IoSlice::new(request.as_bytes())];
        sendmsg(&stream, &line, &mut control, SendFlags::empty()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("refused: the policy's settings are not in a file"), "{answer}");
    }
    // An upgrade reads no descriptor.
    let (done, said) = served.ask(&served.copy(), &["upgrade"]);
    assert!(done, "{said}");
    served.end();
}
