//! The record of a run beside its samples: `run.json`.

use serde::{Deserialize, Serialize};

/// The name of the file.
pub const FILE: &str = "run.json";

/// Above this mean share of the machine that other processes used, a step's figures get a warning.
pub const BUSY: f64 = 0.05;

/// A whole run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct Record {
    /// `quick`, `full`, or `partial` for a run of chosen steps.
    pub mode: String,
    /// When it began, seconds since 1970.
    pub begun: u64,
    /// Whether it was stopped by a signal.
    pub interrupted: bool,
    /// Whether every step has been tried.
    pub complete: bool,
    /// Where it ran.
    pub machine: Machine,
    /// `git describe` of the sources.
    pub commit: String,
    /// The pages that were compressed.
    pub corpus: CorpusRecord,
    /// The steps tried, in their order.
    pub steps: Vec<StepRecord>,
}

/// The machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct Machine {
    /// Model of the CPU.
    pub cpu: String,
    /// CPUs that this process may use.
    pub cores: u64,
    /// RAM, MiB.
    pub memory_mib: u64,
    /// Version of the kernel.
    pub kernel: String,
    /// First line of `qemu-system-x86_64 --version`.
    pub qemu: String,
    /// Whether the machine is itself a virtual one.
    pub is_virtual: bool,
}

/// The pages that were compressed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct CorpusRecord {
    /// Files, or made data with the reason.
    pub origin: String,
    /// Each set.
    pub sets: Vec<SetRecord>,
}

/// One set of pages.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct SetRecord {
    /// Its name.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// XXH3, 128 bits, in hexadecimal digits.
    pub xxh3: String,
}

/// How a step ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// Its file is complete.
    Done,
    /// It cannot run here, or there was no time left.
    #[default]
    LeftOut,
    /// Its program failed, or took too long.
    Failed,
    /// A signal stopped the run.
    Interrupted,
}

/// One step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct StepRecord {
    /// Its name, and that of its file without `.json`.
    pub name: String,
    /// Its subject.
    pub title: String,
    /// Program and arguments.
    pub command: String,
    /// How it ended.
    pub state: State,
    /// Why it is not `done`.
    pub why: String,
    /// Its duration.
    pub seconds: f64,
    /// Share of the machine's CPU time that other processes used, 0 to 1, in each second.
    pub others: Vec<f64>,
    /// The same for the time that the machine's host took away.
    pub stolen: Vec<f64>,
}

/// The load during a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// Mean share of the machine used by others or taken by the host, 0 to 1.
    pub mean: f64,
    /// The highest second.
    pub most: f64,
}

impl Load {
    /// Whether the figures need a warning.
    pub fn is_busy(&self) -> bool {
        self.mean > BUSY
    }
}

impl StepRecord {
    /// The load; `None` if it was not watched.
    pub fn load(&self) -> Option<Load> {
        let stolen = self.stolen.iter().copied().chain(std::iter::repeat(0.0));
        let both = self.others.iter().zip(stolen).map(|(others, stolen)| others + stolen);
        let sound: Vec<f64> = both.filter(|share| (0.0..=1.5).contains(share)).collect();
        let mean = sound.iter().sum::<f64>() / sound.len() as f64;
        let most = sound.iter().copied().fold(0.0, f64::max);
        (!sound.is_empty()).then_some(Load { mean, most })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_counts_others_and_what_the_host_took() {
        let step = |others: &[f64], stolen: &[f64]| StepRecord {
            others: others.to_vec(),
            stolen: stolen.to_vec(),
            ..StepRecord::default()
        };
        let load = step(&[0.0, 0.2], &[0.1]).load().unwrap();
        assert!((load.mean - 0.15).abs() < 1e-9 && load.most == 0.2 && load.is_busy());
        assert!(!step(&[0.01, 0.02], &[0.0, 0.0]).load().unwrap().is_busy());
        assert_eq!(step(&[], &[]).load(), None);
        assert_eq!(step(&[f64::NAN, 1e9], &[]).load(), None);
    }
}
