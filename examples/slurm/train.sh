#!/bin/bash
#SBATCH --job-name=moesaic
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00

# sbatch examples/slurm/train.sh PROGRAM [ARGUMENTS...]
#
# Runs PROGRAM on every GPU of nodes of 8 GPUs, one rank per GPU. For other nodes, give sbatch
# other numbers: sbatch --ntasks-per-node=4 --gpus-per-node=4 examples/slurm/train.sh ...
#
# MOESAIC_MPI  The MPI library, where the loader finds none or another one.
# MPI_TYPE     The process manager that this library speaks: pmix for Open MPI, pmi2 for MPICH,
#              Intel MPI and Cray MPICH. If unset, it follows from the name of MOESAIC_MPI, and
#              is pmix without one.
# LAYER        A layer spec. Its kernels are compiled before the ranks start, so that PROGRAM
#              may run with --strict.
# TARGET       Compiles them for cuda (the GPU of the first node), cuda:sm_90a, rocm:gfx942, cpu.
# MESH         Compiles them for the mesh that PROGRAM uses; ep=RANKS if unset.
# TRAINING     What backward recomputes: none, hidden or all. Set it to the empty string for
#              kernels of inference.
# PRECOMPILE   Further options of `moesaic precompile`: --strategy ..., --placement ..., --adaptive-r.
set -euo pipefail

if [ $# -eq 0 ]; then
    echo "usage: sbatch train.sh PROGRAM [ARGUMENTS...]" >&2
    exit 2
fi

# One cache for all nodes, on storage that they share. A kernel that is missing there is compiled
# once: the first rank compiles, the others wait.
export MOESAIC_CACHE=${MOESAIC_CACHE:-$HOME/.cache/moesaic}

# Libraries that meet at an address look at these. Jobs that share a node need different ports.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}

# Since SLURM 22.05 srun does not take this number from sbatch. Without it a rank has one
# processor, and all its threads share it.
export SRUN_CPUS_PER_TASK=${SRUN_CPUS_PER_TASK:-${SLURM_CPUS_PER_TASK:-1}}

# Where NCCL chooses the wrong network, name the right one:
# export NCCL_SOCKET_IFNAME=ib0 NCCL_IB_HCA=mlx5

if [ -z "${MPI_TYPE:-}" ]; then
    case ${MOESAIC_MPI:-} in
    *libmpi.so.12* | *libmpi_abi.so*) MPI_TYPE=pmi2 ;;
    *) MPI_TYPE=pmix ;;
    esac
fi
offered=$(srun --mpi=list 2>&1)
if ! grep -qw -- "$MPI_TYPE" <<<"$offered"; then
    echo "train.sh: srun does not speak $MPI_TYPE: set MPI_TYPE to what it speaks, and MOESAIC_MPI" \
        "to a library of that kind" >&2
    echo "$offered" >&2
    exit 2
fi

if [ -n "${LAYER:-}" ]; then
    options=(--mesh "${MESH:-ep=$SLURM_NTASKS}")
    if [ -n "${TRAINING-none}" ]; then
        options+=(--training "${TRAINING-none}")
    fi
    if [ -n "${PRECOMPILE:-}" ]; then
        read -ra more <<<"$PRECOMPILE"
        options+=("${more[@]}")
    fi
    # One task with all processors of a node, and no part of an MPI world.
    srun --mpi=none --nodes=1 --ntasks=1 --ntasks-per-node=1 \
        --cpus-per-task="${SLURM_CPUS_ON_NODE:-1}" \
        moesaic precompile --spec "$LAYER" --target "${TARGET:-cuda}" "${options[@]}"
fi

ranks=(srun --kill-on-bad-exit=1 --cpu-bind=cores --mpi="$MPI_TYPE")

# Shows which ranks are where, and how fast they reach each other. It fails where they run
# different versions, and the program does not start then.
"${ranks[@]}" moesaic doctor --ranks

"${ranks[@]}" "$@"
