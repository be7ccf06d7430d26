# One target per thing a person does; plain `make` lists them. Settings are given as NAME=value.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
unexport MAKEFLAGS MFLAGS MAKELEVEL MAKEOVERRIDES # programs we start may call make themselves

PYTHON ?= python3
TORCH_INDEX ?=
CONFIG ?= configs/train/quick.yaml
NPROC ?= 1
CLAIM ?= core
PROFILE ?= cpu
HOURS ?= 2
PORT ?= 5000
HOSTFILE ?=
NODES ?= 1
GPUS ?= 0
TIME ?=
PARTITION ?=
RDZV ?=
NNODES ?= 1
OPTIONS ?=
ARGS ?=

PY := .venv/bin/python
# One shell word, whatever a value holds. ARGS stays as it was written: it is shell words already.
quoted = '$(subst ','\'',$(value $(1)))'
# What trains gets CONFIG and ARGS by environment, as written: a newline in them would end a recipe's line.
unexport ARGS CONFIG OPTIONS # make would expand what is in them
train launch launch-ssh launch-deepspeed launch-slurm launch-torchrun doctor: export NORMSCALE_MAKE_CONFIG := $(value CONFIG)
train launch launch-ssh launch-deepspeed launch-slurm launch-torchrun doctor: export NORMSCALE_MAKE_ARGS := $(value ARGS)
# Options of a launcher: those with a value, and those that were given.
with = $(if $(strip $(value $(2))),$(1) $(call quoted,$(2)))
if_given = $(if $(call given,$(2)),$(1) $(call quoted,$(2)))
to_train = --from-make $(call if_given,--claim,CLAIM) $(call if_given,--profile,PROFILE) $(value OPTIONS)

# make takes `model.M=7` for a variable of its own, and nobody would ever read it: settings belong into ARGS.
OWN := PYTHON TORCH_INDEX CONFIG NPROC CLAIM PROFILE HOURS PORT HOSTFILE NODES GPUS TIME PARTITION RDZV NNODES OPTIONS DRY_RUN
STRAY_NAMES := name seed model data train precision probes checkpoint tracking args config nproc claim profile hours port
given = $(if $(filter command,$(firstword $(origin $(1)))),$(1))
as_word = $(if $(word 2,$(value $(1))),'$(1)=$(value $(1))',$(1)=$(value $(1)))
strays := $(strip $(foreach one,$(sort $(.VARIABLES)),\
    $(if $(or $(findstring .,$(one)),$(filter $(STRAY_NAMES),$(one))),$(call given,$(one)))))
ifneq ($(strays),)
known := $(strip $(foreach one,$(OWN),$(if $(call given,$(one)),$(call as_word,$(one)))))
words := $(strip $(value ARGS) $(foreach one,$(strays),$(call as_word,$(one))))
$(error $(firstword $(strays)): settings go into ARGS: make $(strip $(or $(MAKECMDGOALS),train) $(known)) ARGS="$(words)")
endif

# What else is given reaches the programs as environment; what was meant for us is a slip. A make that calls this one may
# hand on any.
others := $(strip $(foreach one,$(filter-out $(OWN) ARGS,$(.VARIABLES)),$(call given,$(one))))
ifneq ($(and $(others),$(filter 0,$(MAKELEVEL))),)
slip := $(shell "$(PYTHON)" launch/make_names.py '$(subst ','\'',$(others))' '$(OWN) ARGS' 2>/dev/null)
$(if $(slip),$(error $(slip)))
endif

# Of our own names, those that each target reads. Any other on the command line would be passed over without a word, and a
# job meant for several hosts would train on this one.
ALWAYS := PYTHON TORCH_INDEX
TO_TRAIN := CONFIG CLAIM PROFILE OPTIONS ARGS DRY_RUN
reads.train := CONFIG NPROC PORT OPTIONS ARGS DRY_RUN
reads.launch := NPROC PORT $(TO_TRAIN)
reads.launch-ssh := HOSTFILE PORT $(TO_TRAIN)
reads.launch-deepspeed := HOSTFILE PORT $(TO_TRAIN)
reads.launch-slurm := NODES GPUS NPROC TIME PARTITION PORT $(TO_TRAIN)
reads.launch-torchrun := RDZV NNODES NPROC $(TO_TRAIN)
reads.doctor := HOSTFILE NODES CONFIG PORT OPTIONS ARGS DRY_RUN
reads.claim := CLAIM PROFILE ARGS DRY_RUN
reads.claims := PROFILE HOURS ARGS DRY_RUN
reads.reproduce := ARGS DRY_RUN
reads.ui := PORT ARGS
reads.server := PORT ARGS
$(foreach one,test test-multinode test-gpu report schemes sync bench-step bench-probes bench-kernels,$(eval reads.$(one) := ARGS))

goals := $(or $(MAKECMDGOALS),$(.DEFAULT_GOAL))
unread := $(strip $(foreach one,$(filter-out $(ALWAYS) $(foreach goal,$(goals),$(reads.$(goal))),$(OWN) ARGS),\
    $(call given,$(one))))
ifneq ($(and $(unread),$(filter 0,$(MAKELEVEL))),)
one := $(firstword $(unread))
readers := $(foreach all,$(filter reads.%,$(.VARIABLES)),$(if $(filter $(one),$($(all))),$(all:reads.%=%)))
$(error $(one): make $(goals) does not read it ($(sort $(readers)) $(if $(word 2,$(readers)),do,does)); \
    it reads $(or $(strip $(foreach goal,$(goals),$(reads.$(goal)))),no setting))
endif

ifneq ($(and $(call given,CONFIG),$(call given,CLAIM)),)
$(error CONFIG and CLAIM: both are given; give the one that is to be trained)
endif

# The environment is as it should be when this file is newer than what it was made from.
STAMP := .venv/installed
ifneq ($(strip $(TORCH_INDEX)),)
ifneq ($(shell cat .venv/torch-index 2>/dev/null),$(TORCH_INDEX))
.PHONY: $(STAMP)
endif
endif

.PHONY: help
help: ## this list
	@echo 'normscale: which normalisation lets a deep Transformer train, and what breaks first when it does not'
	@echo
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/\1\t\2/p' Makefile | while IFS='	' read -r name says; do \
	    printf '  make %-18s %s\n' "$$name" "$$says"; done
	@echo
	@echo 'PYTHON=path of Python 3.11 or newer; TORCH_INDEX=URL of one of PyTorch'\''s own wheel indices (CPU or a CUDA version).'
	@echo 'ARGS are shell words: make train ARGS="train.steps=50 '\''name=a b'\''"; DRY_RUN=1 shows what train or claim would start.'

.PHONY: reproduce
reproduce: $(STAMP) ## trains the core claims' runs, judges them, writes the report; goes on where it was interrupted (ARGS=)
	@$(PY) -m normscale claim run --core --profile cpu $(value ARGS)

.PHONY: test
test: $(STAMP) ## runs the tests (ARGS= for pytest)
	@$(PY) -m pytest -q -n auto --maxprocesses 4 $(value ARGS)

.PHONY: test-multinode
test-multinode: $(STAMP) ## runs the launchers on real hosts, with faults; root, 9 to 15 minutes (ARGS= for pytest)
	@$(PY) -m pytest -q -m multinode -n 2 --dist loadfile --durations=5 tests/multinode $(value ARGS)

.PHONY: test-gpu
test-gpu: $(STAMP) ## runs the tests that need a GPU (ARGS= for pytest)
	@$(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { \
	    echo 'test-gpu: PyTorch finds no GPU here; run it where there is one (TORCH_INDEX= for a CUDA build)' >&2; exit 2; }
	@$(PY) -m pytest -q -m gpu $(value ARGS)

.PHONY: test-kernels-full
test-kernels-full: $(STAMP) ## compiles every norm kernel for every GPU target, and breaks each once to see the tests fail
	@$(PY) -m tests.ops.ahead.compile --full
	@$(PY) -m tests.ops.mutants --sound

.PHONY: check
check: $(STAMP) ## format, lint, types and import rules, without running anything
	@$(PY) -m ruff format --check . || { echo 'make format mends the files above' >&2; exit 1; }
	@$(PY) -m ruff check --quiet .
	@$(PY) -m mypy
	@$(PY) -c 'from importlinter.cli import lint_imports_command as lint; lint(["--no-logo"])'

.PHONY: format
format: $(STAMP) ## formats the code and mends what lint can mend
	@$(PY) -m ruff format --quiet .
	@$(PY) -m ruff check --fix --quiet .

.PHONY: train
train: $(STAMP) ## trains one model (CONFIG= NPROC=1 ARGS="key=value ...")
	@$(PY) -m launch local --nproc $(call quoted,NPROC) $(call if_given,--port,PORT) --from-make $(value OPTIONS)

.PHONY: launch
launch: $(STAMP) ## trains on this machine, a model or a claim (NPROC=1 CONFIG= or CLAIM= PROFILE=, PORT= ARGS=)
	@$(PY) -m launch local --nproc $(call quoted,NPROC) $(call if_given,--port,PORT) $(to_train)

.PHONY: launch-ssh
launch-ssh: $(STAMP) ## the same on the hosts of a hostfile, over ssh (HOSTFILE=file with lines "host slots=N")
	@$(PY) -m launch ssh $(call with,--hostfile,HOSTFILE) $(call if_given,--port,PORT) $(to_train)

.PHONY: launch-deepspeed
launch-deepspeed: $(STAMP) ## the same through DeepSpeed's own launcher and pdsh (HOSTFILE=)
	@$(PY) -m launch deepspeed $(call with,--hostfile,HOSTFILE) $(call if_given,--port,PORT) $(to_train)

.PHONY: launch-slurm
launch-slurm: $(STAMP) ## the same as a job of Slurm (NODES=1 GPUS=a node TIME= PARTITION=)
	@$(PY) -m launch slurm --nodes $(call quoted,NODES) --gpus $(call quoted,GPUS) $(call with,--time,TIME) \
	    $(call with,--partition,PARTITION) $(call if_given,--nproc,NPROC) $(call if_given,--port,PORT) $(to_train)

.PHONY: launch-torchrun
launch-torchrun: $(STAMP) ## this host's ranks of several hosts', to be typed on each of them (RDZV=host:port NNODES=1 NPROC=1)
	@$(PY) -m launch torchrun $(call with,--rdzv,RDZV) --nnodes $(call quoted,NNODES) --nproc $(call quoted,NPROC) $(to_train)

.PHONY: doctor
doctor: $(STAMP) ## says what would go wrong in training, here or on hosts (HOSTFILE=file or NODES=a,b, CONFIG= PORT=)
	@$(PY) -m launch doctor $(call if_given,--hostfile,HOSTFILE) $(call if_given,--nodes,NODES) \
	    $(call if_given,--port,PORT) --from-make $(value OPTIONS)

.PHONY: claim
claim: $(STAMP) ## runs and judges one claim (CLAIM=id PROFILE=smoke|cpu|gpu|paper ARGS=)
	@$(PY) -m normscale claim run $(call quoted,CLAIM) --profile $(call quoted,PROFILE) $(value ARGS)

.PHONY: claims
claims: $(STAMP) ## runs as many of all claims as the time pays for; goes on when started again (PROFILE= HOURS=2 ARGS=)
	@$(PY) -m normscale claim run --all --profile $(call quoted,PROFILE) --hours $(call quoted,HOURS) $(value ARGS)

.PHONY: claims-list
claims-list: $(STAMP) ## lists the claims
	@$(PY) -m normscale claim list

.PHONY: report
report: $(STAMP) ## writes the report from the stored records (ARGS=)
	@$(PY) -m normscale claim report $(value ARGS)

.PHONY: schemes
schemes: $(STAMP) ## writes a page about every scheme: formula, signal, gradient, update, records (ARGS=--survey trains each first)
	@$(PY) -m normscale claim schemes $(value ARGS)

.PHONY: ui
ui: $(STAMP) ## serves the MLflow UI on this machine and prints its address (PORT=5000)
	@$(PY) -m normscale ui --port $(call quoted,PORT) $(value ARGS)

.PHONY: server
server: $(STAMP) ## serves a tracking store that several machines share (PORT=5000 ARGS="--host 0.0.0.0 --store URI")
	@$(PY) -m normscale server --port $(call quoted,PORT) $(value ARGS)

.PHONY: sync
sync: $(STAMP) ## replays the stored records into MLflow again (ARGS=)
	@$(PY) -m normscale sync $(value ARGS)

.PHONY: golden
golden: $(STAMP) ## writes the golden losses anew, to be looked at in git diff
	@NORMSCALE_WRITE_GOLDEN=1 $(PY) -m pytest -q -k golden

.PHONY: golden-kernels
golden-kernels: $(STAMP) ## writes what the kernels take of a GPU anew, to be looked at in git diff
	@$(PY) -m tests.ops.ahead.compile --write

.PHONY: bench
bench: $(STAMP) ## measures start-up, building and stepping on this machine
	@$(PY) -m tests.bench

.PHONY: bench-step
bench-step: $(STAMP) ## measures a DeepNorm step on this CPU, beside others and the machine's products (ARGS=)
	@$(PY) -m tests.bench_step $(value ARGS)

.PHONY: bench-probes
bench-probes: $(STAMP) ## measures what the probes cost a step, with intervals, and holds it to its bounds (ARGS=)
	@$(PY) -m tests.bench_probes $(value ARGS)

.PHONY: bench-kernels
bench-kernels: $(STAMP) ## measures the norm kernels on a GPU, beside others and the device copy (ARGS=)
	@$(PY) -m tests.bench_kernels $(value ARGS)

.PHONY: clean
clean: ## removes the environment and caches, keeps runs and reports
	@rm -rf .venv build dist ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo 'kept: runs, reports, mlflow.db'

# An interrupted installation goes on with the next make. A lock keeps two makes from installing at once.
$(STAMP): pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "normscale needs Python 3.11 or newer with venv; PYTHON=$(PYTHON) is $$("$(PYTHON)" --version 2>&1 || true)." >&2; \
	    echo 'Install it (Debian, Ubuntu: apt-get install python3 python3-venv python3-dev g++) or give PYTHON=path.' >&2; \
	    exit 2; }
	@if command -v flock >/dev/null; then exec flock .venv.lock sh -c "$$INSTALL"; else exec sh -c "$$INSTALL"; fi

define INSTALL
set -eu
if [ -z "$${TORCH_INDEX:-}" ] && [ -n "$$(find $(STAMP) -newer pyproject.toml -newer constraints.txt 2>/dev/null)" ]; then
    exit 0 # another make has done it while this one waited
fi
echo 'Installing into .venv (once; usually 3 to 8 minutes):'
echo '  1/3 an environment in .venv (seconds)'
$(PY) -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear .venv
echo '  2/3 PyTorch, the largest part: 200 MB for CPUs, several GB with CUDA (1 to 4 minutes, without a word)'
if [ -n "$${TORCH_INDEX:-}" ] && [ "$$(cat .venv/torch-index 2>/dev/null)" != "$$TORCH_INDEX" ]; then
    $(PY) -m pip install -qq --no-deps --force-reinstall --index-url "$$TORCH_INDEX" -c constraints.txt torch
    printf '%s\n' "$$TORCH_INDEX" > .venv/torch-index
else
    $(PY) -m pip install -qq -c constraints.txt torch
fi
echo '  3/3 the other packages (MLflow, datasets, Accelerate, DeepSpeed, ...) and normscale (2 to 4 minutes, without a word)'
$(PY) -m pip install -qq -c constraints.txt -e '.[deepspeed,dev]'
touch $(STAMP)
echo 'Installed. Plain make lists what there is.'
endef
export INSTALL TORCH_INDEX
