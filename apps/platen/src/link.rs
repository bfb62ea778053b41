//! The links of forecasts, and the measurement of a link.

use crate::network;
use crate::relay_options::TlsOptions;
use anyhow::Context;
use forecast::Link;
use relay::measure_links;
use session::SessionError;
use std::time::Duration;

/// Connections of a measurement: as many as `migrate` has by default.
const LINKS: u16 = 4;
/// Time of a measurement; its second half counts.
const TIME: Duration = Duration::from_secs(2);
/// The page size of the hello, which a measurement does not use.
const PAGE_SIZE: u32 = 4096;
/// The longest round trip of a --what-if, milliseconds.
pub(crate) const LONGEST_TRIP: u64 = 10_000;

/// A link for which migrations are forecast.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Over {
    pub(crate) link: Link,
    /// Whether the link was measured; else it is a --what-if.
    pub(crate) is_measured: bool,
}

/// Measures the links to a receiver.
pub(crate) fn measure(peer: &str, tls: &TlsOptions, name: Option<&str>) -> anyhow::Result<Over> {
    let connector = network::connector(tls, peer, name)?;
    let found = measure_links(peer, connector.as_ref(), PAGE_SIZE, LINKS, TIME);
    let rate = found.map_err(|error| {
        let is_older = matches!(&error, SessionError::Refused { reason, .. }
            if reason.contains("no target named") || reason.contains("no door") || reason.contains("by --name"));
        let error = anyhow::Error::from(error);
        if is_older {
            return error.context(
                "the receiver's platen is older than this one and does not measure links: use the same \
                 platen on both hosts, or say --what-if link=RATE instead of --peer",
            );
        }
        error
    });
    let rate = rate.with_context(|| format!("cannot measure the links to {peer}"))?;
    let link = Link { goodput: rate.goodput, rtt: rate.rtt };
    Ok(Over { link, is_measured: true })
}
