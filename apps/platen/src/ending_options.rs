//! The options of `migrate` on how and when a migration ends.

use crate::settings_former::capabilities;
use anyhow::{bail, Context};
use clap::{Args, ValueEnum};
use converge::Postcopy;
use qmp::Qmp;
use std::time::Duration;

/// QEMU's longest downtime-limit, ms.
pub(crate) const LONGEST: u64 = 2_000_000;
/// The longest time that an option may name, s.
const YEAR: u64 = 366 * 86_400;

/// Whether QEMU may slow the guest down.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Throttle {
    /// Never.
    Off,
    /// As far as the migration needs it to end.
    Auto,
}

/// Options on the end of a migration.
#[derive(Args, Debug)]
pub(crate) struct EndingOptions {
    /// Longest time for which the VM may be stopped at the end of the migration, 1 to 2000000
    /// milliseconds. platen stops the VM when the rest takes no longer than that, by the rate at
    /// which such pages drain [default: QEMU's downtime-limit, which is 300 unless it was set]
    #[arg(long, value_name = "MILLISECONDS", value_parser = clap::value_parser!(u64).range(1..=LONGEST))]
    pub(crate) max_downtime: Option<u64>,
    /// Seconds after which a migration that is not over is cancelled, as by Ctrl-C; the source VM
    /// goes on [default: no limit]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=YEAR))]
    pub(crate) deadline: Option<u64>,
    /// Whether QEMU may slow the guest's CPUs down (its auto-converge) when the migration does not
    /// converge otherwise
    #[arg(long, value_enum, default_value = "off")]
    pub(crate) throttle: Throttle,
    /// Whether the VM may run at the destination before its memory has arrived: never; when-needed,
    /// if nothing else ends the migration; or after SECONDS. In postcopy the loss of a host loses
    /// the VM. Needs a single stream; a receiver without --qmp needs postcopy-ram on in its QEMU
    #[arg(
        long,
        num_args = 1..=2,
        value_names = ["WHEN", "SECONDS"],
        default_value = "never"
    )]
    pub(crate) postcopy: Vec<String>,
}

impl EndingOptions {
    /// Whether and when the migration may turn to postcopy.
    pub(crate) fn postcopy(&self) -> anyhow::Result<Postcopy> {
        let words: Vec<_> = self.postcopy.iter().map(String::as_str).collect();
        match words.as_slice() {
            ["never"] => Ok(Postcopy::Never),
            ["when-needed"] => Ok(Postcopy::WhenNeeded),
            ["after", seconds] => {
                let number = seconds.parse().ok().filter(|seconds| *seconds <= YEAR);
                let seconds = number.with_context(|| {
                    format!("--postcopy after {seconds}: a number of seconds, 0 to {YEAR}")
                })?;
                Ok(Postcopy::After(Duration::from_secs(seconds)))
            }
            words => bail!(
                "--postcopy {}: it takes never, when-needed or after SECONDS",
                words.join(" ")
            ),
        }
    }

    /// Refuses what this QEMU or this migration cannot do, before anything is changed.
    pub(crate) fn check(&self, qmp: &mut Qmp, channels: u8) -> anyhow::Result<()> {
        let on = capabilities(qmp)?;
        let is_on = |name: &str| on.get(name) == Some(&true);
        let wanted = self.postcopy()? != Postcopy::Never;
        if wanted && channels > 0 {
            bail!("--postcopy goes with a single stream, not with --channels {channels}: leave one of the two out");
        }
        if self.throttle == Throttle::Auto && is_on("dirty-limit") {
            bail!(
                "--throttle auto uses QEMU's auto-converge, which excludes dirty-limit, and that is on: turn it off \
                 (migrate-set-capabilities), or leave the option out"
            );
        }
        Ok(())
    }
}

/// The capabilities that the options need, and those that they exclude. A client may have left a
/// throttle of QEMU's on.
pub(crate) fn wanted_capabilities(
    options: &EndingOptions,
) -> anyhow::Result<Vec<(&'static str, bool)>> {
    let mut wanted = match options.throttle {
        Throttle::Off => vec![("auto-converge", false), ("dirty-limit", false)],
        Throttle::Auto => vec![("auto-converge", true)],
    };
    if options.postcopy()? != Postcopy::Never {
        wanted.push(("postcopy-ram", true));
    }
    Ok(wanted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        ending: EndingOptions,
    }

    fn parse(words: &[&str]) -> EndingOptions {
        Line::try_parse_from([&["x"], words].concat()).map(|line| line.ending).unwrap()
    }

    #[test]
    fn postcopy_has_three_forms() {
        let postcopy = |words: &[&str]| parse(words).postcopy();
        assert_eq!(postcopy(&[]).unwrap(), Postcopy::Never);
        assert_eq!(postcopy(&["--postcopy", "never"]).unwrap(), Postcopy::Never);
        assert_eq!(postcopy(&["--postcopy", "when-needed"]).unwrap(), Postcopy::WhenNeeded);
        let after = postcopy(&["--postcopy", "after", "30", "--throttle", "auto"]).unwrap();
        assert_eq!(after, Postcopy::After(Duration::from_secs(30)));
        for bad in
            [&["after"][..], &["after", "soon"], &["after", "-1"], &["always"], &["never", "3"]]
        {
            let words = [&["--postcopy"], bad].concat();
            let Ok(line) = Line::try_parse_from([&["x"], &words[..]].concat()) else { continue };
            let error = format!("{:#}", line.ending.postcopy().unwrap_err());
            assert!(error.contains("--postcopy"), "{error}");
        }
    }

    #[test]
    fn times_out_of_range_are_refused() {
        for bad in [["--max-downtime", "0"], ["--max-downtime", "2000001"], ["--deadline", "0"]] {
            assert!(Line::try_parse_from([&["x"], &bad[..]].concat()).is_err(), "{bad:?}");
        }
        assert_eq!(parse(&["--max-downtime", "50"]).max_downtime, Some(50));
    }
}
