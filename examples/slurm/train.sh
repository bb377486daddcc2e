#!/bin/bash
#SBATCH --job-name=moesaic
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
# For ranks with GPUs:
##SBATCH --gpus-per-node=4

# sbatch examples/slurm/train.sh PROGRAM [ARGUMENTS...]
#
# MPI_TYPE   the process manager that your MPI library speaks: pmix for Open MPI,
#            pmi2 for MPICH and Intel MPI; `srun --mpi=list` says what there is
# MOESAIC_MPI  the library, where the loader does not find the one of your `module load`
# LAYER      a spec whose kernels are compiled before the ranks start
# TARGET     for what: cpu, cuda:sm_90a, ...
set -euo pipefail

if [ $# -eq 0 ]; then
    echo "usage: sbatch train.sh PROGRAM [ARGUMENTS...]" >&2
    exit 2
fi

# One cache for all nodes, on storage that they share. Kernels that are not in it are
# compiled once: whoever comes first does it, the others wait.
export MOESAIC_CACHE=${MOESAIC_CACHE:-$HOME/.cache/moesaic}

# torchrun's variables, for libraries that meet at an address.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-29500}

# On one node, so that ranks find their kernels there.
if [ -n "${LAYER:-}" ]; then
    srun --nodes=1 --ntasks=1 moesaic precompile --spec "$LAYER" --target "${TARGET:-cpu}"
fi

ranks=(srun --kill-on-bad-exit=1 --cpu-bind=cores ${MPI_TYPE:+--mpi="$MPI_TYPE"})

# Who is where, whether all run the same, and how fast they reach each other.
"${ranks[@]}" moesaic doctor --ranks

"${ranks[@]}" "$@"
