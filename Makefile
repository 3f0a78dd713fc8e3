# The project's surface. Each target installs what it needs; `make setup` installs all of it.

# Parts that are no Debian packages; all clones share them.
export QSD_CSI_DEPS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/qsd-csi
export PATH := $(QSD_CSI_DEPS)/bin:$(PATH)

.PHONY: setup demo test hunt broken check bench

setup:
	@scripts/setup

# The main job on real input: a volume, a VM, a driver that is killed. KEEP=1 keeps all for a look.
demo:
	@scripts/setup build vm
	cargo build --release --locked
	@demo/run

# Everything CI needs: unit tests, and the built driver against real daemons, VMs and csi-sanity.
test:
	@scripts/setup build vm remote sanity
	cargo test --workspace --locked

# The loss hunts at length: everything that serves a VM is killed again and again under load. Ten minutes.
ROUNDS ?= 200
hunt:
	@scripts/setup build vm
	QSD_CSI_ROUNDS=$(ROUNDS) cargo test --locked --test it survival -- --nocapture --test-threads 1

# Broken data at length: records and headers are cut, zeroed and flipped, five volumes a round.
broken:
	@scripts/setup build vm
	QSD_CSI_ROUNDS=$(ROUNDS) cargo test --locked --test it broken:: -- --nocapture

check:
	@scripts/setup build check
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	cargo deny --all-features --log-level error check bans licenses sources
	typos
	cd tests/spec && test -z "$$(gofmt -l .)"

# Latency, memory and throughput, each beside a reference; a report in target/bench/.
bench:
	@scripts/setup build vm
	cargo build --release --locked --workspace
	@target/release/qsd-csi-bench
