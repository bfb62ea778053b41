//! Codec qpl: the units are those of codec zlib, whatever becomes of the library.

use crate::fake_qpl::{fake, Fake, Fault, INTERNAL};
use crate::harness::{
    assert_same, bounded, config, destination_qemu, pages, read_rest, source_qemu, Options, Reader,
    Receiving, Sending, Streams, PAGE,
};
use qpl::{Options as QplOptions, Qpl, Snapshot};
use relay::Source;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Duration;
use stream::synth::{main_stream, Style};

/// Sends by a library whose jobs have these faults. Job 0 is the known unit at the beginning.
fn sending(to: &Receiving, faults: &[(u32, Fault)], verify_every: u32) -> Sending {
    let library = fake();
    library.state.faults.lock().unwrap().extend(faults.iter().copied());
    let options = QplOptions { deadline: Duration::from_secs(300), verify_every };
    let qpl = Some(Qpl::open(Arc::new(library), options).unwrap());
    Sending::new(to, to.address, Options { qpl, ..Options::default() })
}

#[test]
fn every_byte_arrives_whatever_the_library_does() {
    bounded(|| {
        let main = main_stream(Style::Qemu92, PAGE, pages(4000, 7));
        let streams = Streams { main, channels: Vec::new() };
        let failing = [3, 4, 9].map(|at| (at, Fault::EndsWith(INTERNAL)));
        for (faults, failures) in [(&[][..], 0), (&failing, 3), (&[(3, Fault::Flips)], 1)] {
            let receiving = Receiving::new();
            let destination = destination_qemu(receiving.qemu(None), &streams, Reader::Prompt);
            let sending = sending(&receiving, faults, 1);
            let source = source_qemu(sending.path.clone(), streams.clone(), 0);
            assert_same(&destination.join().unwrap().main, &streams.main, "main");
            source.join().unwrap();
            let seen = sending.qpl();
            let sum = |of: fn(&Snapshot) -> u64| seen.iter().map(of).sum::<u64>();
            assert_eq!((seen.len(), sum(|one| one.failures)), (2, failures), "{seen:?}");
            assert!(sum(|one| one.units) > 4, "{seen:?}");
            sending.result().unwrap();
            receiving.result().unwrap();
        }
    });
}

/// With `--accelerator iaa` libdeflate must not take the device's place.
#[test]
fn a_required_library_without_jobs_for_the_threads_is_refused_before_the_migration() {
    bounded(|| {
        let library = Fake { hardware: Ok(8192), ..fake() };
        let state = Arc::clone(&library.state);
        let qpl = Qpl::open(Arc::new(library), QplOptions::default()).unwrap().require();
        state.no_more_jobs.store(true, Ordering::SeqCst);
        let receiving = Receiving::new();
        let options = Options { qpl: Some(qpl), ..Options::default() };
        let connected = Source::connect(&config(receiving.address, options));
        let Err(error) = connected else { panic!("it is not refused") };
        let error = error.to_string();
        assert!(error.contains("no job of the hardware path"), "{error}");
    });
}

/// A wrong stream that nobody verifies at the source costs the migration, and no byte.
#[test]
fn a_wrong_stream_is_refused_by_the_receiver() {
    bounded(|| {
        let sent = main_stream(Style::Qemu92, PAGE, pages(4000, 7));
        let receiving = Receiving::new();
        let listener = receiving.qemu(None);
        let sending = sending(&receiving, &[(5, Fault::Flips)], 0);
        let source = sending.connect();
        let bytes = sent.clone();
        let writer = std::thread::spawn(move || {
            let _ = (&source).write_all(&bytes);
            assert_eq!(read_rest(&source), b"");
        });
        let at = listener.local_addr().unwrap();
        let destination = std::thread::spawn(move || read_rest(&listener.accept().unwrap().0));
        writer.join().unwrap();
        sending.result().unwrap_err();
        let error = receiving.result().unwrap_err().to_string();
        assert!(error.contains("zlib unit"), "{error}");
        // A relay that noticed the damage before it delivered anything never connected: this
        // connects in its place.
        drop(UnixStream::connect_addr(&at));
        let got = destination.join().unwrap();
        assert_same(&got, &sent[..got.len()], "what was delivered");
        assert!(got.len() < sent.len(), "all was delivered");
    });
}
