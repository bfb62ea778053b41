//! Features of the kernel for block devices in compressed memory.

use super::read::{list, text};
use serde::Serialize;
use std::path::Path;

/// Whether the kernel has a feature.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Feature {
    /// The kernel has it.
    Ready,
    /// A module has it, which is not loaded.
    Module,
    /// Neither the kernel nor a module shows it.
    #[default]
    Absent,
}

impl Feature {
    /// The feature's state, for messages.
    pub fn text(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Module => "a module that is not loaded",
            Self::Absent => "absent",
        }
    }
}

/// Features of this host's kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Kernel {
    /// The kernel's release.
    pub release: Option<String>,
    /// Driver of ublk: ready, module (not loaded) or absent.
    pub ublk: Feature,
    /// Client of NBD: ready, module (not loaded) or absent.
    pub nbd: Feature,
    /// FUSE: ready, module (not loaded) or absent.
    pub fuse: Feature,
}

impl Kernel {
    pub(super) fn look(root: &Path) -> Self {
        let release = text(&root.join("proc/sys/kernel/osrelease"));
        // The release is a part of a path.
        let release = release.filter(|name| !name.contains('/') && !name.starts_with('.'));
        let folder = release.as_ref().map(|release| root.join("lib/modules").join(release));
        let files = ["modules.dep", "modules.builtin"];
        let lists = folder.iter().flat_map(|folder| files.map(|file| list(&folder.join(file))));
        let modules: Vec<String> = lists.flatten().collect();
        let feature = |control: &str, module: &str| {
            if root.join(control).exists() || root.join("sys/module").join(module).exists() {
                return Feature::Ready;
            }
            // A line of modules.dep begins with the file and a colon.
            let is_it = |line: &str| {
                let file = line.split(':').next().unwrap_or_default();
                let name = file.rsplit('/').next().unwrap_or_default();
                name.strip_prefix(module).is_some_and(|rest| rest.starts_with(".ko"))
            };
            let known = modules.iter().any(|list| list.lines().any(is_it));
            if known {
                Feature::Module
            } else {
                Feature::Absent
            }
        };
        Self {
            ublk: feature("dev/ublk-control", "ublk_drv"),
            nbd: feature("dev/nbd0", "nbd"),
            fuse: feature("dev/fuse", "fuse"),
            release,
        }
    }
}
