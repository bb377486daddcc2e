//! One rank's weights, out of those of the whole layer.

use super::sharding::{Sharding, placement_of, runs, shared_part};
use moesaic_kernel::DType;
use moesaic_plan::{Parallel, Placement, RankCoords};
use moesaic_spec::LayerSpec;
use moesaic_tensor::{SourceError, Tensor, WeightSource};
use std::fmt;
use std::ops::Range;

/// A weight source with the experts of one rank and its shards of shared ones. Names and dtypes are
/// those of the whole layer, counts and hidden widths those of the rank. Only what the rank holds
/// is read from the whole source.
pub struct Shard<'a> {
    whole: &'a dyn WeightSource,
    mesh: Parallel,
    place: RankCoords,
    placement: Option<&'a Placement>,
    /// The number of experts of the whole layer.
    experts: usize,
    /// The hidden width of a whole expert.
    hidden: usize,
    /// The hidden width of each whole shared expert.
    shared: Vec<usize>,
}

impl fmt::Debug for Shard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shard")
            .field("mesh", &self.mesh)
            .field("place", &self.place)
            .finish_non_exhaustive()
    }
}

impl<'a> Shard<'a> {
    /// Makes the source of the rank at some coordinates, out of `whole`.
    pub fn new(
        spec: &LayerSpec,
        mesh: Parallel,
        place: RankCoords,
        whole: &'a dyn WeightSource,
    ) -> Shard<'a> {
        Shard {
            whole,
            mesh,
            place,
            placement: None,
            experts: spec.shape.experts,
            hidden: spec.shape.hidden_dim,
            shared: spec.shared.iter().map(|one| one.hidden_dim).collect(),
        }
    }

    /// Sets the placement of experts.
    pub fn placed(self, placement: Option<&'a Placement>) -> Shard<'a> {
        Shard { placement, ..self }
    }

    /// Returns the rank's experts.
    fn own_experts(&self) -> Vec<usize> {
        let placement = placement_of(self.mesh, self.placement, self.experts);
        placement.map_or(Vec::new(), |all| all.of(self.place.ep).into_owned())
    }

    /// Returns how ranks share a weight, and the dimension that is split here with the whole
    /// tensor's width in it.
    fn share(&self, name: &str) -> (Sharding, Option<(usize, usize)>) {
        let share = Sharding::of(self.mesh, name);
        let width = match shared_part(name).filter(|_| !share.counts_experts()) {
            Some((index, _)) => self.shared.get(index).copied(),
            None => Some(self.hidden),
        };
        let cut = share.hidden.zip(width);
        (share, cut.filter(|_| self.mesh.expert_tp > 1))
    }

    /// Returns the rank's part of a hidden width.
    fn own(&self, width: usize) -> Range<usize> {
        self.mesh.hidden(self.place.tp, width)
    }
}

/// Joins a weight of all experts, or of a shared one, or its gradient, from the parts of a group's
/// ranks: the inverse of [`Shard`]. `part` returns the part of the rank at some coordinates.
pub fn joined<'t>(
    name: &str,
    mesh: Parallel,
    part: impl Fn(RankCoords) -> Tensor<'t>,
) -> Tensor<'static> {
    joined_placed(name, (mesh, None), part)
}

/// Does the same as [`joined`], with a placement of experts; of replicas it takes the owner's part.
pub fn joined_placed<'t>(
    name: &str,
    (mesh, placement): (Parallel, Option<&Placement>),
    part: impl Fn(RankCoords) -> Tensor<'t>,
) -> Tensor<'static> {
    let share = Sharding::of(mesh, name);
    let dimension = share.hidden;
    // Shards of a tensor without a hidden dimension hold the same values or zeros, so the first
    // shard's count.
    let shards = dimension.map_or(1, |_| mesh.expert_tp);
    let group = |ep: usize| {
        let of = |tp: usize| part(RankCoords { dp: 0, ep, tp });
        let parts: Vec<Tensor<'_>> = (0..shards).map(of).collect();
        concat(&parts, dimension.unwrap_or(0))
    };
    if !share.counts_experts() {
        return group(0);
    }
    let groups: Vec<Tensor<'_>> = (0..mesh.ep).map(group).collect();
    match placement {
        None => concat(&groups, 0),
        Some(placement) => in_order(&groups, placement),
    }
}

/// Joins experts in the order of their ids, each from its owner.
fn in_order(groups: &[Tensor<'_>], placement: &Placement) -> Tensor<'static> {
    let experts = placement.experts();
    let mut shape = groups[0].shape.clone();
    shape[0] = experts;
    let mut whole = Tensor::zeros(groups[0].dtype, &shape);
    let row = whole.data.len() / experts.max(1);
    for (expert, to) in whole.data.to_mut().chunks_exact_mut(row.max(1)).enumerate() {
        let owner = placement.owner(expert);
        let from = placement.slot(owner, expert).map(|slot| slot * row);
        let from = from.and_then(|first| groups[owner].data.get(first..first + row));
        to.copy_from_slice(from.expect("an owner has its expert"));
    }
    whole
}

/// Concatenates tensors along a dimension.
pub(super) fn concat(parts: &[Tensor<'_>], dimension: usize) -> Tensor<'static> {
    let mut shape = parts[0].shape.clone();
    shape[dimension] = parts.iter().map(|part| part.shape[dimension]).sum();
    let mut whole = Tensor::zeros(parts[0].dtype, &shape);
    let inner = shape[dimension + 1..].iter().product::<usize>() * whole.dtype.size();
    let row = shape[dimension] * inner;
    let mut rows = whole.data.to_mut().chunks_exact_mut(row.max(1));
    for at in 0..shape[..dimension].iter().product() {
        let mut to = rows.next().unwrap_or_default();
        for part in parts {
            let width = part.shape[dimension] * inner;
            let (own, rest) = to.split_at_mut(width);
            own.copy_from_slice(&part.data[at * width..(at + 1) * width]);
            to = rest;
        }
    }
    whole
}

#[doc(hidden)]
impl WeightSource for Shard<'_> {
    fn describe(&self, name: &str) -> Option<(DType, Vec<usize>)> {
        let (dtype, mut shape) = self.whole.describe(name)?;
        let (share, cut) = self.share(name);
        // A tensor of another shape than the layer's is passed through: the layer reports it with
        // its whole shape.
        let experts = shape.first_mut().filter(|_| share.counts_experts());
        if let Some(experts) = experts.filter(|experts| **experts == self.experts) {
            *experts = self.own_experts().len();
        }
        if let Some((dimension, width)) = cut
            && let Some(there) = shape.get_mut(dimension).filter(|there| **there == width)
        {
            *there = self.own(width).len();
        }
        Some((dtype, shape))
    }

    fn rows(&self, name: &str, rows: Range<usize>) -> Result<Tensor<'_>, SourceError> {
        let (share, cut) = self.share(name);
        if share.once && self.place.tp > 0 {
            // The first shard holds the values; the others add zeros.
            let (dtype, mut shape) = self.describe(name).ok_or_else(|| gone(name))?;
            shape[0] = rows.len();
            return Ok(Tensor::zeros(dtype, &shape));
        }
        let asked = match cut {
            _ if share.counts_experts() => {
                let own = self.own_experts();
                let own = own.get(rows).unwrap_or_default();
                // A source may return fewer rows than asked for; the caller then asks for the rest.
                runs(own).into_iter().next().ok_or_else(|| gone(name))?
            }
            Some((0, width)) => {
                let first = self.own(width).start;
                first + rows.start..first + rows.end
            }
            _ => rows,
        };
        let own = self.whole.rows(name, asked)?;
        Ok(match cut {
            None | Some((0, _)) => own,
            Some((dimension, width)) => sharded(&own, dimension, &self.own(width)),
        })
    }
}

fn gone(name: &str) -> SourceError {
    format!("there is no tensor `{name}`").into()
}

/// Copies a range of a dimension.
pub(super) fn sharded(
    tensor: &Tensor<'_>,
    dimension: usize,
    range: &Range<usize>,
) -> Tensor<'static> {
    let mut shape = tensor.shape.clone();
    let inner: usize = shape[dimension + 1..].iter().product();
    let inner = inner * tensor.dtype.size();
    let (row, width) = (shape[dimension] * inner, range.len() * inner);
    shape[dimension] = range.len();
    let mut part = Tensor::zeros(tensor.dtype, &shape);
    let to = part.data.to_mut().chunks_exact_mut(width.max(1));
    for (to, from) in to.zip(tensor.data.chunks_exact(row.max(1))) {
        to.copy_from_slice(&from[range.start * inner..range.end * inner]);
    }
    part
}

#[cfg(test)]
mod tests {
    use super::*;
    use moesaic_plan::SharedExperts;
    use moesaic_spec::LayerSpec;
    use moesaic_tensor::Tensors;

    fn spec() -> LayerSpec {
        let text = r#"{"shape":{"model_dim":2,"hidden_dim":4,"experts":3,"top_k":1},
            "experts":{"bias":true}}"#;
        serde_json::from_str(text).unwrap()
    }

    fn place(ep: usize, tp: usize) -> Shard<'static> {
        let mut weights = Tensors::new();
        for (name, shape) in [
            ("experts.up.weight", vec![3, 4, 2]),
            ("experts.up.bias", vec![3, 4]),
            ("experts.down.weight", vec![3, 2, 4]),
            ("experts.down.bias", vec![3, 2]),
        ] {
            let numbers = (0..shape.iter().product()).map(|n: usize| n as f32);
            weights.insert(name, Tensor::owned(&shape, numbers.collect()));
        }
        let mesh = Parallel {
            ep: 2,
            expert_tp: 2,
            ..Parallel::default()
        };
        let place = RankCoords { dp: 0, ep, tp };
        Shard::new(&spec(), mesh, place, Box::leak(Box::new(weights)))
    }

    fn read(tp: &Shard<'_>, name: &str) -> (Vec<usize>, Vec<f32>) {
        let (_, shape) = tp.describe(name).unwrap();
        let tensor = tp.rows(name, 0..shape[0]).unwrap();
        assert_eq!(tensor.shape, shape);
        (shape, tensor.to_f32())
    }

    #[test]
    fn a_rank_has_its_shards_of_its_experts() {
        let second = place(1, 1);
        let up = read(&second, "experts.up.weight");
        assert_eq!(up, (vec![1, 2, 2], vec![20., 21., 22., 23.]));
        let up = read(&second, "experts.up.bias");
        assert_eq!(up, (vec![1, 2], vec![10., 11.]));
        let down = read(&second, "experts.down.weight");
        assert_eq!(down, (vec![1, 2, 2], vec![18., 19., 22., 23.]));
        let first = place(0, 0);
        let down = read(&first, "experts.down.weight").1;
        assert_eq!(down, [0., 1., 4., 5., 8., 9., 12., 13.]);
    }

    #[test]
    fn parts_make_the_whole_again() {
        let mesh = Parallel {
            ep: 2,
            expert_tp: 2,
            ..Parallel::default()
        };
        for name in [
            "experts.up.weight",
            "experts.up.bias",
            "experts.down.weight",
        ] {
            let part = |at: RankCoords| {
                let tp = place(at.ep, at.tp);
                let (_, shape) = tp.describe(name).unwrap();
                tp.rows(name, 0..shape[0]).unwrap().into_static()
            };
            let whole = joined(name, mesh, part).to_f32();
            let numbers = (0..whole.len()).map(|n| n as f32);
            assert!(whole.iter().copied().eq(numbers), "{name}: {whole:?}");
        }
    }

    #[test]
    fn a_rank_has_its_shards_of_shared_experts_where_they_are_sharded() {
        let mut spec = spec();
        let shared = r#"[{"hidden_dim":6}]"#;
        spec.shared = serde_json::from_str(shared).unwrap();
        let mut weights = Tensors::new();
        for (name, shape) in [
            ("shared.0.up.weight", vec![6, 2]),
            ("shared.0.up.bias", vec![6]),
            ("shared.0.down.weight", vec![2, 6]),
            ("shared.0.down.bias", vec![2]),
        ] {
            let numbers = (0..shape.iter().product()).map(|n: usize| n as f32);
            weights.insert(name, Tensor::owned(&shape, numbers.collect()));
        }
        let whole = Parallel {
            ep: 2,
            expert_tp: 2,
            ..Parallel::default()
        };
        let mesh = Parallel {
            shared: SharedExperts::Sharded,
            ..whole
        };
        let second = |mesh| {
            let place = RankCoords {
                dp: 0,
                ep: 1,
                tp: 1,
            };
            Shard::new(&spec, mesh, place, &weights)
        };
        let tp = second(mesh);
        let up = read(&tp, "shared.0.up.weight");
        assert_eq!(up, (vec![3, 2], vec![6., 7., 8., 9., 10., 11.]));
        let chunk = tp.rows("shared.0.up.weight", 1..2).unwrap();
        assert_eq!(chunk.to_f32(), [8., 9.]);
        assert_eq!(read(&tp, "shared.0.up.bias").1, [3., 4., 5.]);
        let down = read(&tp, "shared.0.down.weight");
        assert_eq!(down, (vec![2, 3], vec![3., 4., 5., 9., 10., 11.]));
        assert_eq!(read(&tp, "shared.0.down.bias").1, [0., 0.]);
        let parts = |name: &str| {
            let part = |place| {
                let tp = Shard::new(&spec, mesh, place, &weights);
                let (_, shape) = tp.describe(name).unwrap();
                tp.rows(name, 0..shape[0]).unwrap().into_static()
            };
            joined(name, mesh, part)
        };
        for (name, tensor) in &weights {
            assert!(parts(name) == *tensor, "{name}");
            let (_, shape) = second(whole).describe(name).unwrap();
            assert_eq!(shape, tensor.shape, "{name} is everybody's");
        }
    }

    #[test]
    fn one_shard_adds_the_last_bias() {
        assert_eq!(read(&place(1, 0), "experts.down.bias").1, [4., 5.]);
        assert_eq!(read(&place(1, 1), "experts.down.bias").1, [0., 0.]);
    }
}
