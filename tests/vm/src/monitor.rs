//! The harness's own QMP client, so that platen's is not tested by itself.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail, Context, Error, Result};
use serde_json::{json, Value};

/// A connection to a QEMU's monitor.
#[derive(Debug)]
pub struct Monitor {
    name: String,
    reader: BufReader<UnixStream>,
    line: String,
    events: VecDeque<Value>,
}

/// The time limit of a command: QEMU's monitor blocks while it loads device state under TCG.
const PATIENCE: Duration = Duration::from_secs(300);
/// How often a QEMU is queried in addition to its events.
const ASKED_AGAIN: Duration = Duration::from_secs(5);

impl Monitor {
    /// Connects to the monitor at `path`, which may still be about to appear, and leaves
    /// negotiation mode.
    ///
    /// # Errors
    /// If nothing listens there within `limit`, or it is no QMP monitor.
    pub fn connect(name: &str, path: &Path, limit: Duration) -> Result<Self> {
        Self::negotiate(name, path, limit, json!({}))
    }

    /// As [`Self::connect`], with out-of-band commands enabled: a QEMU in postcopy whose main loop
    /// waits for a page answers only those.
    ///
    /// # Errors
    /// As [`Self::connect`].
    pub fn connect_out_of_band(name: &str, path: &Path, limit: Duration) -> Result<Self> {
        Self::negotiate(name, path, limit, json!({"enable": ["oob"]}))
    }

    fn negotiate(name: &str, path: &Path, limit: Duration, enable: Value) -> Result<Self> {
        let stream = connect(path, limit).with_context(|| format!("monitor of {name}"))?;
        let mut monitor = Self {
            name: name.into(),
            reader: BufReader::new(stream),
            line: String::new(),
            events: VecDeque::new(),
        };
        let greeting = monitor.message(Instant::now() + PATIENCE)?.context("no greeting")?;
        if greeting.get("QMP").is_none() {
            bail!("{name} is no QMP monitor: {greeting}");
        }
        monitor.execute("qmp_capabilities", enable)?;
        Ok(monitor)
    }

    /// Runs a command and returns its answer.
    ///
    /// # Errors
    /// QEMU's own error text, or that the monitor does not answer.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        self.request(command, json!({"execute": command, "arguments": arguments}))
    }

    /// Runs a command out of band.
    ///
    /// # Errors
    /// As [`Self::execute`], and if QEMU does not allow the command out of band.
    pub fn execute_out_of_band(&mut self, command: &str, arguments: Value) -> Result<Value> {
        self.request(command, json!({"exec-oob": command, "arguments": arguments}))
    }

    /// Whether QEMU answers a command within `limit`. If not, the answer may come later, and no
    /// other command can follow.
    ///
    /// # Errors
    /// QEMU's own error text, or that the monitor closes.
    pub fn answers(&mut self, command: &str, limit: Duration) -> Result<bool> {
        self.send(command, &json!({"execute": command}))?;
        let deadline = Instant::now() + limit;
        while let Some(message) = self.message(deadline)? {
            if let Some(error) = message.get("error") {
                bail!("{} refuses {command}: {}", self.name, error["desc"]);
            }
            if message.get("return").is_some() {
                return Ok(true);
            }
            self.events.push_back(message);
        }
        Ok(false)
    }

    fn send(&mut self, command: &str, request: &Value) -> Result<()> {
        self.reader
            .get_mut()
            .write_all(format!("{request}\n").as_bytes())
            .with_context(|| format!("monitor of {} is gone ({command})", self.name))
    }

    fn request(&mut self, command: &str, request: Value) -> Result<Value> {
        self.send(command, &request)?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            let Some(message) = self.message(deadline)? else {
                bail!("{} does not answer {command} within {PATIENCE:?}", self.name);
            };
            if let Some(answer) = message.get("return") {
                return Ok(answer.clone());
            }
            if let Some(error) = message.get("error") {
                bail!("{} refuses {command}: {}", self.name, error["desc"]);
            }
            self.events.push_back(message);
        }
    }

    /// Waits until the migration is in one of `states`, by its events (so that waiting costs QEMU
    /// next to nothing).
    ///
    /// # Errors
    /// If it is in none within `limit`, or the monitor closes.
    pub fn wait_migration(&mut self, states: &[&str], limit: Duration) -> Result<String> {
        let deadline = Instant::now() + limit;
        loop {
            let mut seen = self.migration_status()?;
            // Events that came before that answer are older than it, perhaps of an earlier
            // migration. Occasionally one is not, because the state changed while QEMU was
            // composing its answer. So query again.
            self.events.clear();
            let until = deadline.min(Instant::now() + ASKED_AGAIN);
            if states.contains(&seen.as_str()) || self.wait_event(states, until, &mut seen)? {
                return Ok(seen);
            }
            if Instant::now() >= deadline {
                return Err(self.stays(&seen, states));
            }
        }
    }

    /// As [`Self::wait_migration`] by events alone, from the last state that this monitor reported
    /// on: for a QEMU that may not answer just now.
    ///
    /// # Errors
    /// As [`Self::wait_migration`].
    pub fn wait_migration_event(&mut self, states: &[&str], limit: Duration) -> Result<String> {
        let mut seen = "silent".into();
        if self.wait_event(states, Instant::now() + limit, &mut seen)? {
            return Ok(seen);
        }
        Err(self.stays(&seen, states))
    }

    fn stays(&self, seen: &str, states: &[&str]) -> Error {
        anyhow!("migration of {} is {seen} and does not become {states:?}", self.name)
    }

    /// Whether an event puts the migration in one of `states` by the deadline; `seen` is the last
    /// state reported.
    fn wait_event(
        &mut self,
        states: &[&str],
        deadline: Instant,
        seen: &mut String,
    ) -> Result<bool> {
        loop {
            let event = match self.events.pop_front() {
                Some(event) => event,
                None => match self.message(deadline)? {
                    Some(event) => event,
                    None => return Ok(false),
                },
            };
            if event["event"] == "MIGRATION" {
                if let Some(status) = event["data"]["status"].as_str() {
                    *seen = status.into();
                    if states.contains(&status) {
                        return Ok(true);
                    }
                }
            }
        }
    }

    /// The answer to `query-migrate`.
    ///
    /// # Errors
    /// As [`Monitor::execute`].
    pub fn query_migrate(&mut self) -> Result<Value> {
        self.execute("query-migrate", json!({}))
    }

    /// The migration's state; `none` before the first.
    ///
    /// # Errors
    /// As [`Monitor::execute`].
    pub fn migration_status(&mut self) -> Result<String> {
        Ok(self.query_migrate()?["status"].as_str().unwrap_or("none").into())
    }

    /// The VM's run state, such as `running` or `postmigrate`.
    ///
    /// # Errors
    /// As [`Monitor::execute`].
    pub fn run_state(&mut self) -> Result<String> {
        Ok(self.execute("query-status", json!({}))?["status"].as_str().unwrap_or("?").into())
    }

    /// Turns migration capabilities on or off, once QEMU has released the migration before: QEMU
    /// 7.2 aborts if multifd is switched off earlier.
    ///
    /// # Errors
    /// As [`Monitor::execute`].
    pub fn set_capabilities(&mut self, capabilities: &[(&str, bool)]) -> Result<()> {
        let over = ["completed", "failed", "cancelled"];
        while self.execute("query-yank", json!({}))?.to_string().contains("\"migration\"")
            && over.contains(&self.migration_status()?.as_str())
        {
            std::thread::sleep(Duration::from_millis(10));
        }
        let list: Vec<Value> = capabilities
            .iter()
            .map(|(name, state)| json!({"capability": name, "state": state}))
            .collect();
        self.execute("migrate-set-capabilities", json!({"capabilities": list}))?;
        Ok(())
    }

    /// The next message, or `None` at the deadline.
    fn message(&mut self, deadline: Instant) -> Result<Option<Value>> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            self.reader.get_ref().set_read_timeout(Some(left))?;
            // After a timeout `line` has the part that was read; the next call continues from
            // there.
            match self.reader.read_line(&mut self.line) {
                Ok(0) => bail!("monitor of {} closed", self.name),
                Ok(_) => {
                    let message = serde_json::from_str(&self.line).with_context(|| {
                        format!("monitor of {} says {:?}", self.name, self.line)
                    })?;
                    self.line.clear();
                    return Ok(Some(message));
                }
                Err(e) if would_block(&e) => {}
                Err(e) => return Err(e).with_context(|| format!("monitor of {}", self.name)),
            }
        }
    }
}

/// Whether a read ended because of its timeout.
pub(crate) fn would_block(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut)
}

/// Connects to a unix socket that may still be about to appear.
pub(crate) fn connect(path: &Path, limit: Duration) -> Result<UnixStream> {
    let deadline = Instant::now() + limit;
    loop {
        match UnixStream::connect(path) {
            Ok(stream) => return Ok(stream),
            Err(e) if Instant::now() > deadline => {
                return Err(e).with_context(|| format!("cannot connect to {}", path.display()))
            }
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}
