//! `platen serve-images`: serves the images of a folder to restores on other hosts.

use crate::descriptors::raise_descriptors;
use crate::image_lock::ImageLock;
use crate::network;
use crate::relay_options::TlsOptions;
use crate::say::{printable, say};
use anyhow::Context;
use clap::Args;
use remote::{Folder, Patience, Server, Sessions};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Time in which restores that had locks of a server before this one take them again. Each of them
/// looks twice a second.
const RETURN: Duration = Duration::from_secs(5);

#[derive(Args, Debug)]
pub(crate) struct ServeImagesArgs {
    /// Folder with images, or with stores of them
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
    /// Address to listen on
    #[arg(long, value_name = "HOST:PORT")]
    listen: String,
    /// Serve only hosts with a certificate for this name. Repeatable [default: every certificate
    /// that a trusted CA has signed]
    #[arg(long, value_name = "NAME")]
    peer_name: Vec<String>,
    #[command(flatten)]
    tls: TlsOptions,
}

pub(crate) fn run(args: &ServeImagesArgs) -> anyhow::Result<ExitCode> {
    // A save may lie in hundreds of packs, which are open for each restore.
    raise_descriptors();
    let take_lock = |path: &std::path::Path, shared| {
        let locked = ImageLock::take(path, shared).and_then(|lock| lock.handle());
        locked.map_err(|error| format!("{error:#}"))
    };
    let folder = Folder::open(&args.folder, Box::new(take_lock))
        .with_context(|| format!("folder {}", args.folder.display()))?;
    let acceptor = network::acceptor(&args.tls, &args.peer_name)?;
    let listener = network::listen(&args.listen)?;
    let address = listener.local_addr().context("the listening socket")?;
    say(&format!("serving the images of {} on {address}", args.folder.display()));
    let tell = Box::new(|text: &str| say(&printable(text)));
    let sessions = Sessions::new(folder, Patience::default()).returning_for(RETURN);
    Server::new(sessions, acceptor, tell).run(&listener).context("the listening socket")?;
    Ok(ExitCode::SUCCESS)
}
