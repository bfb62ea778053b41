//! A request for another server while it is carried out.

use super::changes::Changes;
use super::claims::Claims;
use super::plan::Plan;
use super::requests::{Client, Requests};
use anyhow::Context;
use std::ffi::OsString;
use std::fs::File;
use std::os::fd::OwnedFd;

/// A request that is being carried out.
pub(super) struct Renewal {
    pub(super) client: Client,
    /// The program that is to serve from then on.
    pub(super) program: Option<File>,
    pub(super) settings: Option<Settings>,
    /// What the new server inherits for its start alone.
    pub(super) held: Option<[OwnedFd; 2]>,
}

pub(super) struct Settings {
    pub(super) changes: Changes,
    pub(super) plan: &'static Plan<'static>,
    /// Of the present server, once the new one was told to go: then the other fields are as well.
    pub(super) former: Option<&'static Plan<'static>>,
    /// The text of the policy's settings.
    pub(super) policy: Option<OwnedFd>,
}

/// The socket for requests.
pub(super) fn requests(claims: &Claims) -> anyhow::Result<Requests> {
    let listening = claims.requests.as_ref().context("no socket for requests")?;
    Requests::new(&listening.listener)
}

/// The arguments of this process, for a server or another program: with these changes.
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
