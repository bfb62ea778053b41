//! The language of set-up and faults, which `SCRIPT.md` describes for users.
//!
//! A script is parsed completely before any of it is applied, so an invalid line changes nothing.

mod parse;
mod rule;
mod settings;

use parse::{read_rule, read_setup};
pub use rule::{Action, Count, Direction, Entry, Rule, Stuck, Trigger};
use settings::Setup;
pub use settings::{Engine, MemoryMode, Order, Settings, MAX_INSTANCES};

/// A parsed script.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Script {
    setup: Vec<Setup>,
    rules: Vec<Rule>,
    reset: bool,
}

/// An invalid line; the script's author is at fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: `{directive}`: {problem}")]
pub struct ScriptError {
    /// Line, from 1.
    pub line: usize,
    /// The directive, cut to 80 characters.
    pub directive: String,
    /// The problem.
    pub problem: String,
}

impl Script {
    /// Parses a script.
    ///
    /// # Errors
    /// The first invalid directive.
    pub fn parse(text: &str) -> Result<Self, ScriptError> {
        let mut script = Self::default();
        for (number, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default();
            for directive in line.split(';').map(str::trim).filter(|text| !text.is_empty()) {
                script.read(directive).map_err(|problem| ScriptError {
                    line: number + 1,
                    directive: directive.chars().take(80).collect(),
                    problem,
                })?;
            }
        }
        Ok(script)
    }

    /// The faults.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// Whether it has directives that need a stopped device.
    pub(crate) fn has_setup(&self) -> bool {
        !self.setup.is_empty()
    }

    /// Whether it resets the device first.
    pub fn resets(&self) -> bool {
        self.reset
    }

    /// Applies the set-up directives in order.
    pub fn apply(&self, settings: &mut Settings) {
        for setup in &self.setup {
            match *setup {
                Setup::Instances(count) => settings.instances = count,
                Setup::Packages(count) => settings.packages = count,
                Setup::Engine(engine) => settings.engine = engine,
                Setup::LatencyUs(us) => settings.latency_ns = Some(us.saturating_mul(1000)),
                Setup::Gbps(gbps) => settings.gbps = Some(gbps),
                Setup::Engines(count) => settings.engines = count,
                Setup::Ring(entries) => settings.ring = entries,
                Setup::Usdm(bytes) => settings.usdm_bytes = Some(bytes),
                Setup::Memory(mode) => settings.memory = mode,
                Setup::Order(order) => settings.order = order,
                Setup::Seed(seed) => settings.seed = seed,
                Setup::Intermediate(count) => settings.intermediate = count,
                Setup::Contiguous(required) => settings.contiguous = required,
                Setup::Absent => settings.absent = true,
            }
        }
    }

    fn read(&mut self, directive: &str) -> Result<(), String> {
        let mut words = directive.split_whitespace();
        let name = words.next().unwrap_or_default();
        match name {
            "at" | "every" | "after" | "now" => {
                self.rules.push(read_rule(name, &mut words)?);
            }
            "reset" => self.reset = true,
            _ => self.setup.push(read_setup(name, &mut words)?),
        }
        match words.next() {
            Some(word) => Err(format!("`{word}` is one word too many")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(text: &str) -> String {
        Script::parse(text).expect_err("the script is bad").to_string()
    }

    #[test]
    fn a_full_script_is_read() {
        let script = Script::parse(
            "# a device\ninstances 2; engine stored\nusdm 16M\nlatency 30 # us\n\
             at 3 instance=1 op=compress retry 20; every 7 error -9 2\nafter 50 reset 100\nnow fail forever\n\
             at 9 block submit; now spin stop forever",
        )
        .expect("it is in the language");
        let mut settings = Settings::default();
        script.apply(&mut settings);
        assert_eq!(settings.instances, 2);
        assert_eq!(settings.engine, Engine::Stored);
        assert_eq!(settings.usdm_bytes, Some(16 << 20));
        assert_eq!(settings.latency_ns, Some(30_000));
        assert!(script.has_setup());
        let rule = |trigger, action| Rule { trigger, instance: None, direction: None, action };
        assert_eq!(
            script.rules(),
            [
                Rule {
                    instance: Some(1),
                    direction: Some(Direction::Compress),
                    ..rule(Trigger::At(3), Action::Retry(Count::Times(20)))
                },
                rule(Trigger::Every(7), Action::Error(-9, Count::Times(2))),
                rule(Trigger::After(50), Action::Reset(100)),
                rule(Trigger::Now, Action::Fail(Count::Forever)),
                rule(Trigger::At(9), Action::Hang(Entry::Submit, Stuck::Sleeps, Count::Times(1))),
                rule(Trigger::Now, Action::Hang(Entry::Stop, Stuck::Spins, Count::Forever)),
            ]
        );
    }

    #[test]
    fn errors_name_line_number_and_directive() {
        assert_eq!(problem("engine stored\n\nbogus 3"), "line 3: `bogus 3`: no such directive");
        assert_eq!(
            problem("at 0 fail"),
            "line 1: `at 0 fail`: a submission's number: 0 is not from 1 to 18446744073709551615"
        );
        assert_eq!(problem("now"), "line 1: `now`: an action is missing");
        assert_eq!(problem("now fatal 3"), "line 1: `now fatal 3`: `3` is one word too many");
        assert_eq!(
            problem("engine zstd"),
            "line 1: `engine zstd`: `zstd` is not deflate or stored"
        );
        assert_eq!(problem("usdm 5G"), "line 1: `usdm 5G`: `5G` is no number of bytes, K or M");
        assert_eq!(
            problem("now retry 0"),
            "line 1: `now retry 0`: `0` is no count: a number from 1, or `forever`"
        );
        assert_eq!(
            problem("now block close"),
            "line 1: `now block close`: `close` is not submit or poll or process or start or stop"
        );
        assert_eq!(
            problem("now op=both fail"),
            "line 1: `now op=both fail`: op is compress or decompress, not `both`"
        );
    }

    #[test]
    fn no_bytes_make_the_parser_panic() {
        for text in [
            "at",
            "every",
            ";;;#",
            "usdm é",
            "usdm",
            "usdm M",
            "status",
            "now status",
            "after 9 late",
            "now instance=",
        ] {
            let _ = Script::parse(text);
        }
    }
}
