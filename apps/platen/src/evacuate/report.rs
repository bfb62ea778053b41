//! The report of an evacuation.

use crate::report_file::write_whole;
use crate::say::{say, show};
use anyhow::Context;
use serde::Serialize;
use serde_json::Value;
use std::fmt::Write;
use std::path::Path;

/// Outcome for one VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Outcome {
    /// It is at the destination.
    Moved,
    /// Its migration has failed or was cancelled, and it is here as before.
    Stayed,
    /// It could not migrate, as its examination showed. Nothing was started.
    Refused,
    /// The evacuation was interrupted before its turn. It is here as before.
    NotStarted,
    /// Its source QEMU does not say that it runs here, and no one has confirmed that it moved.
    InDoubt,
}

impl Outcome {
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::Moved => "moved",
            Self::Stayed => "still here",
            Self::Refused => "refused",
            Self::NotStarted => "not started",
            Self::InDoubt => "IN DOUBT",
        }
    }
}

/// One VM of an evacuation.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct VmReport {
    /// NAME of --vm or --domain.
    pub(super) name: String,
    /// moved; stayed (its migration has failed or was cancelled, and it is here as before); refused
    /// (it could not move, and nothing was started); not-started (interrupted before its turn);
    /// in-doubt (its source QEMU has not confirmed that it runs).
    pub(super) outcome: Outcome,
    /// Why the VM has not migrated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) error: Option<String>,
    /// Address of the VM's receiver, or URI of the other host's libvirt.
    pub(super) peer: String,
    /// RAM, bytes. Absent if the VM was refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) ram: Option<u64>,
    /// Distinct pages that the guest wrote to before the migration, bytes per second, by QEMU's
    /// calc-dirty-rate over 5 s. Absent if QEMU did not report them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) dirty_rate: Option<f64>,
    /// When the migration started, ms after the evacuation. Absent if it did not start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) started: Option<u64>,
    /// Duration of the migration, ms.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) total_time: Option<u64>,
    /// Time during which the VM did not run, by QEMU's query-migrate, ms.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) downtime: Option<u64>,
    /// Bytes that crossed the network for the VM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) transferred: Option<u64>,
}

impl VmReport {
    pub(super) fn new(name: &str, peer: &str) -> Self {
        Self {
            name: name.into(),
            outcome: Outcome::NotStarted,
            error: None,
            peer: peer.into(),
            ram: None,
            dirty_rate: None,
            started: None,
            total_time: None,
            downtime: None,
            transferred: None,
        }
    }

    /// Takes the figures of `platen migrate`'s report, as far as there are any.
    pub(super) fn take(&mut self, report: &Value) {
        self.total_time = report["total-time"].as_u64();
        self.downtime = report["downtime"].as_u64();
        self.transferred = report["transferred"].as_u64();
    }
}

/// Report of an evacuation.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Evacuation {
    /// VMs that are at the destination.
    pub(super) moved: usize,
    /// All other VMs.
    pub(super) not_moved: usize,
    /// Duration from the first look at the VMs to the last end, ms.
    pub(super) total_time: u64,
    /// Largest number of VMs that migrated at once.
    pub(super) at_once: usize,
    /// The VMs, in the order of their turns.
    pub(super) vms: Vec<VmReport>,
}

impl Evacuation {
    pub(super) fn new(vms: Vec<VmReport>, total_time: u64, at_once: usize) -> Self {
        let moved = vms.iter().filter(|vm| vm.outcome == Outcome::Moved).count();
        Self { moved, not_moved: vms.len() - moved, total_time, at_once, vms }
    }

    /// A line for each VM, and a sum.
    pub(super) fn text(&self) -> String {
        let mut out = String::new();
        let longest = self.vms.iter().map(|vm| vm.name.chars().count()).max().unwrap_or(0);
        for vm in &self.vms {
            let figure = |value: Option<u64>, unit: &str| {
                value.map_or("-".to_owned(), |value| format!("{value} {unit}"))
            };
            let _ = write!(
                out,
                "{:longest$}  {:11}  total {}, downtime {}, sent {}",
                vm.name,
                vm.outcome.words(),
                figure(vm.total_time, "ms"),
                figure(vm.downtime, "ms"),
                figure(vm.transferred, "bytes"),
            );
            let _ = match &vm.error {
                Some(error) => writeln!(out, ": {error}"),
                None => writeln!(out),
            };
        }
        let _ = writeln!(
            out,
            "{} of {} VMs moved in {:.1} s, at most {} at once",
            self.moved,
            self.vms.len(),
            self.total_time as f64 / 1e3,
            self.at_once
        );
        out
    }

    /// Prints the report, and writes it to `json` if given. An error is only reported: the exit
    /// status tells of the VMs.
    pub(super) fn publish(&self, json: Option<&Path>) {
        let written = json.map_or(Ok(()), |path| {
            let line = serde_json::to_string(self).unwrap_or_default() + "\n";
            write_whole(path, &line)
                .with_context(|| format!("cannot write the report to {}", path.display()))
        });
        let shown = show(&crate::say::printable(&self.text()));
        for failed in [written, shown].into_iter().filter_map(Result::err) {
            say(&format!("{failed:#}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_vm_has_a_line_and_the_sum_counts_them() {
        let mut moved = VmReport::new("web", "there:4444");
        moved.outcome = Outcome::Moved;
        moved.take(&json!({"total-time": 1200, "downtime": 80, "transferred": 4096}));
        let mut doubt = VmReport::new("database", "there:4444");
        doubt.outcome = Outcome::InDoubt;
        doubt.error = Some("the peer was lost".into());
        let report = Evacuation::new(vec![moved, doubt], 2500, 2);
        assert_eq!((report.moved, report.not_moved), (1, 1));
        let text = report.text();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert!(
            lines[0].contains("web       moved        total 1200 ms, downtime 80 ms"),
            "{text}"
        );
        assert!(lines[1].contains("IN DOUBT") && lines[1].ends_with("the peer was lost"), "{text}");
        assert!(lines[2].starts_with("1 of 2 VMs moved in 2.5 s"), "{text}");
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["vms"][1]["outcome"], "in-doubt");
    }
}
