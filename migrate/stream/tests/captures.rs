//! Every recorded stream, whole: facts as an independent parser reported them, and identical bytes.

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;

use common::{barriers, check, Outcome};
use stream::{classify, Kind};

struct Want {
    name: &'static str,
    machine: &'static str,
    /// Page records, zero records, COMPRESS_PAGE records on main.
    main: (u64, u64, u64),
    markers: u64,
    return_path: bool,
    postcopy: bool,
}

const fn want(
    name: &'static str,
    machine: &'static str,
    main: (u64, u64, u64),
    markers: u64,
) -> Want {
    Want { name, machine, main, markers, return_path: false, postcopy: false }
}

const RECORDINGS: [Want; 15] = [
    want("q72", "pc-q35-7.2", (156, 20470, 0), 3),
    want("q10", "pc-q35-10.0", (158, 20468, 0), 3),
    want("q72mf", "pc-q35-7.2", (0, 20470, 0), 3),
    want("q10mf", "pc-q35-10.0", (0, 0, 0), 3),
    Want { return_path: true, ..want("q72mfrp", "pc-q35-7.2", (0, 20470, 0), 3) },
    Want { return_path: true, ..want("q10mfrp", "pc-q35-10.0", (0, 0, 0), 4) },
    want("q10mf72", "pc-q35-7.2", (0, 20468, 0), 3),
    want("q72comp", "pc-q35-7.2", (7, 20470, 153), 7),
    want("q72zlib", "pc-q35-7.2", (0, 20470, 0), 3),
    want("q10zstd", "pc-q35-10.0", (0, 0, 0), 4),
    want("q72vm", "pc-q35-7.2", (0, 20470, 0), 3),
    want("q10vm", "pc-q35-10.0", (0, 0, 0), 4),
    postcopy("pc72", "pc-q35-7.2", (160, 20470, 0)),
    postcopy("pcp72", "pc-q35-7.2", (160, 20470, 0)),
    postcopy("pcp10", "pc-q35-10.0", (161, 20468, 0)),
];

const fn postcopy(name: &'static str, machine: &'static str, main: (u64, u64, u64)) -> Want {
    Want { return_path: true, postcopy: true, ..want(name, machine, main, 7) }
}

/// Unpacks one archive into the tests' folder; without the recordings prints the reason and returns
/// `None`.
fn recording(name: &str) -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let archive = root.join("../shared/captures").join(format!("{name}.tar.zst"));
    if !archive.exists() {
        println!("skipped {name}: no recording beside the repository (../shared/captures)");
        return None;
    }
    let into = Path::new(env!("CARGO_TARGET_TMPDIR")).join("captures");
    std::fs::create_dir_all(&into).expect("the target folder is writable");
    let mut tar = Command::new("tar");
    match tar.arg("--zstd").arg("-xf").arg(&archive).arg("-C").arg(&into).status() {
        Ok(status) if status.success() => Some(into.join(name)),
        other => {
            println!("skipped {name}: tar --zstd cannot unpack it ({other:?})");
            None
        }
    }
}

/// Piece sizes: whole, chunks as the relay makes them, odd small ones, single bytes.
const CUTS: [&[usize]; 5] =
    [&[1 << 20], &[512 * 1024], &[65536, 1, 4096], &[4103, 9, 1], &[1, 2, 3, 5, 7, 8, 13]];

fn outcomes(kind: Kind, bytes: &[u8]) -> Vec<Outcome> {
    CUTS.iter().map(|sizes| check(kind, 4096, bytes, sizes)).collect()
}

#[test]
fn recordings_tokenise_to_the_last_byte() {
    let mut ran = 0;
    for want in &RECORDINGS {
        let Some(folder) = recording(want.name) else { continue };
        ran += 1;
        let mut markers = 0;
        let mut syncs = Vec::new();
        let mut channels = Vec::new();
        for entry in std::fs::read_dir(&folder).expect("the recording is a folder") {
            let path = entry.expect("readable").path();
            let bytes = std::fs::read(&path).expect("readable");
            if path.extension().is_some_and(|ext| ext == "rp") {
                outcomes(Kind::Other, &bytes);
                continue;
            }
            if path.extension().is_none_or(|ext| ext != "bin") {
                continue;
            }
            let kind = classify(&bytes).unwrap_or(Kind::Other);
            for outcome in outcomes(kind, &bytes) {
                let facts = &outcome.facts;
                match kind {
                    Kind::Main => {
                        check_main(want, &bytes, &outcome);
                        markers = facts.barriers;
                    }
                    Kind::Multifd => {
                        assert!(!facts.opaque, "{path:?}");
                        let uuid = 0x0011_2233_4455_6677_8899_aabb_ccdd_eeff_u128;
                        assert_eq!(facts.uuid, Some(uuid.to_be_bytes()));
                    }
                    Kind::Recovery | Kind::Preempt | Kind::Other => {
                        assert_eq!(want.name.get(..3), Some("pcp"), "{path:?}");
                    }
                }
            }
            if kind == Kind::Multifd {
                let facts = outcomes(kind, &bytes).remove(0).facts;
                syncs.push(facts.syncs);
                channels.push(facts.channel);
                let method = match want.name {
                    "q72zlib" => 2,
                    "q10zstd" => 4,
                    _ => 0,
                };
                assert!(facts.packets >= facts.syncs && facts.normal > 0);
                assert_eq!(facts.multifd_method, method, "{path:?}");
            }
        }
        assert_eq!(markers, want.markers, "{}", want.name);
        assert!(syncs.iter().all(|&n| n == markers), "{}: {syncs:?} != {markers}", want.name);
        channels.sort_unstable();
        let ids: Vec<_> = (0..channels.len()).map(|id| u8::try_from(id).ok()).collect();
        assert_eq!(channels, ids, "{}", want.name);
    }
    println!("{ran} recordings checked");
}

fn check_main(want: &Want, bytes: &[u8], outcome: &Outcome) {
    let facts = &outcome.facts;
    assert_eq!(facts.machine.as_deref(), Some(want.machine));
    let counted = (facts.normal, facts.duplicate, facts.compressed_records);
    assert_eq!(counted, want.main, "{}", want.name);
    assert_eq!(facts.barriers, barriers(&outcome.tokens));
    assert_eq!((facts.return_path, facts.postcopy), (want.return_path, want.postcopy));
    assert_eq!(facts.postcopy_running, want.postcopy);
    assert_eq!(facts.resyncs, 0, "nothing before the tail is opaque");
    assert!(facts.opaque && facts.vm_stopped_hint);
    let tail = usize::try_from(facts.tail_at).unwrap();
    if want.postcopy {
        // The tail was the blob of PACKAGED, behind the command and its length.
        assert!(facts.switched && !facts.tail);
        assert_eq!(bytes[tail - 9..tail - 4], [8, 0, 7, 0, 4], "{}", want.name);
        return;
    }
    assert!(facts.tail && !facts.switched);
    // The tail begins behind the EOS of RAM's END: a footer, then device state or the end tag.
    assert_eq!(bytes[tail - 8..tail], 0x10u64.to_be_bytes(), "{}", want.name);
    assert_eq!(bytes[tail], 0x7e);
    assert_eq!(bytes[tail + 5], 0x04);
}
