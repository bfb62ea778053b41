//! The bare relays between two QEMUs that the test controls by their monitors, like libvirt.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use serde_json::{json, Value};
use vm_tests::platen::{self, Platen, Receive};
use vm_tests::{Monitor, Vm, VmSpec};

use crate::stage::{Skip, Stage, NOTICE, PATIENCE};

/// The time limit of a tiny VM's migration.
pub(crate) const LIMIT: Duration = Duration::from_secs(900);

/// Every capability that a scenario here turns on; all are turned off first.
const CAPABILITIES: [&str; 6] =
    ["postcopy-preempt", "postcopy-ram", "multifd", "xbzrle", "pause-before-switchover", "x-colo"];

/// The settings of both QEMUs.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    /// Capabilities besides events and return-path.
    pub(crate) on: Vec<&'static str>,
    /// Migration parameters.
    pub(crate) parameters: Value,
}

impl Settings {
    pub(crate) fn new(on: &[&'static str]) -> Self {
        Self { on: on.to_vec(), parameters: json!({}) }
    }

    /// Multifd with this many channels and this compression by QEMU itself; 0 is a single stream.
    pub(crate) fn multifd(channels: u32, compression: &str) -> Self {
        let on = if channels > 0 { vec!["multifd"] } else { Vec::new() };
        let parameters =
            json!({"multifd-channels": channels.max(1), "multifd-compression": compression});
        Self { on, parameters }
    }

    /// Adds a parameter.
    pub(crate) fn with(mut self, name: &str, value: Value) -> Self {
        self.parameters[name] = value;
        self
    }

    /// Sets `vm` up. If the host does not support a capability, the scenario is skipped.
    pub(crate) fn apply(&self, vm: &mut Vm) -> Result<()> {
        let off: Vec<_> = CAPABILITIES.iter().map(|name| (*name, false)).collect();
        vm.monitor.set_capabilities(&off)?;
        let on: Vec<_> = self.on.iter().map(|name| (*name, true)).collect();
        let on = [[("events", true), ("return-path", true)].as_slice(), &on].concat();
        if let Err(error) = vm.monitor.set_capabilities(&on) {
            if format!("{error:#}").contains("userfault") {
                println!("  {error:#}");
                return Err(Skip("this host gives QEMU no userfaultfd: no postcopy").into());
            }
            return Err(error);
        }
        let mut parameters = json!({
            "max-bandwidth": 0,
            "downtime-limit": 300,
            "max-postcopy-bandwidth": 0,
            "multifd-channels": 2,
            "multifd-compression": "none",
        });
        for (name, value) in self.parameters.as_object().context("parameters")? {
            parameters[name] = value.clone();
        }
        vm.monitor.execute("migrate-set-parameters", parameters)?;
        Ok(())
    }
}

/// Two QEMUs with both relays between them.
pub(crate) struct Flight {
    pub(crate) vm: Vm,
    pub(crate) destination: Vm,
    pub(crate) receive: Receive,
    pub(crate) relay: Platen,
    /// In postcopy the destination's main loop may itself wait for a page, and with it every
    /// monitor but this.
    out_of_band: Option<Monitor>,
    socket: PathBuf,
}

impl Flight {
    /// Everything runs and waits for [`Self::go`]. `flags` are the source relay's; both relays soon
    /// give up a peer that was killed or cannot be reached.
    pub(crate) fn prepare(
        stage: &mut Stage,
        vm: Vm,
        to: &VmSpec,
        settings: &Settings,
        flags: &[&str],
    ) -> Result<Self> {
        Self::prepare_patient(stage, vm, to, settings, &[flags, &PATIENCE].concat(), &PATIENCE)
    }

    /// The same with all flags of the source relay, and these of the receiver.
    pub(crate) fn prepare_patient(
        stage: &mut Stage,
        mut vm: Vm,
        to: &VmSpec,
        settings: &Settings,
        flags: &[&str],
        receiver: &[&str],
    ) -> Result<Self> {
        ensure!(to.machine == vm.spec().machine, "both ends must have one machine type");
        let mut destination = stage.lab.incoming_with(&vm, to)?;
        settings.apply(&mut vm)?;
        settings.apply(&mut destination)?;
        destination.listen(&format!("unix:{}", destination.incoming_socket().display()))?;
        let deliver = format!("unix:{}", destination.incoming_socket().display());
        let receive = platen::receive_with(
            &stage.lab,
            destination.side(),
            &[["--deliver", &deliver, "--once"].as_slice(), receiver].concat(),
        )?;
        let socket = stage.lab.scratch("relay");
        let relay = platen::relay(&stage.lab, vm.side(), &socket, receive.peer, flags)?;
        let out_of_band = if settings.on.contains(&"postcopy-ram") {
            let (name, path) = (destination.name(), destination.platen_monitor());
            Some(Monitor::connect_out_of_band(name, &path, NOTICE)?)
        } else {
            None
        };
        Ok(Self { vm, destination, receive, relay, out_of_band, socket })
    }

    /// Tells the source QEMU to migrate.
    pub(crate) fn go(&mut self) -> Result<()> {
        let uri = format!("unix:{}", self.socket.display());
        self.vm.monitor.execute("migrate", json!({"uri": uri})).map(|_| ())
    }

    /// Waits until the migration has completed on both sides, the VM runs at the destination, and
    /// both relays have succeeded. Returns the destination's VM.
    pub(crate) fn land(&mut self) -> Result<()> {
        let ends = ["completed", "failed", "cancelled", "postcopy-paused"];
        let state = self.vm.wait_migration_end(&ends, LIMIT)?;
        ensure!(
            state == "completed",
            "the source is {state}; {}; {}",
            self.relay.process.tail(),
            self.receive.platen.process.tail()
        );
        self.vm.wait_left()?;
        self.destination.assert_running()?;
        self.relay.succeed(NOTICE)?;
        self.receive.platen.succeed(NOTICE)?;
        Ok(())
    }

    /// Two new relays for a migration that is paused in postcopy, and the monitor commands that
    /// make both QEMUs use them.
    pub(crate) fn recover(&mut self, stage: &mut Stage) -> Result<()> {
        let incoming = stage.lab.scratch("recover");
        let incoming = format!("unix:{}", incoming.display());
        let monitor = self.out_of_band.as_mut().context("not set up for postcopy")?;
        monitor.execute_out_of_band("migrate-recover", json!({"uri": incoming}))?;
        self.receive = platen::receive_with(
            &stage.lab,
            self.destination.side(),
            &[["--deliver", &incoming, "--once"].as_slice(), &PATIENCE].concat(),
        )?;
        self.socket = stage.lab.scratch("relay");
        self.relay =
            platen::relay(&stage.lab, self.vm.side(), &self.socket, self.receive.peer, &PATIENCE)?;
        let uri = format!("unix:{}", self.socket.display());
        self.vm.monitor.execute("migrate", json!({"uri": uri, "resume": true}))?;
        let states = ["postcopy-recover", "postcopy-active", "completed"];
        self.vm.monitor.wait_migration_event(&states, NOTICE)?;
        Ok(())
    }
}
