//! A made link, and random lists of operations.

use super::*;
use proptest::prelude::*;

/// Runs until nothing is left: each VM has 100 MB; the link carries `link` bytes per second, and
/// one relay at most `relay`. Returns the most at once.
fn run(count: usize, link: u64, relay: u64) -> usize {
    let mut schedule = Schedule::new(count, AtOnce::Auto);
    let mut sent = vec![0; count];
    let mut running = Vec::new();
    for tick in 0..1_000_000 {
        let now = Duration::from_millis(tick * 250);
        while let Some(vm) = schedule.next(now) {
            running.push(vm);
        }
        let share = relay.min(link / running.len().max(1) as u64) / 4;
        for vm in std::mem::take(&mut running) {
            sent[vm] += share;
            schedule.tells(vm, Sample { bytes: sent[vm], in_doubt: false }, now);
            match sent[vm] {
                100_000_000.. => schedule.ended(vm, now),
                _ => running.push(vm),
            }
        }
        if schedule.is_over() {
            return schedule.most();
        }
    }
    panic!("it does not end");
}

#[test]
fn others_join_only_while_the_link_has_room() {
    // One fills the link: the second is the one that shows it.
    assert_eq!(run(6, 1_000_000, 1_000_000), 2);
    // Three fill it.
    assert_eq!(run(8, 3_000_000, 1_000_000), 4);
    assert_eq!(run(40, 1_000_000_000, 500_000), MOST);
}

#[test]
fn a_vm_in_doubt_that_is_silent_keeps_no_other_from_starting() {
    let second = Duration::from_secs;
    let mut schedule = Schedule::new(2, AtOnce::Fixed(1));
    assert_eq!(schedule.next(second(0)), Some(0));
    schedule.tells(0, Sample { bytes: 50 << 20, in_doubt: false }, second(1));
    schedule.tells(0, Sample { bytes: 51 << 20, in_doubt: true }, second(2));
    assert_eq!(schedule.next(second(10)), None);
    // Heartbeats.
    schedule.tells(0, Sample { bytes: (51 << 20) + 900, in_doubt: true }, second(10));
    assert!(!schedule.waits_in_doubt(0, second(11)) && schedule.waits_in_doubt(0, second(12)));
    assert_eq!(schedule.next(second(12)), Some(1));
    assert!(!schedule.waits_in_doubt(1, second(30)), "it is not in doubt");
    schedule.ended(1, second(13));
    assert!(!schedule.is_over());
    schedule.ended(0, second(14));
    assert!(schedule.is_over());
}

#[test]
fn a_silent_vm_that_is_not_in_doubt_counts() {
    let mut schedule = Schedule::new(2, AtOnce::Fixed(1));
    assert_eq!(schedule.next(Duration::ZERO), Some(0));
    schedule.tells(0, Sample::default(), Duration::from_secs(1));
    assert_eq!(schedule.next(Duration::from_secs(500)), None);
}

#[derive(Clone, Debug)]
enum Op {
    Pass(u64),
    /// Of the nth that runs.
    Tell(usize, u64, bool),
    End(usize),
    Interrupt,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0..20_000_u64).prop_map(Op::Pass),
        4 => (0..9_usize, any::<u64>(), any::<bool>())
            .prop_map(|(nth, bytes, in_doubt)| Op::Tell(nth, bytes >> 20, in_doubt)),
        3 => (0..9_usize).prop_map(Op::End),
        1 => Just(Op::Interrupt),
    ]
}

proptest! {
    /// Whatever the migrations tell and however they end: each VM is started once or reported
    /// as not started, in order, and no more than allowed move at once.
    #[test]
    fn each_vm_starts_once_or_never(
        count in 1..12_usize,
        fixed in prop::option::of(1..5_usize),
        ops in prop::collection::vec(op(), 0..120),
    ) {
        let at_once = fixed.map_or(AtOnce::Auto, AtOnce::Fixed);
        let mut schedule = Schedule::new(count, at_once);
        let mut now = Duration::ZERO;
        let (mut running, mut ended, mut never) = (Vec::new(), Vec::new(), Vec::new());
        let mut started = 0;
        let ends = std::iter::repeat_n(Op::End(0), 2 * count);
        for op in ops.into_iter().chain(ends) {
            while let Some(vm) = schedule.next(now) {
                prop_assert_eq!(vm, started);
                prop_assert!(never.is_empty(), "started after the interrupt");
                started += 1;
                running.push(vm);
                let moving =
                    schedule.running.iter().filter(|one| one.is_moving(now)).count();
                prop_assert!(moving <= fixed.unwrap_or(MOST));
            }
            prop_assert!(!running.is_empty() || schedule.is_over(), "nothing runs, some wait");
            match op {
                Op::Pass(millis) => now += Duration::from_millis(millis),
                Op::Tell(nth, bytes, in_doubt) if nth < running.len() => {
                    schedule.tells(running[nth], Sample { bytes, in_doubt }, now);
                }
                Op::End(nth) if nth < running.len() => {
                    let vm = running.remove(nth);
                    schedule.ended(vm, now);
                    ended.push(vm);
                }
                Op::Interrupt => never.extend(schedule.interrupt()),
                _ => {}
            }
        }
        prop_assert!(schedule.is_over());
        ended.extend(never);
        ended.sort_unstable();
        prop_assert_eq!(ended, (0..count).collect::<Vec<_>>());
    }
}
