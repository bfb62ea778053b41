//! Programs that stand for the benchmarks.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use tempfile::TempDir;

/// A folder with programs, each a script whose last argument is the file for its figures.
pub(crate) struct Stage {
    folder: TempDir,
}

impl Stage {
    /// Programs by name, with their scripts.
    pub(crate) fn new(programs: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for (name, script) in programs {
            let path = folder.path().join(name);
            let file = "for file; do :; done";
            let text = format!("#!/bin/sh\n{file}\ncd {}\n{script}\n", folder.path().display());
            // Written by another process: a descriptor open for writing here would be inherited by
            // processes that other tests start at that moment, and the kernel does not execute a
            // file open for writing.
            let made = "mkdir -p \"${2%/*}\" && printf %s \"$1\" > \"$2\" && chmod 755 \"$2\"";
            let made = Command::new("sh").args(["-c", made, "sh", &text]).arg(&path).status();
            assert!(made.unwrap().success());
        }
        Self { folder }
    }

    /// A path in the folder.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The page of a run with `out` in this folder.
    pub(crate) fn page(&self) -> String {
        fs::read_to_string(self.path("out/index.html")).unwrap()
    }
}
