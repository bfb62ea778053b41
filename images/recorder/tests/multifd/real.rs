//! Migrations that QEMU 7.2 and 10.0 have written.

use super::*;

/// The golden migrations of real QEMUs, up to their device state, which a made one replaces.
#[test]
fn migrations_of_real_qemus_arrive() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../migrate/stream/tests/golden");
    let unpacked = |name: String| {
        let file = std::fs::File::open(folder.join(name + ".z")).unwrap();
        let mut bytes = Vec::new();
        flate2::read::ZlibDecoder::new(file).read_to_end(&mut bytes).unwrap();
        bytes
    };
    for name in ["q72mfrp", "q10mfrp"] {
        let main = unpacked(format!("{name}-0"));
        let mut tokeniser = Tokeniser::new(Kind::Main, PAGE);
        tokeniser.feed(&main, &mut Vec::new());
        // The footer of the last section of RAM follows its end.
        let ram = usize::try_from(tokeniser.facts().tail_at).unwrap() + 5;
        let tail = MainStream::new(PAGE).device_tail(400).take();
        let main = [&main[..ram], &tail].concat();
        let lanes: Vec<_> = (1..4).map(|at| unpacked(format!("{name}-{at}"))).collect();
        let (normal, zero) = counts(&main, &lanes);
        for pauses in [0, 0x5a5a_0ff0_1234_8421, u64::MAX] {
            let (outcome, memory) = record_at(&main, &lanes, 1 << 16, pauses);
            let recorded = outcome.unwrap();
            assert_eq!((recorded.pages, recorded.zeros), (normal, zero), "{name}");
            assert!(normal > 100 && memory.0.lock().unwrap().pages.len() as u64 > normal, "{name}");
        }
    }
}

/// Pages and zero pages by the tokeniser.
fn counts(main: &[u8], lanes: &[Vec<u8>]) -> (u64, u64) {
    let facts = |kind, bytes: &[u8]| {
        let mut tokeniser = Tokeniser::new(kind, PAGE);
        tokeniser.feed(bytes, &mut Vec::new());
        (tokeniser.facts().normal, tokeniser.facts().duplicate)
    };
    let lanes = lanes.iter().map(|lane| facts(Kind::Multifd, lane));
    lanes.chain([facts(Kind::Main, main)]).fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
}

/// Whole recorded migrations, where they are present.
#[test]
fn whole_migrations_of_real_qemus_arrive() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for name in ["q72mf", "q72mfrp", "q10mf", "q10mfrp", "q10mf72", "q72vm", "q10vm"] {
        let archive = root.join("../shared/captures").join(format!("{name}.tar.zst"));
        if !archive.exists() {
            println!("skipped: no recording {name} beside the repository (../shared/captures)");
            continue;
        }
        let folder = tempfile::tempdir().unwrap();
        let mut tar = std::process::Command::new("tar");
        tar.arg("--zstd").arg("-xf").arg(&archive).arg("-C").arg(folder.path());
        let status = tar.status().expect("scripts/setup installs tar and zstd");
        assert!(status.success(), "{name}: tar --zstd cannot unpack it: {status}");
        let of_channel =
            |at: u32| std::fs::read(folder.path().join(format!("{name}/ch{at}.bin"))).unwrap();
        let (main, lanes) = (of_channel(0), [1, 2, 3].map(of_channel));
        let (outcome, memory) = record_at(&main, &lanes, 1 << 18, 0x1234_5678_9abc_def0);
        let recorded = outcome.unwrap();
        assert_eq!((recorded.pages, recorded.zeros), counts(&main, &lanes), "{name}");
        assert!(memory.0.lock().unwrap().pages.len() > 16384, "{name}");
        assert!(!recorded.state.devices.is_empty(), "{name}");
    }
}
