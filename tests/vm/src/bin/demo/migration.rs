//! Live migration: a VM that constantly writes to its memory moves over a 200 Mbit/s link, by
//! platen with its default settings and by QEMU's two compressors. After each migration the guest
//! recomputes every byte of its memory.

use std::time::Duration;

use anyhow::{Context, Result};
use vm_tests::table::{megabytes, render, seconds, to_f64};
use vm_tests::{Compression, DidNotEnd, Lab, Method, Outcome, Patience, Rate, Vm, VmSpec};

/// Pages in the guest, all different.
const DATA_MIB: u64 = 300;
/// The link's speed, at which compression decides.
const LINK: Rate = Rate::Mbit(200);
/// Updates a second, per cent of them that rewrite a whole page, MiB of their range.
const WRITES: (u64, u64, u64) = (10_000, 25, 128);
/// The time limit of a migration; a longer one has not converged.
const LIMIT: Duration = Duration::from_secs(60);

/// One way to migrate the VM.
struct Way {
    name: &'static str,
    method: Method,
    /// `None` if it did not end within [`LIMIT`].
    outcome: Option<Outcome>,
}

/// Runs the migrations and prints their table. Returns what platen has gained or lost.
pub(crate) fn run(lab: &Lab) -> Result<String> {
    lab.net.shape(LINK)?;
    println!("1. Live migration over a 200 Mbit/s link ({})", lab.net.describe());
    println!("The guest writes to its memory {} times a second while it moves.", WRITES.0);
    let way = |name, method| Way { name, method, outcome: None };
    let mut ways = [
        way("platen, default settings", Method::platen(&[])),
        way("QEMU, 2 multifd channels, zlib", Method::QemuMultifd(2, Compression::Zlib)),
        way("QEMU, 2 multifd channels, zstd", Method::QemuMultifd(2, Compression::Zstd)),
    ];
    let mut vm = None;
    for way in &mut ways {
        let here = match vm.take() {
            Some(vm) => vm,
            None => boot(lab)?,
        };
        println!("\n{}: moving it to the other side", way.name);
        match one_move(lab, here, &way.method) {
            Ok((there, outcome)) => {
                way.outcome = Some(outcome);
                vm = Some(there);
            }
            Err(error) if error.is::<DidNotEnd>() => println!("  {error}: given up"),
            Err(error) => return Err(error.context(way.name)),
        }
    }
    println!("\n{}", table(&ways));
    println!("  CPU: everything both QEMUs and both relays used, without the guest's own CPU.");
    Ok(verdict(&ways))
}

fn boot(lab: &Lab) -> Result<Vm> {
    println!(
        "\nBooting the guest under QEMU (TCG) and filling {DATA_MIB} MiB with pages that are all \
         different"
    );
    let mut vm = lab.boot(&VmSpec::large(), DATA_MIB)?;
    vm.guest.verify().context("after the boot")?;
    Ok(vm)
}

/// Migrates the VM while its guest writes, and has the guest verify every byte.
fn one_move(lab: &Lab, mut vm: Vm, method: &Method) -> Result<(Vm, Outcome)> {
    // Resets the settings of the previous method.
    Method::platen(&[]).prepare(&mut vm)?;
    vm.guest.dirty(WRITES.0, WRITES.1, WRITES.2)?;
    let (mut vm, outcome) = method.run(lab, vm, Patience::ByItself(LIMIT))?;
    println!("  arrived after {}; the guest checks every byte", seconds(outcome.total_ms));
    vm.guest.stop()?;
    let verified = vm.guest.verify()?;
    println!("  {} pages, all as the guest has written them", verified.pages);
    Ok((vm, outcome))
}

fn table(ways: &[Way]) -> String {
    let rows: Vec<Vec<String>> = ways
        .iter()
        .map(|way| match &way.outcome {
            Some(outcome) => vec![
                way.name.to_owned(),
                seconds(outcome.total_ms),
                format!("{} ms", outcome.downtime_ms),
                megabytes(outcome.wire),
                format!("{:.2} s", outcome.cost.total()),
            ],
            None => {
                let none = "-".to_owned();
                let more = format!("> {} s", LIMIT.as_secs());
                vec![way.name.to_owned(), more, none.clone(), none.clone(), none]
            }
        })
        .collect();
    render(&["", "total time", "downtime", "on the wire", "CPU, both ends"], &rows)
}

/// The gain or loss of platen against the faster of QEMU's methods.
fn verdict(ways: &[Way]) -> String {
    let [platen, qemu @ ..] = ways else { return String::new() };
    let ended = qemu.iter().filter_map(|way| Some((way.name, way.outcome.as_ref()?)));
    let best = ended.min_by_key(|(_, outcome)| outcome.total_ms);
    match (&platen.outcome, best) {
        (Some(ours), Some((name, theirs))) => {
            let ratio = |ours: f64, theirs: f64| ours / theirs;
            let time = ratio(to_f64(ours.total_ms), to_f64(theirs.total_ms));
            format!(
                "platen {}: {time:.2} times the total time of QEMU's best way here ({name}), \
                 {:.2} times its bytes, {:.2} times its CPU time.",
                if time <= 1.0 { "gained" } else { "lost" },
                ratio(to_f64(ours.wire), to_f64(theirs.wire)),
                ratio(ours.cost.total(), theirs.cost.total()),
            )
        }
        (Some(ours), None) => format!(
            "platen gained: it moved the VM in {}; none of QEMU's ways ended within {} s.",
            seconds(ours.total_ms),
            LIMIT.as_secs()
        ),
        (None, Some((name, theirs))) => format!(
            "platen lost: it did not end within {} s; QEMU ({name}) took {}.",
            LIMIT.as_secs(),
            seconds(theirs.total_ms)
        ),
        (None, None) => format!("Nobody moved the VM within {} s.", LIMIT.as_secs()),
    }
}
