//! Candidates with a history, as `--history` adds them.

use codec::{Codec, Settings};
use controller::{Class, Config, Controller};

use crate::fastest;
use crate::model::{run, Chooser, World};
use crate::tables::Row;

/// A guest's memory by the table of histories in `docs/figures.md`: the columns of zstd 7 and 9 are
/// those with a history.
const SIZES: [u32; 14] =
    [10000, 7000, 6400, 5600, 4880, 5000, 4810, 4440, 3570, 3480, 3390, 3320, 3070, 3030];
const COSTS: [u64; 14] =
    [0, 500, 700, 900, 1200, 1300, 1400, 1600, 2000, 2500, 3000, 6600, 13000, 17400];

/// None, lz4 -7 and 1, zstd 1 and 3, and with a history zstd 7 and 9.
fn candidates() -> Vec<Settings> {
    let mut all = Config::candidates();
    for settings in &mut all {
        if settings.codec() == Codec::Zstd && settings.level() > 5 {
            *settings = settings.with_history();
        }
    }
    assert_eq!(all.iter().filter(|one| one.has_history()).count(), 2);
    all
}

fn world(link: f64, workers: usize) -> World {
    let row = |scale: f64| {
        let mut row = (Class::Plain, [(0, 0); 14]);
        for (at, cell) in row.1.iter_mut().enumerate() {
            let size = f64::from(SIZES[at]) * if at == 0 { 1.0 } else { scale };
            *cell = ((size as u32).min(10_000), (COSTS[at] as f64 * scale) as u64);
        }
        row
    };
    // The simulation wants rows that live as long as the program.
    let rows: &'static [Row] = [0.8, 1.2, 1.0, 0.9, 1.1].map(row).to_vec().leak();
    World { workers, bytes: link * 20e9, ..World::new(link, |at| &rows[at % rows.len()]) }
}

/// The share of the plan's chunks with a history.
fn share(auto: &Controller) -> f64 {
    let classes = auto.current().classes;
    let parts = classes.iter().flat_map(|mix| mix.parts.iter().map(|part| (mix.weight, part)));
    parts.filter(|(_, (settings, _))| settings.has_history()).map(|(of, (_, part))| of * part).sum()
}

#[test]
fn histories_are_used_behind_slow_links_and_by_no_fast_one() {
    for (link, workers, least, most) in [
        // A part goes without one where that takes up to 2 % longer and much less CPU time.
        (0.0125, 4, 0.7, 1.0),
        (0.0125, 1, 0.5, 1.0),
        (0.125, 16, 0.7, 1.0),
        // CPU time is short.
        (1.25, 2, 0.0, 0.0),
    ] {
        let world = world(link, workers);
        let auto = Controller::new(Config { candidates: candidates(), ..Config::new(workers) });
        let time = run(&world, Chooser::Auto(&auto)).time;
        let (_, best) = fastest(&world, f64::INFINITY).expect("there are some");
        let (share, of_best) = (share(&auto), time / best.time);
        println!("{link}, {workers} threads: {share:.2} with a history, {of_best:.3} of the time");
        let context = auto.current();
        assert!((least..=most).contains(&share), "{link}, {workers}: {share}\n{context}");
        assert!(of_best < 1.05, "{link}, {workers}: {of_best}\n{context}");
    }
}
