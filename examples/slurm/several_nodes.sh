#!/bin/bash
# GPT-2 on several nodes. What fails is started again from the newest checkpoint within the same allocation; before the
# time is over the job saves and goes back to the queue. When a node dies Slurm puts it back (--requeue).
#
#     sbatch --nodes=4 examples/slurm/several_nodes.sh
#
# From the project's root, in an environment where it is installed, on a file system that all nodes share. The job's name
# is also that of its directory: another training needs another one (sbatch --job-name=NAME), and of one name a single job
# runs at a time (singleton); the next one goes on where the last one has ended.
#
#SBATCH --job-name=gpt2-xl
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=4
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
#SBATCH --dependency=singleton

set -u

MPI=${MPI:-pmi2} # pmi2: MPICH, Intel MPI; pmix: Open MPI. `srun --mpi=list` says what there is.
RUN=${RUN:-runs/$SLURM_JOB_NAME} # on a file system that all nodes share
STOPPED=75    # asked to stop, saved, can go on
TOO_EARLY=138 # the signal came before the launcher listened, and ended it

mkdir -p "$RUN"
export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"

# Slurm signals this script (B:), the script the launcher, and the launcher, through srun, the ranks. SIGTERM comes from
# scancel, which wants the job gone, or before Slurm itself puts it back.
asked=
gone=
launcher=
trap 'asked=yes; [ -z "$launcher" ] || kill -USR1 "$launcher"' USR1
trap 'asked=yes; gone=yes; [ -z "$launcher" ] || kill -USR1 "$launcher"' TERM

put_back() {
    [ -n "$gone" ] || scontrol requeue "$SLURM_JOB_ID"
}

srun --mpi="$MPI" --cpus-per-task="$SLURM_CPUS_PER_TASK" python -m mpidl.doctor

if [ -n "$asked" ]; then
    put_back
    exit "$STOPPED"
fi
python -m mpidl.launch --max-restarts 20 --checkpoint "$RUN" \
    --json "$RUN/launch-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}.json" -- \
    srun --mpi="$MPI" --ntasks="$SLURM_NTASKS" --kill-on-bad-exit=1 \
    --cpu-bind=cores --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    python examples/gpt2_zero3.py --model gpt2-xl --data my.txt --steps 100000 \
    --checkpoint-dir "$RUN" --save-every 200 --on-nan skip --check-replicas 500 &
launcher=$!
[ -z "$asked" ] || kill -USR1 "$launcher" # the signal came before the number of the launcher was known

# `wait` returns early when a signal comes, and is then to be called again.
wait "$launcher"
status=$?
while kill -0 "$launcher" 2>/dev/null; do
    wait "$launcher"
    status=$?
done

if [ "$status" -eq "$STOPPED" ] || [ "$status" -eq "$TOO_EARLY" ]; then
    put_back
fi
exit "$status"
