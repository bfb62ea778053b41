#!/bin/sh
# Runs the loom models of this crate, then once more for each ordering, fence and step of the
# protocol taken away: a model has to fail then, or the proof proves nothing.
# Usage: memory/store/loom.sh    (a minute or two on two cores)
set -eu
cd "$(dirname "$0")/../.."
export RUSTFLAGS="--cfg loom"
target=${LOOM_TARGET_DIR:-target/loom}

echo "models, as written:"
cargo test -p store --release --target-dir "$target" --test loom

binary=$(cargo test -p store --release --target-dir "$target" --test loom --no-run \
    --message-format=json 2>/dev/null |
    sed -n 's/.*"executable":"\([^"]*loom-[^"]*\)".*/\1/p' | tail -n 1)
[ -x "$binary" ] || { echo "loom.sh: no test binary was built" >&2; exit 1; }

log=$(mktemp)
trap 'rm -f "$log"' EXIT
sites=$(sed -n '/^pub enum Site/,/^}/s/^    \([A-Z][A-Za-z]*\),$/\1/p' memory/store/src/sync.rs)
fences=$(echo "$sites" | sed -n 's/.*Fence$/&AcqRel/p')
models=$("$binary" --list 2>/dev/null | sed -n 's/: test$//p')
missed=0
echo
printf '%-21s %s\n' "taken away" "models that fail"
for site in $sites $fences; do
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
            why=$(sed -n 's/.*\(deadlock\|[Cc]ausality violation\|assertion\).*/\1/p' "$log" | head -n 1)
            failed="$failed$model (${why:-see WEAKEN=$site}) "
        fi
    done
    case $failed in "" | "NO END") missed=$((missed + 1)) ;; esac
    printf '%-21s %s\n' "$site" "${failed:-NONE}"
done
[ "$missed" -eq 0 ] || { echo "loom.sh: $missed of them are missed by nobody" >&2; exit 1; }
echo "loom.sh: all models hold, and each thing taken away is missed by one at least"
