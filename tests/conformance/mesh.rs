//! Layers over ranks: across all ranks, results equal those of one process.

use super::case::{Case, floats, host, ints, longs};
use super::cases::tiny;
use super::layers::engine as cpu;
use super::random::seeds;
use super::simulated::open;
use super::trained::{RNG_KEY, near};
use moesaic::collectives::{Call, Collectives, threads};
use moesaic::engine::joined_placed;
use moesaic::mesh::{ProcessGroup, SharedExperts};
use moesaic::plan::Placement;
use moesaic::reference;
use moesaic::spec::*;
use moesaic::{Engine, Layer, LayerOptions, Mesh, Parallel, Recompute, Strategy, Tensor, Training};
use moesaic_harness::thorough::in_turns;
use std::collections::BTreeMap;
use std::ops::Range;

pub type Results = BTreeMap<String, Vec<f64>>;

pub const fn mesh(ep: usize, shards: usize, dp: usize) -> Parallel {
    Parallel {
        ep,
        expert_tp: shards,
        dp,
        shared: SharedExperts::Whole,
    }
}

/// The same grid with sharded shared experts.
pub const fn sharded(ep: usize, shards: usize, dp: usize) -> Parallel {
    Parallel {
        ep,
        expert_tp: shards,
        dp,
        shared: SharedExperts::Sharded,
    }
}

/// A mesh and the strategy of its ranks.
#[derive(Clone, Copy, Debug)]
pub struct Grid {
    pub parallel: Parallel,
    pub strategy: Strategy,
}

impl From<Parallel> for Grid {
    fn from(parallel: Parallel) -> Grid {
        Grid {
            parallel,
            strategy: Strategy::default(),
        }
    }
}

impl Grid {
    /// Returns the grid with the strategy of the ranks, at its own adaptive
    /// parallelism degree.
    pub fn on(self, ranks: &impl Ranks) -> Grid {
        let (own, theirs) = (self.strategy, ranks.strategy());
        let strategy = if theirs == Strategy::default() {
            own
        } else {
            Strategy {
                adaptive_r: own.adaptive_r,
                ..theirs
            }
        };
        Grid { strategy, ..self }
    }

    pub fn layer(
        &self,
        engine: &Engine,
        mesh: &Mesh,
        case: &Case,
        training: Option<Training>,
    ) -> Layer {
        let layer = if self.strategy.gathers(&self.parallel) {
            layer_on(engine, &mesh.for_any_r(), case, training)
        } else {
            layer_on(engine, mesh, case, training)
        };
        let set = layer.set_strategy(self.strategy);
        set.unwrap_or_else(|e| panic!("{self:?} of {}: {e}", case.describe()));
        layer
    }

    /// Returns true if a row meets whole experts, so that its sums are those of
    /// one process.
    fn sums_alike(&self) -> bool {
        self.strategy.adaptive_r(&self.parallel) <= 1
            && !self.strategy.plan_form(&self.parallel).sums
            && !self.parallel.shards_shared()
    }
}

/// Runs `body` on every rank of a mesh, each a thread.
pub fn on_ranks<T: Send>(
    engine: &Engine,
    parallel: Parallel,
    body: impl Fn(&Mesh) -> T + Sync,
) -> Vec<T> {
    on_nodes(engine, parallel, parallel.ranks(), body)
}

/// Runs `body` with a number of ranks on each node.
pub fn on_nodes<T: Send>(
    engine: &Engine,
    parallel: Parallel,
    per_node: usize,
    body: impl Fn(&Mesh) -> T + Sync,
) -> Vec<T> {
    let device = |_| Ok(engine.device().clone());
    let ranks = threads::run(parallel.ranks(), device, |mut world| {
        let host = format!("node{}", world.rank() / per_node);
        let mesh = Mesh::on_host(&mut world, parallel, &host);
        let mesh = mesh.unwrap_or_else(|e| panic!("{e}"));
        let result = body(&mesh);
        world
            .finish(&Call::new("end"))
            .unwrap_or_else(|e| panic!("{e}"));
        result
    });
    let ranks = ranks.unwrap_or_else(|e| panic!("{e}"));
    let unwound = |rank: std::thread::Result<T>| match rank {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic),
    };
    ranks.into_iter().map(unwound).collect()
}

/// The ranks of a test.
pub trait Ranks {
    /// Runs `body` on every rank of a mesh.
    fn each<T: Send>(
        &self,
        parallel: Parallel,
        body: impl Fn(&Engine, &Mesh) -> T + Sync,
    ) -> Vec<T>;

    /// The placement of experts, if not contiguous.
    fn placement(&self) -> Option<&Placement> {
        None
    }

    /// Returns the strategy of the layers of these ranks.
    fn strategy(&self) -> Strategy {
        Strategy::default()
    }
}

/// Ranks as threads that share an engine.
impl Ranks for Engine {
    fn each<T: Send>(
        &self,
        parallel: Parallel,
        body: impl Fn(&Engine, &Mesh) -> T + Sync,
    ) -> Vec<T> {
        on_ranks(self, parallel, |mesh| body(self, mesh))
    }
}

/// Splits tokens into unequal shares; the second rank of three or more has none.
pub fn shares(tokens: usize, ranks: usize) -> Vec<Range<usize>> {
    let weight = |rank: usize| match rank {
        1 if ranks > 2 => 0,
        _ => 1 + rank * 5 % 3,
    };
    let all: usize = (0..ranks).map(weight).sum();
    let edge = |rank: usize| (0..rank).map(weight).sum::<usize>() * tokens / all;
    (0..ranks).map(|rank| edge(rank)..edge(rank + 1)).collect()
}

/// Some tokens of a case.
pub fn part(case: &Case, tokens: &Range<usize>) -> Case {
    fn of<T: Clone>(all: &[T], width: usize, tokens: &Range<usize>) -> Vec<T> {
        all[tokens.start * width..tokens.end * width].to_vec()
    }
    let (spec, input) = (&case.spec, &case.input);
    let k = spec.shape.top_k;
    let routing = input.routing.as_ref();
    Case {
        spec: spec.clone(),
        weights: case.weights.clone(),
        input: reference::Input {
            tokens: tokens.len(),
            x: of(&input.x, spec.shape.model_dim, tokens),
            token_ids: input.token_ids.as_ref().map(|ids| of(ids, 1, tokens)),
            token_mask: input.token_mask.as_ref().map(|mask| of(mask, 1, tokens)),
            routing: routing.map(|(ids, weights)| (of(ids, k, tokens), of(weights, k, tokens))),
            sequence_ids: input.sequence_ids.as_ref().map(|ids| of(ids, 1, tokens)),
            ..input.clone()
        },
    }
}

pub fn layer_on(engine: &Engine, mesh: &Mesh, case: &Case, training: Option<Training>) -> Layer {
    let layer = engine.layer_with(
        &case.spec,
        &case.host_weights(),
        LayerOptions::over(mesh).training(training),
    );
    layer.unwrap_or_else(|e| panic!("{} on {:?}: {e}", case.describe(), mesh.parallel()))
}

/// Returns the gradients of all weights of a rank's part, also of those that another rank updates.
fn gradients_of(layer: &Layer) -> Vec<(String, Tensor<'static>)> {
    let names = canonical_tensors(layer.spec()).into_iter();
    let gradient = |name: String| Some((name.clone(), layer.gradient(&name).ok()?));
    names.filter_map(|tensor| gradient(tensor.name)).collect()
}

/// Returns the bytes of `y` of all ranks, in rank order.
pub fn evaluated(ranks: &impl Ranks, grid: impl Into<Grid>, case: &Case) -> Vec<u8> {
    let grid = grid.into().on(ranks);
    let parallel = grid.parallel;
    let shares = shares(case.input.tokens, parallel.ranks());
    let ranks = ranks.each(parallel, |engine, mesh| {
        let layer = grid.layer(engine, mesh, case, None);
        let own = part(case, &shares[mesh.rank()]);
        let output = layer.forward(&own.input());
        let output = output.unwrap_or_else(|e| panic!("{}: {e}", case.describe()));
        output.y().data.to_vec()
    });
    ranks.concat()
}

/// Outputs, gradients of tokens, and gradients of weights after reduction.
pub fn trained(
    all: &impl Ranks,
    grid: impl Into<Grid>,
    case: &Case,
    training: Training,
    names: &[&str],
    dy: &[f64],
) -> Results {
    let grid = grid.into().on(all);
    let parallel = grid.parallel;
    let shares = shares(case.input.tokens, parallel.ranks());
    let width = case.spec.output_dim();
    let ranks = all.each(parallel, |engine, mesh| {
        let layer = grid.layer(engine, mesh, case, Some(training));
        let tokens = &shares[mesh.rank()];
        let own = part(case, tokens);
        let call = layer.forward_train(own.input().reading(names), RNG_KEY);
        let (output, saved) = call.unwrap_or_else(|e| panic!("{}: {e}", case.describe()));
        let dy = &dy[tokens.start * width..tokens.end * width];
        let dy = host(case.spec.precision.activations, &[tokens.len(), width], dy);
        let back = layer.backward(&saved, &dy, false);
        let back = back.unwrap_or_else(|e| panic!("{}: {e}", case.describe()));
        let reduced = layer.reduce_gradients();
        reduced.unwrap_or_else(|e| panic!("{}: {e}", case.describe()));
        let mut results = Results::new();
        for name in names {
            results.insert(name.to_string(), floats(&output, name));
        }
        for name in ["dx", "grad.topk_weights"] {
            results.insert(name.to_string(), floats(&back, name));
        }
        (mesh.place(), results, gradients_of(&layer))
    });
    let mut results = Results::new();
    for (_, tokens, weights) in &ranks {
        for (name, values) in tokens {
            results.entry(name.clone()).or_default().extend(values);
        }
        for (name, _) in weights {
            let part = |place| {
                let rank = ranks.iter().find(|(at, _, _)| *at == place).unwrap();
                let (_, gradient) = rank.2.iter().find(|(other, _)| other == name).unwrap();
                gradient.lend()
            };
            let whole = match ProcessGroup::of(parallel, name) {
                ProcessGroup::World => part(ranks[0].0).into_static(),
                _ => joined_placed(name, (parallel, all.placement()), part),
            };
            let values = whole.to_f32().into_iter().map(f64::from);
            results.insert(name.clone(), values.collect());
        }
    }
    results
}

/// Returns the same of one process, whose group is itself.
fn trained_alone(engine: &Engine, case: &Case, names: &[&str], dy: &[f64]) -> Results {
    let layer = case.training_layer(engine, Recompute::None);
    let mut input = case.input();
    if names.contains(&"loss.global") {
        let routed = layer.route(input.reading(&["counts", "topk_ids"]).in_training(RNG_KEY));
        let routed = routed.unwrap_or_else(|e| panic!("{}: {e}", case.describe()));
        let counts = longs(&routed, "counts");
        let ids = ints(&routed, "topk_ids");
        let choices = ids.chunks(case.spec.shape.top_k);
        let live = choices.filter(|ids| ids.iter().any(|id| *id >= 0)).count();
        let counts = Tensor::owned(&[counts.len()], counts);
        input.insert("global_counts", counts);
        input.insert("global_tokens", Tensor::owned(&[1], vec![live as i64]));
    }
    let call = layer.forward_train(input.reading(names), RNG_KEY);
    let (output, saved) = call.unwrap_or_else(|e| panic!("{}: {e}", case.describe()));
    let shape = [case.input.tokens, case.spec.output_dim()];
    let dy = host(case.spec.precision.activations, &shape, dy);
    let back = layer.backward(&saved, &dy, false).unwrap();
    let mut results = Results::new();
    for name in names {
        results.insert(name.to_string(), floats(&output, name));
    }
    for name in ["dx", "grad.topk_weights"] {
        results.insert(name.to_string(), floats(&back, name));
    }
    for (name, gradient) in layer.gradients().unwrap() {
        let values = gradient.to_f32().into_iter().map(f64::from);
        results.insert(name, values.collect());
    }
    results
}

pub fn spec(text: &str) -> LayerSpec {
    LayerSpec::from_toml(text).unwrap_or_else(|e| panic!("{}", e.render("spec", false)))
}

/// Layers that have what ranks have to do with.
pub fn specs() -> Vec<LayerSpec> {
    [
        "shape = { model_dim = 37, hidden_dim = 24, experts = 5, top_k = 2 }",
        "shape = { model_dim = 16, hidden_dim = 12, experts = 7, top_k = 3, output_dim = 9 }
         experts = { bias = true, form = 'plain', activation = 'gelu' }
         precision = { weights = 'bf16', activations = 'bf16', expert_gradients = 'bf16' }",
        "shape = { model_dim = 24, hidden_dim = 16, experts = 6, top_k = 2 }
         router = { weight_on = 'activation', renormalize = 'sum' }
         experts = { bias = true }
         shared = [{ hidden_dim = 11, gate = 'sigmoid' }]",
        "shape = { model_dim = 20, hidden_dim = 8, experts = 4, top_k = 1 }
         router = { weight_on = 'input', score = 'sigmoid' }
         precision = { weights = 'f16', activations = 'f16' }
         shared = [{ hidden_dim = 16 }]",
        "shape = { model_dim = 24, hidden_dim = 16, experts = 8, top_k = 3 }
         experts = { identity = 2 }
         latent = { dim = 10, norm_eps = 0.05 }",
        "shape = { model_dim = 24, hidden_dim = 12, experts = 8, top_k = 3 }
         experts = { output_norm_eps = 0.05, bias = true }
         latent = { dim = 10, input_norm_eps = 0.1 }",
    ]
    .map(spec)
    .into()
}

#[test]
fn dropless_outputs_of_ranks_are_the_bytes_of_one_process() {
    let engine = cpu();
    for (seed, spec) in specs().iter().enumerate() {
        let case = Case::random(spec, 41, seed as u64);
        let whole = case.layer(&engine).forward(&case.input()).unwrap();
        for parallel in [mesh(1, 1, 1), mesh(2, 1, 1), mesh(3, 1, 1), mesh(2, 1, 2)] {
            let found = evaluated(&engine, parallel, &case);
            assert!(
                found == *whole.y().data,
                "{parallel:?}: {}",
                case.describe()
            );
        }
    }
}

/// Compares everything that ranks compute with one process.
pub fn compare(engine: &Engine, grid: impl Into<Grid>, case: &Case, recompute: Recompute) {
    compare_on(engine, engine, grid, case, recompute);
}

/// Compares any ranks with one process.
pub fn compare_on(
    engine: &Engine,
    ranks: &impl Ranks,
    grid: impl Into<Grid>,
    case: &Case,
    recompute: Recompute,
) {
    let grid = grid.into();
    let dy = case.dy(77);
    let losses = case.spec.losses.iter();
    let losses: Vec<String> = losses.map(|l| format!("loss.{}", l.kind.name())).collect();
    let mut names = vec!["y"];
    names.extend(losses.iter().map(String::as_str));
    let want = trained_alone(engine, case, &names, &dy);
    let training = Training { recompute };
    let mut found = trained(ranks, grid, case, training, &names, &dy);
    for loss in &losses {
        let parts = found.get_mut(loss).expect("every rank has its part");
        *parts = vec![parts.iter().sum()];
    }
    let all = want.values().flatten();
    let largest = all.fold(0.0, |most: f64, v| most.max(v.abs()));
    assert!(found.keys().eq(want.keys()), "{:?}", found.keys());
    for (name, want) in &want {
        let what = format!("`{name}` on {grid:?} of {}", case.describe());
        if name == "y" && grid.on(ranks).sums_alike() {
            assert!(found[name] == *want, "{what}");
        }
        near(&what, &case.spec, &found[name], want, largest);
    }
}

#[test]
fn gradients_of_ranks_are_those_of_one_process() {
    let engine = cpu();
    for (seed, spec) in specs().iter().enumerate() {
        let case = Case::random(spec, 41, seed as u64);
        for parallel in in_turns(seed, [mesh(2, 1, 1), mesh(2, 2, 2)]) {
            compare(&engine, parallel, &case, Recompute::None);
        }
    }
}

#[test]
fn what_is_computed_again_is_the_same_on_ranks() {
    let engine = cpu();
    let case = Case::random(&specs()[2], 23, 5);
    let dy = case.dy(3);
    let all = [Recompute::None, Recompute::Hidden, Recompute::All].map(|recompute| {
        let training = Training { recompute };
        trained(&engine, mesh(2, 1, 1), &case, training, &["y"], &dy)
    });
    assert!(all[0] == all[1] && all[0] == all[2]);
}

#[test]
fn ranks_draw_the_numbers_of_one_process_and_share_a_loss() {
    let engine = cpu();
    for text in [
        "shape = { model_dim = 17, hidden_dim = 8, experts = 6, top_k = 2 }
         router = { noise = 1.5, noise_kind = 'gaussian', jitter = 0.1 }
         losses = [{ kind = 'global', coefficient = 0.3 }]",
        "shape = { model_dim = 17, hidden_dim = 8, experts = 6, top_k = 2 }
         router = { token_mask = true, score = 'sigmoid', input_dropout = 0.2 }
         losses = [{ kind = 'global', coefficient = 0.5 }]",
    ] {
        let case = Case::random(&spec(text), 45, 9);
        for parallel in [mesh(2, 1, 1), mesh(3, 1, 1)] {
            compare(&engine, parallel, &case, Recompute::None);
        }
    }
}

#[test]
fn the_capacity_of_ranks_is_that_of_the_one_with_the_most_tokens() {
    let engine = cpu();
    let parallel = mesh(3, 1, 1);
    let base = "shape = { model_dim = 12, hidden_dim = 8, experts = 4, top_k = 2 }";
    for (mode, order) in [
        ("mode = 'factor', factor = 0.75", "slot-major"),
        (
            "mode = 'factor', factor = -0.5, align = 2",
            "batch-prioritized",
        ),
        ("mode = 'bounded', factor = 0.5", "token-major"),
        ("mode = 'fixed', rows = 3", "probability"),
        ("mode = 'max-count'", "slot-major"),
    ] {
        let text = format!("{base}\ncapacity = {{ {mode}, order = '{order}' }}");
        let case = Case::random(&spec(&text), 40, 4);
        let shares = shares(40, parallel.ranks());
        let most = shares.iter().map(ExactSizeIterator::len).max().unwrap();
        let ranks = on_ranks(&engine, parallel, |mesh| {
            let layer = layer_on(&engine, mesh, &case, None);
            let own = part(&case, &shares[mesh.rank()]);
            let output = layer.forward(own.input().reading(&["y", "capacity", "counts"]));
            output.unwrap_or_else(|e| panic!("{text}: {e}"))
        });
        let capacities: Vec<i64> = ranks.iter().map(|o| longs(o, "capacity")[0]).collect();
        assert!(capacities.iter().all(|c| *c == capacities[0]), "{text}");
        let counts = ranks.iter().flat_map(|output| longs(output, "counts"));
        let limit = match case.spec.capacity.mode {
            CapacityMode::MaxCount => counts.max().unwrap(),
            CapacityMode::Fixed => 3,
            _ => {
                let factor = case.spec.capacity.factor_of(false);
                let limit = moesaic::plan::row_limit(&case.spec, factor, most as u64);
                let limit = if limit < 0 { !limit } else { limit };
                let limit = if factor < 0.0 {
                    limit.min(counts.max().unwrap())
                } else {
                    limit
                };
                (limit.max(0) as usize).next_multiple_of(case.spec.capacity.align) as i64
            }
        };
        assert_eq!(capacities[0], limit, "{text}");
        // Each rank's tokens as one process has them that has this capacity.
        let mut fixed = case.spec.clone();
        fixed.capacity = Capacity {
            mode: CapacityMode::Fixed,
            rows: Some(limit as usize),
            order: fixed.capacity.order,
            ..Capacity::default()
        };
        for (tokens, output) in shares.iter().zip(&ranks) {
            let mut own = part(&case, tokens);
            own.spec = fixed.clone();
            let want = own.layer(&engine).forward(&own.input()).unwrap();
            assert!(output.y().data == want.y().data, "{text}: {tokens:?}");
        }
    }
}

/// A sample without what looks at all tokens of a call, which on ranks are a rank's own:
/// room that runs out, choices that experts make, losses that are not `global`.
pub fn of_tokens_alone(seed: u64) -> LayerSpec {
    let mut spec = tiny(seed);
    spec.capacity = Capacity::default();
    if matches!(
        spec.router.select,
        Select::ExpertChoice(_) | Select::Sinkhorn(_)
    ) {
        spec.router.select = Select::TopK;
    }
    spec.router.blocks = None;
    spec.losses.retain(|loss| loss.kind == LossKind::Global);
    let valid = spec.validate();
    valid.unwrap_or_else(|problems| panic!("seed {seed}: {problems:?}"));
    spec
}

#[test]
fn random_layers_of_ranks_are_those_of_one_process() {
    let engine = cpu();
    for seed in seeds(700..704) {
        let spec = of_tokens_alone(seed);
        let tokens = [29, 2, 11, 0][seed as usize % 4];
        let case = Case::random(&spec, tokens, seed);
        let meshes = [mesh(2, 1, 1), mesh(3, 1, 1), mesh(2, 1, 2), mesh(1, 2, 1)];
        let fits = |parallel: &&Parallel| parallel.check(&spec).is_ok();
        let meshes: Vec<&Parallel> = meshes.iter().filter(fits).collect();
        let Some(parallel) = meshes.get(seed as usize % meshes.len().max(1)) else {
            continue; // one expert that cannot be cut
        };
        compare(&engine, **parallel, &case, Recompute::None);
    }
}

#[test]
fn ranks_run_on_simulated_gpus() {
    let text = "shape = { model_dim = 24, hidden_dim = 16, experts = 3, top_k = 2 }
         shared = [{ hidden_dim = 8 }]";
    let case = Case::random(&spec(text), 19, 6);
    for target in ["sim:sm_90a", "sim:gfx942"] {
        compare(&open(target), mesh(2, 1, 1), &case, Recompute::None);
    }
}
