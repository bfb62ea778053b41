//! The simulated QAT device, for relays started while it is set up.

use std::path::{Path, PathBuf};

use anyhow::{ensure, Context, Result};
use serde_json::Value;

use crate::platen::binary;

/// A device's script in the environment that relays inherit, until it is dropped. One at a time.
#[derive(Debug)]
pub struct SimulatedQat {
    libraries: PathBuf,
    report: PathBuf,
}

impl SimulatedQat {
    /// A device with this script; `folder` is for its report.
    ///
    /// # Errors
    /// When its libraries have not been built beside the binary under test.
    pub fn new(script: &str, folder: &Path) -> Result<Self> {
        let binary = binary()?.canonicalize()?;
        let beside = binary.parent().context("the binary lies in no folder")?;
        let libraries = beside.join("qat-sim");
        std::fs::create_dir_all(&libraries)?;
        for (built, name) in
            [("libqat_sim_libqat.so", "libqat.so.4"), ("libqat_sim_libusdm.so", "libusdm.so.0")]
        {
            let (built, link) = (beside.join(built), libraries.join(name));
            ensure!(built.exists(), "{} is missing: make build", built.display());
            // By a rename: relays of other programs load it meanwhile.
            let new = libraries.join(format!("{name}.{}", std::process::id()));
            let _ = std::fs::remove_file(&new);
            std::os::unix::fs::symlink(built, &new)?;
            std::fs::rename(new, link)?;
        }
        let report = folder.join("qat-sim.json");
        let _ = std::fs::remove_file(&report);
        std::env::set_var("PLATEN_QAT_SIM", script);
        std::env::set_var("PLATEN_QAT_SIM_REPORT", &report);
        Ok(Self { libraries, report })
    }

    /// The flags of a relay that uses it.
    pub fn flags(&self) -> Vec<String> {
        let libraries = self.libraries.display().to_string();
        vec!["--qat-libraries".into(), libraries]
    }

    /// CPU seconds of the device's own threads in the last relay that ended.
    ///
    /// # Errors
    /// When that relay left no report.
    pub fn device_cpu(&self) -> Result<f64> {
        let text = std::fs::read_to_string(&self.report)
            .with_context(|| format!("no report {}", self.report.display()))?;
        let report: Value = serde_json::from_str(&text)?;
        Ok(report["device_cpu_ns"].as_f64().context("no device_cpu_ns")? / 1e9)
    }
}

impl Drop for SimulatedQat {
    fn drop(&mut self) {
        std::env::remove_var("PLATEN_QAT_SIM");
        std::env::remove_var("PLATEN_QAT_SIM_REPORT");
    }
}
