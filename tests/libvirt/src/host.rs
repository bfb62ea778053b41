//! One host: its namespaces, its libvirt daemon, and its `platen host`.

use std::fs;
use std::io::Write;
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::domain::{EMULATOR, EMULATOR_SCRIPT};
use anyhow::{bail, ensure, Context, Result};
use serde_json::Value;
use vm_tests::cleanup::{register, Leftover, Ticket};

/// The limit of what only a hang takes.
const PATIENCE: Duration = Duration::from_secs(400);

/// The first process of a host, as a script: mounts, then a shell that waits for all that ends.
const INIT: &str = r#"
set -e
mount --make-rprivate /
mount -t overlay overlay -o "lowerdir=$BASE,upperdir=$HERE/upper,workdir=$HERE/work" "$HERE/root"
cd "$HERE/root"
mkdir -p proc sys run tmp dev root guest
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs -o mode=1777 tmpfs tmp
mount -t tmpfs -o mode=755 tmpfs dev
rm -rf var/run; ln -s /run var/run
mkdir -p dev/pts dev/shm run/libvirt run/lock var/lib/libvirt/qemu var/log/libvirt/qemu var/cache/libvirt/qemu
chmod 777 run
chown -R 64055:64055 var/lib/libvirt/qemu
for n in null zero full random urandom tty; do : > dev/$n; mount --bind /dev/$n dev/$n; done
# The folder of unix sockets has one path on both hosts and for both services.
mkdir -p ".$DOORS"; mount --bind "$HERE/doors" ".$DOORS"
mount -t devpts -o newinstance,ptmxmode=666,mode=620 devpts dev/pts; ln -s pts/ptmx dev/ptmx
mount -t tmpfs -o mode=1777 tmpfs dev/shm
ln -s /proc/self/fd dev/fd
for f in kernel:"$KERNEL" initramfs:"$INITRAMFS"; do
  : > guest/${f%%:*}; mount --bind "${f#*:}" guest/${f%%:*}; mount -o remount,ro,bind guest/${f%%:*}; done
hostname "$NAME"
ip link set lo up
cat > init <<'Y'
trap : CHLD TERM
echo up > /up
while :; do sleep 3600 & wait; done
Y
exec chroot . /bin/bash /init
"#;

/// Starts the service where the folder of unix sockets is its host's.
const SERVICE: &str = r#"mount --bind "$1" "$2" && shift 2 && exec "$@""#;

/// The first folder in PATH on a host: programs that libvirt runs in place of the usual ones.
const FILTERS: &str = "/filters";

/// A host.
#[derive(Debug)]
pub struct Host {
    /// Its name, also that of its certificate.
    pub name: &'static str,
    /// Its address.
    pub address: Ipv4Addr,
    folder: PathBuf,
    /// The path of its unix sockets, which is the other host's, too.
    doors: PathBuf,
    /// Its first process.
    pid: u32,
    /// The program by which libvirt compresses saves.
    pub filter: &'static str,
    child: Child,
    _group: Ticket,
}

impl Host {
    /// Starts the namespaces; `base` is the unpacked system.
    pub(crate) fn start(
        name: &'static str,
        address: Ipv4Addr,
        folder: &Path,
        base: &Path,
        guest: (&Path, &Path),
        doors: &Path,
    ) -> Result<Self> {
        for part in ["upper/etc/libvirt", "upper/usr/bin", "work", "root", "doors"] {
            fs::create_dir_all(folder.join(part))?;
        }
        let etc = folder.join("upper/etc");
        let uuid = if name == "hosta" { "1" } else { "2" };
        let uuid = format!(
            "{0}-{1}-4{2}-8{2}-{3}",
            uuid.repeat(8),
            uuid.repeat(4),
            uuid.repeat(3),
            uuid.repeat(12)
        );
        fs::write(
            etc.join("libvirt/libvirtd.conf"),
            format!(
                "host_uuid = \"{uuid}\"\nlisten_tls = 0\nlisten_tcp = 1\nauth_tcp = \"none\"\n\
                 auth_unix_rw = \"none\"\nlog_outputs = \"3:file:/var/log/libvirt/libvirtd.log\"\n"
            ),
        )?;
        let filter = filter_of(base)?;
        fs::write(
            etc.join("libvirt/qemu.conf"),
            format!(
                "security_driver = \"none\"\nuser = \"libvirt-qemu\"\ngroup = \"libvirt-qemu\"\n\
                 cgroup_controllers = [ ]\nstdio_handler = \"file\"\n\
                 save_image_format = \"{filter}\"\n"
            ),
        )?;
        let emulator = folder.join("upper").join(EMULATOR.trim_start_matches('/'));
        fs::write(&emulator, EMULATOR_SCRIPT)?;
        fs::set_permissions(&emulator, fs::Permissions::from_mode(0o755))?;
        fs::write(etc.join("hostname"), format!("{name}\n"))?;
        fs::write(etc.join("hosts"), "127.0.0.1 localhost\n10.77.0.1 hosta\n10.77.0.2 hostb\n")?;
        let log = fs::File::create(folder.join("init.log"))?;
        let mut child = Command::new("unshare")
            .args(["--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child"])
            .args(["sh", "-c", INIT])
            .envs([("BASE", base), ("HERE", folder), ("KERNEL", guest.0), ("INITRAMFS", guest.1)])
            .env("NAME", name)
            .env("DOORS", doors)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .process_group(0)
            .spawn()
            .context("unshare")?;
        let group =
            register(Leftover::Group(rustix_pid(child.id()).context("a process has a number")?));
        let until = Instant::now() + PATIENCE;
        while !folder.join("upper/up").exists() {
            let said = || fs::read_to_string(folder.join("init.log")).unwrap_or_default();
            if let Some(status) = child.try_wait()? {
                bail!("{name} does not start ({status}): {}", said());
            }
            ensure!(Instant::now() < until, "{name} does not come up: {}", said());
            std::thread::sleep(Duration::from_millis(20));
        }
        let pid = first_child(child.id())?;
        let (folder, doors) = (folder.into(), doors.into());
        Ok(Self { name, address, folder, doors, pid, filter, child, _group: group })
    }

    /// Ends everything on the host.
    pub(crate) fn end(&mut self) {
        // With the namespace's first process everything in the namespace ends. `unshare` ends it,
        // and is ended only once.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Its folder of unix sockets, as this machine has it.
    pub(crate) fn doors(&self) -> PathBuf {
        self.folder.join("doors")
    }

    /// The number of its first process.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// A command on the host, in its files.
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command
            .args(["-t", &self.pid.to_string()])
            .args(["--mount", "--uts", "--ipc", "--net", "--pid", "--root", "--wdns=/"])
            .args(["env", "-i", &format!("PATH={FILTERS}:/usr/sbin:/usr/bin:/sbin:/bin")])
            .args(["HOME=/root", "LC_ALL=C"])
            .args(words)
            .stdin(Stdio::null());
        command
    }

    /// Runs a command to its end; returns whether it succeeded, and all that it said.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn run(&self, words: &[&str]) -> Result<(bool, String)> {
        let out = self.command(words).output().context("nsenter")?;
        let said = String::from_utf8_lossy(&[out.stdout, out.stderr].concat()).into_owned();
        Ok((out.status.success(), said))
    }

    /// Runs `virsh` with these words; what it said.
    ///
    /// # Errors
    /// It fails.
    pub fn virsh(&self, words: &[&str]) -> Result<String> {
        let (well, said) = self.run(&[&["virsh", "-q"], words].concat())?;
        ensure!(well, "virsh {} on {}: {said}", words.join(" "), self.name);
        Ok(said.trim().to_owned())
    }

    /// Makes `binary` the host's `gzip` or `zstd`. The program has this machine's libraries,
    /// because the host's system may be older.
    pub(crate) fn install_filter(&self, binary: &Path) -> Result<()> {
        let folder = self.file(FILTERS);
        fs::create_dir_all(&folder)?;
        let linked = Command::new("ldd").arg(binary).output().context("ldd")?;
        let linked = String::from_utf8_lossy(&linked.stdout).into_owned();
        let mut loader = None;
        for path in linked.split_whitespace().filter(|word| word.starts_with('/')) {
            let path = Path::new(path);
            let name = path.file_name().context("a library has a name")?;
            fs::copy(path, folder.join(name))?;
            let is_loader = name.to_string_lossy().starts_with("ld-linux");
            loader = loader.or(is_loader.then(|| name.to_owned()));
        }
        let loader = loader.context("the program has no loader")?;
        fs::copy(binary, folder.join("platen"))?;
        let script = format!(
            "#!/bin/sh\nexec {FILTERS}/{} --library-path {FILTERS} --argv0 {} {FILTERS}/platen \
             \"$@\"\n",
            loader.display(),
            self.filter
        );
        fs::write(folder.join(self.filter), script)?;
        let (well, said) = self.run(&["chmod", "-R", "755", FILTERS])?;
        ensure!(well, "chmod: {said}");
        Ok(())
    }

    /// A program of this machine that has the host's folder of unix sockets at its path.
    pub(crate) fn at_its_doors(&self, binary: &Path) -> Command {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", SERVICE, "sh"]);
        command.args([&self.folder.join("doors"), &self.doors, binary]).stdin(Stdio::null());
        command
    }

    /// Kills libvirtd, and starts it again.
    ///
    /// # Errors
    /// It does not answer.
    pub fn restart_libvirt(&self) -> Result<()> {
        let kill = "kill -KILL $(cat /run/libvirtd.pid)";
        let (well, said) = self.run(&["/bin/bash", "-c", kill])?;
        ensure!(well, "libvirtd of {} is not killed: {said}", self.name);
        self.start_libvirt()
    }

    /// Starts libvirtd, and waits until it answers.
    pub(crate) fn start_libvirt(&self) -> Result<()> {
        let log = fs::File::create(self.folder.join("libvirtd.log"))?;
        // Its end is that of its namespace.
        self.command(&["libvirtd", "--listen"])
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("libvirtd")?;
        let until = Instant::now() + PATIENCE;
        while !self.run(&["virsh", "-q", "list"])?.0 {
            let said = fs::read_to_string(self.folder.join("libvirtd.log")).unwrap_or_default();
            ensure!(Instant::now() < until, "libvirtd of {} does not answer: {said}", self.name);
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// A file of the host, as this process reaches it.
    pub fn file(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{path}", self.pid))
    }

    /// Whether a domain runs here.
    ///
    /// # Errors
    /// virsh cannot be started.
    pub fn runs(&self, domain: &str) -> Result<bool> {
        let (known, said) = self.run(&["virsh", "-q", "domstate", domain])?;
        Ok(known && said.trim() == "running")
    }

    /// Sets the host's end of the link up or down.
    ///
    /// # Errors
    /// `ip` fails.
    pub fn set_link(&self, up: bool) -> Result<()> {
        let state = if up { "up" } else { "down" };
        self.ip(&["link", "set", "link0", state])
    }

    /// Limits what the host sends to the other one, as `tc` writes rates.
    ///
    /// # Errors
    /// `tc` fails.
    pub fn limit_link(&self, rate: &str) -> Result<()> {
        let words = ["qdisc", "replace", "dev", "link0", "root", "tbf", "rate", rate];
        let out = self
            .in_network(&["tc"])
            .args(words)
            .args(["burst", "128k", "latency", "50ms"])
            .output()
            .context("tc")?;
        ensure!(out.status.success(), "tc: {}", String::from_utf8_lossy(&out.stderr));
        Ok(())
    }

    /// Runs this machine's `ip` in the host's network.
    pub(crate) fn ip(&self, words: &[&str]) -> Result<()> {
        let out = self.in_network(&["ip"]).args(words).output().context("ip")?;
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        ensure!(out.status.success(), "ip {} on {}: {said}", words.join(" "), self.name);
        Ok(())
    }

    /// A program of this machine in the host's network.
    fn in_network(&self, words: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["-t", &self.pid.to_string(), "--net", "--"]).args(words).stdin(Stdio::null());
        command
    }

    /// Starts `platen host`, and waits until it is up.
    ///
    /// # Errors
    /// It does not come up.
    pub fn start_platen(&self, binary: &Path, config: &Path) -> Result<Service> {
        let log = self.folder.join("platen.log");
        let out = fs::File::options().create(true).append(true).open(&log)?;
        let before = fs::read_to_string(&log)?.len();
        let run_dir = self.folder.join("run");
        let flags = ["--name", self.name, "--config", &text(config), "--run-dir", &text(&run_dir)]
            .map(String::from);
        let doors = self.folder.join("doors");
        let mut command = self.in_network(&["unshare", "--mount", "sh", "-c", SERVICE, "sh"]);
        command.args([&doors, &self.doors, binary]).arg("host");
        command.args(&flags).stdout(Stdio::null()).stderr(out).process_group(0);
        let child = command.spawn().context("platen host")?;
        let ticket = register(Leftover::Group(rustix_pid(child.id()).context("a number")?));
        let mut service =
            Service { child, binary: binary.into(), flags: flags.into(), log, _group: ticket };
        let until = Instant::now() + PATIENCE;
        while !service.said()?[before..].contains("for other hosts") {
            if let Some(status) = service.child.try_wait()? {
                bail!("platen host on {} ends ({status}): {}", self.name, service.said()?);
            }
            ensure!(Instant::now() < until, "platen host on {} is not up", self.name);
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(service)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.end();
    }
}

/// A running `platen host`.
#[derive(Debug)]
pub struct Service {
    child: Child,
    binary: PathBuf,
    flags: Vec<String>,
    log: PathBuf,
    _group: Ticket,
}

impl Service {
    /// All that it and its carriers have said.
    ///
    /// # Errors
    /// The log cannot be read.
    pub fn said(&self) -> Result<String> {
        Ok(fs::read_to_string(&self.log)?)
    }

    /// `platen host status`.
    ///
    /// # Errors
    /// The service does not answer.
    pub fn status(&self) -> Result<Value> {
        let out = Command::new(&self.binary)
            .args(["host", "status", "--json"])
            .args(&self.flags)
            .output()?;
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        ensure!(out.status.success(), "platen host status: {said}");
        Ok(serde_json::from_slice(&out.stdout)?)
    }

    /// The last migration that has ended; waits until `count` have.
    ///
    /// # Errors
    /// They do not end.
    pub fn ended(&self, count: usize) -> Result<Value> {
        let until = Instant::now() + PATIENCE;
        loop {
            let status = self.status()?;
            let history = status["history"].as_array().context("no history")?;
            let running = status["running"].as_array().map_or(0, Vec::len);
            if history.len() >= count && running == 0 {
                return Ok(history.last().cloned().unwrap_or_default());
            }
            ensure!(Instant::now() < until, "{count} migrations have not ended: {status}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The number of migrations that have ended.
    ///
    /// # Errors
    /// The service does not answer.
    pub fn count(&self) -> Result<usize> {
        Ok(self.status()?["history"].as_array().map_or(0, Vec::len))
    }

    /// Bytes that the oldest running migration has moved.
    ///
    /// # Errors
    /// The service does not answer.
    pub(crate) fn moved(&self) -> Result<u64> {
        Ok(self.status()?["running"][0]["plain"].as_u64().unwrap_or(0))
    }

    /// Kills the service, and nothing that it has started.
    ///
    /// # Errors
    /// The kernel's.
    pub fn kill(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The compressor that the libvirt of this system has: zstd from version 11 on.
fn filter_of(system: &Path) -> Result<&'static str> {
    let folder = system.join("usr/lib/x86_64-linux-gnu");
    let version = fs::read_dir(&folder)?.flatten().find_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        name.strip_prefix("libvirt.so.0.")?.split('.').next()?.parse::<u32>().ok()
    });
    let version = version.with_context(|| format!("no libvirt in {}", folder.display()))?;
    Ok(if version < 11_000 { "gzip" } else { "zstd" })
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

fn rustix_pid(pid: u32) -> Option<rustix::process::Pid> {
    rustix::process::Pid::from_raw(i32::try_from(pid).ok()?)
}

/// The only child of a process.
fn first_child(pid: u32) -> Result<u32> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
    let first = text.split_whitespace().next().context("unshare has no child")?;
    Ok(first.parse()?)
}

/// Writes what a test has to say where a person sees it at once.
pub(crate) fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "libvirt: {text}");
}
