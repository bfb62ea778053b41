//! Parses the words of a directive to a set-up directive or a rule.

use super::rule::{Action, Count, Direction, Entry, Rule, Stuck, Trigger};
use super::settings::{Engine, MemoryMode, Order, Setup, MAX_INSTANCES};

pub(super) fn read_setup<'a>(
    name: &str,
    words: &mut impl Iterator<Item = &'a str>,
) -> Result<Setup, String> {
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

pub(super) fn read_rule<'a>(
    name: &str,
    words: &mut impl Iterator<Item = &'a str>,
) -> Result<Rule, String> {
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
        "block" => Action::Hang(entry(words)?, Stuck::Sleeps, count(words)?),
        "spin" => Action::Hang(entry(words)?, Stuck::Spins, count(words)?),
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

fn entry<'a>(words: &mut impl Iterator<Item = &'a str>) -> Result<Entry, String> {
    let all = [
        ("submit", Entry::Submit),
        ("poll", Entry::Poll),
        ("process", Entry::Process),
        ("start", Entry::Start),
        ("stop", Entry::Stop),
    ];
    choice(words, &all)
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
