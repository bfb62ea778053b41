//! Idle pages recompressed by the policy, against zram's best: ratio in memory, and the cost of
//! reads afterwards.

use super::front::{Front, Own};
use super::measure::{median, percentiles, process_cpu, timed, Aligned, Random};
use super::{DeviceBenchArgs, Kind};
use anyhow::{bail, Context};
use device::PAGE;
use policy::{Passes, Settings, Step};
use serde::Serialize;
use serde_json::json;
use std::time::Duration;

pub(super) fn measure(
    args: &DeviceBenchArgs,
    fronts: &[Kind],
    name: &str,
    pages: &[u8],
) -> anyhow::Result<serde_json::Value> {
    let count = pages.len() / PAGE;
    println!(
        "\n{name}: {count} pages, all idle, {} runs in turns; ratios in memory, microseconds of CPU a page",
        args.runs
    );
    let mut best = 0.0_f64;
    for front in fronts.iter().filter(|front| matches!(front, Kind::Zram(_))) {
        let mut kept = front.open(count as u64, 0)?;
        fill(&mut *kept, pages)?;
        compact_fully(&mut *kept)?;
        let ratio = ratio(&kept.memory()?);
        println!("{front:<16} ratio {ratio:.3}");
        best = best.max(ratio);
    }
    println!("of best: of the {}", super::best_of(fronts));
    println!(
        "{:<16}{:>7}{:>8}{:>8}{:>8}{:>10}{:>10}{:>10}{:>10}{:>9}{:>9}{:>9}",
        "",
        "before",
        "coded",
        "after",
        "of best",
        "recompr.",
        "alone",
        "p50",
        "p99",
        "in order",
        "grouped",
        "no room"
    );
    let settings = |group: usize| Settings { group, level: args.idle_level, ..Settings::default() };
    let mut runs: Vec<Vec<Figures>> = vec![Vec::new(); args.groups.len()];
    for _ in 0..args.runs {
        for (&group, runs) in args.groups.iter().zip(&mut runs) {
            let figures = one(&settings(group), pages);
            runs.push(figures.with_context(|| format!("groups of {group}"))?);
        }
    }
    let mut rows = Vec::new();
    for (&group, runs) in args.groups.iter().zip(&runs) {
        let of = |field: fn(&Figures) -> f64| median(runs.iter().map(field).collect());
        let after = of(|f| f.after);
        let of_best = after / best.max(f64::MIN_POSITIVE);
        println!(
            "{:<16}{:>7.3}{:>8.3}{after:>8.3}{of_best:>8.2}{:>10.1}{:>10.1}{:>10.1}{:>10.1}{:>9.1}{:>9}{:>9}",
            format!("{}:{} x{group}", settings(group).codec, args.idle_level),
            of(|f| f.before),
            of(|f| f.coded),
            of(|f| f.recompress_cpu),
            of(|f| f.read_cpu),
            of(|f| f.read_p50),
            of(|f| f.read_p99),
            of(|f| f.read_in_order_cpu),
            of(|f| f.pages_grouped as f64),
            of(|f| f.no_room as f64),
        );
        rows.push(
            json!({ "group": group, "level": args.idle_level, "of_best": of_best, "runs": runs }),
        );
    }
    Ok(json!({ "part": "idle", "set": name, "pages": count, "zram_best": best, "groups": rows }))
}

/// One run: ratios in memory before and after, and of the compressed data alone; CPU and times in
/// microseconds a page.
#[derive(Clone, Copy, Debug, Serialize)]
struct Figures {
    before: f64,
    after: f64,
    coded: f64,
    recompress_cpu: f64,
    read_cpu: f64,
    read_p50: f64,
    read_p99: f64,
    read_in_order_cpu: f64,
    pages_grouped: u64,
    no_room: u64,
}

fn one(settings: &Settings, pages: &[u8]) -> anyhow::Result<Figures> {
    let count = (pages.len() / PAGE) as u64;
    let mut kept = Own::new(codec::Settings::default(), count, 0)?;
    fill(&mut kept, pages)?;
    compact_fully(&mut kept)?;
    let before = ratio(&kept.memory()?);
    let mut passes = Passes::new(kept.store(), settings)?;
    (0..settings.idle).for_each(|_| passes.grow_older());
    let cpu = process_cpu();
    loop {
        match passes.step(settings.idle) {
            Step::More => {}
            Step::NoRoom => std::thread::sleep(Duration::from_millis(5)),
            Step::Done => break,
        }
    }
    let recompressed = (process_cpu() - cpu) / count as f64;
    compact_fully(&mut kept)?;
    let memory = kept.memory()?;
    let after = ratio(&memory);
    let coded = memory.plain as f64 / memory.compressed.max(1) as f64;
    let page = |number: u64| {
        let at = usize::try_from(number).expect("in memory") * PAGE;
        &pages[at..at + PAGE]
    };
    let mut read = |numbers: &[u64]| -> anyhow::Result<(f64, f64, f64)> {
        let mut times = Vec::with_capacity(numbers.len());
        let mut out = Aligned::new(PAGE);
        let out = out.all();
        let mut used = 0.0;
        for &number in numbers {
            let cpu = process_cpu();
            timed(&mut times, || kept.read(number, out))?;
            used += process_cpu() - cpu;
            if out != page(number) {
                bail!("page {number} has another content");
            }
        }
        let (p50, p99) = percentiles(&mut times);
        Ok((used / numbers.len() as f64, p50, p99))
    };
    let (alone, p50, p99) = read(&Random(7).order(count))?;
    let (in_order, ..) = read(&(0..count).collect::<Vec<_>>())?;
    let stats = passes.stats();
    Ok(Figures {
        before,
        after,
        coded,
        recompress_cpu: recompressed,
        read_cpu: alone,
        read_p50: p50,
        read_p99: p99,
        read_in_order_cpu: in_order,
        pages_grouped: stats.pages_grouped,
        no_room: stats.no_room,
    })
}

/// Compacts until that frees no more: the final state of an idle device.
fn compact_fully(kept: &mut dyn Front) -> anyhow::Result<()> {
    let mut used = u64::MAX;
    loop {
        kept.compact()?;
        let now = kept.memory()?.used;
        if now >= used {
            return Ok(());
        }
        used = now;
    }
}

/// Writes all pages in order, then each again in random order, so that memory is as after some use.
fn fill(kept: &mut dyn Front, pages: &[u8]) -> anyhow::Result<()> {
    let count = (pages.len() / PAGE) as u64;
    let again = Random(3).order(count);
    for number in (0..count).chain(again) {
        let at = usize::try_from(number)? * PAGE;
        kept.write(number, &pages[at..at + PAGE])?;
    }
    Ok(())
}

fn ratio(memory: &super::front::Memory) -> f64 {
    memory.plain as f64 / memory.used.max(1) as f64
}
