//! What can be typed after `platen device`.

use super::size::Size;
use clap::{Args, Subcommand};
use codec::Codec;
use relay::UnixAddress;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Arguments of `platen device`.
#[derive(Args, Debug)]
pub(crate) struct DeviceArgs {
    #[command(subcommand)]
    pub(crate) command: DeviceCommand,
}

/// What to do with devices.
#[derive(Subcommand, Debug)]
pub(crate) enum DeviceCommand {
    /// Serve a block device whose contents are kept compressed in memory, until interrupted
    Serve(ServeArgs),
    /// What the devices that are served hold, and what they cost
    Stat(StatArgs),
}

/// Arguments of `platen device serve`.
#[derive(Args, Debug)]
pub(crate) struct ServeArgs {
    /// What to call it: its control socket and its NBD export have this name
    #[arg(long, default_value = "platen0", value_parser = name)]
    pub(crate) name: String,
    /// Bytes of the device, 8G for example: what clients see, not what it takes
    #[arg(long)]
    pub(crate) size: Size,
    /// lz4, zstd or zlib; none keeps pages as they are
    #[arg(long, default_value = "zstd", value_parser = page_codec)]
    pub(crate) codec: Codec,
    /// Level of the codec [default: 1; zlib 0 to 9, zstd -5 to 19]
    #[arg(long, allow_negative_numbers = true)]
    pub(crate) level: Option<i32>,
    /// Bytes of memory that it may take, tables and all [default: any number]; a write that needs more
    /// fails with ENOSPC
    #[arg(long, value_name = "SIZE")]
    pub(crate) mem_limit: Option<Size>,
    /// Threads that share large requests with the one that took them [default: the cores but one]
    #[arg(long, value_parser = clap::value_parser!(u16).range(0..=32))]
    pub(crate) workers: Option<u16>,
    /// Serve NBD on this socket, unix:PATH, for its owner alone
    #[arg(long, value_name = "unix:PATH", required = true)]
    pub(crate) nbd: Option<UnixAddress>,
    /// NBD connections at a time
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=30))]
    pub(crate) connections: u16,
    /// Answer Prometheus on this address, for example 127.0.0.1:9600
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) prometheus: Option<SocketAddr>,
    #[command(flatten)]
    pub(crate) control: ControlOptions,
}

/// Where control sockets are.
#[derive(Args, Debug)]
pub(crate) struct ControlOptions {
    /// Folder of the control sockets [default: /run/platen for root, else $XDG_RUNTIME_DIR/platen]
    #[arg(long, value_name = "DIR")]
    pub(crate) run_dir: Option<PathBuf>,
}

/// Arguments of `platen device stat`.
#[derive(Args, Debug)]
pub(crate) struct StatArgs {
    /// Of this device alone, with every counter [default: a line for each]
    pub(crate) name: Option<String>,
    /// As JSON, an array of one object for each device
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) control: ControlOptions,
}

/// A name that is a file's name too.
fn name(text: &str) -> Result<String, String> {
    let sound = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if (1..=32).contains(&text.len()) && text.chars().all(sound) && !text.starts_with('.') {
        Ok(text.to_owned())
    } else {
        Err(format!("'{text}' is not a name: 1 to 32 letters, digits, '-', '_' and '.'"))
    }
}

fn page_codec(text: &str) -> Result<Codec, String> {
    match text.parse() {
        Ok(codec @ (Codec::Raw | Codec::Lz4 | Codec::Zlib | Codec::Zstd)) => Ok(codec),
        _ => Err(format!("'{text}' is none of none, lz4, zlib, zstd")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_file_names_and_codecs_those_for_pages() {
        assert_eq!(name("platen0"), Ok("platen0".to_owned()));
        for bad in ["", ".", "../x", "a/b", "a b", "ä"] {
            assert!(name(bad).unwrap_err().contains("not a name"), "{bad}");
        }
        assert!(name(&"x".repeat(33)).is_err());
        assert_eq!(page_codec("zlib"), Ok(Codec::Zlib));
        assert!(page_codec("qatzip").unwrap_err().contains("none of"));
    }
}
