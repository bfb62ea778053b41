//! Seeds: pages of a store of saved VMs that a migration to this host need not carry (W29b of the
//! wire protocol). `offered` reads a store; `departure` and `spool` write the pages of a VM that
//! migrates to another host into one, so that the VM can come back with fewer bytes.

mod departure;
mod offered;
mod spool;

use std::time::Duration;

/// How long a migration waits for the pages that the receiver has: it reads them all first.
pub(crate) const OFFERS: Duration = Duration::from_secs(5);

pub(crate) use departure::{refuse_seed, Departure, WriteSeedOptions};
pub(crate) use offered::{source_seed, StoreSeed};
