# make test    everything that proves platen right; sets up what it needs
# make demo    one VM moved by QEMU alone and by platen, side by side (about two minutes)
# make demo-memory  redis beyond its guest's memory: without swap, with zram, with platen (some minutes)
# make bench   the figures of the README (about an hour and a half)
# make check   formatting, lints and documentation, warnings as errors
#
# On Debian and Ubuntu these install missing packages through apt (as root, or with sudo).

CARGO ?= cargo

.PHONY: all build setup test unit vm demo demo-memory bench check clean

all: build

build:
	$(CARGO) build --release -p platen -p qat-sim-libqat -p qat-sim-libusdm

setup:
	@scripts/setup

test:
	@scripts/test

# Parts of `make test`.
unit:
	@scripts/test unit

vm:
	@scripts/test vm

demo: setup build
	@$(CARGO) run --release --quiet -p vm-tests --bin demo

demo-memory: setup build
	@scripts/fetch-qemu10
	@scripts/fetch-linux612
	@$(CARGO) run --release --quiet -p vm-tests --bin demo_memory

bench: setup build
	@scripts/bench

check:
	$(CARGO) fmt --all --check
	cd tests/vm/guest && $(CARGO) fmt --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	cd tests/vm/guest && CARGO_TARGET_DIR=../../../target/vm/guest-build $(CARGO) clippy --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --document-private-items

clean:
	$(CARGO) clean
