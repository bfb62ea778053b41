//! The pages that earlier restores requested, read before QEMU gets any command.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use image::HotSet;

use crate::ahead::Ahead;
use crate::serve::Server;
use crate::PlayError;

/// Limits of the pages that are sent before the guest runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HotLimits {
    /// Bytes of the stream. One unit may exceed them.
    pub bytes: usize,
    /// Time for reading.
    pub time: Duration,
}

/// Reads the pages of `set` up to `limits`. Returns the sections with them, and their number. The
/// units of the other pages become the first ones of `ahead`.
pub(crate) fn prepare(
    server: &mut Server,
    ahead: &mut Ahead,
    set: &HotSet,
    limits: HotLimits,
) -> Result<(Vec<u8>, u64), PlayError> {
    let deadline = Instant::now() + limits.time;
    let before = (server.counts.pages, server.counts.zeros);
    let hot: HashSet<(usize, u64)> = set.pages().iter().map(|of| (of.block, of.page)).collect();
    let (mut known, mut out) = (HashSet::new(), Vec::new());
    ahead.begin_with(set.pages().iter().filter_map(|of| {
        let unit = server.unit_of(of.block, of.page)?;
        known.insert(unit).then_some(unit)
    }));
    for of in set.pages() {
        if out.len() >= limits.bytes {
            break;
        }
        match server.unit_of(of.block, of.page) {
            None => server.put_filled(of.block, of.page, &mut out),
            // `ahead` asks for these units in the order of their first pages.
            Some(unit) if known.remove(&unit) => {
                let Some(unit) = ahead.wait(unit, deadline, |unit| server.wants(unit))? else {
                    break;
                };
                server.put_hot(&unit, |block, page| hot.contains(&(block, page)), &mut out);
            }
            Some(_) => {}
        }
    }
    Ok((out, server.counts.pages + server.counts.zeros - before.0 - before.1))
}
