//! `platen device set` and `platen device upgrade`: replace the server of a device in use.

use super::args::{SetArgs, UpgradeArgs};
use super::changes::Changes;
use super::requests::{self, DONE, REFUSED};
use super::{control, settings_file, waiting};
use crate::say::{printable, show};
use anyhow::{bail, Context};
use std::os::fd::AsFd;
use std::os::fd::BorrowedFd;
use std::path::Path;

pub(crate) fn set(args: &SetArgs) -> anyhow::Result<()> {
    let folder = control::folder(args.control.run_dir.as_deref())?;
    let changes = Changes {
        size: args.size,
        mem_limit: args.mem_limit,
        codec: args.codec,
        level: args.level.map(Some),
    };
    // Sends the text, not the path: the supervisor must not wait for a file.
    let text = args.policy.as_deref().map(settings_file::read).transpose()?;
    let policy = text.map(|text| settings_file::share(&text)).transpose()?;
    let policy = policy.as_ref().map(AsFd::as_fd);
    ask(&folder, &args.name, &format!("set {changes}"), policy)
}

pub(crate) fn upgrade(args: &UpgradeArgs) -> anyhow::Result<()> {
    let folder = control::folder(args.control.run_dir.as_deref())?;
    ask(&folder, &args.name, "upgrade", None)
}

fn ask(
    folder: &Path,
    name: &str,
    request: &str,
    with: Option<BorrowedFd<'_>>,
) -> anyhow::Result<()> {
    let answer = requests::begin(folder, name, request, with)
        .and_then(|stream| waiting::answer(name, &stream))
        .with_context(|| format!("device {name}"))?;
    let answer = printable(answer.trim_end());
    let (before, last) = answer.rsplit_once('\n').unwrap_or(("", &answer));
    let before = before.trim_start_matches("platen: ").replace("\nplaten: ", "; ");
    let before = if before.is_empty() { before } else { format!(": {before}") };
    if last == DONE {
        return show(&format!("device {name}: done\n"));
    }
    match last.strip_prefix(REFUSED) {
        Some(why) => bail!("device {name}: refused: {why}{before}"),
        None => bail!(
            "device {name}: its supervisor has ended before it reported the result: `platen device \
             stat {name}` shows who serves it: {last}{before}"
        ),
    }
}
