//! `platen host` on both sides of the link, for QEMUs that are told each other's addresses.

use std::net::IpAddr;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use serde_json::Value;

use crate::lab::Lab;
use crate::net::Side;
use crate::platen::binary;
use crate::process::Proc;

/// The limit of what only a hang takes.
const LIMIT: Duration = Duration::from_secs(300);
/// The ports at which QEMUs of both hosts await migrations.
pub const PORTS: std::ops::RangeInclusive<u16> = 46_000..=46_007;

/// The services of both sides, source first, with their configuration.
#[derive(Debug)]
pub struct Services {
    services: [Option<Proc>; 2],
    configs: [PathBuf; 2],
    folders: [PathBuf; 2],
    addresses: [IpAddr; 2],
}

impl Services {
    /// Both services, with these lines before the configuration's hosts.
    ///
    /// # Errors
    /// They do not come up.
    pub fn start(lab: &Lab, lines: &str) -> Result<Self> {
        let sides = [Side::Source, Side::Destination];
        let mut addresses = Vec::new();
        for side in sides {
            addresses.push(lab.net.meeting_point(side)?.0.ip());
        }
        let names = ["source.test", "destination.test"];
        let mut hosts = String::new();
        for (nth, name) in names.iter().enumerate() {
            let (number, first) = (nth + 1, 47_000 + 100 * nth);
            hosts.push_str(&format!(
                "[[host]]\nname = \"{name}\"\naddress = \"{}\"\ndoor = \"127.80.0.{number}\"\n\
                 ports = \"{first}-{}\"\nintercept = \"{}-{}\"\n",
                addresses[nth],
                first + 7,
                PORTS.start(),
                PORTS.end()
            ));
        }
        let (mut configs, mut folders) = (Vec::new(), Vec::new());
        for side in sides {
            let config = lab.scratch("platen.toml");
            let tls = lab.certificates()?.of(side).display();
            let text = format!("tls_dir = \"{tls}\"\nresume_timeout = 8\n{lines}\n{hosts}");
            std::fs::write(&config, text)?;
            configs.push(config);
            folders.push(lab.scratch("run"));
        }
        let [source, destination] = &configs[..] else { bail!("two sides") };
        let [from, to] = &folders[..] else { bail!("two sides") };
        let mut services = Self {
            services: [None, None],
            configs: [source.clone(), destination.clone()],
            folders: [from.clone(), to.clone()],
            addresses: [addresses[0], addresses[1]],
        };
        for side in sides {
            services.start_one(lab, side)?;
        }
        Ok(services)
    }

    /// Starts the service of a side.
    ///
    /// # Errors
    /// It does not come up.
    pub fn start_one(&mut self, lab: &Lab, side: Side) -> Result<()> {
        let argv = self.argv(side, &["host"])?;
        let mut service = lab.spawn("host", side, &argv)?;
        service.wait_for_output("for other hosts", LIMIT)?;
        self.services[nth(side)] = Some(service);
        Ok(())
    }

    /// Kills the service of a side, and nothing that it has started.
    ///
    /// # Errors
    /// It does not run.
    pub fn kill(&mut self, side: Side) -> Result<()> {
        self.services[nth(side)].take().context("it does not run")?.kill().map(drop)
    }

    /// The first door of a side: its QEMUs listen at this address, and the other side connects to
    /// it.
    pub fn door(&self, side: Side) -> String {
        let nth = nth(side);
        format!("127.80.0.{}:{}", nth + 1, 47_000 + 100 * nth)
    }

    /// CPU seconds of the service of a side and of the processes that it has started, once all of
    /// these have ended.
    ///
    /// # Errors
    /// It does not run, or carries a migration all the time.
    pub fn cpu(&self, side: Side) -> Result<f64> {
        let service = self.services[nth(side)].as_ref().context("it does not run")?;
        let pid = service.id();
        let until = Instant::now() + LIMIT;
        loop {
            let tasks = std::fs::read_dir(format!("/proc/{pid}/task"))?.flatten();
            let children = tasks.map(|task| std::fs::read_to_string(task.path().join("children")));
            if children.flatten().all(|children| children.is_empty()) {
                break;
            }
            ensure!(Instant::now() < until, "processes of the service do not end");
            std::thread::sleep(Duration::from_millis(20));
        }
        service.cpu_with_children()
    }

    /// The messages of a side's service and its carriers; nothing if it does not run.
    pub fn said(&self, side: Side) -> String {
        self.services[nth(side)].as_ref().map(Proc::output).unwrap_or_default()
    }

    /// The address of a side, as the other reaches it.
    pub fn address(&self, side: Side) -> IpAddr {
        self.addresses[nth(side)]
    }

    fn argv(&self, side: Side, words: &[&str]) -> Result<Vec<String>> {
        let name = ["source.test", "destination.test"][nth(side)];
        let mut argv = vec![binary()?.display().to_string()];
        argv.extend(words.iter().map(|word| String::from(*word)));
        argv.extend(["--name".into(), name.into(), "--config".into()]);
        argv.push(self.configs[nth(side)].display().to_string());
        argv.extend(["--run-dir".into(), self.folders[nth(side)].display().to_string()]);
        Ok(argv)
    }

    /// Runs a command about the service of a side: whether it succeeds, and what it says.
    ///
    /// # Errors
    /// It cannot be started, or does not end.
    pub fn command(&self, lab: &Lab, side: Side, words: &[&str]) -> Result<(bool, String)> {
        let mut run = lab.spawn("command", side, &self.argv(side, words)?)?;
        let ended = run.wait(LIMIT)?;
        Ok((ended.status.success(), run.output()))
    }

    /// `platen host status` of a side.
    ///
    /// # Errors
    /// The service does not answer.
    pub fn status(&self, side: Side) -> Result<Value> {
        // The control socket is a file: it is the same in each network.
        let argv = self.argv(side, &["host", "status", "--json"])?;
        let out = Command::new(&argv[0]).args(&argv[1..]).output()?;
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        ensure!(out.status.success(), "platen host status: {said}");
        Ok(serde_json::from_slice(&out.stdout)?)
    }

    /// The last of `count` migrations that have ended, when none runs.
    ///
    /// # Errors
    /// They do not end.
    pub fn ended(&self, side: Side, count: usize) -> Result<Value> {
        let until = Instant::now() + LIMIT;
        loop {
            let status = self.status(side)?;
            let history = status["history"].as_array().context("no history")?;
            let running = status["running"].as_array().map_or(0, Vec::len);
            if history.len() >= count && running == 0 {
                return Ok(history.last().cloned().unwrap_or_default());
            }
            ensure!(Instant::now() < until, "{count} migrations have not ended: {status}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The process that carries the migration of a side, once it has moved this many bytes.
    ///
    /// # Errors
    /// None moves.
    pub fn carrier(&self, side: Side, plain: u64) -> Result<i32> {
        let until = Instant::now() + LIMIT;
        loop {
            let status = self.status(side)?;
            let record = &status["running"][0];
            if record["plain"].as_u64().is_some_and(|moved| moved >= plain) {
                let pid = record["pid"].as_i64().context("a process")?;
                return Ok(i32::try_from(pid)?);
            }
            ensure!(Instant::now() < until, "no migration moves: {status}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Services {
    fn drop(&mut self) {
        // Carriers outlive their services.
        for side in [Side::Source, Side::Destination] {
            let status = self.status(side).unwrap_or_default();
            for record in status["running"].as_array().into_iter().flatten() {
                if let Some(pid) = record["pid"].as_u64() {
                    let _ = Command::new("kill").args(["-KILL", &pid.to_string()]).status();
                }
            }
        }
    }
}

fn nth(side: Side) -> usize {
    usize::from(side == Side::Destination)
}
