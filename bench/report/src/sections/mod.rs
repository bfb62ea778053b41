//! The sections: each reads samples and says what they show.

mod advise;
mod compress;
pub(crate) mod measured;
mod moves;
mod overview;
mod qatzip;
mod qzram;
mod qzram_jobs;
mod qzram_redis;
pub(crate) mod scaling;
mod stages;
mod swap;
mod threads;

use crate::data::Data;
use crate::section::Section;

/// All sections, in the page's order.
pub(crate) fn all(data: &Data) -> Vec<Section> {
    vec![
        overview::section(data),
        qatzip::section(data),
        compress::section(data),
        qzram::section(data),
        threads::section(data),
        swap::section(data),
        advise::section(data),
        scaling::section(data),
        overview::samples(data),
    ]
}
