//! The link is lost, slows down, delays, reorders and cuts: QEMU sees a pause and never an error,
//! and the VM arrives intact.

use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use serde_json::Value;
use vm_tests::platen::{self, Platen};
use vm_tests::table::to_f64;
use vm_tests::{Habits, Rate, Signal, Vm, WildLink};

use crate::stage::{
    destination_ends, names_the_cause, source_goes_on, then_moves, wait_crossed, HalfWay, Stage,
    CREEP, HALF_WAY, LOAD, NOTICE, PACE, STAYS,
};
use crate::Scenario;

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut all = Vec::new();
    for seconds in [1, 5, 20] {
        for channels in ["0", "2"] {
            all.push(Scenario::new(
                format!("survives_a_link_cut_of_{seconds}_s_{channels}_channels"),
                move |stage| link_cut(stage, seconds, channels),
            ));
        }
    }
    all.push(Scenario::new("a_link_cut_of_5_s_costs_little_more", what_a_cut_costs));
    for channels in ["0", "2"] {
        all.push(Scenario::new(
            format!("survives_delays_reordering_and_cuts_{channels}_channels"),
            move |stage| wild(stage, channels),
        ));
    }
    all.push(Scenario::new("survives_a_link_of_changing_speed", changing_speed));
    for (name, channels) in [("deltas", "0"), ("multifd_deltas", "2")] {
        all.push(Scenario::new(
            format!("moves_with_{name}_over_a_link_that_is_cut"),
            move |stage| deltas(stage, channels),
        ));
    }
    all.push(Scenario::new("moves_with_histories_over_a_link_that_is_cut", histories));
    all.push(Scenario::new("cancelled_while_the_link_is_away", cancelled_meanwhile));
    all
}

const LIMIT: Duration = Duration::from_secs(400);
/// Longer than any cut here.
const RESUME: [&str; 2] = ["--resume-timeout", "90"];
/// For a receiver whose source will not come back.
const BRIEF: [&str; 2] = ["--resume-timeout", "8"];

/// A migration half way over a slow link, with relays that wait long enough; the receiver waits as
/// `waits` says.
fn half_way(stage: &mut Stage, channels: &str, waits: [&str; 2]) -> Result<HalfWay> {
    let mut vm = stage.vm()?;
    stage.lab.net.shape(Rate::Mbit(100))?;
    let destination = stage.lab.incoming_for(&vm)?;
    let receive = platen::receive(&stage.lab, &destination, &waits)?;
    vm.guest.dirty(LOAD.0, LOAD.1, LOAD.2)?;
    let crossed = stage.lab.net.crossed()?;
    let flags = [&["--channels", channels], &RESUME[..]].concat();
    vm.is_reluctant()?;
    let mut migrate = platen::migrate(&stage.lab, &vm, receive.peer, &flags)?;
    vm.wait_active(&mut migrate.process)?;
    vm.hold_migration(PACE)?;
    wait_crossed(&stage.lab, crossed + HALF_WAY, &mut migrate)?;
    stage.lab.net.shape(STAYS)?;
    Ok(HalfWay { vm, destination, receive, migrate })
}

/// Waits for success and verifies the VM, which is dirtying its memory if `busy`.
fn arrives(stage: &mut Stage, half_way: HalfWay, busy: bool) -> Result<Value> {
    let HalfWay { mut vm, mut destination, mut receive, mut migrate } = half_way;
    vm.let_migrate()?;
    migrate.arrive(&mut vm, LIMIT).with_context(|| receive.platen.process.tail())?;
    receive.platen.succeed(NOTICE)?;
    drop(vm);
    destination.assert_running()?;
    if busy {
        destination.guest.stop()?;
    }
    destination.guest.verify()?;
    let report = migrate.report()?;
    ensure!(report["status"] == "completed", "{report}");
    stage.park(destination);
    Ok(report)
}

fn number(report: &Value, key: &str) -> Result<f64> {
    report[key].as_f64().with_context(|| format!("no {key} in {report}"))
}

/// A cut of this many seconds is noticed by a relay before TCP repairs it.
const NOTICED: u64 = 5;

/// Takes the link down for `seconds`, and until that has been noticed if they are [`NOTICED`] or
/// more; returns how long that was, and how long after the link's return bytes crossed it again.
fn cut(stage: &Stage, seconds: u64, mover: &mut Platen) -> Result<[Duration; 2]> {
    let gone = Instant::now();
    stage.lab.net.set_up(false)?;
    std::thread::sleep(Duration::from_secs(seconds));
    if seconds >= NOTICED {
        mover.process.wait_for_output("waiting up to", NOTICE)?;
    }
    let crossed = stage.lab.net.crossed()?;
    stage.lab.net.set_up(true)?;
    let back = Instant::now();
    wait_crossed(&stage.lab, crossed + (1 << 20), mover)?;
    Ok([back - gone, back.elapsed()])
}

fn link_cut(stage: &mut Stage, seconds: u64, channels: &str) -> Result<()> {
    let mut half_way = half_way(stage, channels, RESUME)?;
    let [_, back] = cut(stage, seconds, &mut half_way.migrate)?;
    let status = half_way.vm.monitor.migration_status()?;
    ensure!(status == "active", "after the cut the migration is {status}");
    println!("  a megabyte had crossed {:.2} s after the link was back", back.as_secs_f64());
    stage.lab.net.shape(Rate::Unlimited)?;
    let report = arrives(stage, half_way, true)?;
    let (resumes, lost) = (number(&report, "resumes")?, number(&report, "seconds-lost")?);
    println!("  resumes {resumes}, seconds-lost {lost:.2}");
    // A cut of a second may go unnoticed: TCP repairs it. Or a relay resumes because the other one
    // got no CPU for seconds: that end has lost little time.
    let noticed = resumes >= 1.0 && lost > 0.5;
    ensure!(noticed || seconds < NOTICED, "{resumes} resumes in {lost} s: {report}");
    Ok(())
}

/// Waits until QEMU has started pass `wanted` over its memory; returns the number of the current
/// pass.
fn wait_passes(vm: &mut Vm, mover: &mut Platen, wanted: u64) -> Result<u64> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let stats = vm.monitor.query_migrate()?;
        let pass = stats["ram"]["dirty-sync-count"].as_u64().unwrap_or(0);
        if pass >= wanted {
            return Ok(pass);
        }
        let ended = mover.process.poll()?;
        ensure!(ended.is_none(), "it ended in pass {pass} of {wanted}; {}", mover.process.tail());
        ensure!(Instant::now() < deadline, "in pass {pass} of {wanted} after {LIMIT:?}: {stats}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Pages sent again, as differences from the versions sent before and after the cut.
fn deltas(stage: &mut Stage, channels: &str) -> Result<()> {
    // Always, not only while it pays: this machine's speed does not matter here.
    let flags = ["--codec", "lz4", "--delta-cache", "128M", "--channels", channels];
    let report = over_a_cut_link(stage, &flags, &[])?;
    let pages =
        report["delta"]["pages"].as_f64().with_context(|| format!("no deltas in {report}"))?;
    println!("  {pages} pages went as differences");
    ensure!(pages > 100.0, "only {pages}: {report}");
    Ok(())
}

fn histories(stage: &mut Stage) -> Result<()> {
    let source = ["--codec", "zstd", "--level", "6", "--history", "32M", "--delta-cache", "64M"];
    let report = over_a_cut_link(stage, &source, &["--history", "32M"])?;
    let chunks = number(&report, "history-chunks")?;
    println!("  {chunks} chunks had references to chunks before them");
    ensure!(chunks > 100.0, "only {chunks}: {report}");
    Ok(())
}

/// MiB that the guest rewrites where passes over its memory are counted: each pass takes some
/// seconds at [`CREEP`], in which a guest that gets a tenth of a CPU rewrites most of them. At
/// [`PACE`] the passes of such a guest become shorter and shorter until there is none left to send.
const REWRITTEN: u64 = 8;

/// A VM that writes arrives with these flags of both ends, although the link is cut in the middle
/// and much of its memory is sent again.
fn over_a_cut_link(stage: &mut Stage, source: &[&str], receiver: &[&str]) -> Result<Value> {
    let mut vm = stage.vm()?;
    stage.lab.net.shape(Rate::Mbit(100))?;
    let destination = stage.lab.incoming_for(&vm)?;
    let receive = platen::receive(&stage.lab, &destination, &[receiver, &RESUME].concat())?;
    vm.guest.dirty(LOAD.0, LOAD.1, REWRITTEN)?;
    vm.is_reluctant()?;
    let flags = [source, &RESUME].concat();
    let mut migrate = platen::migrate(&stage.lab, &vm, receive.peer, &flags)?;
    vm.wait_active(&mut migrate.process)?;
    vm.hold_migration(PACE)?;
    wait_passes(&mut vm, &mut migrate, 2)?;
    vm.hold_migration(CREEP)?;
    // A second pass over its memory is complete, which is what is sent again.
    let passes = wait_passes(&mut vm, &mut migrate, 3)?;
    let mut half_way = HalfWay { vm, destination, receive, migrate };
    cut(stage, NOTICED, &mut half_way.migrate)?;
    wait_passes(&mut half_way.vm, &mut half_way.migrate, passes + 2)?;
    stage.lab.net.shape(Rate::Unlimited)?;
    arrives(stage, half_way, true)
}

/// The same idle VM over the same slow link, without a cut and with one.
fn what_a_cut_costs(stage: &mut Stage) -> Result<()> {
    // With a codec whose output does not depend on the machine's speed.
    let flags = [&["--codec", "zstd"], &RESUME[..]].concat();
    let (mut sent, mut gone, mut lost) = ([0.0; 2], Duration::ZERO, 0.0);
    for (with, sent) in [false, true].into_iter().zip(&mut sent) {
        let vm = stage.vm()?;
        // So slow that the cut is in the middle, however late this process makes it.
        stage.lab.net.shape(Rate::Mbit(10))?;
        let destination = stage.lab.incoming_for(&vm)?;
        let receive = platen::receive(&stage.lab, &destination, &RESUME)?;
        let crossed = stage.lab.net.crossed()?;
        let mut migrate = platen::migrate(&stage.lab, &vm, receive.peer, &flags)?;
        wait_crossed(&stage.lab, crossed + HALF_WAY, &mut migrate)?;
        if with {
            [gone, _] = cut(stage, NOTICED, &mut migrate)?;
        }
        stage.lab.net.shape(Rate::Mbit(100))?;
        let report = arrives(stage, HalfWay { vm, destination, receive, migrate }, false)?;
        *sent = number(&report, "transferred")?;
        lost = number(&report, "seconds-lost")?;
        println!("  {:.2} s in all", number(&report, "total-time")? / 1e3);
    }
    // The cost of a cut is the data sent twice, and the time until the link is used again. On a
    // machine that is slow just now the rest takes longer with and without a cut.
    let [more, longer] = [sent[1] - sent[0], lost - gone.as_secs_f64()];
    println!("  {more} bytes more, {lost:.2} s lost to a cut of {:.2} s", gone.as_secs_f64());
    ensure!(more < to_f64(HALF_WAY) / 2.0, "{more} bytes more: it began anew");
    // The goal is 1 s.
    ensure!(longer < 10.0, "nothing moved for {longer:.2} s after the link was back");
    Ok(())
}

/// The least bytes of such a VM on the link are [`HALF_WAY`] and more.
const WILD_CUTS: u64 = HALF_WAY / 3;

fn wild(stage: &mut Stage, channels: &str) -> Result<()> {
    let mut vm = stage.vm()?;
    let destination = stage.lab.incoming_for(&vm)?;
    let receive = platen::receive(&stage.lab, &destination, &RESUME)?;
    // However well a machine compresses, three times as much and more crosses the link.
    let habits = Habits { delay: 5, jitter: 30, stall_every: 150, cut_every: WILD_CUTS };
    let link = WildLink::start(&stage.lab.net, vm.side(), receive.peer, habits)?;
    vm.guest.dirty(LOAD.0 / 4, LOAD.1, LOAD.2 / 4)?;
    let name = receive.peer.ip().to_string();
    let flags = [&["--channels", channels, "--peer-name", &name], &RESUME[..]].concat();
    let migrate = platen::migrate(&stage.lab, &vm, link.address, &flags)?;
    arrives(stage, HalfWay { vm, destination, receive, migrate }, true)?;
    println!("  {} connections were cut", link.cuts());
    ensure!(link.cuts() > 2, "only {} connections were cut", link.cuts());
    Ok(())
}

fn changing_speed(stage: &mut Stage) -> Result<()> {
    let mut half_way = half_way(stage, "0", RESUME)?;
    // By bytes and not by time: together they are less than the rest.
    for (mbit, kib) in [(10, 1024), (200, 3072), (3, 256), (100, 1024)] {
        let crossed = stage.lab.net.crossed()?;
        stage.lab.net.shape(Rate::Mbit(mbit))?;
        wait_crossed(&stage.lab, crossed + (kib << 10), &mut half_way.migrate)?;
    }
    stage.lab.net.shape(STAYS)?;
    let status = half_way.vm.monitor.migration_status()?;
    ensure!(status == "active", "the migration is {status}");
    stage.lab.net.shape(Rate::Unlimited)?;
    arrives(stage, half_way, true).map(drop)
}

/// Ctrl-C during an outage: the source resumes at once; the receiver gives up after its timeout, or
/// when it is asked.
fn cancelled_meanwhile(stage: &mut Stage) -> Result<()> {
    let HalfWay { mut vm, mut destination, mut receive, mut migrate } =
        half_way(stage, "0", BRIEF)?;
    stage.lab.net.set_up(false)?;
    migrate.process.wait_for_output("waiting up to", NOTICE)?;
    migrate.process.signal(Signal::INT)?;
    // See `cancel`: QEMU may report it as failed.
    source_goes_on(&mut vm, &["cancelled", "failed"])?;
    let ended = migrate.process.wait(NOTICE)?;
    ensure!(!ended.status.success() && ended.killed_by().is_none(), "{}", ended.status);
    names_the_cause(&migrate.complaints(), &["cancel"])?;
    stage.lab.net.set_up(true)?;
    let said = receive.platen.fail(NOTICE)?;
    names_the_cause(&said, &["link", "source", "peer", "network"])?;
    destination_ends(&mut destination)?;
    then_moves(stage, vm)
}
