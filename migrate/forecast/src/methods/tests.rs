use super::*;
use crate::best::Work;
use crate::curve::{DirtyCurve, Pass};

/// Half a GB of data that zstd 1 halves, written to at `rate`.
fn setup(rate: f64) -> Setup {
    let set = 50e6;
    let pass = |t: f64| Pass { seconds: t, bytes: set * (1.0 - (-rate * t / set).exp()) };
    let curve = DirtyCurve::new(&[0.05, 0.2, 0.5, 1.0, 3.0, 8.0].map(pass), 1e9);
    let guest = Guest {
        ram: 1e9,
        data: 0.5e9,
        source: 1e9,
        zeros: 0.1,
        zeros_cpu: [0.0; 2],
        data_share: 1.0,
        curve,
    };
    let of = |settings: codec::Settings| {
        let encoded = if settings.level() == 0 { 1000 } else { 500 };
        Candidate { pages: 1000, encoded, cpu_ns: 2000, ..Candidate::new(settings) }
    };
    let first = Sizes(controller::Config::candidates().into_iter().map(of).collect());
    let sampled = Sampled { first: first.clone(), again: first, again_whole: None };
    let work = Work { page: 0.4, wire: 0.0 };
    Setup {
        guest,
        sampled,
        cores: Cores { workers: 2.0, free: 2.0, work, there: None },
        qemu_cores: Cores { workers: 2.0, free: 2.0, work: Work::default(), there: None },
        device: None,
        qemu: QemuSettings { version: (7, 2), max_bandwidth: None, channels: 2.0 },
        max_downtime: Duration::from_millis(300),
        postcopy: true,
    }
}

fn link(mbit: u64) -> Link {
    Link::of_rate(mbit * 125_000, Duration::ZERO)
}

#[test]
fn a_link_that_carries_the_writes_compressed_converges_with_compression_only() {
    // 20 MB/s, over 12.5 MB/s.
    let setup = setup(20e6);
    let (platen, why) = setup.forecast(Method::Platen, link(100));
    assert_eq!((platen.end, why), (End::Completes, None));
    assert!(platen.downtime < 0.3, "{platen:?}");
    assert_eq!(setup.forecast(Method::QemuZstd, link(100)).0.end, End::Completes);
    let (qemu, why) = setup.forecast(Method::Qemu, link(100));
    assert!(matches!(qemu.end, End::Never { .. }), "{qemu:?}");
    let text = why.unwrap().to_string();
    for words in ["dirties", "drain", "300 ms are allowed", "--max-downtime", "a link of"] {
        assert!(text.contains(words), "{text}");
    }
}

/// Each remedy makes the migration converge in the same model.
#[test]
fn a_remedy_helps() {
    let setup = setup(100e6);
    let (_, why) = setup.forecast(Method::Platen, link(50));
    let mut seen = 0;
    for remedy in why.unwrap().would {
        seen += 1;
        let (changed, over) = match remedy {
            Remedy::Downtime(max_downtime) => (Setup { max_downtime, ..setup.clone() }, link(50)),
            Remedy::Throttle(percent) => {
                (Setup { guest: setup.guest.slowed(percent), ..setup.clone() }, link(50))
            }
            Remedy::Link(rate) => (setup.clone(), Link::of_rate(to_u64(rate) + 1, Duration::ZERO)),
            _ => continue,
        };
        let (ends, _) = changed.forecast(Method::Platen, over);
        assert_eq!(ends.end, End::Completes, "{remedy:?}");
    }
    assert_eq!(seen, 4);
}

#[test]
fn qemus_limits_count() {
    let limited = |version, max_bandwidth| {
        let mut setup = setup(0.0);
        setup.qemu = QemuSettings { version, max_bandwidth, channels: 8.0 };
        setup.forecast(Method::QemuZstd, link(10_000)).0.seconds
    };
    // 0.5 GB at 50 MB/s; QEMU 8.1 counts the half of them.
    assert!((limited((7, 2), Some(50e6)) - 10.3).abs() < 0.1);
    assert!((limited((10, 0), Some(50e6)) - 5.3).abs() < 0.1);
    assert!(limited((7, 2), None) < 1.8);
}

#[test]
fn a_named_codec_has_its_own_size_and_a_device_its_own_rate() {
    let mut setup = setup(0.0);
    let qatzip = Settings::new(Codec::DeflateQz, None).unwrap();
    let of = Candidate { pages: 1000, encoded: 250, cpu_ns: 200, ..Candidate::new(qatzip) };
    setup.sampled.first.0.push(of);
    let bytes = |setup: &Setup, method| setup.forecast(method, link(1000)).0.bytes;
    let none = Settings::new(Codec::Raw, None).unwrap();
    assert!(bytes(&setup, Method::PlatenWith(none)) > 0.5e9);
    let small = bytes(&setup, Method::PlatenWith(qatzip));
    assert!((0.125e9..0.14e9).contains(&small), "{small}");
    // `--codec auto` never uses it.
    assert!(bytes(&setup, Method::Platen) > 0.25e9);
    // 0.5 GB at 50 MB/s.
    setup.device = Some(50e6);
    let slow = setup.forecast(Method::PlatenWith(qatzip), link(1000)).0.seconds;
    assert!((slow - 10.3).abs() < 0.2, "{slow}");
}
