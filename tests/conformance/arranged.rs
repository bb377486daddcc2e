//! Ranks on nodes, with experts anywhere.

use super::case::{Case, host};
use super::mesh::{Grid, Ranks, layer_on, on_nodes, part, shares};
use super::trained::{RNG_KEY, near};
use moesaic::plan::Placement;
use moesaic::{DType, Engine, Layer, Mesh, Parallel, Strategy, Tensor, Tensors, Training};

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

/// Ranks of which two are on a node.
pub fn ranks<'e>(engine: &'e Engine, placement: Option<&Placement>) -> Arranged<'e> {
    Arranged {
        engine,
        per_node: 2,
        placement: placement.cloned(),
        strategy: Strategy::default(),
    }
}

/// A grid of ranks with a strategy, as text.
pub fn grid(parallel: Parallel, strategy: &str) -> Grid {
    let strategy = strategy.parse().unwrap();
    Grid { parallel, strategy }
}

/// The gradients of every rank, reduced, that add up over a pass of each strategy, from a layer
/// that was prepared.
pub fn added_gradients(
    ranks: &impl Ranks,
    parallel: Parallel,
    case: &Case,
    strategies: &[impl AsRef<str> + Sync],
    prepare: impl Fn(&mut Layer) + Sync,
) -> Vec<Tensors<'static>> {
    let shares = shares(case.input.tokens, parallel.ranks());
    let width = case.spec.output_dim();
    ranks.each(parallel, |engine, mesh| {
        let mut layer = layer_on(engine, mesh, case, Some(Training::default()));
        prepare(&mut layer);
        let tokens = &shares[mesh.rank()];
        let own = part(case, tokens);
        for (pass, strategy) in strategies.iter().enumerate() {
            layer
                .set_strategy(strategy.as_ref().parse().unwrap())
                .unwrap();
            let call = layer.forward_train(&own.input(), RNG_KEY);
            let dy = &case.dy(pass as u64)[tokens.start * width..tokens.end * width];
            let dy = host(DType::F32, &[tokens.len(), width], dy);
            layer.backward(&call.unwrap().1, &dy, pass > 0).unwrap();
        }
        layer.reduce_gradients().unwrap();
        layer.gradients().unwrap()
    })
}

/// Holds the tensors of every rank against others.
pub fn near_everywhere(what: &str, case: &Case, found: &[Tensors<'_>], want: &[Tensors<'_>]) {
    let values =
        |tensor: &Tensor<'_>| -> Vec<f64> { tensor.to_f32().into_iter().map(f64::from).collect() };
    for (rank, (found, want)) in found.iter().zip(want).enumerate() {
        for (name, want) in want {
            let (found, want) = (values(&found[name]), values(want));
            let most = want.iter().fold(0.0, |most: f64, v| most.max(v.abs()));
            let what = format!("{what}, rank {rank}: {name}");
            near(&what, &case.spec, &found, &want, most);
        }
    }
}
