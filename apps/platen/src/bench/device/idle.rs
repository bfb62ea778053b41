//! What the policy makes of pages that nobody touches, against zram's best: ratio in memory, and what a read
//! costs then.

use super::front::{Front, Own};
use super::{percentiles, process_cpu, timed, Aligned, DeviceBenchArgs, Kind, Random};
use anyhow::{bail, Context};
use device::PAGE;
use policy::{Passes, Settings, Step};
use serde_json::json;
use std::time::Duration;

pub(super) fn measure(
    args: &DeviceBenchArgs,
    fronts: &[Kind],
    name: &str,
    pages: &[u8],
) -> anyhow::Result<serde_json::Value> {
    let count = pages.len() / PAGE;
    println!("\n{name}: {count} pages, all idle; ratios in memory, microseconds of CPU a page");
    let mut best = 0.0_f64;
    for front in fronts.iter().filter(|front| matches!(front, Kind::Zram(_))) {
        let mut kept = front.open(count as u64, 0)?;
        fill(&mut *kept, pages)?;
        settle(&mut *kept)?;
        let ratio = ratio(&kept.memory()?);
        println!("{front:<16} ratio {ratio:.3}");
        best = best.max(ratio);
    }
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
    let mut rows = Vec::new();
    for group in &args.groups {
        let settings = Settings { group: *group, level: args.idle_level, ..Settings::default() };
        let row = one(&settings, pages, best).with_context(|| format!("groups of {group}"))?;
        rows.push(row);
    }
    Ok(json!({ "part": "idle", "set": name, "pages": count, "zram_best": best, "groups": rows }))
}

fn one(settings: &Settings, pages: &[u8], best: f64) -> anyhow::Result<serde_json::Value> {
    let count = (pages.len() / PAGE) as u64;
    let mut kept = Own::new(codec::Settings::default(), count, 0)?;
    fill(&mut kept, pages)?;
    settle(&mut kept)?;
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
    settle(&mut kept)?;
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
    println!(
        "{:<16}{before:>7.3}{coded:>8.3}{after:>8.3}{:>8.2}{recompressed:>10.1}{alone:>10.1}{p50:>10.1}{p99:>10.1}{in_order:>9.1}{:>9}{:>9}",
        format!("{}:{} x{}", settings.codec, settings.level, settings.group),
        after / best.max(f64::MIN_POSITIVE),
        stats.pages_grouped,
        stats.no_room,
    );
    Ok(json!({
        "group": settings.group, "level": settings.level, "before": before, "coded": coded, "after": after,
        "of_best": after / best.max(f64::MIN_POSITIVE), "recompress_cpu": recompressed,
        "read_cpu": alone, "read_p50": p50, "read_p99": p99, "read_in_order_cpu": in_order,
        "pages_grouped": stats.pages_grouped, "groups_made": stats.groups_made,
        "pages_recompressed": stats.pages_recompressed,
    }))
}

/// Compacts until that brings nothing more: what a device that is left alone comes to.
fn settle(kept: &mut dyn Front) -> anyhow::Result<()> {
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

/// All pages in order, then each again in random order, so that memory is as after some use.
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
