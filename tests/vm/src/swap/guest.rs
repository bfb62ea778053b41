//! A guest with platen in it, and the operations of its tests.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};

use super::{write_initramfs, Contents, SwapVm, HUNG_SECONDS};
use crate::cleanup::Ticket;
use crate::{platen, scratch};

/// The time limit of a short command on a busy machine.
pub const SHORT: Duration = Duration::from_secs(600);

/// The time limit of a long command: a hung task in a guest panics long before.
pub const LONG: Duration = Duration::from_secs(1200);

/// The time limit of what a server does by itself.
const PATIENCE: Duration = SHORT;

/// The pause between two looks at a log: each costs a guest under TCG 0.1 s of its CPU.
const POLL: Duration = Duration::from_secs(1);

/// The initramfs that all scenarios share.
#[derive(Debug)]
pub struct Stage {
    initramfs: PathBuf,
    _folder: Ticket,
}

impl Stage {
    /// Packs the binary under test and redis.
    ///
    /// # Errors
    /// When a piece is missing.
    pub fn new() -> Result<Self> {
        Self::with(&[])
    }

    /// The same, and these programs under these names.
    ///
    /// # Errors
    /// When a piece is missing.
    pub fn with(programs: &[(&Path, &str)]) -> Result<Self> {
        Self::packed(programs, &[])
    }

    /// The same as [`Self::new`], and these libraries under these names in `/lib`.
    ///
    /// # Errors
    /// When a piece is missing.
    pub fn with_libraries(libraries: &[(&Path, &str)]) -> Result<Self> {
        Self::packed(&[], libraries)
    }

    fn packed(programs: &[(&Path, &str)], libraries: &[(&Path, &str)]) -> Result<Self> {
        let (folder, ticket) = scratch::folder()?;
        let mut contents = Contents::default();
        // A guest has no disk: all of `platen` would take memory even while it does not run.
        contents.program(&platen::device_binary()?, "platen")?;
        contents.redis()?;
        for (path, name) in programs {
            contents.program(path, name)?;
        }
        for (path, name) in libraries {
            contents.library(path, name);
        }
        let initramfs = folder.join("initramfs");
        write_initramfs(&initramfs, &contents)?;
        Ok(Self { initramfs, _folder: ticket })
    }

    /// Boots a guest with two CPUs.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn boot(&self, name: &str, memory_mib: u64) -> Result<Guest> {
        self.boot_with_disk(name, memory_mib, 0)
    }

    /// The same with an empty disk, `/dev/vda`.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn boot_with_disk(&self, name: &str, memory_mib: u64, disk_mib: u64) -> Result<Guest> {
        self.start(name, memory_mib, 2, disk_mib, "")?.tuned(256)
    }

    /// Boots a guest with this many CPUs.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn boot_with_cpus(&self, name: &str, memory_mib: u64, cpus: u32) -> Result<Guest> {
        self.start(name, memory_mib, cpus, 0, "")?.tuned(memory_mib)
    }

    /// Boots a guest with the kernel's default settings.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn boot_untuned(&self, name: &str, memory_mib: u64) -> Result<Guest> {
        self.start(name, memory_mib, 2, 0, "")
    }

    /// Boots a guest with four CPUs whose kernel interrupts its own threads too.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn boot_preempted(&self, name: &str, memory_mib: u64) -> Result<Guest> {
        self.start(name, memory_mib, 4, 0, "preempt=full")?.tuned(memory_mib)
    }

    fn start(
        &self,
        name: &str,
        memory_mib: u64,
        cpus: u32,
        disk_mib: u64,
        settings: &str,
    ) -> Result<Guest> {
        let mut vm = SwapVm::boot(name, &self.initramfs, memory_mib, cpus, disk_mib, settings)?;
        // All scenarios need this: a hung task ends the guest, and with it the test.
        let hung =
            "cd /proc/sys/kernel && cat hung_task_panic hung_task_timeout_secs panic_on_oops";
        let read = vm.sh(hung, SHORT)?;
        let expected = format!("1 {HUNG_SECONDS} 1");
        ensure!(read.split_whitespace().eq(expected.split(' ')), "a hung task is no panic: {read}");
        Ok(Guest { vm })
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        // An error leaves a file in the temporary folder.
        if let Some(folder) = self.initramfs.parent() {
            let _ = std::fs::remove_dir_all(folder);
        }
    }
}

/// A guest started by [`Stage::boot`].
#[derive(Debug)]
pub struct Guest {
    /// The VM.
    pub vm: SwapVm,
}

impl Guest {
    /// Sets what docs/memory.md advises for any machine that swaps to memory; redis needs the last
    /// one.
    fn tuned(mut self, memory_mib: u64) -> Result<Self> {
        self.vm.sh(
            &format!(
                "sysctl -w vm.page-cluster=0 vm.watermark_scale_factor=125 \
                 vm.min_free_kbytes={} vm.overcommit_memory=1",
                memory_mib * 16
            ),
            SHORT,
        )?;
        Ok(self)
    }

    /// Starts `platen device serve` with these arguments, and waits until it says `ready`.
    ///
    /// # Errors
    /// When it does not.
    pub fn serve(&mut self, arguments: &str, ready: &str) -> Result<()> {
        self.background("serve", &format!("platen device serve {arguments}"))?;
        self.wait_for("serve", ready, SHORT)
    }

    /// Runs a command in the background, with its output and then its status in `/tmp/NAME.log`.
    ///
    /// # Errors
    /// When the guest is silent.
    pub fn background(&mut self, name: &str, command: &str) -> Result<()> {
        let log = format!("/tmp/{name}.log");
        let command = format!(
            "rm -f {log}; ({command} > {log} 2>&1; echo status $? >> {log}) > /dev/null 2>&1 &"
        );
        self.vm.sh(&command, SHORT).map(drop)
    }

    /// Runs `guest swap eat` with these arguments in the background, in a cgroup of its own, and
    /// waits until it has filled its memory.
    ///
    /// # Errors
    /// When it does not.
    pub fn eat(&mut self, name: &str, arguments: &str) -> Result<()> {
        let group = format!("/sys/fs/cgroup/{name}");
        self.background(
            name,
            &format!(
                "mkdir -p {group}; sh -c 'echo $$ > {group}/cgroup.procs; exec guest swap eat {arguments}'"
            ),
        )?;
        self.wait_for(name, "filled pages", SHORT)
    }

    /// Makes the kernel swap out `mib` MiB of the memory of [`eat`](Self::eat), or as much as it
    /// can, however much memory is free.
    ///
    /// # Errors
    /// When the guest is silent, or has no memory controller.
    pub fn push_out(&mut self, name: &str, mib: u64) -> Result<()> {
        let file = format!("/sys/fs/cgroup/{name}/memory.reclaim");
        // It need not manage all of it.
        self.vm
            .sh(&format!("test -e {file} && {{ echo {mib}M > {file} || true; }}"), SHORT)
            .map(drop)
    }

    /// Waits until this much memory is available without swap: another program's memory is freed
    /// gradually.
    ///
    /// # Errors
    /// When it does not come.
    pub fn wait_for_memory(&mut self, mib: u64) -> Result<()> {
        let deadline = Instant::now() + SHORT;
        loop {
            let there = self.available_mib()?;
            if there >= mib {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "{there} MiB are available, not {mib}");
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// Waits until the log of a background command has `text`.
    ///
    /// # Errors
    /// When it ends before, or writes nothing for `limit`.
    pub fn wait_for(&mut self, name: &str, text: &str, limit: Duration) -> Result<()> {
        let mut last = (String::new(), Instant::now());
        loop {
            let log = self.log(name)?;
            if log.contains(text) {
                return Ok(());
            }
            ensure!(!log.contains("status "), "{name} ended without {text:?}: {log}");
            is_not_still(name, log, &mut last, limit).with_context(|| format!("no {text:?}"))?;
            std::thread::sleep(POLL);
        }
    }

    /// Waits for the success of a background command; returns its log.
    ///
    /// # Errors
    /// A bad end, or no end and no output for `limit`.
    pub fn finish(&mut self, name: &str, limit: Duration) -> Result<String> {
        let mut last = (String::new(), Instant::now());
        loop {
            let log = self.log(name)?;
            if log.contains("status 0") {
                return Ok(log);
            }
            if log.contains("status ") {
                let served = self.log("serve")?;
                bail!("{name} failed: {}\nserver: {}", tail(&log), tail(&served));
            }
            is_not_still(name, log, &mut last, limit)?;
            std::thread::sleep(POLL);
        }
    }

    /// The output of a background command.
    ///
    /// # Errors
    /// When the guest is silent.
    pub fn log(&mut self, name: &str) -> Result<String> {
        // There may be none yet.
        Ok(self.vm.try_sh(&format!("cat /tmp/{name}.log"), SHORT)?.1)
    }

    /// A field of `platen device stat --json`.
    ///
    /// # Errors
    /// If the guest does not answer.
    pub fn stat(&mut self, field: &str) -> Result<u64> {
        let text = self.stats()?;
        found(&text, field).with_context(|| format!("{field} in {text}"))
    }

    fn stats(&mut self) -> Result<String> {
        let deadline = Instant::now() + LONG;
        loop {
            match self.vm.sh("platen device stat --json", SHORT) {
                // Five seconds are too little if the client has to be swapped in first, by a guest
                // under TCG.
                Err(error)
                    if error.to_string().contains("does not answer")
                        && Instant::now() < deadline => {}
                answer => return answer,
            }
        }
    }

    /// Waits until a field of `platen device stat --json` is at least `value`. There may be no such
    /// field at first: a policy starts after its device.
    ///
    /// # Errors
    /// If it does not get there, or the guest does not answer.
    pub fn wait_for_stat(&mut self, field: &str, value: u64) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let all = self.stats()?;
            let there = found(&all, field);
            if there.is_some_and(|there| there >= value) {
                return Ok(());
            }
            if Instant::now() >= deadline {
                bail!("{field} is {there:?} in {PATIENCE:?}, not {value}: {all}");
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// Waits until the kernel has swapped out this many pages since the guest booted.
    ///
    /// # Errors
    /// If it does not, or the guest does not answer.
    pub fn wait_for_swapped_out(&mut self, pages: u64) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let out = self.vmstat("pswpout")?;
            if out >= pages {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "{out} pages were swapped out, not {pages}");
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// The output of `platen device check`, once all required items are met, and seen where that is
    /// possible: a new stand-by server takes a moment.
    ///
    /// # Errors
    /// When it does not get there.
    pub fn check(&mut self) -> Result<String> {
        let deadline = Instant::now() + SHORT;
        loop {
            let (status, said) = self.vm.try_sh("platen device check", SHORT)?;
            let unseen = said.lines().filter(|line| line.starts_with("unseen")).count();
            // Two items are always unseen.
            if status == 0 && !said.contains("NOT MET") && unseen == 2 {
                return Ok(said);
            }
            ensure!(Instant::now() < deadline, "status {status}: {said}");
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// Kills the server with SIGKILL and waits until another one answers; returns the time in
    /// milliseconds of the guest's clock.
    ///
    /// # Errors
    /// When it is not replaced.
    pub fn kill_server(&mut self) -> Result<u64> {
        self.lose_server("KILL")
    }

    /// Stops the server with SIGSTOP, like a server that hangs, and waits until another one
    /// answers; returns the time in milliseconds of the guest's clock.
    ///
    /// # Errors
    /// When it is not replaced.
    pub fn stop_server(&mut self) -> Result<u64> {
        self.lose_server("STOP")
    }

    fn lose_server(&mut self, signal: &str) -> Result<u64> {
        let (pid, generation) = (self.stat("pid")?, self.stat("generation")?);
        let timeouts = self.timeouts()?;
        // The control socket answers once the store is taken over and requests flow.
        let script = format!(
            "now() {{ cut -d' ' -f1 /proc/uptime | tr -d .; }}; begin=$(now); kill -{signal} {pid}; \
             for i in $(seq 3000); do platen device stat --json 2> /dev/null | grep '\"generation\": ' | \
             grep -qv '\"generation\": {generation},' && break; done; \
             echo took=$((($(now) - begin) * 10))"
        );
        let said = self.vm.sh(&script, LONG)?;
        let now = self.stat("generation")?;
        ensure!(now > generation, "the server was not replaced: {said}");
        // The driver may end the commands of a server that has just taken the disk over.
        let is_of_driver =
            now > generation + 1 && self.log("serve")?.contains("the driver has ended ");
        ensure!(
            now == generation + 1 || is_of_driver || self.timeouts()? > timeouts,
            "{} servers in the place of one: {}",
            now - generation,
            self.log("serve")?
        );
        number(&said, "took=").with_context(|| said.clone())
    }

    /// How often the kernel's NBD client has given up a connection because no answer came for 8 s,
    /// as where the host gives a CPU of the guest no time. The server is then replaced.
    ///
    /// # Errors
    /// When the guest is silent.
    pub fn timeouts(&mut self) -> Result<u64> {
        let said = self.vm.try_sh("dmesg | grep -c 'Connection timed out'", SHORT)?.1;
        said.trim().parse().with_context(|| format!("timeouts: {said}"))
    }

    /// A counter of /proc/vmstat.
    ///
    /// # Errors
    /// When the guest is silent.
    pub fn vmstat(&mut self, name: &str) -> Result<u64> {
        let text = self.vm.sh("cat /proc/vmstat", SHORT)?;
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|value| value.parse().ok()).with_context(|| format!("no {name} in vmstat"))
    }

    /// CPU seconds used by the whole guest.
    ///
    /// # Errors
    /// When the guest is silent.
    pub fn cpu(&mut self) -> Result<f64> {
        let text = self.vm.sh("head -1 /proc/stat", SHORT)?;
        let fields: Vec<f64> =
            text.split_whitespace().skip(1).filter_map(|word| word.parse().ok()).collect();
        ensure!(fields.len() >= 7, "/proc/stat says {text}");
        // user, nice, system, (idle, iowait), irq, softirq, in hundredths.
        Ok((fields[0] + fields[1] + fields[2] + fields[5] + fields[6]) / 100.0)
    }

    /// KiB that are swapped out.
    ///
    /// # Errors
    /// When the guest is silent.
    pub fn swapped_kib(&mut self) -> Result<u64> {
        let text = self.vm.sh("cat /proc/swaps", SHORT)?;
        Ok(text
            .lines()
            .skip(1)
            .filter_map(|line| line.split_whitespace().nth(3)?.parse::<u64>().ok())
            .sum())
    }

    /// MiB available to a program without swap.
    ///
    /// # Errors
    /// When the guest is silent.
    pub fn available_mib(&mut self) -> Result<u64> {
        let text = self.vm.sh("grep MemAvailable /proc/meminfo", SHORT)?;
        let kib: u64 = text
            .split_whitespace()
            .nth(1)
            .and_then(|word| word.parse().ok())
            .context(text.clone())?;
        Ok(kib >> 10)
    }
}

/// A guest's swap device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SwapOn {
    /// Nothing.
    Nothing,
    /// The kernel's zram, with zstd.
    Zram,
    /// platen by ublk, with zstd.
    Platen,
}

impl Guest {
    /// Starts swapping.
    ///
    /// # Errors
    /// When that is not possible.
    pub fn swap_on(&mut self, on: SwapOn) -> Result<()> {
        match on {
            SwapOn::Nothing => Ok(()),
            SwapOn::Platen => self.serve("--size 512M --codec zstd --ublk --swap", "page-cluster"),
            SwapOn::Zram => self.zram("zstd", 512),
        }
    }

    /// Swaps to the kernel's zram.
    ///
    /// # Errors
    /// When that is not possible.
    pub fn zram(&mut self, codec: &str, size_mib: u64) -> Result<()> {
        let command = format!(
            "echo {codec} > /sys/block/zram0/comp_algorithm && \
             echo {size_mib}M > /sys/block/zram0/disksize && mkswap /dev/zram0 && \
             swapon -d /dev/zram0"
        );
        self.vm.sh(&command, SHORT).map(drop)
    }

    /// Starts redis-server on `/tmp/redis.sock`.
    ///
    /// # Errors
    /// When it does not start.
    pub fn redis(&mut self) -> Result<()> {
        self.background(
            "redis",
            "redis-server --port 0 --unixsocket /tmp/redis.sock --save '' --appendonly no --dir /tmp",
        )?;
        self.wait_for("redis", "eady to accept connections", SHORT)
    }
}

/// The number after `key`.
pub fn number(text: &str, key: &str) -> Option<u64> {
    let rest = text.split_once(key)?.1.trim_start();
    rest[..rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len())].parse().ok()
}

/// A field of `platen device stat --json`, whose output this is.
fn found(stats: &str, field: &str) -> Option<u64> {
    number(stats, &format!("\"{field}\":"))
}

/// Fails if the log has stayed the same for `limit`. `last` is the log before, and since when. (The
/// length says nothing: of a long log the guest returns the end.)
fn is_not_still(
    name: &str,
    log: String,
    last: &mut (String, Instant),
    limit: Duration,
) -> Result<()> {
    if log != last.0 {
        *last = (log, Instant::now());
    }
    ensure!(last.1.elapsed() < limit, "{name} writes nothing for {limit:?}: {}", tail(&last.0));
    Ok(())
}

/// The end of a log.
pub fn tail(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(6)..].join(" | ")
}
