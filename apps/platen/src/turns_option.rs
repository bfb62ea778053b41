//! Turns that a migration takes among others of this host.

use anyhow::Context;
use std::fmt;
use std::fs::File;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use turns::{Priority, Turns};

/// `PATH,PRIORITY` of the memory in which `evacuate` has its migrations take turns.
#[derive(Clone, Debug)]
pub(crate) struct TurnsOption {
    pub(crate) path: PathBuf,
    pub(crate) priority: Priority,
}

impl FromStr for TurnsOption {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (path, priority) = text.rsplit_once(',').ok_or("no PATH,PRIORITY")?;
        Ok(Self { path: path.into(), priority: priority.parse()? })
    }
}

impl TurnsOption {
    pub(crate) fn open(&self) -> anyhow::Result<Arc<Turns>> {
        let file = File::options().read(true).write(true).open(&self.path);
        let turns = file.and_then(|file| Turns::open(&file.into(), self.priority));
        turns.map(Arc::new).with_context(|| format!("turns {}", self.path.display()))
    }
}

impl fmt::Display for TurnsOption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},{}", self.path.display(), self.priority)
    }
}
