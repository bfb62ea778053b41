//! The command line, with QEMU's names where QEMU has them.

use crate::auto::explainer;
use crate::cpus::cores;
use crate::ending_options::EndingOptions;
use crate::qat_args::{QatLibraries, QplLibrary, SourceAccelerator};
use crate::rate::Rate;
use crate::relay_options::{
    delta_cache_default, delta_cache_size, history_size, ConnectOptions, RelayOptions,
};
use crate::seed::WriteSeedOptions;
use crate::size::Size;
use crate::turns_option::TurnsOption;
use anyhow::bail;
use clap::{Args, ValueEnum};
use codec::{Codec, Settings};
use relay::{AutoConfig, UnixAddress};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// An option that is on or off, as in QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnOff {
    On,
    Off,
}

/// The number of multifd channels of the source QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Channels {
    /// platen's choice for this QEMU.
    Auto,
    /// A number; 0 is a single stream.
    Count(u8),
}

impl FromStr for Channels {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            number => number
                .parse()
                .map(Self::Count)
                .map_err(|_| format!("'{number}' is neither auto nor a number from 0 to 255")),
        }
    }
}

impl Channels {
    /// The number to use.
    ///
    /// A single stream is the default for every QEMU: platen's threads compress either way, and
    /// QEMU 7.2's multifd threads spin while their channels are blocked (28 CPU seconds at 200
    /// Mbit/s, where a single stream takes 2). Multifd gains only where one migration thread cannot
    /// fill the link, beyond 10 Gbit/s.
    pub(crate) fn count(self) -> u8 {
        match self {
            Self::Auto => 0,
            Self::Count(count) => count,
        }
    }
}

/// Options of both commands that send: the receiver, compression, links, and the report.
#[derive(Args, Debug)]
pub(crate) struct SourceOptions {
    /// Address on which `platen receive` listens
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) peer: String,
    /// Name of the target at the receiver (NAME of its --deliver or --allow) [default: the unnamed
    /// target]
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// Codec: none, lz4, zlib, zstd, qatzip, qpl or auto. auto adapts codec and level during the
    /// migration to the speed of the link and to the CPU time that is free. qpl is zlib's deflate
    /// by Intel's libqpl
    #[arg(long, default_value = "auto", visible_alias = "multifd-compression")]
    pub(crate) codec: CodecChoice,
    /// Compression level of a named codec: zlib 0 to 9, zstd -5 to 19, lz4 -63 to 1, qatzip 1 to 9
    /// [default: 1]
    #[arg(long, allow_negative_numbers = true, visible_alias = "compress-level")]
    pub(crate) level: Option<i32>,
    /// Compression level of codec qatzip, 1 to 9, by QEMU's name for it [default: 1]
    #[arg(
        long,
        value_name = "LEVEL",
        visible_alias = "multifd-qatzip-level",
        conflicts_with = "level"
    )]
    pub(crate) qatzip_level: Option<i32>,
    /// Compressor for codecs qatzip and qpl
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) accelerator: SourceAccelerator,
    #[command(flatten)]
    pub(crate) qat: QatLibraries,
    #[command(flatten)]
    pub(crate) qpl: QplLibrary,
    /// Number of compression threads, 1 to 255 [default: the number of CPUs, at most 8, and at most
    /// --max-cpu rounded up]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=255))]
    pub(crate) compress_threads: Option<u16>,
    /// CPU time that the relay may use on average, in CPUs: 0.05 to 4096, for example 1.5. With a
    /// named codec the limit sets only the number of compression threads [default: no limit]
    #[arg(long, value_name = "CORES", value_parser = cores)]
    pub(crate) max_cpu: Option<f64>,
    /// Print each decision of --codec auto, and with `platen migrate` each one about the end of the
    /// migration, with the measurements that led to it
    #[arg(long)]
    pub(crate) explain: bool,
    /// Wait for a compression thread when all are busy (on), or send the page uncompressed (off)
    #[arg(long, value_enum, default_value = "on")]
    pub(crate) compress_wait_thread: OnOff,
    /// Largest rate of the migration, over all its connections together and with the headers of
    /// Ethernet, IP and TCP: bytes per second, perhaps with K, M or G (powers of 1024), or bits per
    /// second with kbit, mbit or gbit (powers of 1000). Unlike QEMU's max-bandwidth it holds with
    /// multifd, in postcopy and while the VM is stopped [default: no limit]
    #[arg(long, value_name = "RATE")]
    pub(crate) max_bandwidth: Option<Rate>,
    /// Memory of the turns among other migrations
    #[arg(long, hide = true, value_name = "PATH,PRIORITY")]
    pub(crate) turns: Option<TurnsOption>,
    /// Number of TCP connections to the receiver, 1 to 64
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) links: u16,
    /// Memory, here and at the receiver, for a copy of each page as it was last sent. A page that
    /// is sent again then crosses the network as its difference from that copy. platen allocates
    /// the memory as it needs it; --codec auto uses it only while the link is slower than the CPUs.
    /// 0 turns differences off; 64G at most [default: 256M or 1/16 of the available memory, the
    /// smaller, with --codec auto; else 0]
    // QEMU's xbzrle-cache-size is 64M. Guests that do not converge over a slow link write to more
    // than that, and a slot serves one page only; with a named codec nothing shows whether the
    // copies cost more than they save.
    #[arg(long, value_name = "SIZE", value_parser = delta_cache_size)]
    pub(crate) delta_cache: Option<Size>,
    /// Memory, here and at the receiver, for what was sent before, so that zstd can refer to it.
    /// platen shares it among the compression threads, and allocates it as it needs it; their
    /// tables take up to 10M each besides, with zstd of level 10 to 19 up to 16 times a thread's
    /// share but at most 80M. It goes with --codec auto, and with zstd of level 3 to 19; more than
    /// 8M for each compression thread gains little. 0 turns it off; 4G at most
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = history_size)]
    pub(crate) history: Size,
    /// Longest silence of the source QEMU while it prepares its RAM, before it sends the first of
    /// it: seconds, 1 to 3600. QEMU 11.1 that is cancelled at that moment stands still until the
    /// relay closes its connection. A VM of several TB, or one whose host has no CPU time left, may
    /// need more
    #[arg(long, value_name = "SECONDS", default_value_t = relay::SETUP_TIMEOUT.as_secs(), value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) setup_timeout: u64,
    /// Name or address that the receiver's certificate must contain [default: HOST of --peer]
    #[arg(long, value_name = "NAME")]
    pub(crate) peer_name: Option<String>,
    #[command(flatten)]
    pub(crate) seed: WriteSeedOptions,
    #[command(flatten)]
    pub(crate) relay: RelayOptions,
    /// Write the report to this file as one line of JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

impl SourceOptions {
    /// Codec and level; `None` with `--codec auto`.
    pub(crate) fn settings(&self) -> anyhow::Result<Option<Settings>> {
        if let Some(level) = self.qatzip_level {
            if self.codec != CodecChoice::Named(Codec::DeflateQz) {
                bail!("--qatzip-level {level} goes with --codec qatzip, not with {}", self.codec);
            }
        }
        self.codec.settings(self.qatzip_level.or(self.level))
    }

    /// Refuses --explain with a named codec: then there is no decision to print.
    pub(crate) fn refuse_explain(&self) -> anyhow::Result<()> {
        match self.codec {
            CodecChoice::Auto => Ok(()),
            codec if self.explain => {
                bail!("--explain goes with --codec auto: {codec} leaves nothing to decide")
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn threads(&self) -> usize {
        self.compress_threads.map_or_else(|| compress_threads(self.max_cpu), usize::from)
    }

    /// Bytes of delta cache to request.
    pub(crate) fn delta_cache(&self) -> u64 {
        match self.delta_cache {
            Some(size) => size.0,
            None if self.codec == CodecChoice::Auto => delta_cache_default(),
            None => 0,
        }
    }

    /// The configuration of `--codec auto`; `None` for a named codec.
    pub(crate) fn auto(&self) -> anyhow::Result<Option<AutoConfig>> {
        if self.codec != CodecChoice::Auto {
            return Ok(None);
        }
        Ok(Some(AutoConfig { max_cpu: self.max_cpu, explain: explainer(self.explain)? }))
    }
}

/// A codec named by the user, or platen's choice during the migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CodecChoice {
    /// platen chooses, repeatedly.
    Auto,
    /// Codec zlib, by libqpl.
    Qpl,
    /// The user's choice.
    Named(Codec),
}

impl CodecChoice {
    /// The codec with its level; `None` for auto.
    ///
    /// # Errors
    /// The codec has no such level.
    pub(crate) fn settings(self, level: Option<i32>) -> anyhow::Result<Option<Settings>> {
        match (self, level) {
            (Self::Named(codec), level) => Ok(Some(Settings::new(codec, level)?)),
            (Self::Qpl, None | Some(1)) => Ok(Some(Settings::qpl())),
            (Self::Qpl, Some(level)) => bail!("qpl has no level {level}, expected 1"),
            (Self::Auto, None) => Ok(None),
            (Self::Auto, Some(level)) => bail!(
                "level {level} goes with a codec that has levels: choose one, for example zstd, or \
                 leave the level to auto"
            ),
        }
    }
}

impl FromStr for CodecChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "qpl" => Ok(Self::Qpl),
            name => name.parse().map(Self::Named).map_err(|_| {
                format!("'{name}' is none of auto, none, lz4, zlib, zstd, qatzip, qpl")
            }),
        }
    }
}

impl fmt::Display for CodecChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.pad("auto"),
            Self::Qpl => f.pad("qpl"),
            Self::Named(codec) => codec.fmt(f),
        }
    }
}

/// Arguments of `platen migrate`.
#[derive(Args, Debug)]
pub(crate) struct MigrateArgs {
    /// Monitor socket of the source QEMU; start QEMU with -qmp unix:PATH,server=on,wait=off
    #[arg(long, value_name = "unix:PATH")]
    pub(crate) qmp: UnixAddress,
    /// Number of QEMU's multifd channels, 0 to 255; 0 is a single stream. auto is 0
    #[arg(long, default_value = "auto", visible_alias = "multifd-channels")]
    pub(crate) channels: Channels,
    #[command(flatten)]
    pub(crate) ending: EndingOptions,
    #[command(flatten)]
    pub(crate) source: SourceOptions,
    #[command(flatten)]
    pub(crate) connect: ConnectOptions,
    /// Write samples to standard input, a socket of `platen evacuate`
    #[arg(long, hide = true)]
    pub(crate) feed: bool,
}

/// Arguments of `platen relay`.
#[derive(Args, Debug)]
pub(crate) struct RelayArgs {
    /// Socket to listen on; QEMU (or libvirt) migrates to it
    #[arg(long, value_name = "unix:PATH")]
    pub(crate) listen: UnixAddress,
    /// Number of multifd channels that the source QEMU uses, 0 to 255. A receiver with --qmp sets
    /// the destination QEMU to the same number
    #[arg(long, visible_alias = "multifd-channels")]
    pub(crate) channels: Option<u8>,
    #[command(flatten)]
    pub(crate) source: SourceOptions,
    #[command(flatten)]
    pub(crate) connect: ConnectOptions,
}

/// The number of CPUs, at most 8: 8 threads fill a 25 Gbit/s link with zstd 1, and the host has
/// other work.
pub(crate) fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).min(8)
}

/// Threads that compress a migration which may use that many CPUs.
pub(crate) fn compress_threads(max_cpu: Option<f64>) -> usize {
    let most = max_cpu.map_or(usize::MAX, |cores| {
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "0.05 to 4096 by its parser"
        )]
        let threads = cores.ceil() as usize;
        threads
    });
    default_threads().min(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_are_auto_or_a_number() {
        assert_eq!("auto".parse(), Ok(Channels::Auto));
        assert_eq!("8".parse(), Ok(Channels::Count(8)));
        assert!("256".parse::<Channels>().unwrap_err().contains("255"));
    }
}
