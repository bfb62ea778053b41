//! `--cpus LIST`: the CPUs on which the relay may run.

use anyhow::{bail, ensure, Context};
use rustix::thread::{sched_getaffinity, sched_setaffinity, CpuSet};
use std::str::FromStr;

/// CPUs in the kernel's list format: "0-3,8".
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cpus(Vec<usize>);

impl FromStr for Cpus {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |word: &str| {
            // `parse` would accept a sign.
            if word.is_empty() || !word.bytes().all(|digit| digit.is_ascii_digit()) {
                return Err(format!("'{word}' in '{text}' is no CPU: give a list like 0-3,8"));
            }
            let cpu = word.parse::<usize>().ok().filter(|&cpu| cpu < CpuSet::MAX_CPU);
            cpu.ok_or_else(|| format!("CPU '{word}' of '{text}' is not below {}", CpuSet::MAX_CPU))
        };
        let mut cpus = Vec::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(format!("'{part}' in '{text}' runs backwards"));
            }
            cpus.extend(first..=last);
        }
        cpus.sort_unstable();
        cpus.dedup();
        Ok(Self(cpus))
    }
}

impl Cpus {
    /// Restricts this thread, and all that it starts from now on, to these CPUs. Call it before
    /// there are other threads.
    pub(crate) fn apply(&self) -> anyhow::Result<()> {
        let mut set = CpuSet::new();
        for &cpu in &self.0 {
            set.set(cpu);
        }
        if let Err(error) = sched_setaffinity(None, &set) {
            // EINVAL: none of these CPUs exists.
            bail!("--cpus: cannot run on any of {:?}: {error}", self.0);
        }
        let got = sched_getaffinity(None).context("--cpus: cannot tell what was granted")?;
        let missing: Vec<_> = self.0.iter().filter(|&&cpu| !got.is_set(cpu)).collect();
        ensure!(missing.is_empty(), "--cpus: this process may not run on CPUs {missing:?}");
        Ok(())
    }
}

/// Parses a number of cores for `--max-cpu`.
pub(crate) fn cores(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(cores) if (0.05..=4096.0).contains(&cores) => Ok(cores),
        _ => Err(format!("'{text}' is not a number of cores from 0.05 to 4096")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists_of_the_kernel_are_parsed_and_others_are_refused_with_a_reason() {
        let cpus = |text: &str| text.parse::<Cpus>().map(|cpus| cpus.0);
        assert_eq!(cpus("0-3,8"), Ok(vec![0, 1, 2, 3, 8]));
        assert_eq!(cpus("5,1-2,2"), Ok(vec![1, 2, 5]));
        assert!(cpus("3-1").unwrap_err().contains("backwards"));
        for bad in ["", "a", "1,", "-1", "1-", "1--2", " 1", "+1", "0x1", "1-2-3"] {
            assert!(cpus(bad).unwrap_err().contains("is no CPU"), "{bad}: {:?}", cpus(bad));
        }
        assert!(cpus("99999").unwrap_err().contains("not below 1024"));
        assert!(cpus("18446744073709551616").is_err());
    }

    #[test]
    fn core_limits_are_positive() {
        assert_eq!(cores("1.5"), Ok(1.5));
        for bad in ["0", "-1", "nan", "inf", "many", ""] {
            assert!(cores(bad).unwrap_err().contains("cores"), "{bad}");
        }
    }

    #[test]
    fn threads_run_on_their_cpus_and_absent_cpus_are_refused() {
        // In a thread of its own, whose affinity ends with it.
        std::thread::spawn(|| {
            let allowed = sched_getaffinity(None).unwrap();
            let one = (0..CpuSet::MAX_CPU).find(|&cpu| allowed.is_set(cpu)).unwrap();
            Cpus(vec![one]).apply().unwrap();
            let of_child = std::thread::spawn(|| sched_getaffinity(None).unwrap()).join().unwrap();
            assert!(of_child.is_set(one) && of_child.count() == 1);
            let absent = CpuSet::MAX_CPU - 1;
            if !std::path::Path::new(&format!("/sys/devices/system/cpu/cpu{absent}")).exists() {
                assert!(Cpus(vec![absent]).apply().unwrap_err().to_string().contains("1023"));
                assert!(Cpus(vec![one, absent]).apply().unwrap_err().to_string().contains("1023"));
            }
        })
        .join()
        .unwrap();
    }
}
