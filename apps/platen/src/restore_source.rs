//! The image and the copies of it that a VM is restored from.

use crate::image_lock::ImageLock;
use crate::remote_image::{Remote, RemoteOptions};
use crate::saved_vm::open;
use crate::say::say;
use crate::seed::refuse_seed;
use anyhow::{ensure, Context};
use image::{check_units, Image};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// An image that the VM can be restored from.
pub(crate) struct Source<'a> {
    pub(crate) path: &'a Path,
    pub(crate) image: Arc<Image>,
    pub(crate) from: From,
}

/// Location of an image.
pub(crate) enum From {
    /// This host. The lock's file is handed to players.
    Here(ImageLock),
    /// Another host. It holds the lock, for the processes of a session.
    There(Remote),
}

impl<'a> Source<'a> {
    /// Opens and locks an image and its copies.
    pub(crate) fn all(
        path: &'a Path,
        copies: &'a [PathBuf],
        shared: bool,
        options: &RemoteOptions,
    ) -> anyhow::Result<Vec<Self>> {
        let mut sources = Vec::new();
        for path in std::iter::once(path).chain(copies.iter().map(PathBuf::as_path)) {
            let (image, from) = if Remote::is_remote(path) {
                let remote = Remote::open(path, shared, None, options)?;
                (Arc::clone(&remote.image), From::There(remote))
            } else {
                // The lock comes first: nobody removes or rewrites a save that is locked.
                let lock = ImageLock::take(path, shared)?;
                (open(path)?, From::Here(lock))
            };
            refuse_seed(&image).with_context(|| format!("image {}", path.display()))?;
            sources.push(Self { path, image, from });
        }
        let identity = sources[0].image.identity();
        for copy in sources.iter().skip(1) {
            let copied = copy.image.identity();
            ensure!(copied == identity, "{} is no copy of {}", copy.path.display(), path.display());
        }
        Ok(sources)
    }

    /// Compares the checksums of all units, and leaves out damaged images.
    pub(crate) fn verify(sources: &mut Vec<Self>, threads: usize) -> anyhow::Result<()> {
        let mut damaged = None;
        sources.retain(|source| {
            let Err(error) = check_units(&source.image, threads) else { return true };
            let error =
                anyhow::Error::from(error).context(format!("image {}", source.path.display()));
            say(&format!("{error:#}"));
            damaged = Some(error);
            false
        });
        match damaged {
            Some(error) if sources.is_empty() => {
                Err(error.context("no sound image to restore from"))
            }
            _ => Ok(()),
        }
    }
}
