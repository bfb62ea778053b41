//! Certificates of the relays: a CA, a certificate for each end, and some that must be refused.
//!
//! Made by `platen cert`, as a user would, in the lab's scratch folder.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{ensure, Context, Result};

use crate::net::Side;
use crate::platen;

/// A CA, and the folders of the certificates that it signed.
#[derive(Debug)]
pub struct Certificates {
    ca: PathBuf,
    ends: [PathBuf; 2],
}

impl Certificates {
    /// Makes a CA in `folder` and a certificate for each end. `ends`: the names of each end, source
    /// first.
    ///
    /// # Errors
    /// If `platen cert` fails.
    pub fn new(folder: &Path, ends: [&[&str]; 2]) -> Result<Self> {
        let ca = folder.to_owned();
        cert(&["init", "--dir", &ca.display().to_string()])?;
        let [source, destination] = ends.map(|names| issue(&ca, names));
        Ok(Self { ends: [source?, destination?], ca })
    }

    /// The `--tls-dir` of an end.
    pub fn of(&self, side: Side) -> &Path {
        match side {
            Side::Source => &self.ends[0],
            Side::Destination => &self.ends[1],
        }
    }

    /// Makes the CA sign one more certificate; returns its `--tls-dir`.
    ///
    /// # Errors
    /// If `platen cert` fails.
    pub fn issue(&self, names: &[&str]) -> Result<PathBuf> {
        issue(&self.ca, names)
    }
}

fn issue(ca: &Path, names: &[&str]) -> Result<PathBuf> {
    let ca_words = ca.display().to_string();
    cert(&[&["issue", "--dir", &ca_words], names].concat())?;
    let folder = ca.join(names.first().context("a certificate needs a name")?);
    ensure!(folder.join("cert.pem").exists(), "platen cert made no {}", folder.display());
    Ok(folder)
}

fn cert(words: &[&str]) -> Result<()> {
    let output = Command::new(platen::binary()?).arg("cert").args(words).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "platen cert {} failed: {said}", words.join(" "));
    Ok(())
}
