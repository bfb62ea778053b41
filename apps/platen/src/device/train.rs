//! `platen device train`: the process that trains a dictionary for a server. Its supervisor starts it, and kills it when
//! it takes long; what it makes is read with suspicion.

use anyhow::Context;
use policy::Ground;

/// Address space that it may take: training takes some 30 MiB, this program's own the rest.
const MEMORY: u64 = 512 << 20;

/// Seconds of CPU: it takes about one.
const CPU: u64 = 60;

pub(crate) fn run() -> anyhow::Result<()> {
    for untaken in swap::apart(MEMORY, CPU) {
        eprintln!("platen: {:#}", anyhow::Error::from(untaken));
    }
    // Where nothing else is started with it, and nothing but this is open.
    let ground = rustix::stdio::stdout().try_clone_to_owned()?;
    let ground = Ground::open(ground).context("standard output is no training file")?;
    policy::train(&ground).context("cannot train")
}
