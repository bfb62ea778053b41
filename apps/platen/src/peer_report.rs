//! The report that each end of a migration sends to the other one in its FINISH (W24).
//!
//! It has only what a peer reads. A FINISH has 16 KiB, and the lists of a whole report have an
//! entry for each codec thread.

use crate::report::{CpuSeconds, Report};
use relay::SourceEnd;
use serde::Serialize;

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct ForPeer<'a> {
    status: &'static str,
    cpu_seconds: &'a CpuSeconds,
}

impl Report {
    /// Sets the figures that exist only at a source whose migration has completed.
    pub(crate) fn set_end(&mut self, end: &SourceEnd) {
        self.set_total(end.total);
        self.hidden_downtime = end.hidden_downtime.map(|time| time.as_secs_f64() * 1e3);
        self.cpu_seconds.destination = destination_cpu(&end.peer_report);
    }

    /// The report for the peer of a migration that has completed at this end.
    pub(crate) fn for_peer(&self) -> Vec<u8> {
        let report = ForPeer { status: "completed", cpu_seconds: &self.cpu_seconds };
        // Without a report the peer only lacks the CPU seconds.
        serde_json::to_vec(&report).unwrap_or_else(|_| b"{}".to_vec())
    }
}

/// Reads the destination's CPU seconds from its report.
fn destination_cpu(report: &[u8]) -> Option<f64> {
    let report: serde_json::Value = serde_json::from_slice(report).ok()?;
    report.get("cpu-seconds")?.get("destination")?.as_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_for_the_peer_has_its_cpu_seconds_and_fits_whatever_the_number_of_threads() {
        let cpu_seconds = CpuSeconds { source: None, destination: Some(1.5) };
        let accelerators = vec![qat::Snapshot::default(); 1024];
        let report = Report { cpu_seconds, accelerators, ..Report::default() };
        assert!(report.json().len() > session::MAX_FREE_PAYLOAD);
        let sent = report.for_peer();
        assert!(sent.len() <= session::MAX_FREE_PAYLOAD, "{} bytes", sent.len());
        assert_eq!(destination_cpu(&sent), Some(1.5));
    }
}
