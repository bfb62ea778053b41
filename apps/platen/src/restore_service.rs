//! The service of a VM by one player after the other, whoever controls the VM's QEMU.

use crate::restore_player::Serve;
use crate::restore_players::{Players, Service};
use player::Recovery;
use serde_json::Value;
use std::time::Duration;

/// Time between two questions about the VM's state.
pub(crate) const AGAIN: Duration = Duration::from_millis(2);
/// Players that may die before they have connected to QEMU.
pub(crate) const ATTEMPTS: u32 = 3;

/// How the service of a VM by one player has ended.
pub(crate) enum End {
    Done(Value),
    Failed(Value),
    /// The player has died. `connecting`: it may have sent QEMU something.
    Died {
        connecting: bool,
    },
}

/// The copies of an image, one of which is in use.
pub(crate) struct Copies<'a> {
    pub(crate) players: &'a Players<'a>,
    at: usize,
}

impl<'a> Copies<'a> {
    /// The first one is in use.
    pub(crate) fn new(players: &'a Players<'a>) -> Self {
        Self { players, at: 0 }
    }

    /// Has a VM served from the copy in use.
    pub(crate) fn serve(
        &self,
        serve: &Serve,
        recovery: Option<&Recovery>,
    ) -> anyhow::Result<Service> {
        self.players.serve(self.at, serve, recovery)
    }

    /// Goes on to the next copy; returns whether there is one. The last one stays in use, for a
    /// player that is killed later.
    pub(crate) fn next(&mut self) -> bool {
        let is_there = self.players.source(self.at + 1).is_some();
        self.at += usize::from(is_there);
        is_there
    }

    /// Path of the copy in use.
    pub(crate) fn path(&self) -> String {
        let source = self.players.source(self.at);
        source.map(|source| source.path.display().to_string()).unwrap_or_default()
    }
}

/// Completes the report of the player that has sent everything. `vm` is the VM's state.
pub(crate) fn complete(report: &mut Value, deaths: u32, started_ms: Option<f64>, vm: &str) {
    report["status"] = "completed".into();
    report["mode"] = "instant".into();
    report["deaths"] = deaths.into();
    report["started-ms"] = started_ms.into();
    report["vm"] = vm.into();
    if let Some(report) = report.as_object_mut() {
        report.remove("event");
    }
}
