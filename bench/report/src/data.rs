//! The files of a run, read within bounds: at most 64 of them, 16 MiB each and 64 MiB together, and
//! of an array the first 20,000 elements.
//!
//! A file that cannot be used is kept as the reason, which names the file.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;
use twox_hash::XxHash3_128;

use crate::record::{self, Record, State, StepRecord};

/// Files that are read.
const FILES: usize = 64;
/// Bytes of a file that are read, and of all files.
const FILE_BYTES: u64 = 16 << 20;
const ALL_BYTES: u64 = 64 << 20;
/// Elements of an array that are looked at.
const ELEMENTS: usize = 20_000;
/// Characters of a text from a file that are shown.
const CHARACTERS: usize = 600;

/// A file of the run.
#[derive(Debug)]
pub struct Entry {
    /// Its name, with `.json`.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// XXH3, 128 bits, in hexadecimal digits; empty if it was not read.
    pub xxh3: String,
    value: Result<Value, String>,
}

/// All files of a run.
#[derive(Debug, Default)]
pub struct Data {
    record: Record,
    /// Why there is no record.
    problem: Option<String>,
    /// By name, without `.json`.
    entries: BTreeMap<String, Entry>,
}

impl Data {
    /// Reads the files `*.json` of `folder`.
    ///
    /// # Errors
    /// If the folder cannot be read. Files that cannot be used are no error.
    pub fn load(folder: &Path) -> Result<Self> {
        let listed = fs::read_dir(folder)
            .with_context(|| format!("cannot read the folder {}", folder.display()))?;
        let mut names: Vec<String> = listed
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok())
            .filter(|name| name.ends_with(".json"))
            .collect();
        names.sort();
        let mut data = Self::default();
        if !names.iter().any(|name| name == record::FILE) {
            data.problem = Some(format!("{} is not there", record::FILE));
        }
        let mut left = ALL_BYTES;
        for name in names.into_iter().take(FILES) {
            let entry = read(&folder.join(&name), name, &mut left);
            if entry.name == record::FILE {
                let parsed = entry.value.as_ref().map_err(Clone::clone).and_then(|value| {
                    Record::deserialize_from(value)
                        .map_err(|error| format!("{}: {error}", entry.name))
                });
                match parsed {
                    Ok(record) => data.record = record,
                    Err(why) => data.problem = Some(why),
                }
            } else {
                let key = entry.name.trim_end_matches(".json").to_owned();
                data.entries.insert(key, entry);
            }
        }
        Ok(data)
    }

    /// The record of the run; an empty one if it cannot be used ([`Self::problem`]).
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// Why there is no record of the run.
    pub fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }

    /// The files, but for the record.
    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.entries.values()
    }

    /// The record of a step.
    pub fn step(&self, name: &str) -> Option<&StepRecord> {
        self.record.steps.iter().find(|step| step.name == name)
    }

    /// The samples of a step.
    ///
    /// # Errors
    /// Why there are none, as a sentence without its full stop.
    pub fn samples(&self, name: &str) -> Result<&Value, String> {
        match (self.entries.get(name).map(|entry| &entry.value), self.step(name)) {
            (Some(Ok(value)), _) => Ok(value),
            (Some(Err(why)), _) => Err(why.clone()),
            (None, Some(step)) if step.state != State::Done => {
                let what = match step.state {
                    State::Failed => "failed",
                    State::Interrupted => "interrupted",
                    _ => "left out",
                };
                Err(format!("{} was {what}: {}", step.title, short(&step.why))
                    .replace("was failed", "failed"))
            }
            (None, _) => Err(format!("{name}.json is not there")),
        }
    }
}

impl Record {
    fn deserialize_from(value: &Value) -> Result<Self, serde_json::Error> {
        let mut record: Self = serde::Deserialize::deserialize(value)?;
        record.steps.truncate(FILES);
        record.corpus.sets.truncate(200);
        for step in &mut record.steps {
            step.others.truncate(ELEMENTS);
            step.stolen.truncate(ELEMENTS);
        }
        Ok(record)
    }
}

fn read(path: &Path, name: String, left: &mut u64) -> Entry {
    let mut bytes = Vec::new();
    let most = FILE_BYTES.min(*left);
    let got = File::open(path).and_then(|file| file.take(most + 1).read_to_end(&mut bytes));
    let length = bytes.len() as u64;
    *left = left.saturating_sub(length);
    let value = match got {
        Err(error) => Err(format!("{name} cannot be read: {error}")),
        Ok(_) if length > most => {
            Err(format!("{name} is larger than the {} MiB that are read of it", most >> 20))
        }
        Ok(_) => {
            serde_json::from_slice(&bytes).map_err(|error| format!("{name} is no JSON: {error}"))
        }
    };
    let xxh3 = if length > most {
        String::new()
    } else {
        format!("{:032x}", XxHash3_128::oneshot(&bytes))
    };
    Entry { name, bytes: length, xxh3, value }
}

/// The elements of the array at `pointer`; none if there is no array.
pub(crate) fn each<'a>(value: &'a Value, pointer: &str) -> &'a [Value] {
    let array = value.pointer(pointer).and_then(Value::as_array);
    let all = array.map_or(&[][..], Vec::as_slice);
    &all[..all.len().min(ELEMENTS)]
}

/// The number at `pointer`.
pub(crate) fn number(value: &Value, pointer: &str) -> Option<f64> {
    value.pointer(pointer).and_then(Value::as_f64).filter(|number| number.is_finite())
}

/// The numbers at `pointer` of each value.
pub(crate) fn numbers(values: &[Value], pointer: &str) -> Vec<f64> {
    values.iter().filter_map(|value| number(value, pointer)).collect()
}

/// The text at `pointer`, cut to what is shown; empty if there is none.
pub(crate) fn text(value: &Value, pointer: &str) -> String {
    short(value.pointer(pointer).and_then(Value::as_str).unwrap_or_default())
}

/// The name of a set of pages, which may be many joined by `+`.
pub(crate) fn set_name(joined: &str) -> String {
    match joined.split('+').count() {
        1 => format!("pages of {joined}"),
        count => {
            let first = joined.split('+').next().unwrap_or_default();
            format!("pages of {first} and {} sets more", count - 1)
        }
    }
}

/// The first characters of a text from outside, without control characters.
pub(crate) fn short(text: &str) -> String {
    let mut out: String =
        text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(CHARACTERS).collect();
    if text.chars().nth(CHARACTERS).is_some() {
        out.push('…');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_is_not_there_is_a_reason() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        write("pool.json", "{\"runs\": [1, 2]}");
        write("hop.json", "{");
        let why = "no root";
        let step = |name: &str, state: &str| json!({"name": name, "title": name, "state": state, "why": why});
        let steps = [step("swap", "left-out"), step("redis", "failed")];
        write(record::FILE, &json!({"mode": "quick", "steps": steps}).to_string());
        let data = Data::load(folder.path()).unwrap();
        assert_eq!(data.record().mode, "quick");
        assert_eq!(numbers(each(data.samples("pool").unwrap(), "/runs"), ""), [1.0, 2.0]);
        assert!(data.samples("hop").unwrap_err().starts_with("hop.json is no JSON"));
        assert_eq!(data.samples("swap").unwrap_err(), "swap was left out: no root");
        assert_eq!(data.samples("redis").unwrap_err(), "redis failed: no root");
        assert_eq!(data.samples("codec").unwrap_err(), "codec.json is not there");
        assert!(Data::load(&folder.path().join("none")).is_err());
    }

    #[test]
    fn a_file_that_is_too_large_is_not_parsed() {
        let folder = tempfile::tempdir().unwrap();
        let file = File::create(folder.path().join("pool.json")).unwrap();
        file.set_len(FILE_BYTES + 1).unwrap();
        let data = Data::load(folder.path()).unwrap();
        assert!(data.samples("pool").unwrap_err().contains("larger than the 16 MiB"));
        assert_eq!(data.problem(), Some("run.json is not there"));
    }

    #[test]
    fn texts_from_outside_are_short_and_have_no_control_characters() {
        assert_eq!(short("a\u{1b}[31m\nb"), "a [31m b");
        assert_eq!(short(&"x".repeat(1000)).chars().count(), CHARACTERS + 1);
    }
}
