//! Arguments that pick one rank of a mesh, for commands that show a rank and run nothing.

use crate::experts;
use crate::failure::{Failure, Result};
use clap::Args;
use moesaic::collectives::nccl::Kernels;
use moesaic::emit::emit_layer;
use moesaic::kernel::KernelSource;
use moesaic::plan::{RankPlan, Sharing, plan_rank};
use moesaic::{EngineError, LayerSpec, Parallel, PlanOptions, Strategy, Target};
use std::path::{Path, PathBuf};

/// The options that go with `--mesh`.
#[derive(Args, Debug)]
pub struct OneRankArgs {
    /// Strategy of the ranks, as in `run`: r, overlap_degree, overlap_by, comm_dtype and shadows
    /// change steps; r, comm_dtype and shadows also change kernels
    #[arg(long, value_name = "S", value_parser = str::parse::<Strategy>, default_value = "default", requires = "mesh")]
    strategy: Strategy,
    /// Index of the rank
    #[arg(long, value_name = "N", default_value_t = 0, requires = "mesh")]
    rank: usize,
    /// File that assigns experts to groups of ranks, such as `0-2 | 3-5,+2` (text or JSON); experts
    /// in order if not given
    #[arg(long, value_name = "FILE", requires = "mesh")]
    placement: Option<PathBuf>,
}

impl OneRankArgs {
    /// Returns the placement file.
    pub fn placement(&self) -> Option<&Path> {
        self.placement.as_deref()
    }

    /// Returns the plan of the rank.
    pub fn plan(
        &self,
        spec: &LayerSpec,
        target: Target,
        options: &PlanOptions,
        mesh: Parallel,
    ) -> Result<RankPlan> {
        self.strategy.check(&mesh).map_err(Failure::input)?;
        let placement = experts::placement(self.placement.as_deref())?;
        let sharing = Sharing::from(mesh).by(self.strategy.plan_form(&mesh));
        let sharing = sharing.placed(placement.as_ref());
        let plan = plan_rank(spec, target, options, sharing, self.rank);
        let plan = plan.map_err(EngineError::from)?;
        let plan = plan.in_comm_dtype(self.strategy.comm_dtype);
        Ok(plan.in_chunks(self.strategy.chunks()))
    }
}

/// A kernel of a rank, and the part of the rank's plan that it belongs to.
pub struct OfRank {
    pub part: &'static str,
    pub source: KernelSource,
}

impl OfRank {
    /// Returns the part and the file name, such as `experts/grouped_gemm_up.c`.
    pub fn file_name(&self) -> String {
        format!("{}/{}", self.part, self.source.file_name())
    }
}

/// Emits the kernels of every part of a rank and, for GPUs, the kernel that sums values over ranks.
pub fn kernels(plan: &RankPlan) -> Result<Vec<OfRank>> {
    let mut all = Vec::new();
    for (part, plan) in plan.named_parts() {
        let sources = emit_layer(plan).map_err(EngineError::from)?;
        all.extend(sources.into_iter().map(|source| OfRank { part, source }));
    }
    let sums = Kernels::source(plan.tokens.target).into_iter();
    all.extend(sums.map(|source| OfRank {
        part: "sums",
        source,
    }));
    Ok(all)
}
