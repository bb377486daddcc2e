//! Ranks on nodes, with experts anywhere.

use super::mesh::{Ranks, on_nodes};
use moesaic::plan::Placement;
use moesaic::{Engine, Mesh, Parallel, Strategy};

/// Threads that share an engine, of which so many are on a node, with experts placed somewhere.
pub struct Arranged<'a> {
    pub engine: &'a Engine,
    pub per_node: usize,
    pub placement: Option<Placement>,
    pub strategy: Strategy,
}

impl Ranks for Arranged<'_> {
    fn each<T: Send>(
        &self,
        parallel: Parallel,
        body: impl Fn(&Engine, &Mesh) -> T + Sync,
    ) -> Vec<T> {
        on_nodes(self.engine, parallel, self.per_node, |mesh| {
            match &self.placement {
                None => body(self.engine, mesh),
                Some(placement) => body(self.engine, &mesh.placed(placement).unwrap()),
            }
        })
    }

    fn placement(&self) -> Option<&Placement> {
        self.placement.as_ref()
    }

    fn strategy(&self) -> Strategy {
        self.strategy
    }
}
