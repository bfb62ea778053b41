//! `platen image`: shows and verifies an image, and converts it to a plain stream, to QEMU's
//! mapped-ram file or to libvirt's save file. `import` is in `image_import`, `verify` in
//! `image_verify`; commands for stores are in `store_command` and `store_list`.

use crate::image_import::{self, ImportArgs};
use crate::image_verify::verify_all;
use crate::image_watch;
use crate::restore_fit::{is_paused_by_its_state_alone, was_paused};
use crate::saved_vm::{bytes, open};
use crate::say::{printable, say, show};
use crate::seed::refuse_seed;
use crate::store_command::{self, refuse_in_store, CollectArgs, InitArgs, RemoveArgs};
use crate::store_list::{self, ListArgs};
use anyhow::{anyhow, ensure, Context};
use clap::{Args, Subcommand};
use image::{Content, HotSet, LinkError, NewFile, Options};
use player::{mapped_ram, plain, PlainOptions, PlayError, Reader};
use recorder::head;
use serde_json::{json, Value};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Arguments of `platen image`.
#[derive(Args, Debug)]
pub(crate) struct ImageArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Show the contents of an image
    Info(InfoArgs),
    /// Read every byte of an image and compare all checksums
    Verify(VerifyArgs),
    /// Write an image as a plain migration stream, which QEMU's -incoming reads, as a mapped-ram
    /// file, or as a file that `virsh restore` reads
    Export(ExportArgs),
    /// Make an image of a plain migration stream (a file of QEMU's exec:cat, exec:zstd or
    /// exec:gzip), of a mapped-ram file, or of the file that `virsh save` writes as raw, sparse,
    /// gzip or zstd
    Import(ImportArgs),
    /// Make a store: a folder in which saves share their pages
    Init(InitArgs),
    /// List the saves of a store
    List(ListArgs),
    /// Remove images, and from their stores the pages that no other save uses
    Rm(RemoveArgs),
    /// Remove the pages of a store that no save uses, as `rm` does
    Gc(CollectArgs),
}

#[derive(Args, Debug)]
struct InfoArgs {
    /// Image
    #[arg(value_name = "IMAGE")]
    image: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
struct VerifyArgs {
    /// Image, or a store: all of its saves
    #[arg(value_name = "IMAGE")]
    image: PathBuf,
}

#[derive(Args, Debug)]
struct ExportArgs {
    /// Image
    #[arg(value_name = "IMAGE")]
    image: PathBuf,
    /// File to write, with mode 0600; - is standard output. An existing file is not replaced
    #[arg(value_name = "STREAM")]
    stream: PathBuf,
    /// Write a file that `virsh restore` reads, for the domain that this file describes (virsh
    /// dumpxml --migratable DOMAIN)
    #[arg(long, value_name = "XML")]
    libvirt: Option<PathBuf>,
    /// Write a mapped-ram file, which QEMU 9.0 or later loads by -incoming file:STREAM with
    /// capability mapped-ram on, and with multifd by several threads. Zero pages are holes in it
    #[arg(long, conflicts_with = "libvirt")]
    mapped_ram: bool,
}

pub(crate) fn run(args: &ImageArgs) -> anyhow::Result<ExitCode> {
    image_watch::begin(image_watch::COMMAND)?;
    match &args.command {
        Command::Info(args) => info(args).map(|()| ExitCode::SUCCESS),
        Command::Verify(args) => verify_all(&args.image),
        Command::Export(args) => export(args).map(|()| ExitCode::SUCCESS),
        Command::Import(args) => image_import::run(args).map(|()| ExitCode::SUCCESS),
        Command::Init(args) => store_command::init(args).map(|()| ExitCode::SUCCESS),
        Command::List(args) => store_list::list(args).map(|()| ExitCode::SUCCESS),
        Command::Rm(args) => store_command::remove(args).map(|()| ExitCode::SUCCESS),
        Command::Gc(args) => store_command::collect(args).map(|()| ExitCode::SUCCESS),
    }
}

fn info(args: &InfoArgs) -> anyhow::Result<()> {
    let image = open(&args.image)?;
    let (state, index) = (image.state(), image.index());
    // A damaged hot set costs the image nothing.
    let (hot, hot_error) = match HotSet::read(&args.image, &image) {
        Ok(set) => (set.pages().len(), None),
        Err(damage) => (0, Some(damage.chain())),
    };
    // The facts may be empty, or of another version of platen.
    let facts: Value = serde_json::from_slice(&state.facts).unwrap_or_else(|_| json!({}));
    let blocks: Vec<_> = index
        .blocks
        .iter()
        .map(|block| {
            let count = |kind: fn(&Content) -> bool| -> u64 {
                let of_kind = block.extents.iter().filter(|extent| kind(&extent.content));
                of_kind.map(|extent| extent.pages).sum()
            };
            json!({
                "name": block.name,
                "pages": block.pages,
                "stored": count(|content| matches!(content, Content::Slot(_))),
                "filled": count(|content| matches!(content, Content::Filled(_))),
            })
        })
        .collect();
    let report = json!({
        "machine": state.machine(), "ram-bytes": image.ram_bytes(),
        "image-bytes": image.file_len(), "page-size": image.shape().page_size(),
        "unit-bytes": image.shape().unit_bytes(), "units": index.units.len(),
        "pages": index.pages(), "packs": image.pack_refs().len(), "device-bytes": state.devices.len(), "blocks": blocks,
        "hot-pages": hot, "hot-error": hot_error, "facts": facts,
    });
    if args.json {
        return show(&format!("{report}\n"));
    }
    let text = |value: &Value| match value {
        Value::String(text) => printable(text).into_owned(),
        Value::Null => "unknown".into(),
        other => other.to_string(),
    };
    let mut lines = format!(
        "VM {} ({}), machine {}, QEMU {}\n{} of RAM and {} of device state in {}: {} pages in {} units of {}\n",
        text(&facts["name"]),
        text(&facts["uuid"]),
        printable(state.machine().unwrap_or("unknown")),
        text(&facts["qemu"]),
        bytes(image.ram_bytes()),
        bytes(state.devices.len() as u64),
        bytes(image.file_len()),
        index.pages(),
        index.units.len(),
        bytes(image.shape().unit_bytes() as u64),
    );
    if image.is_save() {
        lines += &format!("  its units lie in {} packs of its store\n", image.pack_refs().len());
    }
    match &hot_error {
        None => lines += &format!("  {hot} pages that earlier restores asked for\n"),
        Some(error) => lines += &format!("  hot set ignored: {}\n", printable(error)),
    }
    for block in &blocks {
        let name = text(&block["name"]);
        let (pages, stored, filled) = (&block["pages"], &block["stored"], &block["filled"]);
        lines +=
            &format!("  {name}: {pages} pages, {stored} stored, {filled} filled with a word\n");
    }
    show(&lines)
}

/// The remark about a stream without the head of libvirt's file.
const PAUSED: &str =
    "the VM ran when it was saved, but the stream says that it is paused, as after every virsh \
     save: a VM that loads it will be paused. Export with --libvirt XML for virsh restore, or \
     continue the VM by cont";

fn export(args: &ExportArgs) -> anyhow::Result<()> {
    let image = open(&args.image)?;
    refuse_seed(&image).with_context(|| format!("image {}", args.image.display()))?;
    let how =
        PlainOptions { threads: Options::default().threads, reader: Reader::Any, runs: false };
    let head = match &args.libvirt {
        None => Vec::new(),
        Some(path) => {
            let xml = std::fs::read(path).with_context(|| format!("{}", path.display()))?;
            head(&xml, !was_paused(&image)).with_context(|| format!("{}", path.display()))?
        }
    };
    let to = |file: &File| -> anyhow::Result<()> {
        if args.libvirt.is_none() && is_paused_by_its_state_alone(&image) {
            say(PAUSED);
        }
        if args.mapped_ram {
            mapped_ram(&image, file, how.threads).map_err(|error| unwritten(args, error))?;
            return synced(file);
        }
        let mut out = BufWriter::with_capacity(1 << 20, file);
        out.write_all(&head).map_err(|error| cannot_write(&args.stream, error))?;
        plain(&image, &mut out, how).map_err(|error| unwritten(args, error))?;
        synced(out.get_ref())
    };
    if args.stream == Path::new("-") {
        ensure!(
            !args.mapped_ram,
            "a mapped-ram file cannot be written to standard output: give the name of a file"
        );
        let out =
            rustix::stdio::stdout().as_fd().try_clone_to_owned().context("standard output")?;
        return to(&File::from(out));
    }
    refuse_in_store(&args.stream)?;
    // A reader cannot tell an incomplete stream from a whole one: libvirt's head, for example, says
    // at once that the file is complete.
    let cannot = || format!("cannot create {}", args.stream.display());
    let new = NewFile::create(&args.stream).with_context(cannot)?;
    to(new.file())?;
    new.link(&args.stream).map_err(|error| {
        let what = match error {
            LinkError::Nameless(_) => cannot(),
            LinkError::Stays(_) => format!(
                "{} is complete, but it may lose its name when this host loses power: look at the disk",
                args.stream.display()
            ),
        };
        anyhow::Error::new(std::io::Error::from(error)).context(what)
    })
}

/// Why a stream is not complete: its file, its reader or the image is at fault, and no QEMU.
fn unwritten(args: &ExportArgs, error: PlayError) -> anyhow::Error {
    let stream = args.stream.display();
    match error {
        PlayError::Closed => anyhow!("cannot write {stream}: its reader has ended"),
        PlayError::Io { source, .. } => cannot_write(&args.stream, source),
        error => anyhow::Error::new(error).context(format!("image {}", args.image.display())),
    }
}

fn cannot_write(stream: &Path, error: std::io::Error) -> anyhow::Error {
    anyhow::Error::new(error).context(format!("cannot write {}", stream.display()))
}

/// Makes a file durable: some file systems notice only then that they had no room for all of it,
/// and its reader takes what is missing for zeros. Other outputs, such as a pipe, have no disk.
fn synced(file: &File) -> anyhow::Result<()> {
    match file.sync_all() {
        Err(error) if error.kind() == std::io::ErrorKind::InvalidInput => Ok(()),
        synced => synced.context("cannot write the stream"),
    }
}
