//! Two services on one machine: each has addresses of 127.0.0.0/8 that no other test has.

#![allow(dead_code, reason = "each of the test programs uses a part")]

use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::fd::AsFd;
use serde_json::Value;
use std::io::{BufRead, BufReader, ErrorKind, PipeWriter, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use stream::synth::Style;

/// A whole migration with a return path through running services.
pub(crate) fn migrates(rig: &Rig, from: usize, port: u16) {
    let stream = main_stream(300);
    // The last migration with this port may be ending, and take seconds for it on a busy machine.
    until(|| !rig.carries(port_of(1 - from, port)));
    let qemu = rig.listen_as_qemu(1 - from, port);
    let source = rig.connect_as_qemu(from, port);
    let writer = write_all(&source, stream.clone());
    let (destination, _) = rig.accept(&qemu);
    finish(&source, &destination, &stream);
    writer.join().unwrap();
}

/// A migration from A to B under way: 50 000 of its bytes have arrived, and the destination QEMU
/// listens no more, so that its next connection to this port would be another migration's. Returns
/// the sockets of the source and of the destination, and the whole stream.
pub(crate) fn under_way(rig: &Rig, port: u16) -> (TcpStream, TcpStream, Vec<u8>) {
    let stream = main_stream(500);
    let qemu = rig.listen_as_qemu(B, port);
    let source = rig.connect_as_qemu(A, port);
    (&source).write_all(&stream[..UNDER_WAY]).unwrap();
    let (destination, _) = rig.accept(&qemu);
    assert!(read_exactly(&destination, UNDER_WAY) == stream[..UNDER_WAY]);
    (source, destination, stream)
}

/// Ends such a migration in order.
pub(crate) fn finish_under_way(ends: (TcpStream, TcpStream, Vec<u8>)) {
    let (source, destination, stream) = ends;
    let rest = stream[UNDER_WAY..].to_vec();
    let writer = write_all(&source, rest.clone());
    finish(&source, &destination, &rest);
    writer.join().unwrap();
}

/// The bytes of a migration under way.
const UNDER_WAY: usize = 50_000;
/// Nothing here takes this long unless it hangs.
pub(crate) const WATCHDOG: Duration = Duration::from_secs(240);
/// The two hosts.
pub(crate) const A: usize = 0;
pub(crate) const B: usize = 1;
const NAMES: [&str; 2] = ["a", "b"];
pub(crate) const SHUT_OK: [u8; 8] = [0, 1, 0, 4, 0, 0, 0, 0];
/// A migration without a return path: the file header and the end-of-stream tag.
pub(crate) const UNCONFIRMED: &[u8] = b"QEVM\0\0\0\x03\0";
const PAGE: usize = 4096;

/// Waits until it is so.
pub(crate) fn until(mut done: impl FnMut() -> bool) {
    let limit = Instant::now() + WATCHDOG;
    while !done() {
        assert!(Instant::now() < limit, "it does not happen");
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub(crate) fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    u64::try_from(since.as_millis()).unwrap()
}

/// The migrations of a status with this outcome.
pub(crate) fn status_of(status: &Value, outcome: &str) -> usize {
    let history = status["history"].as_array().unwrap();
    history.iter().filter(|record| record["status"] == outcome).count()
}

/// Descriptors, threads and KiB of memory of a service.
pub(crate) fn figures(pid: u32) -> (usize, usize, usize) {
    let count = |what: &str| std::fs::read_dir(format!("/proc/{pid}/{what}")).unwrap().count();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    (count("fd"), count("task"), line.split_whitespace().next().unwrap().parse().unwrap())
}

/// Half-compressible pages of a VM, different for each `count`.
fn pages(count: usize) -> Vec<Vec<u8>> {
    let mut state = count as u64 * 2 + 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[3]
    };
    (0..count).map(|_| (0..PAGE).map(|at| if at % 2 == 0 { next() } else { 7 }).collect()).collect()
}

pub(crate) fn main_stream(count: usize) -> Vec<u8> {
    stream::synth::main_stream(Style::Qemu72, PAGE, pages(count))
}

pub(crate) fn multifd_streams(count: usize, channels: u8) -> (Vec<u8>, Vec<Vec<u8>>) {
    stream::synth::multifd_streams(Style::Qemu72, PAGE, channels, pages(count))
}

/// Writes on a thread, which may have to wait for a reader. The socket may be closed meanwhile.
/// Begins at once: the thread may get no CPU for so long that a silent connection is a disk's.
pub(crate) fn write_all(socket: &TcpStream, bytes: Vec<u8>) -> JoinHandle<()> {
    let mut socket = socket.try_clone().unwrap();
    let begun = bytes.len().min(64);
    let written = socket.write_all(&bytes[..begun]);
    std::thread::spawn(move || drop(written.and_then(|()| socket.write_all(&bytes[begun..]))))
}

pub(crate) fn read_exactly(mut socket: &TcpStream, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    socket.read_exact(&mut bytes).expect("the connection goes on");
    bytes
}

/// Reads some bytes. With a timeout a read ends with EINTR if this process was stopped meanwhile.
pub(crate) fn read_some(mut socket: impl Read, bytes: &mut [u8]) -> std::io::Result<usize> {
    loop {
        match socket.read(bytes) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            read => return read,
        }
    }
}

/// All that comes; a reset ends it like a close.
pub(crate) fn read_all(socket: &TcpStream) -> Vec<u8> {
    let (mut all, mut piece) = (Vec::new(), vec![0; 65536]);
    while let Ok(got @ 1..) = read_some(socket, &mut piece) {
        all.extend_from_slice(&piece[..got]);
    }
    all
}

/// Waits for the end of a connection; whether it was a reset.
pub(crate) fn is_reset(socket: &TcpStream) -> bool {
    let end = read_some(socket, &mut [0; 1]);
    matches!(end, Err(error) if error.kind() == ErrorKind::ConnectionReset)
}

/// The destination reads the stream and confirms, and the source hears it.
pub(crate) fn finish(source: &TcpStream, mut destination: &TcpStream, stream: &[u8]) {
    let got = read_exactly(destination, stream.len());
    assert!(got == stream, "the stream differs");
    destination.write_all(&SHUT_OK).unwrap();
    assert_eq!(read_exactly(source, 8), SHUT_OK);
    let _ = source.shutdown(std::net::Shutdown::Both);
}

/// A platen that runs, and what it says.
pub(crate) struct Platen {
    child: Child,
    /// Its standard error.
    errors: PipeWriter,
    lines: Receiver<String>,
    said: Vec<String>,
}

/// Written behind all that a platen has said.
const END: &str = "that is all";

impl Platen {
    fn start(args: &[&str], environment: &[(&str, &str)]) -> Self {
        let (reader, errors) = std::io::pipe().unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_platen"))
            .args(args)
            .envs(environment.iter().copied())
            .stdout(Stdio::null())
            .stderr(errors.try_clone().unwrap())
            .process_group(0)
            .spawn()
            .unwrap();
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(reader).lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        Self { child, errors, lines, said: Vec::new() }
    }

    /// Waits for a line with these words.
    pub(crate) fn says(&mut self, words: &str) {
        while !self.said.last().is_some_and(|line| line.contains(words)) {
            let Ok(line) = self.lines.recv_timeout(WATCHDOG) else {
                panic!("'{words}' is not said: {:#?}", self.said);
            };
            self.said.push(line);
        }
    }

    /// The line that [`says`](Self::says) has waited for.
    pub(crate) fn last(&self) -> &str {
        self.said.last().map_or("", String::as_str)
    }

    /// The number of its process.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Tells a service to read its configuration again.
    pub(crate) fn hang_up(&self) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args(["-HUP", &id]).status().unwrap().success());
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Its exit status, and what it has said. Its carriers may still have its standard error.
    pub(crate) fn ends(mut self) -> (Option<i32>, String) {
        let limit = Instant::now() + WATCHDOG;
        let status = loop {
            match self.child.try_wait().unwrap() {
                Some(status) => break status,
                None => assert!(Instant::now() < limit, "it does not end: {:#?}", self.said),
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        // Its carriers write whole lines.
        writeln!(self.errors, "{END}").unwrap();
        while self.said.last().is_none_or(|line| line != END) {
            self.said.push(self.lines.recv_timeout(WATCHDOG).expect("what it has said"));
        }
        self.said.pop();
        (status.code(), self.said.join("\n"))
    }

    pub(crate) fn terminates(self) -> (Option<i32>, String) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
        self.ends()
    }
}

impl Drop for Platen {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs a command to its end.
pub(crate) fn run(args: &[&str]) -> (Option<i32>, String) {
    let out = Command::new(env!("CARGO_BIN_EXE_platen")).args(args).output().unwrap();
    let said = [out.stdout, out.stderr].concat();
    (out.status.code(), String::from_utf8_lossy(&said).into_owned())
}

/// A network between A and B that can be cut.
#[derive(Clone, Default)]
struct Proxy {
    sockets: Arc<Mutex<Vec<TcpStream>>>,
    /// How many more connections get no answer.
    unanswered: Arc<AtomicU32>,
}

impl Proxy {
    fn start(&self, at: (Ipv4Addr, u16), to: (Ipv4Addr, u16)) {
        let listener = TcpListener::bind(at).unwrap();
        let Self { sockets, unanswered } = self.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let less = |left: u32| left.checked_sub(1);
                if unanswered.fetch_update(Ordering::AcqRel, Ordering::Acquire, less).is_ok() {
                    sockets.lock().unwrap().push(client);
                    continue;
                }
                let Ok(server) = TcpStream::connect(to) else { continue };
                for (from, into) in [(&client, &server), (&server, &client)] {
                    let (mut from, mut into) =
                        (from.try_clone().unwrap(), into.try_clone().unwrap());
                    std::thread::spawn(move || {
                        let _ = std::io::copy(&mut from, &mut into);
                        let _ = into.shutdown(std::net::Shutdown::Both);
                    });
                }
                sockets.lock().unwrap().extend([client, server]);
            }
        });
    }
}

/// The second and third number of addresses that no other rig has had in this test program, nor in
/// one that runs at the same time: a socket at one of them shows that they are taken. It stays,
/// since a proxy outlives its rig.
fn claim() -> (u8, u8) {
    const NETS: u32 = 120 * 250;
    let first = std::process::id() % NETS;
    let claimed = (0..NETS).find_map(|nth| {
        let unique = (first * 64 + nth) % NETS;
        let net = (u8::try_from(100 + unique / 250).unwrap(), u8::try_from(unique % 250).unwrap());
        let socket = UdpSocket::bind((Ipv4Addr::new(127, net.0, net.1, 1), 4444)).ok()?;
        std::mem::forget(socket);
        Some(net)
    });
    claimed.expect("a net that no rig has")
}

/// Configuration, certificates and folders of both hosts.
pub(crate) struct Rig {
    folder: tempfile::TempDir,
    /// The second and third number of all addresses.
    net: (u8, u8),
    proxy: Option<Proxy>,
}

impl Drop for Rig {
    /// Carriers outlive their services; they end with the test.
    fn drop(&mut self) {
        for pid in self.carriers() {
            let _ = Command::new("kill").args(["-KILL", &pid.to_string()]).status();
        }
    }
}

impl Rig {
    pub(crate) fn new(settings: &str) -> Self {
        Self::made(settings, None)
    }

    /// The links to B go through a network that can be cut.
    pub(crate) fn with_proxy(settings: &str) -> Self {
        Self::made(settings, Some(Proxy::default()))
    }

    fn made(settings: &str, proxy: Option<Proxy>) -> Self {
        let rig = Self { folder: tempfile::tempdir().unwrap(), net: claim(), proxy };
        let mut text =
            format!("{settings}compress_threads = 2\ntls_dir = \"{}\"\n", rig.at("ca/a").display());
        for host in [A, B] {
            let reached =
                if rig.proxy.is_some() && host == B { rig.ip(1, 9) } else { rig.address(host) };
            text.push_str(&format!(
                "[[host]]\nname = \"{}\"\naddress = \"{reached}\"\nlisten = \"{}\"\ndoor = \"{}\"\n\
                 deliver = \"{}\"\nports = \"{}-{}\"\n",
                NAMES[host],
                rig.address(host),
                rig.door(host),
                rig.qemu(host),
                port_of(host, 49152),
                port_of(host, 49155),
            ));
        }
        std::fs::write(rig.config(), text).unwrap();
        rig.make_ca("ca");
        if let Some(proxy) = &rig.proxy {
            proxy.start((rig.ip(1, 9), 4444), (rig.address(B), 4444));
        }
        rig
    }

    fn make_ca(&self, folder: &str) {
        let dir = self.at(folder);
        let dir = dir.to_str().unwrap();
        for args in
            [&["cert", "init", "--dir", dir][..], &["cert", "issue", "a", "b", "--dir", dir]]
        {
            let (code, said) = run(args);
            assert_eq!(code, Some(0), "{said}");
        }
    }

    /// Gives a host certificates of a CA of its own.
    pub(crate) fn make_another_ca(&self, host: usize) {
        self.make_ca("other");
        let (ours, other) = (self.at("ca/a"), self.at("other/a"));
        self.configure(host, |text| {
            text.replace(&ours.display().to_string(), &other.display().to_string())
        });
    }

    pub(crate) fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn config(&self) -> String {
        self.at("platen.toml").to_str().unwrap().to_owned()
    }

    fn ip(&self, first: u8, host: u8) -> Ipv4Addr {
        Ipv4Addr::new(127, self.net.0, self.net.1, first * 20 + host)
    }

    /// The address of a host.
    pub(crate) fn address(&self, host: usize) -> Ipv4Addr {
        self.ip(1, u8::try_from(host).unwrap() + 1)
    }

    /// The door address of a host.
    pub(crate) fn door(&self, host: usize) -> Ipv4Addr {
        self.ip(2, u8::try_from(host).unwrap() + 1)
    }

    /// The address at which a host's QEMUs listen: on two machines this is the door address.
    fn qemu(&self, host: usize) -> Ipv4Addr {
        self.ip(3, u8::try_from(host).unwrap() + 1)
    }

    /// A QEMU of the host that awaits a VM. As many connections may wait as a migration without
    /// multifd makes: the service then waits for a source that gets no CPU and is silent at first.
    pub(crate) fn listen_as_qemu(&self, host: usize, port: u16) -> TcpListener {
        let listener = self.listen_as_server(host, port);
        rustix::net::listen(&listener, 1).unwrap();
        listener
    }

    /// A server of the host. A's ports are ten higher than those given here, which are B's.
    pub(crate) fn listen_as_server(&self, host: usize, port: u16) -> TcpListener {
        let address = (self.qemu(host), port_of(host, port));
        let mut bound = None;
        // A process that another test is starting has a copy of the last listener until its exec.
        until(|| {
            bound = TcpListener::bind(address).ok();
            bound.is_some()
        });
        bound.expect("it is bound")
    }

    /// Waits for a connection. A migration that has failed makes none, and the test has to end.
    pub(crate) fn awaits(&self, listener: impl AsFd) {
        let mut fds = [PollFd::new(&listener, PollFlags::IN)];
        let limit = Timespec::try_from(WATCHDOG).unwrap();
        if poll(&mut fds, Some(&limit)).unwrap() == 0 {
            panic!("nobody connects: {:#?}", self.records().collect::<Vec<_>>());
        }
    }

    /// The next connection to a QEMU.
    pub(crate) fn accept(&self, qemu: &TcpListener) -> (TcpStream, SocketAddr) {
        self.awaits(qemu);
        qemu.accept().unwrap()
    }

    /// A connection of a QEMU on `host` to the other one's door.
    pub(crate) fn connect_as_qemu(&self, host: usize, port: u16) -> TcpStream {
        let to = 1 - host;
        let socket = TcpStream::connect((self.door(to), port_of(to, port))).unwrap();
        socket.set_read_timeout(Some(WATCHDOG)).unwrap();
        socket
    }

    /// Gives a host a configuration of its own: the common one, changed.
    pub(crate) fn configure(&self, host: usize, change: impl FnOnce(String) -> String) {
        let text = std::fs::read_to_string(self.config()).unwrap();
        std::fs::write(self.at(&format!("{}.toml", NAMES[host])), change(text)).unwrap();
    }

    pub(crate) fn arguments(&self, host: usize) -> Vec<String> {
        let own = self.at(&format!("{}.toml", NAMES[host]));
        let config = if own.exists() { own.to_str().unwrap().to_owned() } else { self.config() };
        let run = self.at(&format!("run-{}", NAMES[host]));
        let run = run.to_str().unwrap().to_owned();
        ["--config", &config, "--name", NAMES[host], "--run-dir", &run].map(String::from).into()
    }

    /// Starts a service, which may refuse.
    pub(crate) fn spawn(&self, host: usize, environment: &[(&str, &str)]) -> Platen {
        let arguments = self.arguments(host);
        let arguments: Vec<&str> =
            ["host"].into_iter().chain(arguments.iter().map(String::as_str)).collect();
        Platen::start(&arguments, environment)
    }

    pub(crate) fn start_with(&self, host: usize, environment: &[(&str, &str)]) -> Platen {
        let mut service = self.spawn(host, environment);
        service.says("for other hosts; 4 doors to");
        service
    }

    /// Starts a service, and waits until it is up. A test can also wait for messages from before.
    pub(crate) fn start(&self, host: usize) -> Platen {
        let mut service = self.spawn(host, &[]);
        let mut said = Vec::new();
        loop {
            let line = service.lines.recv_timeout(WATCHDOG).expect("it comes up");
            let is_up = line.contains("for other hosts; ");
            said.push(line);
            if is_up {
                break;
            }
        }
        let has_all = said.last().is_some_and(|line| line.contains("; 4 doors to"));
        // Read again from the beginning.
        let (sender, lines) = mpsc::channel();
        let later = std::mem::replace(&mut service.lines, lines);
        said.into_iter().for_each(|line| sender.send(line).unwrap());
        std::thread::spawn(move || later.iter().for_each(|line| drop(sender.send(line))));
        if !has_all {
            self.opens_all_doors(host);
        }
        service
    }

    /// Waits for the doors that a service could not open at its start. A process that a killed
    /// service was starting has copies of its sockets until its exec, and a carrier that gets no
    /// CPU may not have given its door back before its migration ends.
    pub(crate) fn opens_all_doors(&self, host: usize) {
        until(|| {
            let status = self.status(host);
            status["doors"] == 4 || !status["running"].as_array().unwrap().is_empty()
        });
    }

    /// `platen relay` to a host's service.
    pub(crate) fn relay_to(&self, host: usize, name: &str) -> Platen {
        self.relay_with(host, name, "ca/a")
    }

    /// The same, with the certificate in this folder of the rig.
    pub(crate) fn relay_with(&self, host: usize, name: &str, tls: &str) -> Platen {
        let peer = format!("{}:4444", self.address(host));
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let listen = format!("unix:{}", self.at(&format!("src-{number}")).display());
        let tls = self.at(tls);
        let tls = tls.to_str().unwrap();
        Platen::start(
            &["relay", "--peer", &peer, "--peer-name", NAMES[host], "--name", name]
                .into_iter()
                .chain(["--listen", &listen, "--tls-dir", tls])
                .collect::<Vec<_>>(),
            &[],
        )
    }

    /// A command about a host's service.
    pub(crate) fn command(&self, host: usize, words: &[&str]) -> (Option<i32>, String) {
        let arguments = self.arguments(host);
        let arguments = arguments.iter().map(String::as_str);
        run(&words.iter().copied().chain(arguments).collect::<Vec<_>>())
    }

    fn json(&self, host: usize, words: &[&str]) -> Value {
        let mut answer = String::new();
        until(|| {
            let (code, said) = self.command(host, &[words, &["--json"]].concat());
            // A machine that stands still is no error of the service's.
            let is_late = said.contains("it does not answer within 30 s");
            assert!(code == Some(0) || is_late, "{code:?}: {said}");
            answer = said;
            code == Some(0)
        });
        serde_json::from_str(&answer).unwrap()
    }

    pub(crate) fn status(&self, host: usize) -> Value {
        self.json(host, &["host", "status"])
    }

    pub(crate) fn list(&self, host: usize) -> Value {
        self.json(host, &["list"])
    }

    /// The last of `count` migrations that have ended.
    pub(crate) fn ended(&self, host: usize, count: usize) -> Value {
        let mut last = Value::Null;
        until(|| {
            let status = self.status(host);
            let history = status["history"].as_array().unwrap();
            last = history.last().cloned().unwrap_or_default();
            history.len() == count && status["running"].as_array().unwrap().is_empty()
        });
        last
    }

    /// B's service is too busy for the next `count` connections.
    pub(crate) fn leave_unanswered(&self, count: u32) {
        let proxy = self.proxy.as_ref().expect("a rig with a proxy");
        proxy.unanswered.store(count, Ordering::Release);
    }

    pub(crate) fn cut_links(&self) {
        let proxy = self.proxy.as_ref().expect("a rig with a proxy");
        for socket in proxy.sockets.lock().unwrap().drain(..) {
            let _ = socket.shutdown(std::net::Shutdown::Both);
        }
    }

    /// The records in this rig's folders.
    fn records(&self) -> impl Iterator<Item = Value> + '_ {
        let files = NAMES.iter().flat_map(|name| {
            let folder = self.at(&format!("run-{name}/migrations"));
            std::fs::read_dir(folder).into_iter().flatten().flatten()
        });
        files.filter_map(|file| serde_json::from_slice(&std::fs::read(file.path()).ok()?).ok())
    }

    /// Those that do not say that they have ended.
    fn running(&self) -> impl Iterator<Item = Value> + '_ {
        self.records().filter(|record| record["phase"] != "ended")
    }

    /// The carriers whose sockets are in this rig's folders.
    fn carriers(&self) -> Vec<u64> {
        self.running().filter_map(|record| record["pid"].as_u64()).collect()
    }

    /// Whether a migration with this port has not ended at both hosts.
    fn carries(&self, port: u16) -> bool {
        self.running().any(|record| record["port"] == port && record["what"] != "disk")
    }

    pub(crate) fn carriers_are_gone(&self) -> bool {
        self.carriers().is_empty()
    }
}

/// No two hosts have the same ports.
fn port_of(host: usize, port: u16) -> u16 {
    if host == A {
        port + 10
    } else {
        port
    }
}
