//! Both hosts, their link, their services, and the guest that goes from one to the other.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use vm_tests::cleanup::Ticket;
use vm_tests::{guest_image, platen, scratch, Console};

use crate::domain::{domain, ODD_BYTES};
use crate::host::{note, Host, Service};

/// The script that fetches what this crate needs.
pub const FETCH: &str = "scripts/fetch-libvirt";
/// The guest's RAM, and what of it has known contents.
const RAM_MIB: u32 = 160;
const FILLED_MIB: u64 = 64;
/// The limit of what only a hang takes.
const PATIENCE: Duration = Duration::from_secs(400);

/// One of the two hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// hosta.
    A,
    /// hostb.
    B,
}

impl Side {
    /// The other one.
    #[must_use]
    pub fn other(self) -> Self {
        if self == Self::A {
            Self::B
        } else {
            Self::A
        }
    }
}

/// Two hosts with libvirt and platen, and one guest.
#[derive(Debug)]
pub struct Lab {
    hosts: [Host; 2],
    services: [Option<Service>; 2],
    binary: PathBuf,
    config: PathBuf,
    /// The folder of unix sockets.
    doors: PathBuf,
    /// Where the guest runs.
    pub at: Side,
    folder: PathBuf,
    _ticket: Ticket,
}

impl Lab {
    /// Why there can be no lab here; `None` if there can.
    pub fn missing() -> Option<String> {
        if !system().join("usr/sbin/libvirtd").exists() {
            return Some(format!("{} has not fetched libvirt", FETCH));
        }
        let is_root = fs::metadata("/proc/self")
            .is_ok_and(|me| std::os::unix::fs::MetadataExt::uid(&me) == 0);
        (!is_root).then(|| "it needs root, for namespaces and mounts".into())
    }

    /// Starts both hosts, and boots the guest on the first.
    ///
    /// # Errors
    /// A step fails.
    pub fn new() -> Result<Self> {
        let (folder, ticket) = scratch::folder()?;
        let binary = platen::binary()?.canonicalize()?;
        let doors = folder.join("doors");
        fs::create_dir_all(&doors)?;
        let config = configuration(&folder, &binary, &doors)?;
        let (kernel, initramfs) = (guest_image::kernel()?, guest_image::initramfs(8, false)?);
        let host = |name: &'static str, last: u8| -> Result<Host> {
            let folder = folder.join(name);
            fs::create_dir_all(folder.join("upper/etc/libvirt"))?;
            let address = Ipv4Addr::new(10, 77, 0, last);
            Host::start(name, address, &folder, &system(), (&kernel, &initramfs), &doors)
        };
        let hosts = [host("hosta", 1)?, host("hostb", 2)?];
        link(&hosts)?;
        let mut lab = Self {
            hosts,
            services: [None, None],
            binary,
            config,
            doors,
            at: Side::A,
            folder,
            _ticket: ticket,
        };
        for side in [Side::A, Side::B] {
            // The upper folder is in use, and libvirtd reads the file later: what matters is that
            // the host's own path shows it.
            lab.doors_on(side)?;
            lab.start_service(side)?;
            lab.host(side).install_filter(&lab.binary)?;
            lab.host(side).start_libvirt()?;
        }
        lab.boot()?;
        Ok(lab)
    }

    /// A host.
    pub fn host(&self, side: Side) -> &Host {
        &self.hosts[side as usize]
    }

    /// The service of a host.
    ///
    /// # Panics
    /// It does not run.
    pub fn service(&self, side: Side) -> &Service {
        self.services[side as usize].as_ref().expect("the service runs")
    }

    /// Runs `platen` with these words on this machine, whose `virsh` is that of `host`; returns
    /// whether it succeeded, and all that it said.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn platen_with_virsh(&self, host: &Host, words: &[&str]) -> Result<(bool, String)> {
        let folder = self.folder.join("virsh");
        fs::create_dir_all(&folder)?;
        let script = folder.join("virsh");
        let command = host.command(&["virsh"]);
        let argv = std::iter::once(command.get_program()).chain(command.get_args());
        let argv: Vec<_> = argv.map(|word| format!("'{}'", word.to_string_lossy())).collect();
        fs::write(&script, format!("#!/bin/sh\nexec {} \"$@\"\n", argv.join(" ")))?;
        fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
        let path = format!("{}:{}", folder.display(), std::env::var("PATH")?);
        let out = Command::new(&self.binary).args(words).env("PATH", path).output()?;
        let said = String::from_utf8_lossy(&[out.stdout, out.stderr].concat()).into_owned();
        Ok((out.status.success(), said))
    }

    /// Runs `platen` with these words, outside of the hosts.
    ///
    /// # Errors
    /// It fails.
    pub fn platen(&self, words: &[&str]) -> Result<()> {
        let out = Command::new(&self.binary).args(words).output().context("platen")?;
        let said = String::from_utf8_lossy(&out.stderr);
        ensure!(out.status.success(), "platen {}: {said}", words.join(" "));
        Ok(())
    }

    /// `platen virsh-restore` with these words, for the host where the guest is.
    pub fn virsh_restore(&self, words: &[&str]) -> Command {
        let host = self.host(self.at);
        let socket = host.file("/run/libvirt/libvirt-sock");
        let mut command = host.at_its_doors(&self.binary);
        command.arg("virsh-restore").args(words);
        command.arg("--connect").arg(format!("unix:{}", socket.display()));
        command.arg("--socket-dir").arg(self.doors.join("restore"));
        command
    }

    /// The path of the folder of unix sockets, on both hosts.
    pub fn doors(&self) -> &Path {
        &self.doors
    }

    /// That folder of a host, as this machine has it.
    pub fn doors_of(&self, side: Side) -> PathBuf {
        self.host(side).doors()
    }

    /// A folder for files of a scenario, outside of the hosts.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Starts the service of a host.
    ///
    /// # Errors
    /// It does not come up.
    pub fn start_service(&mut self, side: Side) -> Result<()> {
        let service = self.host(side).start_platen(&self.binary, &self.config)?;
        self.services[side as usize] = Some(service);
        Ok(())
    }

    /// Kills the service of a host, and nothing that it has started.
    ///
    /// # Errors
    /// It does not run.
    pub fn kill_service(&mut self, side: Side) -> Result<()> {
        self.services[side as usize].take().context("the service does not run")?.kill()
    }

    fn doors_on(&self, side: Side) -> Result<()> {
        // Through the overlay: a changed lower or upper folder is not seen in it.
        let name = self.host(side).name;
        let copy = self.folder.join(format!("{name}.qemu.conf"));
        let inside = self.host(side).file("/etc/libvirt/qemu.conf");
        fs::copy(&inside, &copy)?;
        let out = Command::new(&self.binary)
            .args(["host", "doors", "on", "--name", name])
            .arg("--config")
            .arg(&self.config)
            .arg("--qemu-conf")
            .arg(&copy)
            .output()?;
        ensure!(out.status.success(), "doors on: {}", String::from_utf8_lossy(&out.stderr));
        fs::copy(&copy, &inside)?;
        Ok(())
    }

    fn boot(&mut self) -> Result<()> {
        let path = self.host(Side::A).file("/tmp/g1.xml");
        fs::write(path, domain("g1", RAM_MIB))?;
        self.host(Side::A).virsh(&["define", "/tmp/g1.xml"])?;
        self.host(Side::A).virsh(&["start", "g1"])?;
        let size = ["qemu-monitor-command", "g1", "--hmp", "info memory_size_summary"];
        let size = self.host(Side::A).virsh(&size)?;
        let odd = (u64::from(RAM_MIB) << 20) + ODD_BYTES;
        ensure!(size.contains(&format!("base memory: {odd}")), "not the emulator's RAM: {size}");
        let mut console = self.console()?;
        console.wait_ready(PATIENCE)?;
        console.fill(FILLED_MIB, 1)?;
        Ok(())
    }

    fn console(&self) -> Result<Console> {
        Console::connect("g1", &self.host(self.at).file("/run/g1.console"), PATIENCE)
    }

    /// The guest runs where it should, nowhere else, and every byte of its memory is right.
    ///
    /// # Errors
    /// It does not.
    pub fn check_guest(&self) -> Result<()> {
        ensure!(self.host(self.at).runs("g1")?, "g1 does not run on {}", self.host(self.at).name);
        let other = self.host(self.at.other());
        ensure!(!other.runs("g1")?, "g1 runs on {}, too", other.name);
        let verified = self.console()?.verify()?;
        ensure!(verified.pages >= FILLED_MIB * 256, "the guest has checked only {verified:?}");
        Ok(())
    }

    /// Begins `virsh migrate` to the other host, with these words beside.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn begin(&self, words: &[&str]) -> Result<Migration> {
        self.begin_of("g1", self.at, words)
    }

    /// The same for another domain, from this host to the other one.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn begin_of(&self, domain: &str, from: Side, words: &[&str]) -> Result<Migration> {
        let to = format!("qemu+tcp://{}/system", self.host(from.other()).name);
        self.begin_to(domain, from, &to, words)
    }

    /// The same to the libvirt of this URI.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn begin_to(
        &self,
        domain: &str,
        from: Side,
        to: &str,
        words: &[&str],
    ) -> Result<Migration> {
        let command = [&["virsh", "migrate", "--live"], words, &[domain, to]].concat();
        let child = self
            .host(from)
            .command(&command)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("virsh")?;
        Ok(Migration { child, began: Instant::now() })
    }

    /// Waits until the source's service has moved this many bytes of the guest.
    ///
    /// # Errors
    /// It does not; the error says how both services, libvirt and the connections stand.
    pub fn wait_for_bytes(&self, bytes: u64) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        let mut slowest = Duration::ZERO;
        loop {
            let asked = Instant::now();
            let moved = self.service(self.at).moved()?;
            slowest = slowest.max(asked.elapsed());
            if moved >= bytes {
                return Ok(());
            }
            ensure!(
                Instant::now() < until,
                "{moved} of {bytes} bytes have moved; the slowest answer took {slowest:?}\n{}",
                self.state()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// How a migration that does not go on stands.
    fn state(&self) -> String {
        let mut all = self.logs();
        for side in [Side::A, Side::B] {
            let host = self.host(side);
            let status = self.services[side as usize].as_ref().map(Service::status);
            all.push_str(&format!("    {}: status {status:?}\n", host.name));
            for command in [&["virsh", "-q", "domjobinfo", "g1"][..], &["ss", "-tnp"]] {
                let said = host.run(command).map(|(_, said)| said);
                all.push_str(&format!("    {}: {command:?} {said:?}\n", host.name));
            }
        }
        all
    }

    /// Migrates the guest to the other host, through platen, and checks it.
    ///
    /// # Errors
    /// The migration fails, goes past platen, or the guest is not as it was.
    pub fn migrate(&mut self, words: &[&str]) -> Result<()> {
        let counts = [self.service(Side::A).count()?, self.service(Side::B).count()?];
        let migration = self.begin(words)?;
        self.arrive(migration, counts)
    }

    /// The flags of a migration to the other host by a unix socket.
    pub fn by_socket(&self, number: u16) -> [String; 2] {
        let there = self.host(self.at.other()).name;
        let path = self.doors.join(there).join(number.to_string());
        ["--migrateuri".into(), format!("unix://{}", path.display())]
    }

    /// The same as [`migrate`](Self::migrate), by a unix socket.
    ///
    /// # Errors
    /// As there, or it goes another way.
    pub fn migrate_by_socket(&mut self, words: &[&str]) -> Result<()> {
        let socket = self.by_socket(1);
        let socket: Vec<&str> = socket.iter().map(String::as_str).collect();
        self.migrate(&[&socket, words].concat())?;
        for side in [Side::A, Side::B] {
            let record = self.service(side).ended(self.service(side).count()?)?;
            ensure!(record["place"] == "socket:1", "it went another way: {record}");
        }
        Ok(())
    }

    /// Waits for a migration that has to succeed. `counts`: migrations that had ended before.
    ///
    /// # Errors
    /// As [`migrate`](Self::migrate).
    pub fn arrive(&mut self, migration: Migration, counts: [usize; 2]) -> Result<()> {
        let (well, said) = migration.ends()?;
        ensure!(well, "virsh migrate failed: {said}\n{}", self.logs());
        let from = self.at;
        self.at = self.at.other();
        for side in [Side::A, Side::B] {
            let record = self.service(side).ended(counts[side as usize] + 1)?;
            ensure!(record["status"] == "completed", "the record is {record}");
            // libvirt has connected to a unix socket, and nobody says for which VM.
            let is_told = side != from || record["place"].as_str() != Some("socket:1");
            ensure!(!is_told || record["vm"] == "g1", "the record does not name the VM: {record}");
        }
        self.check_guest()
    }

    /// Latest messages of both services.
    pub fn logs(&self) -> String {
        let mut all = String::new();
        for host in &self.hosts {
            let log = self.folder.join(host.name).join("platen.log");
            let text = fs::read_to_string(log).unwrap_or_default();
            let lines: Vec<_> = text.lines().collect();
            for line in &lines[lines.len().saturating_sub(12)..] {
                all.push_str(&format!("    {}: {line}\n", host.name));
            }
        }
        all
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        // Carriers outlive their services, and are in no namespace of processes.
        let _ = self.services.each_ref().map(Option::as_ref).map(|service| {
            let status = service.and_then(|service| service.status().ok());
            let running = status.and_then(|status| status["running"].as_array().cloned());
            for record in running.unwrap_or_default() {
                if let Some(pid) = record["pid"].as_u64() {
                    let _ = Command::new("kill").args(["-KILL", &pid.to_string()]).status();
                }
            }
        });
        self.services = [None, None];
        if std::env::var_os("PLATEN_KEEP").is_some() {
            return note(&format!("what was written is in {}", self.folder.display()));
        }
        self.hosts.iter_mut().for_each(Host::end);
        // The overlay's work folder is free once its namespace has ended.
        let until = Instant::now() + Duration::from_secs(10);
        while fs::remove_dir_all(&self.folder).is_err() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// A running `virsh migrate`.
#[derive(Debug)]
pub struct Migration {
    child: Child,
    began: Instant,
}

impl Migration {
    /// Waits for its end: whether it succeeded, and what it said.
    ///
    /// # Errors
    /// It does not end.
    pub fn ends(self) -> Result<(bool, String)> {
        self.ends_within(PATIENCE)
    }

    /// The same with another limit.
    ///
    /// # Errors
    /// It does not end.
    pub fn ends_within(mut self, limit: Duration) -> Result<(bool, String)> {
        while self.child.try_wait()?.is_none() {
            if self.began.elapsed() > limit {
                let _ = self.child.kill();
                bail!("virsh migrate does not end");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let Output { status, stdout, stderr } = self.child.wait_with_output()?;
        let said = String::from_utf8_lossy(&[stdout, stderr].concat()).into_owned();
        Ok((status.success(), said))
    }
}

/// The unpacked system: that of `PLATEN_LIBVIRT`, or bookworm's.
fn system() -> PathBuf {
    if let Some(folder) = std::env::var_os("PLATEN_LIBVIRT") {
        let root = Path::new(&folder).join("root");
        return root.canonicalize().unwrap_or(root);
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    root.canonicalize().unwrap_or(root).join("target/libvirt/root")
}

/// Certificates and the configuration of both hosts.
fn configuration(folder: &Path, binary: &Path, doors: &Path) -> Result<PathBuf> {
    let ca = folder.join("ca");
    let cert = |words: &[&str]| -> Result<()> {
        let out = Command::new(binary).arg("cert").args(words).arg("--dir").arg(&ca).output()?;
        ensure!(out.status.success(), "cert: {}", String::from_utf8_lossy(&out.stderr));
        Ok(())
    };
    cert(&["init"])?;
    cert(&["issue", "hosta", "hostb"])?;
    let config = folder.join("platen.toml");
    // The namespaces of processes hide libvirt-qemu's name from this machine.
    let mut text = format!(
        "tls_dir = \"{}\"\nallow_users = [\"64055\"]\nresume_timeout = 60\nsockets = 2\n\
         socket_dir = \"{}\"\n",
        ca.join("hosta").display(),
        doors.display()
    );
    for (name, last) in [("hosta", 1), ("hostb", 2)] {
        text.push_str(&format!(
            "[[host]]\nname = \"{name}\"\naddress = \"10.77.0.{last}\"\ndoor = \"127.80.0.{last}\"\n\
             ports = \"49{last}00-49{last}15\"\n"
        ));
    }
    fs::write(&config, text)?;
    Ok(config)
}

/// The link between the hosts.
fn link(hosts: &[Host; 2]) -> Result<()> {
    let pids = hosts.each_ref().map(|host| host.pid().to_string());
    let out = Command::new("ip")
        .args(["link", "add", "link0", "netns", &pids[0], "type", "veth"])
        .args(["peer", "name", "link0", "netns", &pids[1]])
        .output()
        .context("ip")?;
    ensure!(out.status.success(), "ip link: {}", String::from_utf8_lossy(&out.stderr));
    for host in hosts {
        host.ip(&["addr", "add", &format!("{}/24", host.address), "dev", "link0"])?;
        host.ip(&["link", "set", "link0", "up"])?;
    }
    Ok(())
}
