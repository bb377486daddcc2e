//! A kernel of ranks that may not be compiled: which command adds it.

use super::groups::Mesh;
use crate::error::EngineError;
use moesaic_plan::{Parallel, Strategy};

/// The error with the options of `precompile` that say which ranks a missing kernel is for.
pub(super) fn for_ranks(error: EngineError, mesh: &Mesh, strategy: Strategy) -> EngineError {
    let EngineError::NotCached {
        kernel,
        target,
        mut options,
    } = error
    else {
        return error;
    };
    options += &format!(" --mesh {}", written(mesh.parallel()));
    if mesh.placement().is_some() {
        options += " --placement <file>";
    }
    if strategy != Strategy::default() {
        options += &format!(" --strategy {strategy}");
    }
    EngineError::NotCached {
        kernel,
        target,
        options,
    }
}

/// A mesh as the command line has it.
fn written(mesh: Parallel) -> String {
    let Parallel { ep, shards, dp, .. } = mesh;
    let more = [("shards", shards), ("dp", dp)].into_iter();
    let more = more.filter(|(_, count)| *count > 1);
    let more: String = more
        .map(|(name, count)| format!(",{name}={count}"))
        .collect();
    let sliced = if mesh.slices_shared() {
        ",shared=sliced"
    } else {
        ""
    };
    format!("ep={ep}{more}{sliced}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use moesaic_plan::SharedExperts;

    #[test]
    fn meshes_are_written_as_they_are_read() {
        let mesh = Parallel {
            ep: 2,
            shards: 4,
            ..Parallel::default()
        };
        assert_eq!(written(Parallel { shards: 1, ..mesh }), "ep=2");
        assert_eq!(written(Parallel { dp: 3, ..mesh }), "ep=2,shards=4,dp=3");
        let shared = SharedExperts::Sliced;
        assert_eq!(
            written(Parallel { shared, ..mesh }),
            "ep=2,shards=4,shared=sliced"
        );
    }
}
