//! Runs every fuzz target as an ordinary test, on its seeds and on mutations of each.
//!
//! The targets are the files of `fuzz/fuzz_targets`, included unchanged: this crate replaces
//! libFuzzer, and its macro makes a function instead of a program. `fuzz/run.sh` runs the same
//! targets instrumented, for any time.

#![cfg(test)]
#![allow(unused_attributes, unused_imports, reason = "for the programs of fuzz/")]
#![allow(missing_docs, unreachable_pub, reason = "the files are crates elsewhere")]
#![allow(clippy::all, clippy::pedantic, reason = "fuzz/ is not of this workspace's lints")]

extern crate self as libfuzzer_sys;

/// Replaces libFuzzer's macro: the target is the function `run`.
#[macro_export]
macro_rules! fuzz_target {
    (|$input:ident: &[u8]| $body:block) => {
        pub(crate) fn run($input: &[u8]) {
            $body
        }
    };
}

#[path = "../../../fuzz/seeds.rs"]
mod seeds;

/// Each seed is also cut to about ten lengths, and has about ten of its bytes changed; four with
/// `PLATEN_QUICK`.
fn variants() -> usize {
    if std::env::var_os("PLATEN_QUICK").is_some() {
        4
    } else {
        10
    }
}

/// Runs a target on its seeds and their mutations.
fn run(name: &str, target: fn(&[u8])) {
    let seeds: Vec<Vec<u8>> = seeds::all()
        .expect("seeds are made")
        .into_iter()
        .filter(|(of, _)| *of == name)
        .map(|(_, bytes)| bytes)
        .collect();
    assert!(!seeds.is_empty(), "the target {name} has no seeds");
    // A fixed seed, so that every run is the same.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        usize::try_from(state >> 33).expect("31 bits") % below
    };
    for seed in seeds {
        target(&seed);
        for _ in 0..variants().min(seed.len()) {
            target(&seed[..random(seed.len())]);
            let mut bent = seed.clone();
            bent[random(seed.len())] ^= 1 << random(8);
            target(&bent);
        }
    }
}

macro_rules! targets {
    ($($name:ident $file:literal)*) => {
        $(
            #[path = $file]
            mod $name;
        )*

        mod over_seeds {
            $(
                #[test]
                fn $name() {
                    super::run(stringify!($name), super::$name::run);
                }
            )*
        }

        /// Checks that every file of `fuzz/fuzz_targets` is one of the targets here.
        #[test]
        fn no_target_is_left_out() {
            let here = [$(stringify!($name)),*];
            let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/fuzz_targets");
            for entry in std::fs::read_dir(folder).expect("fuzz_targets") {
                let path = entry.expect("an entry").path();
                let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
                assert!(path.is_dir() || here.contains(&&*name), "{name} is left out");
            }
        }
    };
}

targets! {
    backing_header "../../../fuzz/fuzz_targets/backing_header.rs"
    codec_decode "../../../fuzz/fuzz_targets/codec_decode.rs"
    delta_apply "../../../fuzz/fuzz_targets/delta_apply.rs"
    filter_streams "../../../fuzz/fuzz_targets/filter_streams.rs"
    hello "../../../fuzz/fuzz_targets/hello.rs"
    history_decode "../../../fuzz/fuzz_targets/history_decode.rs"
    image_open "../../../fuzz/fuzz_targets/image_open.rs"
    libvirt_answers "../../../fuzz/fuzz_targets/libvirt_answers.rs"
    libvirt_head "../../../fuzz/fuzz_targets/libvirt_head.rs"
    mapped_ram "../../../fuzz/fuzz_targets/mapped_ram.rs"
    memory_map "../../../fuzz/fuzz_targets/memory_map.rs"
    nbd_parse "../../../fuzz/fuzz_targets/nbd_parse.rs"
    policy_settings "../../../fuzz/fuzz_targets/policy_settings.rs"
    qmp_replies "../../../fuzz/fuzz_targets/qmp_replies.rs"
    record_multifd "../../../fuzz/fuzz_targets/record_multifd.rs"
    record_stream "../../../fuzz/fuzz_targets/record_stream.rs"
    remote_image "../../../fuzz/fuzz_targets/remote_image.rs"
    restore_back "../../../fuzz/fuzz_targets/restore_back.rs"
    return_path "../../../fuzz/fuzz_targets/return_path.rs"
    save_open "../../../fuzz/fuzz_targets/save_open.rs"
    store_attach "../../../fuzz/fuzz_targets/store_attach.rs"
    store_ops "../../../fuzz/fuzz_targets/store_ops.rs"
    swap_nbd "../../../fuzz/fuzz_targets/swap_nbd.rs"
    tokenise "../../../fuzz/fuzz_targets/tokenise.rs"
    unpack "../../../fuzz/fuzz_targets/unpack.rs"
    wire_frame "../../../fuzz/fuzz_targets/wire_frame.rs"
}
