//! Saved VMs: a VM of 2 GiB is saved to a file and restored from it, by platen and by each method
//! that its QEMU has. The QEMU is the 10 of `scripts/fetch-qemu 10` if that has run: the system's
//! may be too old for mapped-ram, QEMU's fastest method.

use anyhow::{ensure, Context, Result};
use vm_tests::saved::{Restored, Saved, Way};
use vm_tests::table::{megabytes, render};
use vm_tests::{Lab, Qemu, Vm, VmSpec, MACHINE_10};

/// RAM of the VM.
const MEMORY_MIB: u64 = 2048;
/// Pages in the guest, all different.
const DATA_MIB: u64 = 1024;
/// platen first.
const WAYS: [Way; 4] = [Way::Platen, Way::ExecZstd, Way::MappedRam, Way::MappedRam2];

/// Costs of one way.
struct Run {
    way: Way,
    saved: Saved,
    restored: Restored,
}

/// Saves and restores the VM by each way and prints the table. Returns what platen has gained or
/// lost.
pub(crate) fn run(lab: &Lab) -> Result<String> {
    println!("\n2. A VM of {} GiB, saved and restored", MEMORY_MIB >> 10);
    let mut spec = VmSpec { memory_kib: (MEMORY_MIB << 10) + 8, ..VmSpec::large() };
    if Qemu::Ten.is_there() {
        (spec.qemu, spec.machine) = (Qemu::Ten, MACHINE_10);
    }
    let qemu = if spec.qemu == Qemu::Ten { "QEMU 10" } else { "the system's QEMU" };
    println!("Booting the guest in {qemu} and filling {DATA_MIB} MiB with pages, all different");
    let mut vm = lab.boot(&spec, DATA_MIB)?;
    // QEMU maps pages that the guest has never touched when it first reads them. No way is
    // measured with that.
    let unmeasured = lab.scratch("unmeasured");
    Way::ExecZstd.save(lab, &mut vm, &unmeasured)?;
    vm.monitor.execute("cont", serde_json::json!({}))?;
    std::fs::remove_file(&unmeasured)?;
    let mut runs = Vec::new();
    for way in WAYS {
        if way.is_known(&mut vm)? {
            println!("\n{}: saving it and restoring it", way.name());
            runs.push(one_run(lab, &mut vm, way).with_context(|| way.name())?);
        } else {
            println!("\n{}: this QEMU does not have it", way.name());
        }
    }
    println!("\n{}", table(&runs));
    println!(
        "  runs, answers: from the request to the restored VM running, and to its first answer"
    );
    println!("  on the console. CPU: QEMU and platen, without the guest's own CPU.");
    verdict(&runs)
}

fn one_run(lab: &Lab, vm: &mut Vm, way: Way) -> Result<Run> {
    let file = lab.scratch("saved");
    let saved = way.save(lab, vm, &file)?;
    let destination = lab.incoming_for(vm)?;
    drop(std::mem::replace(vm, destination));
    let restored = way.restore(lab, vm, &file)?;
    println!("  runs after {:.0} ms; the guest checks every byte", restored.runs * 1e3);
    let verified = vm.guest.verify()?;
    println!("  {} pages, all as the guest has written them", verified.pages);
    std::fs::remove_file(&file)?;
    Ok(Run { way, saved, restored })
}

fn table(runs: &[Run]) -> String {
    let rows: Vec<Vec<String>> = runs
        .iter()
        .map(|Run { way, saved, restored }| {
            vec![
                way.name().to_owned(),
                format!("{:.2} s", saved.seconds),
                format!("{:.2} s", saved.cpu),
                megabytes(saved.bytes),
                format!("{:.0} ms", restored.runs * 1e3),
                format!("{:.0} ms", restored.answers * 1e3),
                format!("{:.2} s", restored.cpu),
            ]
        })
        .collect();
    render(&["", "saved in", "CPU", "file", "runs after", "answers after", "CPU"], &rows)
}

/// The gain or loss of platen against the best of QEMU's methods in each figure.
fn verdict(runs: &[Run]) -> Result<String> {
    let least = |of: fn(&Run) -> f64| {
        let qemu = runs.iter().filter(|run| run.way != Way::Platen);
        qemu.map(of).min_by(f64::total_cmp).context("QEMU has a method")
    };
    let ours = runs.first().context("platen's run")?;
    ensure!(ours.way == Way::Platen, "platen's run comes first");
    let ratio = |of: fn(&Run) -> f64| Ok::<f64, anyhow::Error>(of(ours) / least(of)?);
    let answers = ratio(|run| run.restored.answers)?;
    Ok(format!(
        "platen {}: the guest answered after {answers:.2} times the time of QEMU's best way here; \
         the save took {:.2} times the time and {:.2} times the bytes of QEMU's best.",
        if answers <= 1.0 { "gained" } else { "lost" },
        ratio(|run| run.saved.seconds)?,
        ratio(|run| vm_tests::table::to_f64(run.saved.bytes))?,
    ))
}
