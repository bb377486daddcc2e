//! The launchers whose variables name a process's rank.

use std::fmt;

/// A launcher, identified by the variables it sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankLauncher {
    /// `torchrun` and compatible launchers.
    Torchrun,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// `mpiexec` of MPICH, Intel MPI and others with a PMI process manager.
    Pmi,
    /// SLURM's `srun`.
    Slurm,
}

impl RankLauncher {
    /// Returns its variables for rank, size, rank within the node, and ranks of the node.
    pub(crate) const fn variables(self) -> [&'static str; 4] {
        match self {
            RankLauncher::Torchrun => ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"],
            RankLauncher::OpenMpi => [
                "OMPI_COMM_WORLD_RANK",
                "OMPI_COMM_WORLD_SIZE",
                "OMPI_COMM_WORLD_LOCAL_RANK",
                "OMPI_COMM_WORLD_LOCAL_SIZE",
            ],
            RankLauncher::Pmi => ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
            RankLauncher::Slurm => ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ""],
        }
    }
}

impl fmt::Display for RankLauncher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RankLauncher::Torchrun => "torchrun",
            RankLauncher::OpenMpi => "Open MPI",
            RankLauncher::Pmi => "PMI",
            RankLauncher::Slurm => "SLURM",
        })
    }
}
