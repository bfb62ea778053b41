#!/bin/sh
# Runs the loom models of the mailbox, then once more for each ordering and step of it taken away: a model has to fail
# then, or the proof proves nothing.
# Usage: accel/qat/loom.sh    (seconds, once it is built)
set -eu
cd "$(dirname "$0")/../.."
export RUSTFLAGS="--cfg loom"
target=${LOOM_TARGET_DIR:-target/loom}

echo "models, as written:"
cargo test -p qat --release --target-dir "$target" --lib mailbox::models

binary=$(cargo test -p qat --release --target-dir "$target" --lib --no-run \
    --message-format=json 2>/dev/null |
    sed -n 's/.*"executable":"\([^"]*\/qat-[^"]*\)".*/\1/p' | tail -n 1)
[ -x "$binary" ] || { echo "loom.sh: no test binary was built" >&2; exit 1; }

log=$(mktemp)
trap 'rm -f "$log"' EXIT
sites=$(sed -n '/^pub(crate) enum Site/,/^}/s/^    \([A-Z][A-Za-z]*\),$/\1/p' accel/qat/src/sync.rs)
models=$("$binary" --list 2>/dev/null | sed -n 's/^\(mailbox::models::.*\): test$/\1/p')
# Nothing to take away, or nothing to run, would miss nothing.
[ -n "$sites" ] && [ -n "$models" ] || { echo "loom.sh: no sites or no models found" >&2; exit 1; }
missed=0
echo
printf '%-16s %s\n' "taken away" "models that fail"
for site in $sites; do
    failed=
    for model in $models; do
        # One process for each, so that one failure does not hide another.
        status=0
        WEAKEN=$site timeout 60 "$binary" --exact "$model" >"$log" 2>&1 || status=$?
        if [ "$status" -eq 124 ]; then
            failed="NO END"
            break
        elif [ "$status" -ne 0 ]; then
            # An unknown name would fail too, and prove nothing.
            if grep -q "WEAKEN=$site is not known" "$log"; then cat "$log"; exit 1; fi
            why=$(sed -n 's/.*\([Cc]ausality violation\|assertion\|exceeded maximum number of branches\).*/\1/p' "$log" | head -n 1)
            failed="$failed${model##*::} (${why:-see WEAKEN=$site}) "
        fi
    done
    case $failed in "" | "NO END") missed=$((missed + 1)) ;; esac
    printf '%-16s %s\n' "$site" "${failed:-NONE}"
done
[ "$missed" -eq 0 ] || { echo "loom.sh: $missed of them are missed by nobody" >&2; exit 1; }
echo "loom.sh: all models hold, and each thing taken away is missed by one at least"
