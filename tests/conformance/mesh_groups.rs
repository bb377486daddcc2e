//! Layers over a group of ranks that is a part of the world, at every adaptive parallelism degree.

use super::case::Case;
use super::layers::engine as cpu;
use super::mesh::{Ranks, compare_on, mesh, spec};
use super::mesh_adaptive_r::at_r;
use moesaic::collectives::{Call, Collectives, threads};
use moesaic::{Engine, Mesh, Parallel, Recompute};

/// Every second rank of a world of twice as many, in descending order; the others have the same
/// layer in a group of their own.
struct EverySecond<'e>(&'e Engine);

impl Ranks for EverySecond<'_> {
    fn each<T: Send>(
        &self,
        parallel: Parallel,
        body: impl Fn(&Engine, &Mesh) -> T + Sync,
    ) -> Vec<T> {
        let device = |_| Ok(self.0.device().clone());
        let ranks = threads::run(2 * parallel.ranks(), device, |mut world| {
            let rank = world.rank();
            let color = u32::from(rank.is_multiple_of(2));
            let group = world.split(Some(color), -(rank as i64), &Call::new("split"));
            let mut group = group.unwrap().expect("every rank has a group");
            let mesh = Mesh::new(&mut *group, parallel).unwrap_or_else(|e| panic!("{e}"));
            let result = (color, mesh.rank(), body(self.0, &mesh));
            drop(mesh);
            world.finish(&Call::new("end")).unwrap();
            result
        });
        let ranks = ranks.unwrap_or_else(|e| panic!("{e}")).into_iter();
        let mut own: Vec<_> = ranks
            .map(|rank| rank.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .filter(|(color, _, _)| *color == 0)
            .collect();
        own.sort_by_key(|(_, rank, _)| *rank);
        assert_eq!(own.len(), parallel.ranks());
        own.into_iter().map(|(_, _, result)| result).collect()
    }
}

#[test]
fn a_group_that_is_not_the_world_has_every_degree() {
    let engine = cpu();
    let text = "shape = { model_dim = 17, hidden_dim = 24, experts = 5, top_k = 2 }";
    let case = Case::random(&spec(text), 41, 3);
    for adaptive_r in [0, 1, 2] {
        let grid = at_r(mesh(2, 2, 1), adaptive_r);
        compare_on(&engine, &EverySecond(&engine), grid, &case, Recompute::None);
    }
    let grid = at_r(mesh(1, 2, 2), 1);
    compare_on(&engine, &EverySecond(&engine), grid, &case, Recompute::All);
}
