# make test    every promise at its simplest: 15 minutes on a fresh machine with 2 cores
# make proof   everything there is, for a release (hours); make proof PART="vm swap" runs parts
# make demo    a VM that writes moves, and one of 2 GiB is saved and restored: by platen and by QEMU (two minutes)
# make demo-memory  redis beyond its guest's memory: no swap, zram, platen (some minutes)
# make memory-matrix  the same in guests of 128 to 512 MiB, beside zram (an hour; a part of proof)
# make bench   most figures of docs/figures.md and of saved VMs (about two and a quarter hours)
# make report  the documents' figures beside ours: target/report/index.html (an hour; QUICK=1 ten minutes)
# make deb     a Debian package: target/deb/platen_VERSION_ARCHITECTURE.deb
# make rpm     an RPM package: target/rpm/platen-VERSION-1.ARCHITECTURE.rpm (needs rpmbuild, or scripts/fetch-packaging)
# make packages  tests them, the first in a fresh Debian: lintian, installation, upgrade, purge (a part of proof)
# make check   formatting, lints and documentation, warnings as errors
#
# On Debian and Ubuntu these install missing packages through apt (as root, or with sudo).

CARGO ?= cargo

.PHONY: all build setup test proof demo demo-memory memory-matrix bench report deb rpm manuals packages check clean

all: build

build:
	$(CARGO) build --release -p platen -p qat-sim-libqat -p qat-sim-libusdm

setup:
	@scripts/setup

test:
	@scripts/test

PART ?=
proof:
	@scripts/test proof $(PART)

demo: setup build
	@$(CARGO) run --release --quiet -p vm-tests --bin demo

demo-memory: setup build
	@scripts/fetch-qemu 10
	@scripts/fetch-linux612
	@$(CARGO) run --release --quiet -p vm-tests --bin demo_memory

memory-matrix: setup build
	@scripts/fetch-qemu 10
	@scripts/fetch-linux612
	@$(CARGO) run --release --quiet -p vm-tests --bin swap_matrix

bench: setup build
	@scripts/fetch-qemu 10
	@scripts/fetch-qemu 11
	@scripts/bench

# Without the swap guests' parts the report says which sections lack them; without libqpl it has no
# rows of codec qpl.
report: setup build
	@scripts/fetch-qemu 10 || true
	@scripts/fetch-linux612 || true
	@scripts/fetch-qpl || true
	@scripts/report

manuals: build
	$(CARGO) run --release --quiet -p platen --example manuals -- target/release/manuals

deb: manuals
	@scripts/deb target/release target/release/manuals

rpm: manuals
	@scripts/rpm target/release target/release/manuals

packages: setup manuals
	@scripts/test-packages target/release target/release/manuals

check:
	$(CARGO) fmt --all --check
	cd tests/vm/guest && $(CARGO) fmt --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	cd tests/vm/guest && CARGO_TARGET_DIR=../../../target/vm/guest-build $(CARGO) clippy --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --document-private-items

clean:
	$(CARGO) clean
