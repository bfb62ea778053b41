//! `platen virsh-restore`: a saved VM under libvirt before its RAM is loaded.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use libvirt_tests::Lab;
use serde_json::Value;

use crate::Userfaultfd;

/// The limit of what only a hang takes.
const PATIENCE: Duration = Duration::from_secs(400);
/// Slow enough for something to happen while RAM is loaded.
const SLOW: [&str; 2] = ["--push-rate", "8M"];
/// Slow enough for the guest to idle before the middle of the image is loaded.
const SETTLED: [&str; 2] = ["--push-rate", "8M"];
/// The time in which the guest has asked for what it needs to idle.
const SETTLES: Duration = Duration::from_millis(700);
const RUNS: &str = "the VM runs under libvirt";
const LOADED: &str = "everything is loaded";

/// The guest as an image, and the XML of its domain.
struct Saved {
    xml: PathBuf,
    image: PathBuf,
    log: PathBuf,
    report: PathBuf,
}

impl Saved {
    /// Saves the guest by virsh, which ends it, and imports libvirt's file.
    fn of(lab: &Lab, flags: &[&str]) -> Result<Self> {
        let host = lab.host(lab.at);
        host.virsh(&[&["save", "g1", "/tmp/g1.save"], flags].concat())?;
        ensure!(!host.runs("g1")?, "g1 runs after its save");
        let file = |name: &str| lab.folder().join(name);
        let saved = Self {
            xml: file("g1.xml"),
            image: file("g1.image"),
            log: file("restore.log"),
            report: file("restore.json"),
        };
        fs::write(&saved.xml, host.virsh(&["save-image-dumpxml", "/tmp/g1.save"])?)?;
        let _ = fs::remove_file(&saved.image);
        let _ = fs::remove_file(lab.folder().join(".g1.image.hot"));
        let stream = host.file("/tmp/g1.save").display().to_string();
        lab.platen(&["image", "import", &stream, &saved.image.display().to_string()])?;
        Ok(saved)
    }

    fn command(&self, lab: &Lab, words: &[&str]) -> Command {
        let mut command = lab.virsh_restore(words);
        command.args([&self.xml, &self.image]).arg("--json").arg(&self.report);
        command
    }

    /// Begins to restore it.
    fn begin(&self, lab: &Lab, words: &[&str]) -> Result<Restore> {
        let log = File::create(&self.log)?;
        let mut command = self.command(lab, words);
        command.stdout(Stdio::null()).stderr(log);
        Ok(Restore { child: command.spawn().context("platen")?, log: self.log.clone() })
    }

    /// Restores it, which has to succeed; the report.
    fn restore(&self, lab: &Lab, words: &[&str]) -> Result<Value> {
        self.begin(lab, words)?.ends(true)?;
        self.report()
    }

    fn report(&self) -> Result<Value> {
        Ok(serde_json::from_str(&fs::read_to_string(&self.report)?)?)
    }

    /// Tries to restore it, which has to fail with these words.
    fn refused(&self, lab: &Lab, words: &[&str], expected: &str) -> Result<()> {
        let said = self.failure(lab, words)?;
        ensure!(said.contains(expected), "not '{expected}': {said}");
        Ok(())
    }

    /// Tries to restore it while libvirt has the VM. On a busy machine the player of the restore
    /// before may still hold the image, which is refused first.
    fn is_there(&self, lab: &Lab) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        loop {
            let said = self.failure(lab, &[])?;
            if said.contains("is there already") {
                return Ok(());
            }
            ensure!(said.contains("is in use by"), "{said}");
            ensure!(Instant::now() < until, "the player does not end: {said}");
        }
    }

    /// Tries to restore it, which has to fail; what it says.
    fn failure(&self, lab: &Lab, words: &[&str]) -> Result<String> {
        let out = self.command(lab, words).output().context("platen")?;
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        ensure!(!out.status.success(), "it was restored: {said}");
        Ok(said)
    }
}

/// A running `platen virsh-restore`.
struct Restore {
    child: Child,
    log: PathBuf,
}

impl Restore {
    fn said(&self) -> Result<String> {
        Ok(fs::read_to_string(&self.log)?)
    }

    /// Waits until it has said something so many times.
    fn says(&self, text: &str, times: usize) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        while self.said()?.matches(text).count() < times {
            ensure!(Instant::now() < until, "not {times} times '{text}': {}", self.said()?);
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Kills the player that serves now.
    ///
    /// Not in the VM's first moments: if a vCPU waits for a page in the middle of a device access,
    /// QEMU's monitor is silent, and libvirt cannot bring another player.
    fn kill_player(&self) -> Result<()> {
        std::thread::sleep(SETTLES);
        let said = self.said()?;
        let mut words = said.split_whitespace().rev();
        words.find(|word| *word == "begins").context("no player has begun")?;
        kill(words.next().context("a player has a number")?)
    }

    /// Kills the command itself, and not its player.
    fn kill(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    fn ends(mut self, well: bool) -> Result<String> {
        let until = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = self.child.try_wait()? {
                break status;
            }
            if Instant::now() > until {
                self.child.kill()?;
                bail!("virsh-restore does not end: {}", self.said()?);
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        ensure!(status.success() == well, "virsh-restore ends ({status}): {}", self.said()?);
        self.said()
    }
}

fn kill(pid: &str) -> Result<()> {
    ensure!(Command::new("kill").args(["-KILL", pid]).status()?.success(), "kill {pid}");
    Ok(())
}

/// Waits until libvirt says this about the guest.
fn wait_for_state(lab: &Lab, expected: &str) -> Result<()> {
    let until = Instant::now() + PATIENCE;
    loop {
        let state = lab.host(lab.at).virsh(&["domstate", "--reason", "g1"])?;
        if state == expected {
            return Ok(());
        }
        ensure!(Instant::now() < until, "g1 is '{state}', not '{expected}'");
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub(crate) fn at_once(lab: &mut Lab) -> Result<()> {
    let _allowed = Userfaultfd::allowed()?;
    let saved = Saved::of(lab, &[])?;
    // Slow enough to look at it while RAM is loaded, on a busy machine too.
    let restore = saved.begin(lab, &["--push-rate", "4M"])?;
    restore.says(RUNS, 1)?;
    wait_for_state(lab, "running (post-copy)")?;
    ensure!(!restore.said()?.contains(LOADED), "it was loaded before anybody could look");
    saved.refused(lab, &[], "is in use by")?;
    let said = restore.ends(true)?;
    ensure!(said.contains(LOADED), "{said}");
    let report = saved.report()?;
    ensure!(report["mode"] == "instant" && report["vm"] == "running", "{report}");
    let started = report["started-ms"].as_f64().context("no time of the start")?;
    let loaded = report["loaded-ms"].as_f64().context("no time of the end")?;
    ensure!(started < loaded, "{report}");
    println!("  it runs after {started:.0} ms, and is loaded after {loaded:.0} ms");
    lab.check_guest()?;
    saved.is_there(lab)?;
    saved.refused(lab, &["--recover"], "nothing to recover")?;
    // libvirt has it under control.
    let host = lab.host(lab.at);
    host.virsh(&["suspend", "g1"])?;
    wait_for_state(lab, "paused (user)")?;
    host.virsh(&["resume", "g1"])?;
    lab.migrate(&[])?;
    // On the other host, and at full speed.
    let report = Saved::of(lab, &[])?.restore(lab, &[])?;
    ensure!(report["mode"] == "instant", "{report}");
    lab.check_guest()?;
    lab.migrate(&[])
}

pub(crate) fn deaths(lab: &mut Lab) -> Result<()> {
    let _allowed = Userfaultfd::allowed()?;
    let host_virsh = |lab: &Lab, words: &[&str]| lab.host(lab.at).virsh(words);
    let saved = Saved::of(lab, &[])?;
    let restore = saved.begin(lab, &SLOW)?;
    restore.says(RUNS, 1)?;
    for nth in 1..=3 {
        restore.kill_player()?;
        restore.says("the VM goes on", nth)?;
    }
    restore.ends(true)?;
    ensure!(saved.report()?["deaths"] == 3, "{}", saved.report()?);
    lab.check_guest()?;
    // The player goes on alone.
    host_virsh(lab, &["destroy", "g1"])?;
    let restore = saved.begin(lab, &SLOW)?;
    restore.says(RUNS, 1)?;
    restore.kill()?;
    wait_for_state(lab, "running (post-copy)")?;
    wait_for_state(lab, "running (migrated)")?;
    lab.check_guest()?;
    // Nobody is left, and another command goes on.
    host_virsh(lab, &["destroy", "g1"])?;
    let restore = saved.begin(lab, &SLOW)?;
    restore.says(RUNS, 1)?;
    let said = restore.said()?;
    std::thread::sleep(SETTLES);
    let player = said.split("player ").nth(1).and_then(|text| text.split(' ').next());
    restore.kill()?;
    kill(player.context("no player has begun")?)?;
    wait_for_state(lab, "running (post-copy failed)")?;
    saved.restore(lab, &["--recover"])?;
    lab.check_guest()?;
    // libvirt itself ends and comes back.
    host_virsh(lab, &["destroy", "g1"])?;
    let restore = saved.begin(lab, &SLOW)?;
    restore.says(RUNS, 1)?;
    lab.host(lab.at).restart_libvirt()?;
    restore.kill_player()?;
    restore.says("the VM goes on", 1)?;
    restore.ends(true)?;
    wait_for_state(lab, "running (migrated)")?;
    lab.check_guest()?;
    // Ended before it runs: nothing is left.
    host_virsh(lab, &["destroy", "g1"])?;
    let restore = saved.begin(lab, &SLOW)?;
    restore.kill()?;
    wait_for_end(lab)?;
    saved.restore(lab, &[])?;
    lab.check_guest()?;
    lab.migrate(&[])
}

/// Waits until the guest's domain does not run.
fn wait_for_end(lab: &Lab) -> Result<()> {
    let until = Instant::now() + PATIENCE;
    loop {
        // A domain that is not defined is gone with its QEMU.
        let (known, said) = lab.host(lab.at).run(&["virsh", "-q", "domstate", "g1"])?;
        if !known || said.contains("shut off") {
            return Ok(());
        }
        ensure!(Instant::now() < until, "g1 does not end");
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub(crate) fn loaded_first(lab: &mut Lab) -> Result<()> {
    // Neither a privilege nor a setting permits postcopy to QEMU's user.
    let forbidden = Userfaultfd::forbidden()?;
    let saved = Saved::of(lab, &[])?;
    let report = saved.restore(lab, &[])?;
    drop(forbidden);
    ensure!(report["mode"] == "load", "{report}");
    let reason = report["fallback"].as_str().unwrap_or_default();
    ensure!(reason.contains("Postcopy is not supported"), "{report}");
    lab.check_guest()?;
    // libvirt would start it at once.
    let _allowed = Userfaultfd::allowed()?;
    let saved = Saved::of(lab, &["--paused"])?;
    let report = saved.restore(lab, &[])?;
    ensure!(report["mode"] == "load" && report["vm"] == "paused", "{report}");
    wait_for_state(lab, "paused (user)")?;
    lab.host(lab.at).virsh(&["resume", "g1"])?;
    lab.check_guest()?;
    let saved = Saved::of(lab, &[])?;
    let report = saved.restore(lab, &["--load"])?;
    ensure!(report["mode"] == "load" && report["fallback"].is_null(), "{report}");
    lab.check_guest()?;
    lab.migrate(&[])
}

pub(crate) fn damaged(lab: &mut Lab) -> Result<()> {
    let _allowed = Userfaultfd::allowed()?;
    let mut saved = Saved::of(lab, &[])?;
    let xml = fs::read_to_string(&saved.xml)?;
    fs::write(&saved.xml, xml.replace("pc-q35-7.2", "pc-q35-7.1"))?;
    saved.refused(lab, &[], "machine type pc-q35-7.2")?;
    // Another VM, as only QEMU can tell: the state of its serial port has no place.
    let (before, rest) = xml.split_once("<serial").context("no serial port")?;
    let (_, after) = rest.split_once("</console>").context("no console")?;
    fs::write(&saved.xml, format!("{before}{after}"))?;
    saved.refused(lab, &["--load"], "the image is as good as before")?;
    saved.refused(lab, &[], "before the VM ran")?;
    wait_for_end(lab)?;
    fs::write(&saved.xml, xml)?;
    let sound = saved.image.clone();
    saved.image = lab.folder().join("damaged.image");
    let mut bytes = fs::read(&sound)?;
    // A part of every unit in the middle.
    let middle = bytes.len() / 2;
    bytes[middle..middle + (1 << 20)].iter_mut().step_by(4096).for_each(|byte| *byte ^= 0x10);
    fs::write(&saved.image, bytes)?;
    saved.refused(lab, &["--verify"], "damaged")?;
    saved.refused(lab, &["--load"], "nothing runs")?;
    wait_for_end(lab)?;
    // Not in the VM's first moments, as in `kill_player`: the damaged part comes after seconds.
    saved.refused(lab, &SETTLED, "The VM waits for the pages that it lacks")?;
    wait_for_state(lab, "running (post-copy failed)")?;
    saved.image = sound.clone();
    saved.restore(lab, &["--recover"])?;
    lab.check_guest()?;
    lab.host(lab.at).virsh(&["destroy", "g1"])?;
    saved.image = lab.folder().join("damaged.image");
    let copy = sound.display().to_string();
    let report = saved.restore(lab, &[&SETTLED[..], &["--copy", &copy]].concat())?;
    // One dies of the damage. Another one may, before QEMU is ready for it. Each goes on from the
    // copy.
    let said = fs::read_to_string(&saved.log)?;
    let goes_on = format!("another goes on from {}", sound.display());
    ensure!(said.contains("damaged") && said.contains(&goes_on), "{said}");
    let deaths = u64::try_from(said.matches("another goes on from").count())?;
    ensure!(report["deaths"].as_u64() >= Some(deaths.max(1)), "{deaths} deaths: {report}, {said}");
    ensure!(said.matches(&goes_on).count() as u64 == deaths, "not all from the copy: {said}");
    lab.check_guest()?;
    lab.migrate(&[])
}
