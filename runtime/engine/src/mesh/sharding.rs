//! The sharing of parameters between ranks, by name.

use super::process_group::ProcessGroup;
use moesaic_plan::{Parallel, Placement};
use std::ops::Range;

/// The way ranks share a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sharding {
    /// The group of ranks that hold the same values.
    pub among: ProcessGroup,
    /// The dimension that shards split, if any.
    pub hidden: Option<usize>,
    /// Whether only the first shard adds the parameter; the others hold zeros.
    pub once: bool,
}

impl Sharding {
    /// Returns how ranks share the parameter of a name, with any prefix.
    pub fn of(mesh: Parallel, name: &str) -> Sharding {
        if let Some(part) = expert_part(name) {
            return Sharding {
                among: ProcessGroup::ExpertDp,
                // Routed experts are stacked, so the expert comes before the dimensions of a
                // matrix.
                hidden: hidden_dimension(part).map(|dimension| dimension + 1),
                once: part == LAST_BIAS,
            };
        }
        match shared_part(name).filter(|_| mesh.shards_shared()) {
            Some((_, part)) => Sharding {
                among: ProcessGroup::EpDp,
                hidden: hidden_dimension(part),
                once: part == LAST_BIAS,
            },
            None => Sharding {
                among: ProcessGroup::World,
                hidden: None,
                once: false,
            },
        }
    }

    /// Returns whether the first dimension counts experts, of which each rank holds some.
    pub fn counts_experts(&self) -> bool {
        self.among == ProcessGroup::ExpertDp
    }

    /// Returns whether every rank holds the whole parameter.
    pub fn is_everywhere(&self) -> bool {
        self.among == ProcessGroup::World
    }
}

impl ProcessGroup {
    /// Returns the group of ranks that hold the same values of a parameter, by its name. A name
    /// with `experts.` in it belongs to experts; a name with `shared.0.` in it, apart from
    /// `shared.0.router.`, belongs to a shard of a shared expert where the mesh shards these
    /// ([`SharedExperts`](moesaic_plan::SharedExperts)); all ranks hold every other parameter.
    pub fn of(mesh: Parallel, name: &str) -> ProcessGroup {
        Sharding::of(mesh, name).among
    }
}

/// Returns the placement of experts on the groups of a mesh, if one exists.
pub(super) fn placement_of(
    mesh: Parallel,
    placement: Option<&Placement>,
    experts: usize,
) -> Option<Placement> {
    match placement {
        Some(placement) => (placement.experts() == experts).then(|| placement.clone()),
        None => (experts >= mesh.ep).then(|| Placement::contiguous(mesh.ep, experts)),
    }
}

/// Returns the runs of consecutive numbers.
pub(super) fn runs(numbers: &[usize]) -> Vec<Range<usize>> {
    let next = |a: &usize, b: &usize| a + 1 == *b;
    let runs = numbers.chunk_by(next);
    runs.map(|run| run[0]..run[0] + run.len()).collect()
}

/// The bias after an expert's last GEMM.
const LAST_BIAS: &str = "down.bias";

/// Returns the hidden dimension of an expert's matrix or bias, if it has one.
fn hidden_dimension(part: &str) -> Option<usize> {
    match part {
        "gate.weight" | "up.weight" | "gate.bias" | "up.bias" => Some(0),
        "down.weight" => Some(1),
        _ => None,
    }
}

/// Returns the name within an expert: `up.weight` of `block3.experts.up.weight`.
fn expert_part(name: &str) -> Option<&str> {
    let behind = |at: usize| &name[at + ".experts.".len()..];
    let first = name.strip_prefix("experts.");
    first.or_else(|| name.find(".experts.").map(behind))
}

/// Returns the index of a shared expert and the name within it, for its own weights but not its
/// gate's: 0 and `up.weight` of `block3.shared.0.up.weight`.
pub(super) fn shared_part(name: &str) -> Option<(usize, &str)> {
    // A model's own prefix may end in `shared.` too, as in `model.shared.block.shared.0.up.weight`,
    // so every occurrence is tried.
    let places = name.match_indices("shared.").map(|(at, _)| at);
    let mut begins = places.filter(|&at| at == 0 || name.as_bytes()[at - 1] == b'.');
    begins.find_map(|at| {
        let (index, part) = name[at + "shared.".len()..].split_once('.')?;
        let cut = hidden_dimension(part).is_some() || part == LAST_BIAS;
        Some((index.parse().ok().filter(|_| cut)?, part))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use moesaic_plan::SharedExperts;

    #[test]
    fn a_name_says_who_has_the_same() {
        let whole = Parallel {
            ep: 2,
            expert_tp: 2,
            ..Parallel::default()
        };
        let sharded = Parallel {
            shared: SharedExperts::Sharded,
            ..whole
        };
        let among = |mesh, name| Sharding::of(mesh, name).among;
        for name in ["experts.up.weight", "block3.experts.down.bias"] {
            assert_eq!(among(whole, name), ProcessGroup::ExpertDp);
            assert_eq!(among(sharded, name), ProcessGroup::ExpertDp);
        }
        for name in [
            "shared.0.up.weight",
            "optimizer.first.b3.shared.12.down.bias",
        ] {
            assert_eq!(among(whole, name), ProcessGroup::World);
            assert_eq!(among(sharded, name), ProcessGroup::EpDp);
        }
        for name in [
            "shared.0.router.weight",
            "shared.x.up.weight",
            "unshared.0.up.weight",
            "router.weight",
        ] {
            assert_eq!(among(sharded, name), ProcessGroup::World);
        }
        let one = Parallel {
            expert_tp: 1,
            ..sharded
        };
        assert_eq!(among(one, "shared.0.up.weight"), ProcessGroup::World);
    }

    #[test]
    fn shards_split_the_hidden_dimension() {
        let mesh = Parallel {
            expert_tp: 2,
            shared: SharedExperts::Sharded,
            ..Parallel::default()
        };
        for (part, dimension) in [
            ("gate.weight", Some(0)),
            ("up.bias", Some(0)),
            ("down.weight", Some(1)),
            ("down.bias", None),
        ] {
            let shared = Sharding::of(mesh, &format!("a.shared.3.{part}"));
            let routed = Sharding::of(mesh, &format!("a.experts.{part}"));
            assert_eq!(shared.hidden, dimension);
            assert_eq!(routed.hidden, dimension.map(|at| at + 1));
            assert_eq!([shared.once, routed.once], [part == "down.bias"; 2]);
        }
        assert_eq!(
            shared_part("a.shared.13.up.weight"),
            Some((13, "up.weight"))
        );
    }
}
