//! `qzip` of Debian trixie on the simulated device.

use conformance::{intel, sample, Intel, Run};
use flate2::read::MultiGzDecoder;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::Command;

/// QATzip's hardware buffer: one request for each.
const CHUNK: usize = 65_536;

fn qzip(intel: &Intel, arguments: &[&str], folder: &Path) -> Run {
    let run = intel.run(&intel.program("qzip"), arguments, folder, "");
    assert!(run.output.status.success(), "qzip {arguments:?}: {}", run.text());
    assert_eq!(run.count("violations"), 0, "{}", run.text());
    run
}

fn gunzip(path: &Path) -> Vec<u8> {
    let mut plain = Vec::new();
    let file = fs::File::open(path).expect("qzip has written it");
    MultiGzDecoder::new(file).read_to_end(&mut plain).expect("gzip members, sound");
    plain
}

#[test]
fn qzip_goes_through_the_device_both_ways_and_gunzip_reads_it() {
    let Some(intel) = intel() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let (plain, packed) = (folder.path().join("data"), folder.path().join("data.gz"));
    let data = sample();
    fs::write(&plain, &data).expect("30 MB of room");
    let chunks = data.len().div_ceil(CHUNK) as u64;

    let run = qzip(&intel, &["-k", "data"], folder.path());
    assert_eq!((run.count("compress"), run.count("decompress")), (chunks, 0));
    assert_eq!(run.count("callbacks"), chunks);
    assert_eq!(run.count("plain_bytes"), data.len() as u64);
    assert_eq!((run.count("in_flight"), run.count("sessions")), (0, 0), "it left in order");
    assert!(gunzip(&packed) == data, "zlib-rs reads what the device made");
    // And by gzip itself, if it is installed.
    match Command::new("gzip").args(["-dc", "data.gz"]).current_dir(folder.path()).output() {
        Ok(output) => assert!(output.status.success() && output.stdout == data, "gzip -dc"),
        Err(error) => println!("skipped: gzip -dc: {error}"),
    }

    fs::remove_file(&plain).expect("it is there");
    let run = qzip(&intel, &["-d", "data.gz"], folder.path());
    assert_eq!((run.count("compress"), run.count("decompress")), (0, chunks));
    assert!(fs::read(&plain).expect("qzip has written it") == data);
}

#[test]
fn a_plain_gzip_file_does_not_use_the_device() {
    let Some(intel) = intel() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let data = &sample()[..1_000_000];
    let mut encoder = flate2::read::GzEncoder::new(data, flate2::Compression::fast());
    let mut packed = Vec::new();
    encoder.read_to_end(&mut packed).expect("from memory to memory");
    fs::write(folder.path().join("data.gz"), packed).expect("room");
    let run = qzip(&intel, &["-d", "data.gz"], folder.path());
    assert_eq!(run.count("submissions"), 0);
    assert!(fs::read(folder.path().join("data")).expect("qzip has written it") == data);
}
