//! The rank and size of this process, read from the launcher's environment variables.

use crate::{CollectiveError, Collectives, Communicator, SetupError};
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
    const fn variables(self) -> [&'static str; 4] {
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

/// The position of a process in its world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct World {
    /// This process, from 0.
    pub rank: usize,
    /// The number of processes.
    pub size: usize,
    /// The rank within the node, if the launcher gives it. Use it only to choose a device:
    /// [`topology`](crate::topology::Topology) derives which ranks share a node from host names.
    pub local_rank: Option<usize>,
    /// The launcher whose variables were read; `None` for explicit arguments.
    pub launcher: Option<RankLauncher>,
}

impl World {
    /// Returns a world from explicit arguments.
    ///
    /// # Errors
    /// [`CollectiveError::Setup`] when `rank` is not below `size`.
    pub fn new(rank: usize, size: usize) -> Result<World, CollectiveError> {
        World {
            rank,
            size,
            local_rank: None,
            launcher: None,
        }
        .checked()
    }

    /// Reads the variables of this process; `None` where no launcher has set any.
    ///
    /// # Errors
    /// As [`World::from_variables`].
    pub fn from_environment() -> Result<Option<World>, CollectiveError> {
        World::from_variables(|name| std::env::var(name).ok())
    }

    /// Reads the variables of torchrun, Open MPI, PMI and SLURM, in that order. SLURM's count
    /// only if no other launcher's are set, because they stay set where `srun` starts another
    /// launcher on each node; and only inside tasks of `srun`, because a batch script has them
    /// too and is no rank.
    ///
    /// # Errors
    /// [`CollectiveError::Setup`] for variables that are no numbers, lack their counterparts, or
    /// contradict those of another launcher.
    pub fn from_variables(
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<World>, CollectiveError> {
        let near = [
            RankLauncher::Torchrun,
            RankLauncher::OpenMpi,
            RankLauncher::Pmi,
        ];
        let mut found: Option<World> = None;
        for launcher in near {
            let Some(world) = read(launcher, &variable)? else {
                continue;
            };
            match found {
                None => found = Some(world),
                // Several launchers may set variables for the same process; they only must not
                // disagree.
                Some(first) if first.is_same_as(&world) => {}
                Some(first) => return Err(contradiction(&first, &world)),
            }
        }
        // Read last and only as a fallback: SLURM's variables also reach processes that are not
        // its tasks.
        let task = read(RankLauncher::Slurm, &variable);
        let Some(mut world) = found else {
            return Ok(task?.filter(|task| task.rank > 0 || is_step(&variable)));
        };
        // SLURM's PMI gives no local rank, but SLURM's own variables do. They are not validated
        // further, because they may belong to a task that started this launcher.
        if let (None, Ok(Some(task))) = (world.local_rank, task) {
            world.local_rank = task.local_rank.filter(|_| task.is_same_as(&world));
        }
        Ok(Some(world))
    }

    /// Returns whether SLURM's PMIx has started this process, as `srun --mpi=pmix` does: it is
    /// then the task that SLURM's variables name. Ranks that `torchrun` starts inside such a task
    /// see the same variables without being the task.
    pub(crate) fn is_task_of_pmix(&self, variable: impl Fn(&str) -> Option<String>) -> bool {
        let set = |name: &str| variable(name).is_some_and(|value| !value.is_empty());
        let task = read(RankLauncher::Slurm, &variable).ok().flatten();
        set("PMIX_NAMESPACE")
            && !set("TORCHELASTIC_RUN_ID")
            && task.is_some_and(|task| task.is_same_as(self))
    }

    fn is_same_as(&self, other: &World) -> bool {
        (self.rank, self.size) == (other.rank, other.size)
    }

    /// Returns the variables that were read, in words: `SLURM's SLURM_PROCID=0 and
    /// SLURM_NTASKS=4`.
    pub fn said_by(&self) -> Option<String> {
        let launcher = self.launcher?;
        let [rank, size, ..] = launcher.variables();
        let (own, all) = (self.rank, self.size);
        Some(format!("{launcher}'s {rank}={own} and {size}={all}"))
    }

    fn checked(self) -> Result<World, CollectiveError> {
        if self.rank < self.size {
            return Ok(self);
        }
        Err(CollectiveError::setup(SetupError::Rank {
            rank: self.rank,
            size: self.size,
            launcher: self.launcher,
        }))
    }

    /// Checks that the MPI library agrees with the launcher. A library that does not belong to
    /// the launcher makes every process a world of its own.
    pub(crate) fn must_be(
        &self,
        communicator: &Communicator,
        library: &str,
    ) -> Result<(), CollectiveError> {
        let (rank, size) = (communicator.rank(), communicator.size());
        // A SLURM task may have started the ranks by another launcher.
        let loose = self
            .launcher
            .is_none_or(|launcher| launcher == RankLauncher::Slurm);
        // A library of another MPI sees no launcher and starts a world of one in every process.
        let alone = size == 1 && self.size > 1;
        if (rank, size) == (self.rank, self.size) || (loose && !alone) {
            return Ok(());
        }
        if self.launcher == Some(RankLauncher::Torchrun) && size == 1 {
            return Err(CollectiveError::setup(SetupError::TorchrunWithoutMpi {
                rank: self.rank,
                size: self.size,
                library: library.to_string(),
            }));
        }
        Err(CollectiveError::setup(SetupError::OtherLauncher {
            launcher: self.launcher,
            launched: [self.rank, self.size],
            found: [rank, size],
            library: library.to_string(),
            transport: communicator.transport().to_string(),
        }))
    }
}

fn read(
    launcher: RankLauncher,
    variable: &impl Fn(&str) -> Option<String>,
) -> Result<Option<World>, CollectiveError> {
    let [rank, size, local, _] = launcher.variables();
    let number = |name: &str| match variable(name) {
        None => Ok(None),
        Some(text) => text.trim().parse::<usize>().map(Some).map_err(|_| {
            CollectiveError::setup(SetupError::Variable {
                name: name.to_string(),
                value: text,
                expected: "a number from 0 up",
            })
        }),
    };
    let missing = |set: &str, missing: &str| {
        CollectiveError::setup(SetupError::Counterpart {
            set: set.to_string(),
            missing: missing.to_string(),
        })
    };
    match (number(rank)?, number(size)?) {
        (Some(rank), Some(size)) => World {
            rank,
            size,
            local_rank: number(local)?,
            launcher: Some(launcher),
        }
        .checked()
        .map(Some),
        (None, None) => Ok(None),
        // A batch script has the number of tasks without being one of them.
        (None, Some(_)) if launcher == RankLauncher::Slurm => Ok(None),
        (None, Some(_)) => Err(missing(size, rank)),
        (Some(_), None) => Err(missing(rank, size)),
    }
}

/// Returns whether SLURM's variables belong to a task that `srun` has started. A batch script and
/// the shell of an allocation have rank and size too; their step numbers, if any, are at the
/// upper end of the range.
fn is_step(variable: &impl Fn(&str) -> Option<String>) -> bool {
    const SPECIAL: u32 = 0xffff_fff0;
    let step = variable("SLURM_STEP_ID").or_else(|| variable("SLURM_STEPID"));
    match step {
        Some(step) => step.trim().parse().is_ok_and(|step: u32| step < SPECIAL),
        None => {
            let by_srun = ["SLURM_LAUNCH_NODE_IPADDR", "SRUN_COMM_HOST"];
            by_srun.iter().any(|name| variable(name).is_some())
        }
    }
}

fn contradiction(first: &World, second: &World) -> CollectiveError {
    let says = |world: &World| world.said_by().unwrap_or_default();
    CollectiveError::setup(SetupError::Contradiction {
        first: says(first),
        second: says(second),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn world(variables: &str) -> Result<Option<(usize, usize, Option<usize>)>, String> {
        let lookup = |name: &str| {
            let mut pairs = variables
                .split_whitespace()
                .filter_map(|p| p.split_once('='));
            pairs
                .find(|(key, _)| *key == name)
                .map(|(_, value)| value.to_string())
        };
        let found = World::from_variables(lookup).map_err(|error| error.to_string())?;
        Ok(found.map(|world| (world.rank, world.size, world.local_rank)))
    }

    #[test]
    fn a_rank_that_the_world_lacks_is_told_by_its_numbers() {
        let error = World::new(3, 2).unwrap_err();
        let expected = SetupError::Rank {
            rank: 3,
            size: 2,
            launcher: None,
        };
        assert_eq!(error, CollectiveError::setup(expected));
        let error = World::from_variables(|name| (name == "RANK").then(|| "two".to_string()));
        let Err(CollectiveError::Setup(SetupError::Variable { name, value, .. })) = error else {
            panic!("{error:?}");
        };
        assert_eq!([&*name, &*value], ["RANK", "two"]);
    }

    #[test]
    fn every_launcher_is_read() {
        assert_eq!(world(""), Ok(None));
        assert_eq!(
            world("RANK=3 WORLD_SIZE=8 LOCAL_RANK=1"),
            Ok(Some((3, 8, Some(1))))
        );
        let open_mpi = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2";
        assert_eq!(world(open_mpi), Ok(Some((1, 2, None))));
        assert_eq!(
            world("PMI_RANK=0 PMI_SIZE=1 MPI_LOCALRANKID=0"),
            Ok(Some((0, 1, Some(0))))
        );
        assert_eq!(
            world("SLURM_PROCID=5 SLURM_NTASKS=6"),
            Ok(Some((5, 6, None)))
        );
        assert_eq!(world("SLURM_NTASKS=6"), Ok(None));
    }

    #[test]
    fn slurms_pmi_leaves_the_rank_within_the_node_to_slurm() {
        let pmi = "PMI_RANK=9 PMI_SIZE=16 PMI_FD=7";
        let slurm = "SLURM_PROCID=9 SLURM_NTASKS=16 SLURM_LOCALID=1";
        assert_eq!(world(&format!("{pmi} {slurm}")), Ok(Some((9, 16, Some(1)))));
        // Ranks that another launcher has started inside a task are not the task.
        let task = "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0";
        assert_eq!(world(&format!("{pmi} {task}")), Ok(Some((9, 16, None))));
        let odd = "SLURM_PROCID=x SLURM_NTASKS=2";
        assert_eq!(world(&format!("{pmi} {odd}")), Ok(Some((9, 16, None))));
    }

    #[test]
    fn a_batch_script_is_no_rank() {
        let script = "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0";
        let with = |more: &str| world(&format!("{script} {more}")).unwrap();
        // Steps of the script itself, and of the shell of an allocation.
        for more in [
            "",
            "SLURM_STEP_ID=4294967291",
            "SLURM_STEPID=4294967290 SRUN_COMM_HOST=10.0.0.1",
        ] {
            assert_eq!(with(more), None, "{more}");
        }
        for more in [
            "SLURM_STEP_ID=0",
            "SLURM_STEPID=3",
            "SLURM_LAUNCH_NODE_IPADDR=10.0.0.1",
            "SRUN_COMM_HOST=10.0.0.1",
        ] {
            assert_eq!(with(more), Some((0, 4, Some(0))), "{more}");
        }
    }

    #[test]
    fn the_nearer_launcher_wins_over_slurm_and_must_not_contradict_others() {
        let both = "SLURM_PROCID=0 SLURM_NTASKS=2 PMI_RANK=5 PMI_SIZE=8";
        assert_eq!(world(both), Ok(Some((5, 8, None))));
        assert_eq!(
            world("RANK=1 WORLD_SIZE=2 PMI_RANK=1 PMI_SIZE=2"),
            Ok(Some((1, 2, None)))
        );
        let error = world("RANK=1 WORLD_SIZE=2 PMI_RANK=0 PMI_SIZE=2").unwrap_err();
        assert!(
            error.contains(
                "torchrun's RANK=1 and WORLD_SIZE=2 contradict PMI's PMI_RANK=0 and PMI_SIZE=2"
            ),
            "{error}"
        );
    }

    #[test]
    fn what_cannot_be_is_refused() {
        for (variables, words) in [
            ("RANK=x WORLD_SIZE=2", "RANK is `x`; it must be a number"),
            ("RANK=1", "RANK is set and WORLD_SIZE is not"),
            ("WORLD_SIZE=1", "WORLD_SIZE is set and RANK is not"),
            ("PMI_RANK=4 PMI_SIZE=4", "rank 4 of 4 was given by PMI"),
        ] {
            let error = world(variables).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        assert!(World::new(0, 0).is_err());
        assert_eq!(World::new(1, 2).unwrap().launcher, None);
    }
}
