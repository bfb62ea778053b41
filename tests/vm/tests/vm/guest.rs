//! Tests of the judge itself: the guest detects one wrong byte, and QEMU alone passes platen's
//! tests.

use anyhow::{ensure, Result};
use vm_tests::{Compression, Method, Patience, Rate};

use crate::stage::{Stage, LOAD};
use crate::Scenario;

pub(crate) fn scenarios() -> Vec<Scenario> {
    vec![
        Scenario::without_platen("guest_finds_one_wrong_bit", one_wrong_bit),
        Scenario::without_platen("qemu_alone_moves_a_dirtying_guest", |stage| {
            qemu_alone(stage, &Method::Qemu)
        }),
        Scenario::without_platen("qemu_alone_moves_a_dirtying_guest_by_multifd", |stage| {
            qemu_alone(stage, &Method::QemuMultifd(2, Compression::Zstd))
        }),
    ]
}

fn one_wrong_bit(stage: &mut Stage) -> Result<()> {
    let mut vm = stage.vm()?;
    vm.guest.verify()?;
    vm.guest.command("corrupt 12345 4095", crate::stage::NOTICE)?;
    let error = match vm.guest.verify() {
        Ok(verified) => anyhow::bail!("a wrong bit was not found: {verified:?}"),
        Err(error) => error.to_string(),
    };
    ensure!(error.contains("pages=1 first: page=12345 offset=4095"), "it says {error}");
    Ok(())
}

/// The same guest, load and checks as for platen's migrations, over a link slow enough for several
/// passes. With 512 MiB of RAM (or any multiple of 256 KiB), QEMU before 9.0 under TCG fails this:
/// the guest arrives with stale pages.
fn qemu_alone(stage: &mut Stage, method: &Method) -> Result<()> {
    stage.lab.net.shape(Rate::Mbit(400))?;
    let mut vm = stage.vm()?;
    vm.guest.dirty(LOAD.0, LOAD.1, LOAD.2)?;
    let (mut vm, _) = method.run(&stage.lab, vm, Patience::Helped)?;
    vm.guest.stop()?;
    let verified = vm.guest.verify()?;
    ensure!(verified.whole > 0 && verified.small > 0, "nothing was dirtied: {verified:?}");
    stage.park(vm);
    Ok(())
}
