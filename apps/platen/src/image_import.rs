//! `platen image import`: makes an image of a plain migration stream, of QEMU's mapped-ram file, or
//! of libvirt's save file.

use crate::compression::CompressionArgs;
use crate::saved_vm::{bytes, SavedVm};
use crate::say::say;
use crate::store_command::{begin_image, say_shared};
use anyhow::{bail, ensure, Context};
use clap::Args;
use filter::{decompress, Format};
use image::{Options, State, WriteError, Writer};
use libvirt::Domain;
use recorder::{
    beginning, record, record_file, Beginning, Ending, RecordError, Recorded, SaveFormat,
};
use serde_json::{json, Value};
use std::fs::File;
use std::io::{Cursor, Read, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

#[derive(Args, Debug)]
pub(crate) struct ImportArgs {
    /// File to read; - is standard input. A mapped-ram file cannot come from a pipe
    #[arg(value_name = "STREAM")]
    stream: PathBuf,
    /// Image to write. A file of this name must not exist. In a store, it shares pages with the
    /// other images there
    #[arg(value_name = "IMAGE")]
    image: PathBuf,
    #[command(flatten)]
    compression: CompressionArgs,
}

/// The remedy for an image whose name may not be durable.
const STAYS: &str =
    "the image is complete, and a loss of power may take it: remove it, look at the disk, and import again";

/// The remedy for an image instead of a stream.
const IMAGE: &str =
    "this is an image already. For a save of a store that shares its pages: platen image export IMAGE - | platen \
     image import - STORE/NAME";

pub(crate) fn run(args: &ImportArgs) -> anyhow::Result<()> {
    let options = args.compression.options()?;
    let from = args.stream.display();
    let mut file = if args.stream == Path::new("-") {
        File::from(rustix::stdio::stdin().as_fd().try_clone_to_owned().context("standard input")?)
    } else {
        File::open(&args.stream).with_context(|| format!("cannot read {from}"))?
    };
    // A pipe has no position.
    let first = file.stream_position().ok();
    // Before there is a file of the image.
    let begins = beginning(&mut file).with_context(|| format!("{from}"))?;
    if let Beginning::Other(head) = &begins {
        ensure!(!head.starts_with(b"PLATENVM"), "{from}: {IMAGE}");
    }
    let domain = domain(&begins);
    let vm = domain.as_ref().map_or_else(SavedVm::default, |domain| SavedVm {
        uuid: Some(domain.uuid()),
        name: Some(domain.name().to_owned()),
    });
    let mut writer = begin_image(&args.image, options, &vm)?;
    let (recorded, was_running) = match begins {
        Beginning::Other(head) => match packed_as(&head) {
            Some(format) => (unpacked(Cursor::new(head).chain(file), format, &mut writer), None),
            None => (stream(file, first, head, &mut writer), None),
        },
        Beginning::Libvirt(head) => (saved(file, head.format, &mut writer), Some(head.was_running)),
    };
    let recorded = recorded.with_context(|| format!("{from}"))?;
    let facts = facts(&recorded.state, was_running, domain.as_ref()).to_string().into_bytes();
    let from_channels = is_from_channels(&recorded);
    let finished = writer.finish(&State { facts, ..recorded.state })?;
    let unsent = finished.summary().unsent;
    // A whole stream, too, lacks pages that the guest does not use: those that virtio-mem has
    // unplugged, and those that the guest has reported as free.
    ensure!(
        unsent == 0 || !from_channels,
        "{from} lacks {unsent} pages: is it the main channel of a multifd migration? Save again without multifd"
    );
    let summary = finished.link().map_err(|error| {
        let stays = matches!(error, WriteError::Stays { .. });
        let error = anyhow::Error::new(error);
        if stays {
            error.context(STAYS)
        } else {
            error
        }
    })?;
    say(&format!("{} pages in {}", summary.slots, bytes(summary.file_bytes)));
    say_shared(&summary);
    Ok(())
}

/// The domain of libvirt's file. A description that platen cannot read costs only what it says.
fn domain(begins: &Beginning) -> Option<Domain> {
    let Beginning::Libvirt(head) = begins else { return None };
    Domain::parse(std::str::from_utf8(&head.description).ok()?).ok()
}

/// The facts for `image info`. `was_running` is what libvirt's file says: libvirt pauses a VM
/// before QEMU saves it, so that the state in the stream is always `paused` there.
fn facts(state: &State, was_running: Option<bool>, domain: Option<&Domain>) -> Value {
    let imported = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let mut facts = json!({ "platen": env!("CARGO_PKG_VERSION"), "imported": imported });
    if let Some(domain) = domain {
        (facts["name"], facts["uuid"]) = (json!(domain.name()), json!(domain.uuid()));
    }
    let was_running = was_running.or_else(|| Some(state.run_state()? == "running"));
    if let Some(was_running) = was_running {
        facts["running"] = json!(was_running);
    }
    facts
}

/// Whether a stream that lacks pages is the main channel of a multifd migration. That channel looks
/// like a plain stream, but its pages are in the other channels.
fn is_from_channels(recorded: &Recorded) -> bool {
    // A mapped-ram file has its pages outside the stream.
    !recorded.mapped_ram && (recorded.pages == 0 || recorded.flushes)
}

/// Records the stream whose `head` was read from offset `first`; the rest follows in `file`.
fn stream(
    mut file: File,
    first: Option<u64>,
    head: Vec<u8>,
    writer: &mut Writer,
) -> anyhow::Result<Recorded> {
    match first {
        Some(first) => {
            file.seek(SeekFrom::Start(first))?;
            Ok(record_file(file, writer)?)
        }
        None => Ok(record(Cursor::new(head).chain(file), writer, Ending::Closed)?),
    }
}

/// The compression of a file that begins so, as of `exec:zstd`.
fn packed_as(head: &[u8]) -> Option<Format> {
    match head {
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Some(Format::Zstd),
        [0x1f, 0x8b, ..] => Some(Format::Gzip),
        _ => None,
    }
}

/// Records the stream in libvirt's save file; `file` is positioned at its beginning.
fn saved(mut file: File, format: SaveFormat, writer: &mut Writer) -> anyhow::Result<Recorded> {
    match format {
        SaveFormat::Raw | SaveFormat::Sparse => {
            let first = file.stream_position().ok();
            stream(file, first, Vec::new(), writer)
        }
        SaveFormat::Gzip => unpacked(file, Format::Gzip, writer),
        SaveFormat::Zstd => unpacked(file, Format::Zstd, writer),
    }
}

/// Records a compressed stream.
fn unpacked(
    mut from: impl Read + Send,
    format: Format,
    writer: &mut Writer,
) -> anyhow::Result<Recorded> {
    let threads = Options::default().threads;
    let (plain, mut pipe) = std::io::pipe().context("cannot make a pipe")?;
    thread::scope(|scope| {
        // The thread owns its end of the pipe, and record() owns the other: the end of each ends
        // the other.
        let unpack = scope.spawn(move || decompress(format, threads, &mut from, &mut pipe));
        let recorded = record(plain, writer, Ending::Closed);
        let Ok(unpacked) = unpack.join() else {
            bail!("the thread that decompresses has panicked")
        };
        match (recorded, unpacked) {
            // A damaged frame cuts the stream off.
            (Ok(_) | Err(RecordError::Ends { .. }), Err(damaged)) => Err(damaged.into()),
            (recorded, _) => Ok(recorded?),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Device state of a VM that was in this state.
    fn in_state(run_state: &str) -> State {
        let mut devices = b"\x04\0\0\0\x28\x0bglobalstate\0\0\0\0\0\0\0\x01\0\0\0\x07".to_vec();
        devices.extend(run_state.as_bytes());
        devices.push(0);
        State { devices, ..State::default() }
    }

    #[test]
    fn the_stream_says_whether_the_vm_ran_unless_libvirt_does() {
        for (run_state, libvirt, expected) in [
            ("running", None, json!(true)),
            ("paused", None, json!(false)),
            ("prelaunch", None, json!(false)),
            ("paused", Some(true), json!(true)),
            ("paused", Some(false), json!(false)),
        ] {
            let facts = facts(&in_state(run_state), libvirt, None);
            assert_eq!(facts["running"], expected, "{run_state} {libvirt:?}");
        }
        assert_eq!(facts(&State::default(), None, None)["running"], Value::Null);
    }

    #[test]
    fn a_main_channel_is_told_from_a_stream_of_a_guest_that_does_not_use_all_pages() {
        let recorded = |pages, flushes, mapped_ram| {
            let (state, return_path) = (State::default(), true);
            let (zeros, bytes) = (1, 1);
            Recorded { state, pages, zeros, bytes, return_path, flushes, mapped_ram }
        };
        for (pages, flushes, mapped_ram, expected) in [
            (0, false, false, true),
            (9, true, false, true),
            (9, false, false, false),
            (0, true, true, false),
        ] {
            let found = is_from_channels(&recorded(pages, flushes, mapped_ram));
            assert_eq!(found, expected, "{pages} {flushes} {mapped_ram}");
        }
    }
}
