#!/bin/sh
# fuzz/run.sh [SECONDS [TARGET...]]: builds the fuzz targets on the pinned stable toolchain, seeds
# their corpora and runs each for SECONDS (default 5), as many at once as there are CPUs. Fails after
# all have run if one has crashed, leaked or hung; the input is then in fuzz/artifacts/TARGET. Needs
# a C++ compiler (libFuzzer). Corpora grow in fuzz/corpus and are kept between runs.
set -eu
cd "$(dirname "$0")"

TARGETS="tokenise unpack delta_apply codec_decode history_decode wire_frame hello return_path store_ops store_attach nbd_parse backing_header qmp_replies memory_map swap_nbd policy_settings image_open save_open record_stream record_multifd libvirt_head libvirt_answers mapped_ram remote_image restore_back filter_streams"
seconds=${1:-5}
[ $# -gt 0 ] && shift
[ $# -gt 0 ] && TARGETS="$*"

host=$(rustc -vV | sed -n 's/^host: //p')
export CARGO_TARGET_DIR="${FUZZ_TARGET_DIR:-$(cd .. && pwd)/target/fuzz}"
# What cargo-fuzz passes on nightly; all of it is stable but for the name of the pass. --target
# keeps the instrumentation out of build scripts.
export RUSTFLAGS="-Cpasses=sancov-module \
-Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
-Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares \
-Ccodegen-units=1"
cargo build --release --target "$host" --bins
built=$CARGO_TARGET_DIR/$host/release

seeds=$CARGO_TARGET_DIR/seeds
rm -rf "$seeds"
"$built/seeds" "$seeds"

export seconds built seeds
# Each prints at once what it has to say: lines of two targets must not mix.
# shellcheck disable=SC2016 # $1 is the inner shell's.
run_one='
mkdir -p "corpus/$1" "artifacts/$1"
if ! "$built/$1" "corpus/$1" "$seeds/$1" \
    -max_total_time="$seconds" -max_len=65536 -timeout=10 -rss_limit_mb=2048 \
    -artifact_prefix="artifacts/$1/" -print_final_stats=1 2>"artifacts/$1.log"; then
    echo "== $1
$(tail -40 "artifacts/$1.log")
$1 failed; inputs are in fuzz/artifacts/$1"
    exit 1
fi
echo "== $1: $seconds s
$(grep -E "number_of_executed_units|average_exec|DONE|cov:" "artifacts/$1.log" | tail -4)"
'
# shellcheck disable=SC2086 # $TARGETS is words.
printf '%s\n' $TARGETS | xargs -P "$(nproc)" -n 1 sh -c "$run_one" run
