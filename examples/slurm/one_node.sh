#!/bin/bash
# GPT-2 on one node. Two minutes before its time is over the job saves, and goes back to the queue; there it goes on.
#
#     sbatch examples/slurm/one_node.sh
#
# From the project's root, in an environment where it is installed. The job's name is also that of its directory: another
# training needs another one (sbatch --job-name=NAME), and of one name a single job runs at a time (singleton); the next
# one goes on where the last one has ended.
#
#SBATCH --job-name=gpt2-medium
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=4
#SBATCH --time=04:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
#SBATCH --dependency=singleton

set -u

MPI=${MPI:-pmi2} # pmi2: MPICH, Intel MPI; pmix: Open MPI. `srun --mpi=list` says what there is.
RUN=${RUN:-runs/$SLURM_JOB_NAME}
STOPPED=75    # asked to stop, saved, can go on
TOO_EARLY=138 # the signal came before the training listened, and ended it: its last checkpoint is there

mkdir -p "$RUN"
export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"

srun --mpi="$MPI" --cpu-bind=cores --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    python examples/gpt2_zero3.py --model gpt2-medium --data my.txt --steps 100000 \
    --checkpoint-dir "$RUN" --save-every 200 --on-nan skip --check-replicas 500
status=$?

if [ "$status" -eq "$STOPPED" ] || [ "$status" -eq "$TOO_EARLY" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
