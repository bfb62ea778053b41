//! `platen device serve` survives events that its servers could survive: a resource taken by
//! another process while there is no server, and a standard error that is not read.

use rustix::fs::{open, Mode, OFlags};
use rustix::process::{kill_process, Pid, Signal};
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Longer than anything here takes.
const LONG: Duration = Duration::from_secs(300);

fn platen() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_platen"));
    command.arg("device").stdin(Stdio::null()).stdout(Stdio::null());
    command
}

fn wait(what: &str, mut is: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is() {
        assert!(start.elapsed() < LONG, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A device that is served, and its supervisor.
struct Served {
    supervisor: Child,
    folder: PathBuf,
}

impl Served {
    fn command(folder: &Path, name: &str, socket: &str, options: &[&str]) -> Command {
        let mut command = platen();
        command.args(["serve", "--size", "16M", "--name", name, "--run-dir"]);
        command.arg(folder.join("run"));
        command.args(["--nbd", &format!("unix:{}", folder.join(socket).display())]).args(options);
        command
    }

    fn start(folder: &Path, options: &[&str], stderr: Stdio) -> Self {
        Self::spawn(Self::command(folder, "kept", "nbd.sock", options), folder, stderr)
    }

    fn spawn(mut command: Command, folder: &Path, stderr: Stdio) -> Self {
        let served =
            Self { supervisor: command.stderr(stderr).spawn().unwrap(), folder: folder.to_owned() };
        // The policy begins when the supervisor has been informed that all is ready: a first server
        // that dies before that has not started.
        wait("the server does not begin", || {
            served.stat().is_some_and(|stat| !stat["policy"].is_null())
        });
        served
    }

    /// With its messages in a file `log`.
    fn logged(folder: &Path, options: &[&str]) -> Self {
        let log = fs::File::create(folder.join("log")).unwrap();
        Self::start(folder, options, log.into())
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.join("log")).unwrap()
    }

    /// None when there is no answer.
    fn stat(&self) -> Option<serde_json::Value> {
        let socket = self.folder.join("run/kept.sock");
        let mut stream = UnixStream::connect(socket).ok()?;
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.write_all(b"stat\n").ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        serde_json::from_str(&answer).ok()
    }

    /// The answer to `stat`. There is none for a test that gets no CPU for a second between its
    /// connection and its request.
    fn status(&self) -> serde_json::Value {
        let mut status = None;
        wait("no status", || {
            status = self.stat();
            status.is_some()
        });
        status.expect("it is there")
    }

    fn server(&self) -> Pid {
        let pid = self.status()["pid"].as_i64().unwrap();
        Pid::from_raw(i32::try_from(pid).unwrap()).unwrap()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.supervisor), signal).unwrap();
    }

    /// Kills the server and has `meanwhile` run before its supervisor sees it.
    fn without_server(&self, meanwhile: impl FnOnce()) -> Pid {
        let server = self.server();
        self.signal(Signal::STOP);
        let supervisor = format!("/proc/{}/stat", self.supervisor.id());
        // A signal that is on its way would let it see the death.
        wait("it does not stop", || fs::read_to_string(&supervisor).unwrap().contains(") T "));
        kill_process(server, Signal::KILL).unwrap();
        let of = |what: &str| format!("/proc/{}/{what}", server.as_raw_nonzero());
        // Its first thread may be the first that ends: another one would still take a client.
        wait("it does not die", || {
            fs::read_to_string(of("stat")).unwrap().contains(") Z ")
                && fs::read_dir(of("task")).unwrap().count() == 1
        });
        meanwhile();
        self.signal(Signal::CONT);
        server
    }

    /// Ends it as systemd does.
    fn end(mut self) {
        self.signal(Signal::TERM);
        let mut status = None;
        wait("it does not end", || {
            status = self.supervisor.try_wait().unwrap();
            status.is_some()
        });
        assert!(status.unwrap().success(), "{status:?}");
        assert!(!self.folder.join("nbd.sock").exists());
        assert_eq!(fs::read_dir(self.folder.join("run")).unwrap().count(), 0);
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // Ended already, or a test has failed.
        let _ = self.supervisor.kill();
        let _ = self.supervisor.wait();
        if std::thread::panicking() {
            eprintln!(
                "it said:\n{}",
                fs::read_to_string(self.folder.join("log")).unwrap_or_default()
            );
        }
    }
}

fn said(command: &mut Command) -> (Output, String) {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (output, said)
}

#[test]
fn no_other_process_takes_a_server_s_resources_while_it_is_dead() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let served = Served::logged(folder, &["--prometheus", "127.0.0.1:0"]);
    let log = served.log();
    let address = log.split("http://").nth(1).unwrap().split('/').next().unwrap().to_owned();
    let mut clients = None;
    let killed = served.without_server(|| {
        for (name, socket, why) in [
            ("kept", "other.sock", "device kept is served already"),
            ("other", "nbd.sock", "another process listens there"),
        ] {
            let (output, said) = said(&mut Served::command(folder, name, socket, &[]));
            assert_eq!(output.status.code(), Some(1), "{said}");
            assert!(said.contains(why), "{said}");
        }
        let mut other = Served::command(folder, "other", "other.sock", &["--prometheus", &address]);
        let (output, said) = said(&mut other);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("for Prometheus") && TcpListener::bind(&address).is_err(), "{said}");
        // These wait.
        let nbd = UnixStream::connect(folder.join("nbd.sock")).unwrap();
        let mut metrics = TcpStream::connect(&address).unwrap();
        metrics.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        clients = Some((nbd, metrics));
    });
    let (mut nbd, mut metrics) = clients.unwrap();
    nbd.set_read_timeout(Some(LONG)).unwrap();
    let mut greeting = [0; 8];
    nbd.read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting, b"NBDMAGIC");
    metrics.set_read_timeout(Some(LONG)).unwrap();
    let mut answer = String::new();
    metrics.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert_ne!(served.server(), killed);
    drop(nbd);
    served.end();
}

/// Regression: the supervisor could not wait for its server, and ended with the store.
#[test]
fn a_server_is_replaced_where_the_supervisor_was_started_with_sigchld_ignored() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let ignoring = || {
        let mut command = Command::new("env");
        command.arg("--ignore-signal=CHLD");
        command
    };
    if !ignoring().arg("true").status().is_ok_and(|status| status.success()) {
        println!("skipped: no `env` that ignores a signal (coreutils 8.31)");
        return;
    }
    let served = Served::command(folder, "kept", "nbd.sock", &[]);
    let mut command = ignoring();
    command.arg(served.get_program()).args(served.get_args());
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let log = fs::File::create(folder.join("log")).unwrap();
    let served = Served::spawn(command, folder, log.into());
    assert!(!served.log().contains("is not used"), "{}", served.log());
    let killed = served.without_server(|| ());
    assert_ne!(served.server(), killed);
    assert_eq!(served.status()["platen"]["generation"], 2);
    served.end();
}

#[test]
fn sockets_whose_paths_are_replaced_continue_to_serve() {
    let folder = tempfile::tempdir().unwrap();
    let served = Served::logged(folder.path(), &[]);
    let sockets = ["nbd.sock", "run/kept.sock"].map(|name| folder.path().join(name));
    let aside = |path: &PathBuf| path.with_extension("aside");
    let killed = served.without_server(|| {
        for path in &sockets {
            fs::rename(path, aside(path)).unwrap();
            fs::write(path, "mine").unwrap();
        }
    });
    wait("no other server", || served.log().matches("platen: device kept").count() == 2);
    for path in &sockets {
        assert_eq!(fs::read(path).unwrap(), b"mine");
        fs::rename(aside(path), path).unwrap();
    }
    assert_ne!(served.server(), killed);
    let mut greeting = [0; 8];
    UnixStream::connect(&sockets[0]).unwrap().read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting, b"NBDMAGIC");
    served.end();
}

/// As a cleaner of /run does it: clients that are connected go on, and no other finds the device.
#[test]
fn a_socket_that_is_removed_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let served = Served::logged(folder.path(), &[]);
    let nbd = folder.path().join("nbd.sock");
    let mut greeting = [0; 8];
    let mut client = UnixStream::connect(&nbd).unwrap();
    client.read_exact(&mut greeting).unwrap();
    fs::remove_file(&nbd).unwrap();
    let line = format!("{} was removed or replaced: no client finds the device", nbd.display());
    wait("it is not said", || served.log().contains(&line));
    // The rest of the greeting, and an answer to the client's flags and to an unknown option.
    client.set_read_timeout(Some(LONG)).unwrap();
    client.read_exact(&mut [0; 10]).unwrap();
    client.write_all(&[&[0, 0, 0, 3][..], b"IHAVEOPT", &[0, 0, 0, 99], &[0; 4]].concat()).unwrap();
    client.read_exact(&mut greeting).unwrap();
    assert_eq!(served.status()["removed"], serde_json::json!([nbd]));
    // So does the next server.
    served.without_server(|| ());
    wait("the next server does not report it", || {
        served.stat().is_some_and(|stat| stat["removed"] == serde_json::json!([nbd]))
    });
    // With the lock and the other sockets gone, too, no other device gets the name.
    for file in fs::read_dir(folder.path().join("run")).unwrap() {
        fs::remove_file(file.unwrap().path()).unwrap();
    }
    let (second, said) = (folder.path().join("second"), folder.path().join("second.log"));
    let mut command = Served::command(folder.path(), "kept", "second.sock", &[]);
    let supervisor = command.stderr(fs::File::create(&said).unwrap()).spawn().unwrap();
    let mut second = Served { supervisor, folder: second };
    let mut status = None;
    wait("a second device of the name is served", || {
        status = second.supervisor.try_wait().unwrap();
        status.is_some()
    });
    let said = fs::read_to_string(said).unwrap();
    assert!(!status.unwrap().success(), "{said}");
    assert!(said.contains("device kept is served already, by process "), "{said}");
    assert!(said.contains("but its files were removed from "), "{said}");
    served.end();
}

#[test]
fn a_file_at_the_path_of_a_fuse_mount_does_not_stop_the_server() {
    let tried = Command::new("unshare").args(["--mount", "test", "-r", "/dev/fuse"]).output();
    if !tried.is_ok_and(|tried| tried.status.success()) {
        println!("skipped: no /dev/fuse, or nobody here may mount it");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk");
    let served = Served::logged(folder.path(), &["--fuse", disk.to_str().unwrap()]);
    let file = || fs::File::options().read(true).write(true).open(&disk).unwrap();
    file().write_all_at(b"what it holds", 12345).unwrap();
    served.without_server(|| {
        rustix::mount::unmount(&disk, rustix::mount::UnmountFlags::DETACH).unwrap();
        fs::write(&disk, "mine").unwrap();
    });
    wait("it is not said", || served.log().contains("holds 4 bytes"));
    // By its other ways it serves.
    assert!(served.status()["mm_stat"]["orig_data_size"].as_u64().unwrap() > 0);
    assert_eq!(fs::read(&disk).unwrap(), b"mine");
    fs::write(&disk, "").unwrap();
    wait("it is not mounted again", || fs::metadata(&disk).is_ok_and(|disk| disk.len() > 0));
    let mut got = [0; 13];
    file().read_exact_at(&mut got, 12345).unwrap();
    assert_eq!(&got, b"what it holds");
    assert_eq!(served.log().matches("has died").count(), 1);
    served.end();
}

/// A pipe that takes nothing more.
fn full() -> (OwnedFd, OwnedFd) {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let path = format!("/proc/self/fd/{}", write.as_raw_fd());
    // The file description shared with the server has the flags that a shell gives it.
    let own = open(path, OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty());
    let mut own = fs::File::from(own.unwrap());
    for bytes in [&[b'x'; 4096][..], b"x"] {
        while own.write(bytes).is_ok() {}
    }
    (read, write)
}

#[test]
fn a_server_is_replaced_and_ended_when_its_output_has_no_reader() {
    for full_from_the_beginning in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let (reader, stderr) = match full_from_the_beginning {
            true => full(),
            false => rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap(),
        };
        let options = ["--prometheus", "127.0.0.1:0"];
        let served = Served::start(folder.path(), &options, stderr.into());
        let reader = full_from_the_beginning.then_some(reader);
        for _ in 0..2 {
            let killed = served.without_server(|| ());
            assert_ne!(served.server(), killed, "full: {full_from_the_beginning}");
        }
        assert_eq!(served.status()["platen"]["generation"], 3);
        served.end();
        drop(reader);
    }
}

#[test]
fn the_swap_helper_continues_when_its_output_has_no_reader() {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk");
    fs::write(&disk, [0; 4096]).unwrap();
    // On a file of a page: it fails with a message. Off when it is not on: there is nothing to do.
    for (task, code) in [("on", 1), ("off", 0)] {
        for reads in [false, true] {
            let (reader, stderr) = full();
            let reader = reads.then_some(reader);
            let mut helper = platen();
            helper.args(["swap-helper", task, "--disk"]).arg(&disk).stderr(stderr);
            let mut helper = helper.spawn().unwrap();
            let mut status = None;
            wait("it waits for a reader", || {
                status = helper.try_wait().unwrap();
                status.is_some()
            });
            assert_eq!(status.unwrap().code(), Some(code), "{task}, {reads}: {status:?}");
            drop(reader);
        }
    }
}

#[test]
fn a_reader_that_closes_early_ends_stat_without_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let served = Served::logged(folder.path(), &[]);
    for options in [&["stat", "kept"][..], &["stat", "--json"], &["stat"]] {
        let (reader, stdout) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        drop(reader);
        let mut stat = platen();
        stat.args(options).arg("--run-dir").arg(folder.path().join("run")).stdout(stdout);
        let start = Instant::now();
        let (output, said) = loop {
            let answer = said(&mut stat);
            // A machine that stands still is no error of the server's.
            let late = answer.1.contains("it does not answer within 5 s");
            if !late || start.elapsed() > LONG {
                break answer;
            }
        };
        assert!(output.status.success() && said.is_empty(), "{options:?}: {said}");
    }
    served.end();
}

#[test]
fn processes_have_the_program_s_name() {
    let folder = tempfile::tempdir().unwrap();
    let served = Served::logged(folder.path(), &[]);
    let server = format!("/proc/{}", served.server().as_raw_nonzero());
    assert_eq!(fs::read_to_string(format!("{server}/comm")).unwrap(), "platen\n");
    assert!(fs::read(format!("{server}/cmdline")).unwrap().starts_with(b"platen\0device\0serve\0"));
    assert!(fs::read_link(format!("{server}/exe")).unwrap().ends_with("platen-device"));
    served.end();
}

#[test]
fn the_small_program_serves_only_if_it_has_this_version() {
    let folder = tempfile::tempdir().unwrap();
    let (own, beside) = (folder.path().join("platen"), folder.path().join("platen-device"));
    let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_platen")).arg(&own).status();
    assert!(copied.unwrap().success());
    let refused = || {
        let words = ["device", "serve", "--size", "1", "--nbd", "unix:/dev/null/socket"];
        let output = Command::new(&own).args(words).output().unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    let script = |said: &str| {
        // Written by another process, as in `device_renew.rs`.
        let made = format!("printf '#!/bin/sh\\necho {said}\\n' > $0; chmod +x $0");
        let made = Command::new("sh").args(["-c", &made]).arg(&beside).status();
        assert!(made.unwrap().success());
    };
    let (done, alone) = refused();
    assert!(!done && alone.contains("1 bytes are no whole number of pages"), "{alone}");
    script("platen-device 99.0.0");
    let (done, other) = refused();
    let why = "platen-device is not used: its version is \"platen-device 99.0.0\", expected";
    assert!(!done && other.contains(why) && other.ends_with(&alone), "{other}");
    script(concat!("platen-device ", env!("CARGO_PKG_VERSION")));
    assert_eq!(refused(), (true, String::new()));
}

#[test]
fn a_device_that_may_need_a_driver_is_served_by_the_whole_program() {
    for (accelerator, program) in [("auto", "platen"), ("none", "platen-device")] {
        let folder = tempfile::tempdir().unwrap();
        let options = ["--codec", "qatzip", "--accelerator", accelerator];
        let served = Served::logged(folder.path(), &options);
        let runs = || {
            let exe = format!("/proc/{}/exe", served.server().as_raw_nonzero());
            fs::read_link(exe).unwrap().file_name().unwrap().to_owned()
        };
        assert_eq!(runs(), program, "{accelerator}");
        assert!(!served.log().contains("loads no driver"), "{}", served.log());
        if accelerator == "auto" {
            let run = folder.path().join("run");
            let (output, said) = said(platen().args(["upgrade", "kept", "--run-dir"]).arg(run));
            assert!(output.status.success(), "{said}");
            assert_eq!(runs(), program);
        }
        served.end();
    }
}

#[test]
fn a_server_whose_supervisor_was_killed_removes_its_files() {
    let folder = tempfile::tempdir().unwrap();
    let served = Served::logged(folder.path(), &[]);
    let sockets =
        ["nbd.sock", "run/kept.sock", "run/kept.lock"].map(|name| folder.path().join(name));
    assert!(sockets.iter().all(|path| path.exists()));
    served.signal(Signal::KILL);
    wait("they are still there", || !sockets.iter().any(|path| path.exists()));
    let said = || served.log().contains("the supervisor has died: the device ends");
    wait("it ends without a word", said);
}

#[test]
fn a_swap_server_that_does_not_start_removes_its_cgroup() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("run"), "no folder").unwrap();
    let mut command = Served::command(folder.path(), "kept", "nbd.sock", &["--swap"]);
    let child = command.stderr(Stdio::piped()).spawn().unwrap();
    let cgroup = PathBuf::from(format!("/sys/fs/cgroup/platen-{}", child.id()));
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("cannot make the folder"), "{said}");
    if said.contains("cannot make a cgroup") {
        println!("skipped: no cgroup can be made here: {said}");
    }
    assert!(!cgroup.exists(), "{}", cgroup.display());
}

#[test]
fn without_a_transport_all_of_them_are_named() {
    let (output, said) = said(platen().args(["serve", "--size", "1M"]));
    assert_eq!(output.status.code(), Some(2));
    for way in ["--nbd", "--ublk", "--fuse"] {
        assert!(said.contains(way), "{said}");
    }
}
