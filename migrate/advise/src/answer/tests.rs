//! Answers for machines whose figures are given.

use super::*;

/// Pages that zstd 1 makes 2.6 times smaller at 2.4 ns a byte.
fn sampled() -> Sampled {
    let of = |codec, level, encoded, cpu_ns, decode_ns| {
        let settings = Settings::new(codec, level).unwrap();
        Candidate { settings, pages: 100_000, encoded, cpu_ns, decode_ns }
    };
    let first = vec![
        of(Codec::Raw, None, 100_000, 0, 1_000),
        of(Codec::Lz4, None, 52_000, 150_000, 40_000),
        of(Codec::Zstd, Some(1), 38_000, 240_000, 90_000),
        of(Codec::Zstd, Some(9), 35_000, 1_500_000, 80_000),
        of(Codec::Zlib, Some(1), 38_500, 360_000, 150_000),
        of(Codec::DeflateQz, Some(1), 38_600, 370_000, 150_000),
    ];
    Sampled { first: forecast::Sizes(first), ..Sampled::default() }
}

/// 64 GB of RAM with 54 GB of data, 16 cores at each end.
fn figures() -> Figures {
    Figures {
        ram: 64e9,
        data: Some(54e9),
        passes: Vec::new(),
        unseen: 0.0,
        sampled: sampled(),
        reference: 2.4,
        first_touch: 0.0,
        cores: 16.0,
        free: 16.0,
        there: Destination::Cores(16.0),
        qat: 0,
        qemu: QemuSettings { version: (9, 1), max_bandwidth: None, channels: 8.0 },
        compressors: Vec::new(),
        max_downtime: Duration::from_millis(300),
        postcopy: true,
    }
}

fn link(mbit: u64) -> Link {
    Link::of_rate(mbit * 125_000, Duration::ZERO)
}

fn of(answer: &Answer, method: Method) -> &Alternative {
    answer.alternatives.iter().find(|one| one.method == method).unwrap()
}

fn chosen(answer: &Answer) -> Method {
    answer.alternatives[answer.choice.unwrap()].method
}

#[test]
fn a_slow_link_is_worth_compression_and_a_fast_one_with_few_cores_is_not() {
    let slow = figures().answer(link(1000));
    assert_eq!(chosen(&slow), Method::Platen, "{}", slow.because);
    // 54 GB at 1 Gbit/s, uncompressed.
    let qemu = of(&slow, Method::Qemu).forecast.seconds;
    assert!((430.0..480.0).contains(&qemu), "{qemu}");
    let few = Figures { cores: 2.0, free: 2.0, there: Destination::Here, ..figures() };
    let fast = few.answer(link(10_000));
    assert_eq!(chosen(&fast), Method::Qemu, "{}", fast.because);
}

#[test]
fn a_guest_that_writes_more_than_drains_is_told_with_figures() {
    let passes = [1.0, 5.0].map(|seconds| Pass { seconds, bytes: 500e6 * seconds }).to_vec();
    let busy = Figures { passes, ..figures() };
    let answer = busy.answer(link(1000));
    assert_eq!(answer.choice, None);
    for one in &answer.alternatives {
        assert_eq!(one.verdict, Verdict::Never, "{:?}", one.method);
        let why = one.why.as_ref().unwrap();
        assert!(why.contains("dirties") && why.contains("drain"), "{why}");
    }
}

/// Between those that converge and those that do not lie some of which the model does not say
/// either.
#[test]
fn what_is_close_is_uncertain() {
    let with = |rate: f64| {
        let passes = [1.0, 5.0].map(|seconds| Pass { seconds, bytes: rate * seconds }).to_vec();
        let answer = Figures { passes, ..figures() }.answer(link(1000));
        of(&answer, Method::Qemu).verdict
    };
    assert_eq!(with(20e6), Verdict::Converges);
    assert_eq!(with(118e6), Verdict::Uncertain);
    assert_eq!(with(400e6), Verdict::Never);
}

/// QEMU reports whole MiB a second, rounded down. The link carries a quarter of a MB/s.
#[test]
fn a_rate_of_writes_that_is_rounded_to_zero_is_no_promise() {
    let passes = [0.2, 1.0, 5.0].map(|seconds| Pass { seconds, bytes: 0.0 }).to_vec();
    let idle = Figures { passes, ram: 64e6, data: Some(64e6), ..figures() };
    let measured = Figures { unseen: 1_048_576.0, ..idle.clone() };
    let answer = measured.answer(link(2));
    let qemu = of(&answer, Method::Qemu);
    assert_eq!(qemu.verdict, Verdict::Uncertain);
    let why = qemu.why.as_deref().unwrap();
    assert!(why.contains("1.0 MB/s of writes, which QEMU reports as 0"), "{why}");
    assert_eq!(of(&measured.answer(link(1000)), Method::Qemu).verdict, Verdict::Converges);
    // An idle guest that was given, not measured.
    assert_eq!(of(&idle.answer(link(2)), Method::Qemu).verdict, Verdict::Converges);
}

#[test]
fn a_device_saves_cpu_time_and_is_listed_only_where_there_is_one() {
    let qatzip = Method::PlatenWith(Settings::new(Codec::DeflateQz, None).unwrap());
    let none = figures().answer(link(10_000));
    assert!(none.alternatives.iter().all(|one| one.method != qatzip));
    let with = Figures { qat: 4, ..figures() }.answer(link(10_000));
    let (device, zstd) = (of(&with, qatzip), of(&with, Method::PlatenWith(Settings::default())));
    assert!(device.forecast.cpu < zstd.forecast.cpu / 2.0, "{device:?} {zstd:?}");
}

#[test]
fn a_qemu_without_zstd_is_not_offered_zstd() {
    let plain = Figures { compressors: vec!["none".into(), "zlib".into()], ..figures() };
    let methods = plain.methods();
    assert!(methods.contains(&Method::QemuZlib) && !methods.contains(&Method::QemuZstd));
}

/// A destination that must first be given each page by its host.
#[test]
fn the_first_touch_of_memory_counts_at_the_destination() {
    let few = Figures { cores: 2.0, free: 2.0, there: Destination::Here, ..figures() };
    let slow = Figures { first_touch: 2.4, ..few.clone() };
    let [few, slow] = [few, slow].map(|one| one.answer(link(10_000)));
    let [few, slow] = [&few, &slow].map(|answer| of(answer, Method::Qemu).forecast);
    assert!(slow.seconds > 1.5 * few.seconds && slow.cpu_there > few.cpu_there + 100.0);
    assert!((slow.cpu - few.cpu).abs() < 1e-6);
}

/// Figures that no machine has are no reason to panic.
#[test]
fn odd_figures_give_an_answer() {
    for odd in [0.0, 1e-9, 1e18] {
        let figures = Figures {
            ram: odd,
            data: None,
            free: odd.max(0.05),
            reference: odd,
            first_touch: odd,
            sampled: Sampled::default(),
            passes: vec![Pass { seconds: odd, bytes: odd }],
            ..figures()
        };
        figures.answer(Link { goodput: odd.max(1.0), rtt: Duration::ZERO });
    }
}

/// The machine of docs/figures.md: two cores for both ends, a guest of 1200 MiB with 839 MB of
/// pages that zstd 1 makes 2.6 times smaller, at 2.6 ns a byte.
fn documented() -> Figures {
    let of = |codec, level, encoded, cpu_ns, decode_ns| {
        let settings = Settings::new(codec, level).unwrap();
        Candidate { settings, pages: 100_000, encoded, cpu_ns, decode_ns }
    };
    let first = vec![
        of(Codec::Raw, None, 100_000, 15_000, 30_000),
        of(Codec::Lz4, None, 52_000, 175_000, 75_000),
        of(Codec::Zstd, Some(-3), 49_000, 200_000, 85_000),
        of(Codec::Zstd, Some(1), 38_500, 260_000, 112_000),
        of(Codec::Zstd, Some(3), 37_500, 400_000, 110_000),
        of(Codec::Zstd, Some(9), 36_500, 1_800_000, 105_000),
    ];
    Figures {
        ram: 1258e6,
        data: Some(839e6),
        sampled: Sampled { first: forecast::Sizes(first), ..Sampled::default() },
        reference: 2.6,
        cores: 2.0,
        free: 1.95,
        there: Destination::Here,
        qemu: QemuSettings { version: (7, 2), max_bandwidth: None, channels: 2.0 },
        ..figures()
    }
}

/// The times that docs/figures.md has for that machine, each measured five times.
#[test]
fn forecasts_agree_with_the_documented_figures() {
    let zstd = Method::PlatenWith(Settings::default());
    // Mbit/s (0: as fast as this machine's own network), method, seconds, and by how much the
    // forecast may be off.
    let measured = [
        (1000, Method::Qemu, 7.59, 0.11),
        (1000, Method::QemuZstd, 3.05, 0.11),
        (1000, zstd, 3.05, 0.11),
        (1000, Method::Platen, 3.20, 0.11),
        (2500, Method::Qemu, 3.19, 0.11),
        (2500, Method::Platen, 2.20, 0.11),
        (5000, Method::Qemu, 1.73, 0.11),
        (5000, Method::Platen, 1.67, 0.11),
        (10_000, Method::Qemu, 1.02, 0.11),
        (10_000, Method::Platen, 1.31, 0.11),
        // Without a shaper a byte on the network costs less CPU time.
        (0, Method::Qemu, 0.69, 0.30),
        (0, Method::QemuZstd, 2.58, 0.11),
        (0, Method::Platen, 1.04, 0.30),
    ];
    let mut wrong = Vec::new();
    for (mbit, method, seconds, within) in measured {
        let answer = documented().answer(link(if mbit == 0 { 40_000 } else { mbit }));
        let forecast = of(&answer, method).forecast.seconds;
        println!("{mbit} {} {seconds} {forecast:.2} {:.2}", method.name(), forecast / seconds);
        if (forecast / seconds - 1.0).abs() > within {
            wrong.push(format!("{mbit} {}: {seconds} {forecast:.2}", method.name()));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// An empty guest costs CPU time, too: QEMU reads its zeros at both ends.
#[test]
fn zeros_cost_cpu_time_at_both_ends() {
    let empty = Figures { data: Some(0.0), ..figures() };
    let answer = empty.answer(link(10_000));
    let qemu = of(&answer, Method::Qemu).forecast;
    // 64 GB at 4 GB a second.
    assert!((qemu.cpu - 64.0 / 4.0 / 2.6 * 2.4).abs() < 0.5, "{qemu:?}");
    assert!((qemu.cpu_there - 64.0 * 0.25 / 2.6 * 2.4).abs() < 0.5, "{qemu:?}");
}
