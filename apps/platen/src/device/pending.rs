//! A pending request to replace the server.

use super::changes::Changes;
use super::claims::Claims;
use super::plan::Plan;
use super::requests::{Client, Requests};
use anyhow::Context;
use std::ffi::OsString;
use std::fs::File;
use std::os::fd::OwnedFd;

/// A pending request.
pub(super) struct Renewal {
    pub(super) client: Client,
    /// The new program, for `upgrade`.
    pub(super) program: Option<File>,
    pub(super) settings: Option<Settings>,
    /// Descriptors that the new server inherits only for its start.
    pub(super) held: Option<[OwnedFd; 2]>,
}

pub(super) struct Settings {
    pub(super) changes: Changes,
    pub(super) plan: &'static Plan<'static>,
    /// The present server's plan, set before "go" is sent; `changes` and `policy` then hold the
    /// present server's values too.
    pub(super) former: Option<&'static Plan<'static>>,
    /// The text of the policy's settings.
    pub(super) policy: Option<OwnedFd>,
    /// Whether a size was asked for, be it the present one.
    pub(super) sizes: bool,
}

/// The socket for requests.
pub(super) fn requests(claims: &Claims) -> anyhow::Result<Requests> {
    let listening = claims.requests.as_ref().context("no socket for requests")?;
    Requests::new(&listening.listener)
}

/// The arguments of this process, with these changes, for a server or another program.
pub(super) fn arguments(changes: &Changes) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = Vec::new();
    let mut own = std::env::args_os().skip(1);
    while let Some(argument) = own.next() {
        if argument == "--changed" || argument == "--adopt" {
            own.next();
        } else {
            arguments.push(argument);
        }
    }
    let text = changes.to_string();
    if !text.is_empty() {
        arguments.extend(["--changed".into(), text.into()]);
    }
    arguments
}
