//! The part pages: each page alone is written, overwritten and read.

use super::front;
use super::measure::{median, percentiles, process_cpu, timed, Aligned, Random};
use super::{DeviceBenchArgs, Kind, PAGE};
use anyhow::{bail, Context};
use serde::Serialize;
use serde_json::json;

/// One run of one front over one set. Times are microseconds a page.
#[derive(Clone, Copy, Debug, Serialize)]
struct Figures {
    write_cpu: f64,
    write_p50: f64,
    write_p99: f64,
    read_cpu: f64,
    read_p50: f64,
    read_p99: f64,
    /// Plain bytes per compressed byte.
    coded: f64,
    /// Plain bytes per byte of memory: after filling, after churn, and after compaction.
    filled: f64,
    churned: f64,
    compacted: f64,
}

pub(super) fn measure(
    args: &DeviceBenchArgs,
    fronts: &[Kind],
    name: &str,
    pages: &[u8],
) -> anyhow::Result<serde_json::Value> {
    let mut runs: Vec<Vec<Figures>> = vec![Vec::new(); fronts.len()];
    for run in 0..args.runs {
        for (front, runs) in fronts.iter().zip(&mut runs) {
            let figures = one_run(front, pages, u64::from(run) + 1);
            runs.push(figures.with_context(|| format!("{front} with {name}"))?);
        }
    }
    println!(
        "\n{name}: {} pages, {} runs in turns, microseconds a page (CPU: the whole process)",
        pages.len() / PAGE,
        args.runs
    );
    println!(
        "{:<14}{:>9}{:>8}{:>8}{:>9}{:>8}{:>8}{:>9}{:>8}{:>9}{:>11}",
        "", "write", "p50", "p99", "read", "p50", "p99", "coded", "filled", "churned", "compacted"
    );
    let mut rows = Vec::new();
    for (front, runs) in fronts.iter().zip(&runs) {
        let of = |field: fn(&Figures) -> f64| median(runs.iter().map(field).collect());
        let figures = Figures {
            write_cpu: of(|f| f.write_cpu),
            write_p50: of(|f| f.write_p50),
            write_p99: of(|f| f.write_p99),
            read_cpu: of(|f| f.read_cpu),
            read_p50: of(|f| f.read_p50),
            read_p99: of(|f| f.read_p99),
            coded: of(|f| f.coded),
            filled: of(|f| f.filled),
            churned: of(|f| f.churned),
            compacted: of(|f| f.compacted),
        };
        println!(
            "{:<14}{:>9.2}{:>8.2}{:>8.2}{:>9.2}{:>8.2}{:>8.2}{:>9.3}{:>8.3}{:>9.3}{:>11.3}",
            front.to_string(),
            figures.write_cpu,
            figures.write_p50,
            figures.write_p99,
            figures.read_cpu,
            figures.read_p50,
            figures.read_p99,
            figures.coded,
            figures.filled,
            figures.churned,
            figures.compacted,
        );
        rows.push(json!({ "front": front.to_string(), "median": figures, "runs": runs }));
    }
    compare(fronts, &rows);
    Ok(json!({ "part": "pages", "set": name, "pages": pages.len() / PAGE, "fronts": rows }))
}

/// The important figures, side by side: ratio over zram's best, CPU over lzo-rle's.
fn compare(fronts: &[Kind], rows: &[serde_json::Value]) {
    let value = |row: &serde_json::Value, field: &str| row["median"][field].as_f64().unwrap_or(0.0);
    let both = |row: &serde_json::Value| value(row, "write_cpu") + value(row, "read_cpu");
    let zram = || fronts.iter().zip(rows).filter(|(front, _)| matches!(front, Kind::Zram(_)));
    let best = zram().map(|(_, row)| value(row, "compacted")).fold(0.0, f64::max);
    let lzo = zram().find(|(front, _)| **front == Kind::Zram("lzo-rle".to_owned()));
    let Some((_, lzo)) = lzo else { return };
    let best_of = super::best_of(fronts);
    for (front, row) in fronts.iter().zip(rows).filter(|(front, _)| matches!(front, Kind::Own(_))) {
        println!(
            "  {front}: ratio {:.2} times the {best_of}, CPU of a write and a read {:.2} times lzo-rle's",
            value(row, "compacted") / best,
            both(row) / both(lzo)
        );
    }
}

fn one_run(front: &Kind, pages: &[u8], seed: u64) -> anyhow::Result<Figures> {
    let count = (pages.len() / PAGE) as u64;
    let page = |number: u64| {
        let at = usize::try_from(number).expect("in memory") * PAGE;
        &pages[at..at + PAGE]
    };
    let mut random = Random(seed);
    let order = random.order(count);
    // The new contents of each page.
    let other = random.order(count);
    let mut kept = front.open(count, 0)?;
    let mut times = Vec::with_capacity(order.len() * 2);
    let cpu = process_cpu();
    for number in 0..count {
        timed(&mut times, || kept.write(number, page(number)))?;
    }
    let filled = kept.memory()?;
    for &number in &order {
        timed(&mut times, || kept.write(number, page(other[usize::try_from(number)?])))?;
    }
    let write_cpu = (process_cpu() - cpu) / (2.0 * count as f64);
    let (write_p50, write_p99) = percentiles(&mut times);
    let churned = kept.memory()?;
    kept.compact()?;
    let compacted = kept.memory()?;
    times.clear();
    let mut out = Aligned::new(PAGE);
    let out = out.all();
    let mut read_cpu = 0.0;
    for numbers in random.order(count).chunks(256) {
        // The time excludes the comparison.
        let cpu = process_cpu();
        for &number in numbers {
            timed(&mut times, || kept.read(number, out))?;
        }
        read_cpu += process_cpu() - cpu;
        for &number in numbers.iter().step_by(16) {
            kept.read(number, out)?;
            if out != page(other[usize::try_from(number)?]) {
                bail!("page {number} has another content");
            }
        }
    }
    let (read_p50, read_p99) = percentiles(&mut times);
    let ratio = |memory: &front::Memory| memory.plain as f64 / memory.used.max(1) as f64;
    Ok(Figures {
        write_cpu,
        write_p50,
        write_p99,
        read_cpu: read_cpu / count as f64,
        read_p50,
        read_p99,
        coded: compacted.plain as f64 / compacted.compressed.max(1) as f64,
        filled: ratio(&filled),
        churned: ratio(&churned),
        compacted: ratio(&compacted),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use corpus::Corpus;

    #[test]
    fn a_run_reads_back_what_it_wrote_and_every_figure_is_one() {
        let corpus = Corpus::made("a test");
        let text = corpus.text();
        let mut pages = Aligned::of(&text.pages()[..256 * PAGE]);
        let figures = one_run(&"zstd:1".parse().unwrap(), pages.all(), 7).unwrap();
        assert!(figures.coded > 1.2 && figures.compacted > 1.0, "{figures:?}");
        assert!(figures.write_cpu > 0.0 && figures.write_p50 <= figures.write_p99);
        assert!(figures.read_cpu > 0.0 && figures.read_p50 <= figures.read_p99);
    }
}
