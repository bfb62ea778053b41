//! `make demo`: one VM with 700 MiB of data goes over a 1 Gbit/s link three times: by QEMU alone,
//! by QEMU with multifd and zstd, and by platen. Every time, the guest recomputes every byte of its
//! memory where it arrived.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use vm_tests::table::{megabytes, render, seconds};
use vm_tests::{cleanup, platen, Compression, Lab, Method, Patience, Rate, VmSpec};

const DATA_MIB: u64 = 700;
const LINK: Rate = Rate::Mbit(1000);
/// How long one move may take; ten seconds are usual.
const LIMIT: Duration = Duration::from_secs(300);

fn main() -> ExitCode {
    match demo() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\ndemo: {error:#}");
            eprintln!("Nothing was left running. If a package or the guest's kernel is missing: scripts/setup");
            ExitCode::FAILURE
        }
    }
}

fn demo() -> Result<()> {
    cleanup::install()?;
    // Before anything is started.
    platen::binary()?;
    let begin = Instant::now();
    let lab = Lab::new()?;
    lab.net.shape(LINK)?;
    println!("platen demo: a VM moves over a 1 Gbit/s link ({})", lab.net.describe());
    println!("\nBooting the guest under QEMU (TCG) and filling {DATA_MIB} MiB with pages that are all different");
    let spec = VmSpec::large();
    let mut vm = lab.boot(&spec, DATA_MIB)?;
    let filled = vm.guest.verify()?;

    let methods = [
        ("QEMU alone", Method::Qemu),
        ("QEMU, 2 multifd channels, zstd", Method::QemuMultifd(2, Compression::Zstd)),
        ("platen, zstd", Method::platen(&["--codec", "zstd"])),
    ];
    let mut rows = Vec::new();
    for (name, method) in methods {
        println!("\n{name}: moving it to the other side");
        let moved = method.run(&lab, vm, Patience::ByItself(LIMIT));
        let (moved, outcome) = moved.with_context(|| name.to_owned())?;
        vm = moved;
        println!("  arrived after {}; the guest checks every byte", seconds(outcome.total_ms));
        let verified = vm.guest.verify().with_context(|| name.to_owned())?;
        anyhow::ensure!(verified == filled, "{verified:?} where {filled:?} was filled");
        println!("  {} pages, all as they were", verified.pages);
        rows.push(vec![
            name.to_owned(),
            seconds(outcome.total_ms),
            format!("{} ms", outcome.downtime_ms),
            megabytes(outcome.wire),
            format!("{:.2} s", outcome.cost.total()),
        ]);
    }

    let head = ["", "total time", "downtime", "on the wire", "CPU, both ends"];
    println!("\n{}", render(&head, &rows));
    println!("  CPU: everything both QEMUs and both relays used, without the guest's own CPU.");
    println!("  Whole demo: {:.0} s.", begin.elapsed().as_secs_f64());
    Ok(())
}
