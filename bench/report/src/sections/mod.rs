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
use crate::summary::{self, busy_steps};

/// All sections, in the page's order. The first one sums up the findings of the others.
pub(crate) fn all(data: &Data) -> Vec<Section> {
    let mut others = vec![
        qatzip::section(data),
        compress::section(data),
        qzram::section(data),
        threads::section(data),
        swap::section(data),
        advise::section(data),
        scaling::section(data),
    ];
    let lines = summary::lines(&others, |section| busy_steps(section, data).next().is_some());
    let mut all = vec![overview::section(data, lines)];
    all.append(&mut others);
    all.push(overview::samples(data));
    all
}
