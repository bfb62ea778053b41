//! The options of `migrate` that every VM gets, passed on as they were given.

use crate::args::MigrateArgs;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command, FromArgMatches};
use std::ffi::OsString;

/// Options of `migrate` that differ for each VM, and those that `evacuate` has itself.
const NOT_PASSED_ON: [&str; 7] = ["qmp", "peer", "name", "json", "max_bandwidth", "turns", "feed"];

/// Words of a command line of `migrate`.
#[derive(Clone, Debug, Default)]
pub(super) struct PassedOn(pub(super) Vec<OsString>);

/// The arguments of `migrate` that are passed on.
fn arguments() -> Vec<clap::Arg> {
    let migrate = MigrateArgs::augment_args(Command::new("migrate"));
    let passed_on = |arg: &&clap::Arg| !NOT_PASSED_ON.contains(&arg.get_id().as_str());
    migrate.get_arguments().filter(passed_on).cloned().collect()
}

impl Args for PassedOn {
    fn augment_args(command: Command) -> Command {
        command.args(arguments())
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for PassedOn {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut words = Vec::new();
        for arg in arguments() {
            let id = arg.get_id().as_str();
            let Some(long) = arg.get_long() else { continue };
            if matches.value_source(id) != Some(ValueSource::CommandLine) {
                continue;
            }
            let flag = format!("--{long}");
            if !arg.get_action().takes_values() {
                words.push(flag.into());
                continue;
            }
            for values in matches.get_raw_occurrences(id).into_iter().flatten() {
                let values: Vec<_> = values.collect();
                match values.as_slice() {
                    // A value may begin with a hyphen.
                    [one] => {
                        let mut word = OsString::from(flag.clone() + "=");
                        word.push(one);
                        words.push(word);
                    }
                    several => {
                        words.push(flag.clone().into());
                        words.extend(several.iter().map(OsString::from));
                    }
                }
            }
        }
        Ok(Self(words))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        passed_on: PassedOn,
    }

    #[derive(Parser)]
    struct Migrate {
        #[command(flatten)]
        args: MigrateArgs,
    }

    fn passed_on(words: &[&str]) -> Vec<OsString> {
        Line::try_parse_from([&["x"], words].concat()).unwrap().passed_on.0
    }

    #[test]
    fn options_are_passed_on_as_given_and_mean_the_same() {
        assert!(passed_on(&[]).is_empty());
        let given = [
            "--codec",
            "zstd",
            "--level",
            "-3",
            "--postcopy",
            "after",
            "30",
            "--insecure",
            "--deadline=70",
            "--channels",
            "2",
            "--compress-wait-thread",
            "off",
        ];
        let words = passed_on(&given);
        let own = ["x", "--qmp", "unix:/q", "--peer", "h:1"].map(OsString::from);
        let parsed = |words: Vec<OsString>| {
            let all: Vec<_> = own.iter().cloned().chain(words).collect();
            format!("{:?}", Migrate::try_parse_from(all).unwrap().args)
        };
        let plainly = parsed(given.iter().map(OsString::from).collect());
        assert_eq!(parsed(words), plainly);
        assert!(plainly.contains("level: Some(-3)"), "{plainly}");
    }

    #[test]
    fn options_of_one_vm_are_not_accepted() {
        for word in ["--qmp=unix:/q", "--peer=h:1", "--name=n", "--json=f", "--feed"] {
            assert!(Line::try_parse_from(["x", word]).is_err(), "{word}");
        }
        assert!(Line::try_parse_from(["x", "--codec", "gif"]).is_err());
    }
}
