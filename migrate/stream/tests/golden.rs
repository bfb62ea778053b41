//! The recorded streams that are in the repository (`tests/golden/README.md`).

mod common;

use std::io::Read;
use std::path::Path;

use common::check;
use stream::{classify, Kind};

fn golden(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    let file = std::fs::File::open(&path).expect("the golden stream is in the repository");
    let mut bytes = Vec::new();
    let mut plain = flate2::read::ZlibDecoder::new(file);
    plain.read_to_end(&mut bytes).expect("a zlib stream");
    bytes
}

const CUTS: [&[usize]; 4] = [&[1 << 20], &[512 * 1024], &[4103, 9, 1], &[1, 2, 3, 5, 7, 8, 13]];

#[test]
fn main_channels() {
    // Name, pages, zero records, COMPRESS_PAGE records, markers, machine.
    for (name, normal, duplicate, compressed, markers, machine) in [
        ("q72-0.z", 156, 431, 0, 3, "pc-q35-7.2"),
        ("q10-0.z", 158, 429, 0, 3, "pc-q35-10.0"),
        ("q72comp-0.z", 7, 485, 153, 7, "pc-q35-7.2"),
        ("q72mfrp-0.z", 0, 215, 0, 3, "pc-q35-7.2"),
        ("q10mfrp-0.z", 0, 0, 0, 4, "pc-q35-10.0"),
        ("q10mf72-0.z", 0, 214, 0, 3, "pc-q35-7.2"),
        ("q10vm-0.z", 0, 0, 0, 4, "pc-q35-10.0"),
        ("pc72-0.z", 160, 431, 0, 7, "pc-q35-7.2"),
        ("pcp10-0.z", 161, 493, 0, 7, "pc-q35-10.0"),
    ] {
        let bytes = golden(name);
        assert_eq!(classify(&bytes), Some(Kind::Main));
        for sizes in CUTS {
            let facts = check(Kind::Main, 4096, &bytes, sizes).facts;
            let counted = (facts.normal, facts.duplicate, facts.compressed_records);
            assert_eq!(counted, (normal, duplicate, compressed), "{name}");
            assert_eq!((facts.barriers, facts.resyncs), (markers, 0), "{name}");
            assert_eq!(facts.machine.as_deref(), Some(machine));
            assert!(facts.opaque && facts.vm_stopped_hint, "{name}");
            // In postcopy the end of the stream starts no VM.
            let postcopy = name.starts_with("pc");
            assert_eq!((facts.tail, facts.switched), (!postcopy, postcopy), "{name}");
        }
    }
}

type Channel = (&'static str, u8, u64, u64, u64, u64, u32);

/// Name, channel, packets, SYNCs, pages, zero pages, method.
const CHANNELS: [Channel; 9] = [
    ("q72mfrp-1.z", 0, 6, 3, 126, 0, 0),
    ("q72mfrp-2.z", 1, 5, 3, 26, 0, 0),
    ("q72mfrp-3.z", 2, 5, 3, 4, 0, 0),
    ("q10mfrp-1.z", 0, 59, 4, 21, 6686, 0),
    ("q10mfrp-2.z", 1, 60, 4, 139, 6838, 0),
    ("q10mfrp-3.z", 2, 60, 4, 1, 6944, 0),
    ("q10mf72-1.z", 0, 6, 3, 128, 0, 0),
    ("q72zlib-1.z", 1, 5, 3, 62, 0, 2),
    ("q10zstd-2.z", 1, 42, 4, 107, 4424, 4),
];

#[test]
fn multifd_channels() {
    for (name, channel, packets, syncs, normal, duplicate, method) in CHANNELS {
        let bytes = golden(name);
        assert_eq!(classify(&bytes), Some(Kind::Multifd));
        for sizes in CUTS {
            let outcome = check(Kind::Multifd, 4096, &bytes, sizes);
            let facts = &outcome.facts;
            assert_eq!((facts.packets, facts.syncs), (packets, syncs), "{name}");
            assert_eq!((facts.normal, facts.duplicate), (normal, duplicate), "{name}");
            assert_eq!((facts.channel, facts.multifd_method), (Some(channel), method), "{name}");
            assert!(!facts.opaque, "{name}");
        }
        // In one piece, every header is encoded by its fields: the rest is bodies and a little
        // structure.
        let whole = check(Kind::Multifd, 4096, &bytes, &[1 << 20]);
        let budget = 64 + 12 * 8 + usize::try_from(packets).unwrap() * 100;
        assert!(whole.structure < budget, "{name}: {} > {budget}", whole.structure);
    }
}
