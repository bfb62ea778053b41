//! Settings of the policy: one TOML section, `[policy]`.

mod check;

use std::path::PathBuf;

use serde::{Deserialize, Deserializer, Serialize};
use store::MAX_AGE;

/// The section. A key that is left out has its default; an unknown key is an error.
///
/// The defaults are for a host that has other work. The policy recompresses a page after ten idle
/// minutes, with at most 5 % of one CPU; under memory pressure after half a minute to a minute,
/// with at most 25 %. It writes nothing to a disk unless `backing_dev` names one, and then only
/// under memory pressure, because a read from the disk costs a hundred times a read from memory and
/// because flash wears. Incompressible pages are written first, other pages after half an hour (3.5
/// minutes under pressure). The daily limit of 512 MiB is 182.5 GiB a year; disks endure a hundred
/// TB. Disks reach their full speed with writes of 256 KiB.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Whether the policy runs: recompression, writeback and dictionaries.
    pub enabled: bool,
    /// Length of a period, 1 to 86400 seconds. The age of a page is counted in periods since its
    /// last read or write.
    pub period: u64,
    /// Length of a period under memory pressure, 1 to 86400 seconds, if that is shorter.
    pub period_pressed: u64,
    /// Age at which a page is idle and is recompressed, 1 to 7 periods.
    #[serde(deserialize_with = "periods")]
    pub idle: u8,
    /// `idle` under memory pressure, 1 to 7 periods.
    #[serde(deserialize_with = "periods")]
    pub idle_pressed: u8,
    /// Codec of recompressed pages: zstd, zlib or lz4.
    pub codec: String,
    /// Level of that codec: zstd -5 to 19, zlib 1 to 9, lz4 -63 to 1.
    // 14 is the first level of zstd with which groups reach 1.5 times zram's ratio on guest memory,
    // the store's tables included; 9 reaches 1.49 at a quarter of the cost.
    pub level: i32,
    /// Largest number of neighbouring pages that are compressed together, 8 to 32; 1 compresses
    /// each page alone.
    // On guest memory groups of 16 pages reach 1.53 times zram's ratio and cost 56 us of CPU for a
    // read, groups of 8 reach 1.51 at 32 us, groups of 24 reach 1.55 at 71 us; a page alone costs
    // 6 us.
    pub group: usize,
    /// Smallest gain, 1 to 90 per cent: a new form replaces the old one only if it is smaller by
    /// this.
    pub gain: u32,
    /// Largest CPU time of the policy, 1 to 100 per cent of one CPU.
    pub cpu: u32,
    /// `cpu` under memory pressure, 1 to 100 per cent of one CPU.
    pub cpu_pressed: u32,
    /// Path of the file or block device to which pages are written back, under zram's name. Without
    /// it nothing is written.
    pub backing_dev: Option<PathBuf>,
    /// Size to which the backing file may grow, bytes. Not for a block device.
    pub backing_size: u64,
    /// Bytes that writeback leaves free on the file system of the backing file.
    pub backing_free: u64,
    /// Whether `writeback_limit` applies, under zram's name.
    pub writeback_limit_enable: bool,
    /// Blocks of 4 KiB that may be written from midnight to midnight UTC, under zram's name. It
    /// counts across restarts of the server and, unlike zram's, is not counted down.
    pub writeback_limit: u64,
    /// Blocks of 4 KiB in one write, 1 to 1024, under zram's name.
    pub writeback_batch_size: u32,
    /// Whether pages are written back only under memory pressure. `platen device writeback` writes
    /// at any time.
    pub writeback_pressed_only: bool,
    /// Age at which a page is written back, 1 to 7 periods.
    #[serde(deserialize_with = "periods")]
    pub writeback_idle: u8,
    /// `writeback_idle` under memory pressure, 1 to 7 periods.
    #[serde(deserialize_with = "periods")]
    pub writeback_idle_pressed: u8,
    /// Age at which an incompressible page is written back, 1 to 7 periods.
    #[serde(deserialize_with = "periods")]
    pub writeback_huge_idle: u8,
    /// `writeback_huge_idle` under memory pressure, 1 to 7 periods.
    #[serde(deserialize_with = "periods")]
    pub writeback_huge_idle_pressed: u8,
    /// `auto`: the supervisor's helper trains zstd dictionaries from the device's pages, and the
    /// server uses those that save enough. `off`: no training; existing dictionaries stay in use.
    pub dictionary: String,
    /// Compressed pages that the device must hold before a dictionary is trained, 1024 or more.
    // With 64 MiB of them, a gain of 3 % is 20 times the size of a dictionary and its tables.
    pub dictionary_pages: u64,
    /// Shortest time between two trainings, 1 to 31536000 seconds. It doubles after each training
    /// without a gain, up to 24 times the value.
    pub dictionary_period: u64,
    /// Definition of memory pressure.
    pub pressure: Pressure,
}

/// Definition of memory pressure, by the kernel's pressure stall information.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Pressure {
    /// Path of the host's pressure file, or of a cgroup's `memory.pressure`.
    pub file: PathBuf,
    /// Milliseconds, within one window, for which some task waited for memory; at most `window`.
    pub stall: u32,
    /// Length of the window, 500 to 10000 milliseconds.
    pub window: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            enabled: true,
            period: 300,
            period_pressed: 30,
            idle: 2,
            idle_pressed: 1,
            codec: "zstd".to_owned(),
            level: 14,
            group: 16,
            gain: 2,
            cpu: 5,
            cpu_pressed: 25,
            backing_dev: None,
            backing_size: 0,
            backing_free: 1 << 30,
            writeback_limit_enable: true,
            writeback_limit: 131_072,
            writeback_batch_size: 64,
            writeback_pressed_only: true,
            writeback_idle: 6,
            writeback_idle_pressed: 7,
            writeback_huge_idle: 2,
            writeback_huge_idle_pressed: 3,
            dictionary: "auto".to_owned(),
            dictionary_pages: 16_384,
            dictionary_period: 3600,
            pressure: Pressure::default(),
        }
    }
}

impl Default for Pressure {
    /// A tenth of a window of two seconds: the kernel accepts windows that are multiples of two
    /// seconds from any user, and others only from root.
    fn default() -> Self {
        Self { file: "/proc/pressure/memory".into(), stall: 200, window: 2000 }
    }
}

/// Why settings cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SettingsError {
    /// The TOML is invalid, a key is unknown, or a value has another type.
    #[error("cannot read the policy's settings")]
    Toml(#[from] toml::de::Error),
    /// A number is out of range.
    #[error("policy: {name} = {value}, expected {expected}")]
    Range {
        /// The key.
        name: &'static str,
        /// Its value.
        value: u64,
        /// The valid range.
        expected: &'static str,
    },
    /// `dictionary` is neither `auto` nor `off`.
    #[error("policy: dictionary = \"{0}\" is none of auto, off")]
    Dictionary(String),
    /// `backing_dev` is set, but the policy is disabled.
    #[error("policy: backing_dev needs enabled = true")]
    Disabled,
    /// The codec or level is unknown, or the codec does not compress.
    #[error(
        "policy: codec {codec} at level {level} is none of zstd -5 to 19, zlib 1 to 9, lz4 \
             -63 to 1"
    )]
    Codec {
        /// The codec.
        codec: String,
        /// The level.
        level: i32,
    },
}

/// A file with this section only.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    policy: Settings,
}

/// Sets the keys of `given` in `all`, and leaves the others.
fn merge(all: &mut toml::Table, given: toml::Table) {
    for (key, value) in given {
        match (all.get_mut(&key), value) {
            (Some(toml::Value::Table(inner)), toml::Value::Table(given)) => merge(inner, given),
            (_, value) => drop(all.insert(key, value)),
        }
    }
}

/// Deserializes a number of periods. An error names the valid range, as those of
/// [`Settings::check`] do.
fn periods<'de, D: Deserializer<'de>>(from: D) -> Result<u8, D::Error> {
    let value = i64::deserialize(from)?;
    let wrong = |_| serde::de::Error::custom(format!("{value}, expected 1 to {MAX_AGE} periods"));
    u8::try_from(value).map_err(wrong)
}

impl Settings {
    /// The defaults of a machine with little memory, which is soon short of it. Recompression
    /// begins after five seconds, takes a fifth of the CPU time for each page, and frees nearly as
    /// much (1.47 times zram's ratio on guest memory, 1.53 with the other defaults). The heap is a
    /// third; a trained dictionary would save less than its tables take.
    pub fn small() -> Self {
        Self {
            period_pressed: 5,
            cpu_pressed: 50,
            level: 7,
            group: 8,
            dictionary: "off".to_owned(),
            ..Self::default()
        }
    }

    /// Keys that differ from their defaults and have no effect without `backing_dev`.
    pub fn without_effect(&self) -> Vec<&'static str> {
        let default = Self::default();
        let differ = [
            ("backing_size", self.backing_size != default.backing_size),
            ("backing_free", self.backing_free != default.backing_free),
            (
                "writeback_limit_enable",
                self.writeback_limit_enable != default.writeback_limit_enable,
            ),
            ("writeback_limit", self.writeback_limit != default.writeback_limit),
            ("writeback_batch_size", self.writeback_batch_size != default.writeback_batch_size),
            (
                "writeback_pressed_only",
                self.writeback_pressed_only != default.writeback_pressed_only,
            ),
        ];
        let differ =
            differ.into_iter().filter(|(_, differs)| *differs && self.backing_dev.is_none());
        differ.map(|(name, _)| name).collect()
    }

    /// Reads and checks the text of a TOML file.
    ///
    /// # Errors
    ///
    /// [`SettingsError`].
    pub fn read(text: &str) -> Result<Self, SettingsError> {
        Self::read_over(text, &Self::default())
    }

    /// As [`read`](Self::read), with `base` for the keys that the text does not have.
    ///
    /// # Errors
    ///
    /// [`SettingsError`].
    pub fn read_over(text: &str, base: &Self) -> Result<Self, SettingsError> {
        // The errors of this call name a line.
        let _: File = toml::from_str(text)?;
        let mut all = toml::Table::try_from(File { policy: base.clone() })
            .expect("settings are numbers, strings and tables");
        merge(&mut all, toml::from_str(text)?);
        let File { policy } = all.try_into()?;
        policy.check()?;
        Ok(policy)
    }

    /// Whether dictionaries are trained.
    pub fn trains(&self) -> bool {
        self.enabled && self.dictionary == "auto"
    }
}

#[cfg(test)]
mod tests;
