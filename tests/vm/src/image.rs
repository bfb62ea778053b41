//! The guest's initramfs: its init, two device nodes and the corpus, in one cpio archive.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{bail, Context, Result};
use corpus::Corpus;
use twox_hash::XxHash3_64;

/// The folder of the guest's parts, `target/vm`.
pub(crate) fn folder() -> PathBuf {
    // The repository's root is two folders above this crate.
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    root.canonicalize().unwrap_or(root).join("target/vm")
}

/// The kernel that `scripts/setup` fetched.
///
/// # Errors
/// If it was not fetched.
pub fn kernel() -> Result<PathBuf> {
    present(folder().join("kernel"))
}

/// An initramfs with `corpus_mib` MiB of corpus pages, or with `random` ones; made if it does not
/// exist.
///
/// # Errors
/// If the guest was not built, or the archive cannot be written.
pub fn initramfs(corpus_mib: u32, random: bool) -> Result<PathBuf> {
    let init = std::fs::read(present(folder().join("guest"))?)?;
    let corpus = if random {
        let random = Corpus::load().set("random").context("the corpus has no random pages")?;
        // The guest has 255 keys. A repetition is farther apart than a codec's window.
        random.into_pages().repeat(8)
    } else {
        pages(corpus_mib)
    };
    let key = XxHash3_64::oneshot(&init) ^ XxHash3_64::oneshot(&corpus);
    let kind = if random { "random".into() } else { corpus_mib.to_string() };
    let prefix = format!("initramfs-{kind}-");
    let path = folder().join(format!("{prefix}{key:016x}.cpio"));
    if !path.exists() {
        let unfinished = folder().join(format!("initramfs-{}.tmp", std::process::id()));
        write_archive(&unfinished, &init, &corpus)
            .with_context(|| format!("cannot write {}", unfinished.display()))?;
        std::fs::rename(&unfinished, &path)?;
        remove_others(&path, &prefix)?;
    }
    Ok(path)
}

/// `mib` MiB of distinct pages, in runs of [`RUN`] bytes drawn evenly from the whole corpus; fewer
/// if it has fewer.
fn pages(mib: u32) -> Vec<u8> {
    let all = Corpus::load().mixed_unique();
    let wanted = (mib as usize) << 20;
    if all.len() <= wanted {
        return all;
    }
    let (have, take) = (all.len() / RUN, wanted / RUN);
    let starts = (0..take).map(|nth| nth * have / take * RUN);
    starts.flat_map(|at| &all[at..at + RUN]).copied().collect()
}

/// The length in bytes of runs that stay together, because neighbouring pages are similar.
const RUN: usize = 256 << 10;

/// Removes archives of the same kind with an earlier guest or corpus.
fn remove_others(kept: &Path, prefix: &str) -> Result<()> {
    for entry in std::fs::read_dir(folder())? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.starts_with(prefix) && name.ends_with(".cpio") && path != kept {
            // Another run may have removed it.
            let _ = std::fs::remove_file(path);
        }
    }
    Ok(())
}

pub(crate) fn present(path: PathBuf) -> Result<PathBuf> {
    if !path.exists() {
        bail!(
            "{} is missing: run scripts/setup (make test, make demo and make bench do)",
            path.display()
        );
    }
    Ok(path)
}

/// Writes the initramfs of the migration tests.
fn write_archive(path: &Path, init: &[u8], corpus: &[u8]) -> Result<()> {
    let mut archive = Archive::create(path)?;
    archive.folder("dev")?;
    // The kernel opens /dev/console as the init's standard input and output.
    archive.device("dev/console", (5, 1))?;
    archive.device("dev/ttyS0", (4, 64))?;
    archive.file("init", init, true)?;
    archive.file("corpus", corpus, false)?;
    archive.finish()
}

/// An archive in cpio's "newc" format, which is what the kernel unpacks.
pub(crate) struct Archive {
    out: BufWriter<File>,
    inode: u32,
}

impl Archive {
    pub(crate) fn create(path: &Path) -> Result<Self> {
        Ok(Self { out: BufWriter::new(File::create(path)?), inode: 0 })
    }

    pub(crate) fn folder(&mut self, name: &str) -> Result<()> {
        self.entry(name, 0o040_755, &[], (0, 0))
    }

    pub(crate) fn device(&mut self, name: &str, numbers: (u32, u32)) -> Result<()> {
        self.entry(name, 0o020_600, &[], numbers)
    }

    pub(crate) fn file(&mut self, name: &str, content: &[u8], program: bool) -> Result<()> {
        self.entry(name, if program { 0o100_755 } else { 0o100_644 }, content, (0, 0))
    }

    pub(crate) fn link(&mut self, name: &str, target: &str) -> Result<()> {
        self.entry(name, 0o120_777, target.as_bytes(), (0, 0))
    }

    pub(crate) fn finish(mut self) -> Result<()> {
        self.entry("TRAILER!!!", 0, &[], (0, 0))?;
        self.out.into_inner()?.sync_all()?;
        Ok(())
    }

    fn entry(&mut self, name: &str, mode: u32, content: &[u8], device: (u32, u32)) -> Result<()> {
        self.inode += 1;
        let size = u32::try_from(content.len()).context("too large for a cpio archive")?;
        let name_size = u32::try_from(name.len() + 1)?;
        let (links, check) = (1, 0);
        // inode, mode, uid, gid, links, mtime, size, device of the file (2), device it stands for
        // (2), name, check
        let fields =
            [self.inode, mode, 0, 0, links, 0, size, 0, 0, device.0, device.1, name_size, check];
        self.out.write_all(b"070701")?;
        for field in fields {
            write!(self.out, "{field:08x}")?;
        }
        self.out.write_all(name.as_bytes())?;
        self.out.write_all(&[0])?;
        self.pad(6 + fields.len() * 8 + name.len() + 1)?;
        self.out.write_all(content)?;
        self.pad(content.len())
    }

    fn pad(&mut self, len: usize) -> Result<()> {
        self.out.write_all(&[0; 3][..(4 - len % 4) % 4])?;
        Ok(())
    }
}
