//! The language of set-up and faults, which `SCRIPT.md` describes for users.
//!
//! A script is parsed completely before any of it is applied, so an invalid line changes nothing.

/// A device's treatment of its source bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// Real deflate.
    Deflate,
    /// Immediate stored blocks, so that only the cost of the software around the device remains.
    Stored,
}

/// The layout of pinned memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryMode {
    /// Whole pages for each allocation, with inaccessible pages around it; the device cannot access
    /// a byte more.
    Guard,
    /// 2-MiB slabs shared by allocations, as in the real libusdm: overruns hit neighbours.
    Slab,
}

/// The order in which completions are delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Any.
    Shuffled,
    /// That of submission.
    Fifo,
}

/// A device's configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Compression instances, 0 to [`MAX_INSTANCES`].
    pub instances: usize,
    /// Devices, over which the instances are spread round robin.
    pub packages: usize,
    /// The device's work.
    pub engine: Engine,
    /// Fixed part of a request's time, nanoseconds. `None`: 10 us for deflate (an assumption: no
    /// figure for 4 KiB is published), 0 for stored.
    pub latency_ns: Option<u64>,
    /// Throughput of one device in Gbit/s of plain bytes, 0 for no limit. `None`: 45 for deflate,
    /// the capacity that Linux states for a 4xxx (`ADF_4XXX_RL_MAX_TP_DC`, dynamic deflate, level
    /// 1), no limit for stored.
    pub gbps: Option<u64>,
    /// Requests that a device executes at a time. 8 is an assumption, not a published figure.
    pub engines: usize,
    /// Entries of an instance's ring; at most one less is in flight. 512 in qatlib 24.02 and 26.08.
    pub ring: usize,
    /// Limit of pinned memory in bytes.
    pub usdm_bytes: Option<u64>,
    /// Layout of pinned memory.
    pub memory: MemoryMode,
    /// Order of completions.
    pub order: Order,
    /// Seed of all random choices.
    pub seed: u64,
    /// Intermediate buffers that `cpaDcStartInstance` needs: 0 on 4xxx and later, 12 to 64 on older
    /// devices.
    pub intermediate: u16,
    /// The value of `requiresPhysicallyContiguousMemory`.
    pub contiguous: bool,
    /// No device: `icp_sal_userIsQatAvailable` returns 0 and a start fails.
    pub absent: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            instances: 4,
            packages: 1,
            engine: Engine::Deflate,
            latency_ns: None,
            gbps: None,
            engines: 8,
            ring: qat_abi::RING_REQUESTS,
            usdm_bytes: None,
            memory: MemoryMode::Guard,
            order: Order::Shuffled,
            seed: 1,
            intermediate: 0,
            contiguous: true,
            absent: false,
        }
    }
}

/// The most instances: 64 is what one 4xxx has with all its VFs.
pub const MAX_INSTANCES: usize = 64;

/// When a rule starts to act.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trigger {
    /// At the N-th submission that matches the rule's filter, from 1.
    At(u64),
    /// At every N-th matching submission.
    Every(u64),
    /// This many milliseconds after the first submission.
    After(u64),
    /// When the script is set.
    Now,
}

/// For how many submissions (or polls) an action applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Count {
    /// This many.
    Times(u64),
    /// All later ones.
    Forever,
}

/// A rule's action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Submissions return RETRY.
    Retry(Count),
    /// Submissions return FAIL.
    Fail(Count),
    /// The callback has SUCCESS, the results this status.
    Status(i32, Count),
    /// The callback has FAIL, the results this status.
    Error(i32, Count),
    /// Polls return FAIL and deliver nothing.
    PollFail(Count),
    /// Requests are executed and answered this many milliseconds late.
    Late(u64, Count),
    /// One bit of the output is flipped.
    Flip(Count),
    /// The checksum is wrong.
    Crc(Count),
    /// The results report this many produced bytes.
    Produced(u32, Count),
    /// Nothing is answered.
    Silence,
    /// Ends silence: the delayed requests are executed.
    Revive,
    /// The device dies: silence, then the event, then dummy answers.
    Fatal,
    /// The event at the start of a reset.
    Restarting,
    /// The event at the end of a reset.
    Restarted,
    /// `Fatal`, `Restarting`, and `Restarted` after this many milliseconds.
    Reset(u64),
}

/// A rule's direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Compression.
    Compress,
    /// Decompression.
    Decompress,
}

/// One fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rule {
    /// When it acts.
    pub trigger: Trigger,
    /// Only for this instance.
    pub instance: Option<usize>,
    /// Only for this direction.
    pub direction: Option<Direction>,
    /// The action.
    pub action: Action,
}

/// One set-up directive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Setup {
    Instances(usize),
    Packages(usize),
    Engine(Engine),
    LatencyUs(u64),
    Gbps(u64),
    Engines(usize),
    Ring(usize),
    Usdm(u64),
    Memory(MemoryMode),
    Order(Order),
    Seed(u64),
    Intermediate(u16),
    Contiguous(bool),
    Absent,
}

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

fn read_setup<'a>(name: &str, words: &mut impl Iterator<Item = &'a str>) -> Result<Setup, String> {
    Ok(match name {
        "instances" => Setup::Instances(size(words, "instances", 0, MAX_INSTANCES)?),
        "packages" => Setup::Packages(size(words, "packages", 1, 16)?),
        "engine" => Setup::Engine(choice(
            words,
            &[("deflate", Engine::Deflate), ("stored", Engine::Stored)],
        )?),
        "latency" => Setup::LatencyUs(number(words, "microseconds", 0, 60_000_000)?),
        "gbps" => Setup::Gbps(number(words, "Gbit/s", 0, 100_000)?),
        "engines" => Setup::Engines(size(words, "engines", 1, 64)?),
        "ring" => Setup::Ring(size(words, "entries", 2, 65_536)?),
        "usdm" => Setup::Usdm(bytes(words)?),
        "memory" => Setup::Memory(choice(
            words,
            &[("guard", MemoryMode::Guard), ("slab", MemoryMode::Slab)],
        )?),
        "order" => {
            Setup::Order(choice(words, &[("shuffled", Order::Shuffled), ("fifo", Order::Fifo)])?)
        }
        "seed" => Setup::Seed(number(words, "a seed", 0, u64::MAX)?),
        "intermediate" => {
            let count = size(words, "buffers", 0, 64)?;
            Setup::Intermediate(u16::try_from(count).map_err(|error| error.to_string())?)
        }
        "contiguous" => Setup::Contiguous(choice(words, &[("0", false), ("1", true)])?),
        "absent" => Setup::Absent,
        _ => return Err("no such directive".into()),
    })
}

fn read_rule<'a>(name: &str, words: &mut impl Iterator<Item = &'a str>) -> Result<Rule, String> {
    let trigger = match name {
        "at" => Trigger::At(number(words, "a submission's number", 1, u64::MAX)?),
        "every" => Trigger::Every(number(words, "a number of submissions", 1, u64::MAX)?),
        "after" => Trigger::After(number(words, "milliseconds", 0, 86_400_000)?),
        _ => Trigger::Now,
    };
    let (mut instance, mut direction) = (None, None);
    let verb = loop {
        let word = words.next().ok_or("an action is missing")?;
        if let Some(index) = word.strip_prefix("instance=") {
            let index = index.parse::<usize>().ok().filter(|index| *index < MAX_INSTANCES);
            instance = Some(
                index.ok_or_else(|| format!("an instance is a number below {MAX_INSTANCES}"))?,
            );
        } else if let Some(op) = word.strip_prefix("op=") {
            direction = Some(match op {
                "compress" => Direction::Compress,
                "decompress" => Direction::Decompress,
                _ => return Err(format!("op is compress or decompress, not `{op}`")),
            });
        } else {
            break word;
        }
    };
    let action = match verb {
        "retry" => Action::Retry(count(words)?),
        "fail" => Action::Fail(count(words)?),
        "status" => Action::Status(code(words)?, count(words)?),
        "error" => Action::Error(code(words)?, count(words)?),
        "pollfail" => Action::PollFail(count(words)?),
        "late" => Action::Late(number(words, "milliseconds", 0, 3_600_000)?, count(words)?),
        "flip" => Action::Flip(count(words)?),
        "crc" => Action::Crc(count(words)?),
        "produced" => {
            let bytes = number(words, "bytes", 0, u64::from(u32::MAX))?;
            Action::Produced(u32::try_from(bytes).unwrap_or(u32::MAX), count(words)?)
        }
        "silence" => Action::Silence,
        "revive" => Action::Revive,
        "fatal" => Action::Fatal,
        "restarting" => Action::Restarting,
        "restarted" => Action::Restarted,
        "reset" => Action::Reset(number(words, "milliseconds", 0, 3_600_000)?),
        _ => return Err(format!("no such action: `{verb}`")),
    };
    Ok(Rule { trigger, instance, direction, action })
}

fn number<'a>(
    words: &mut impl Iterator<Item = &'a str>,
    what: &str,
    least: u64,
    most: u64,
) -> Result<u64, String> {
    let word = words.next().ok_or_else(|| format!("{what}: a number is missing"))?;
    let value = word.parse::<u64>().map_err(|_| format!("{what}: `{word}` is no number"))?;
    if value < least || value > most {
        return Err(format!("{what}: {value} is not from {least} to {most}"));
    }
    Ok(value)
}

fn size<'a>(
    words: &mut impl Iterator<Item = &'a str>,
    what: &str,
    least: usize,
    most: usize,
) -> Result<usize, String> {
    let value = number(words, what, least as u64, most as u64)?;
    usize::try_from(value).map_err(|error| error.to_string())
}

fn bytes<'a>(words: &mut impl Iterator<Item = &'a str>) -> Result<u64, String> {
    let word = words.next().ok_or("bytes are missing")?;
    let (digits, unit) = match word.as_bytes().last() {
        Some(b'K') => (&word[..word.len() - 1], 1 << 10),
        Some(b'M') => (&word[..word.len() - 1], 1 << 20),
        _ => (word, 1),
    };
    let value = digits.parse::<u64>().ok().and_then(|value| value.checked_mul(unit));
    value.ok_or_else(|| format!("`{word}` is no number of bytes, K or M"))
}

fn count<'a>(words: &mut impl Iterator<Item = &'a str>) -> Result<Count, String> {
    match words.next() {
        None => Ok(Count::Times(1)),
        Some("forever") => Ok(Count::Forever),
        Some(word) => match word.parse::<u64>() {
            Ok(times) if times > 0 => Ok(Count::Times(times)),
            _ => Err(format!("`{word}` is no count: a number from 1, or `forever`")),
        },
    }
}

fn code<'a>(words: &mut impl Iterator<Item = &'a str>) -> Result<i32, String> {
    let word = words.next().ok_or("a code is missing")?;
    word.parse::<i32>().map_err(|_| format!("`{word}` is no code"))
}

fn choice<'a, T: Copy>(
    words: &mut impl Iterator<Item = &'a str>,
    choices: &[(&str, T)],
) -> Result<T, String> {
    let names = || choices.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(" or ");
    let word = words.next().ok_or_else(|| format!("{} is missing", names()))?;
    let found = choices.iter().find(|(name, _)| *name == word);
    found.map(|(_, value)| *value).ok_or_else(|| format!("`{word}` is not {}", names()))
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
             at 3 instance=1 op=compress retry 20; every 7 error -9 2\nafter 50 reset 100\nnow fail forever",
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
