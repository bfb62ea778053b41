//! The measurement of the links (W4c).

use crate::harness::{
    assert_same, bounded, destination_qemu, source_qemu, Options, Reader, Receiving, Sending,
};
use crate::identity::single;
use relay::measure_links;
use session::{dial, Hello, SessionError};
use std::time::Duration;

/// The links are measured beside a migration, whose bytes are right.
#[test]
fn links_are_measured_while_a_migration_goes_on() {
    bounded(|| {
        let receiving = Receiving::new();
        let sending = Sending::new(&receiving, receiving.address, Options::default());
        let peer = receiving.address.to_string();
        // On a busy machine a thread may read nothing in the second half of less.
        let time = Duration::from_secs(3);
        let measuring = std::thread::spawn(move || measure_links(&peer, None, 4096, 4, time));
        let streams = single(200);
        let destination = destination_qemu(receiving.qemu(None), &streams, Reader::Prompt);
        let source = source_qemu(sending.path.clone(), streams.clone(), 0);
        assert_same(&destination.join().unwrap().main, &streams.main, "main");
        source.join().unwrap();
        let rate = measuring.join().unwrap().unwrap();
        assert!(rate.goodput > 1e5 && rate.rtt < Duration::from_secs(60), "{rate:?}");
        sending.result().unwrap();
        receiving.result().unwrap();
    });
}

/// Nothing but a number of milliseconds, and not too many.
#[test]
fn a_measurement_without_end_is_refused() {
    bounded(|| {
        let receiving = Receiving::new();
        let peer = receiving.address.to_string();
        for name in ["measure:", "measure:10001", "measure:-1", "measure:1s"] {
            let plain = Hello::of_one_link(4096).unwrap();
            let hello = Hello { name: Some(name.into()), again: true, ..plain };
            let error = dial(&peer, None, &hello).unwrap_err();
            let SessionError::Refused { reason, .. } = error else { panic!("{error}") };
            assert!(reason.contains("10000"), "{reason}");
        }
    });
}
