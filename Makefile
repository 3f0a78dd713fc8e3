# The project's surface. Each target installs what it needs; `make setup` installs all of it.

# Parts that are no Debian packages; all clones share them.
export QSD_CSI_DEPS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/qsd-csi
export PATH := $(QSD_CSI_DEPS)/bin:$(PATH)

.PHONY: setup demo test hunt storm broken fuzz coverage check bench

setup:
	@scripts/setup

# The main job on real input: a volume, a VM, a driver that is killed. KEEP=1 keeps all for a look.
demo:
	@scripts/setup build vm
	cargo build --release --locked
	@demo/run

# Everything CI needs: unit tests, and the built driver against real daemons, VMs and csi-sanity.
test:
	@scripts/setup build vm remote rules sanity
	cargo test --workspace --locked

# The loss hunts at length: everything that serves a VM is killed again and again under load. Half an hour.
ROUNDS ?= 200
hunt:
	@scripts/setup build vm
	QSD_CSI_ROUNDS=$(ROUNDS) cargo test --locked --test it -- loss survival --nocapture --test-threads 1

# Many callers at once, some of whom hang up, also while daemons are killed; five minutes each.
SECONDS_EACH ?= 300
storm:
	@scripts/setup build vm
	QSD_CSI_SECONDS=$(SECONDS_EACH) cargo test --locked --test it storm -- --nocapture --test-threads 1

# Looks for bytes that break a parser, SECONDS_EACH for each target; FUZZ="csi source" for these alone, JOBS=2 for two at
# a time, KEEP=1 to keep what it finds. `make test` goes through fuzz/corpus and fuzz/regressions.
export SECONDS_EACH ?= 60
fuzz:
	@scripts/setup build fuzz
	@fuzz/run $(FUZZ)

# How much of the library `make test` runs, with all that its drivers and relays do until they are killed.
# TESTS="--test it -- crash::" measures these alone.
coverage:
	@scripts/setup build vm remote sanity coverage
	@scripts/coverage $(TESTS)

# Broken data at length: records and headers are cut, zeroed and flipped, five volumes a round.
broken:
	@scripts/setup build vm
	QSD_CSI_ROUNDS=$(ROUNDS) cargo test --locked --test it broken:: -- --nocapture

check:
	@scripts/setup build check
	cargo fmt --all --check
	cargo fmt --all --check --manifest-path fuzz/Cargo.toml
	cargo clippy --workspace --all-targets --locked -- -D warnings
	cargo deny --all-features --log-level error check bans licenses sources
	typos
	cd tests/spec && test -z "$$(gofmt -l .)"

# Latency, memory and throughput, each beside a reference; a report in target/bench/.
bench:
	@scripts/setup build vm
	cargo build --release --locked --workspace
	@target/release/qsd-csi-bench
