//! Calls of ranks on device memory of their callers: the bytes of calls on host memory.

use super::arranged::{grid, near_everywhere, ranks};
use super::case::{Case, host};
use super::layers::engine as cpu;
use super::mesh::{Grid, Ranks, layer_on, mesh, on_ranks, part, sharded, shares, spec};
use super::mesh_placed::scattered;
use super::simulated::open;
use super::trained::RNG_KEY;
use moesaic::mesh::{CommDtype, Split};
use moesaic::plan::{SATURATED, TensorRole};
use moesaic::target::{Buffer, Ptr};
use moesaic::tune::{
    CallKind, LayerTuner, Predict, StrategySpace, Tuner, TunerDecision, TunerOptions, What,
};
use moesaic::{Engine, EngineError, Input, Layer, Output, RawBackward, RawCall, Saved};
use moesaic::{Parallel, Tensor, Tensors, Training};
use std::collections::BTreeMap;

/// Tensors by name, as bytes.
type Bytes = BTreeMap<String, Vec<u8>>;

/// The results of a rank's calls: of an evaluation, of routing, of a training
/// pass, of the backward pass; and gradients of weights, before and after ranks
/// add them up.
#[derive(Debug, PartialEq)]
struct Found {
    passes: [Bytes; 4],
    gradients: [Tensors<'static>; 2],
}

impl Found {
    fn new(layer: &Layer, passes: [Bytes; 4]) -> Result<Found, EngineError> {
        let own = layer.gradients()?;
        layer.reduce_gradients()?;
        let gradients = [own, layer.gradients()?];
        Ok(Found { passes, gradients })
    }
}

/// The calls that a rank has to make.
struct Asked<'a> {
    layer: &'a Layer,
    input: Input<'static>,
    dy: Tensor<'static>,
    /// Names that each pass of [`Found`] is asked for.
    names: [Vec<String>; 4],
}

/// Results of gate and scan; exchanges move some of them.
const DECIDED: [&str; 5] = ["topk_ids", "topk_weights", "counts", "offsets", "capacity"];

impl<'a> Asked<'a> {
    fn new(layer: &'a Layer, case: &Case) -> Asked<'a> {
        let tokens = &shares(case.input.tokens, layer.mesh().unwrap().parallel().ranks());
        let tokens = &tokens[layer.mesh().unwrap().rank()];
        let width = case.spec.output_dim();
        let dy = &case.dy(5)[tokens.start * width..tokens.end * width];
        Asked {
            input: part(case, tokens).input(),
            dy: host(case.spec.precision.activations, &[tokens.len(), width], dy),
            names: asked(layer),
            layer,
        }
    }

    fn by_host(&self) -> Result<Found, EngineError> {
        let (layer, input) = (self.layer, &self.input);
        let names = |pass: usize| -> Vec<&str> { self.names[pass].iter().map(|n| &**n).collect() };
        let of = |pass: usize, output: Output| -> Bytes {
            let bytes = |name: &String| output.get(name).unwrap().data.to_vec();
            let names = self.names[pass].iter();
            names.map(|name| (name.clone(), bytes(name))).collect()
        };
        let evaluation = layer.forward(input.reading(&names(0)))?;
        let routing = layer.route(input.reading(&names(1)))?;
        let (output, saved) = layer.forward_train(input.reading(&names(2)), RNG_KEY)?;
        let back = layer.backward(&saved, &self.dy, false)?;
        let passes = [
            of(0, evaluation),
            of(1, routing),
            of(2, output),
            of(3, back),
        ];
        Found::new(layer, passes)
    }

    fn inputs(&self, engine: &Engine) -> Memory {
        let tensors = self.input.tensors.iter();
        Memory::holding(
            engine,
            tensors.map(|(name, tensor)| (&**name, &*tensor.data)),
        )
    }

    fn results(&self, engine: &Engine, pass: usize) -> Memory {
        let bytes = |name: &str| -> Vec<u8> {
            let tensor = self.layer.plan().tensor(name);
            let bytes = tensor.map_or(8, |tensor| tensor.bytes(self.input.tokens as u64));
            vec![0x7F; bytes as usize]
        };
        let names = self.names[pass].iter();
        let all: Vec<(&str, Vec<u8>)> = names.map(|name| (&**name, bytes(name))).collect();
        Memory::holding(engine, all.iter().map(|(name, bytes)| (*name, &**bytes)))
    }

    fn call<'c>(&self, tensors: &'c [(&'c str, Ptr)]) -> RawCall<'c> {
        // SAFETY: memory is of the plan's sizes, ids are those that host calls have checked, and
        // memory outlives downloads of results, which wait.
        unsafe { RawCall::new(self.input.tokens, tensors) }
            .with_capacity_factor(self.input.capacity_factor)
    }

    /// A pass that trains on memory that stays with the result.
    fn train(&self, engine: &Engine) -> Result<(Saved, [Memory; 2]), EngineError> {
        let memory = [self.inputs(engine), self.results(engine, 2)];
        let tensors = memory[0].and(&memory[1]);
        let call = self.call(&tensors);
        let (_, saved) = self.layer.forward_train(call, RNG_KEY)?;
        Ok((saved, memory))
    }

    /// `dx` and the like of a pass back.
    fn back(&self, engine: &Engine, saved: &Saved) -> Result<Bytes, EngineError> {
        let (dy, back) = (
            Memory::holding(engine, [("dy", &*self.dy.data)]),
            self.results(engine, 3),
        );
        let tensors = dy.and(&back);
        // SAFETY: as above.
        let call = unsafe { RawBackward::new(&tensors) };
        self.layer.backward(saved, call, false)?;
        Ok(back.bytes(engine))
    }

    fn by_address(&self, engine: &Engine) -> Result<Found, EngineError> {
        let inputs = self.inputs(engine);
        let [evaluated, routed] = [0, 1].map(|pass| self.results(engine, pass));
        let [evaluation, routing] = [&evaluated, &routed].map(|results| inputs.and(results));
        self.layer.forward(self.call(&evaluation))?;
        self.layer.route(self.call(&routing))?;
        let (saved, trained) = self.train(engine)?;
        let back = self.back(engine, &saved)?;
        let passes = [&evaluated, &routed, &trained[1]].map(|memory| memory.bytes(engine));
        let [evaluated, routed, trained] = passes;
        Found::new(self.layer, [evaluated, routed, trained, back])
    }
}

/// Returns the names that each pass of a layer is asked for.
fn asked(layer: &Layer) -> [Vec<String>; 4] {
    let plan = &layer.plan();
    let comm_dtype = layer.strategy().comm_dtype;
    let f16 = [comm_dtype.forward, comm_dtype.forward, comm_dtype.backward]
        .map(|comm_dtype| comm_dtype == CommDtype::F16);
    let names = |names: &[&str], counts: bool| -> Vec<String> {
        let given = |name: &str| {
            plan.tensor(name)
                .is_none_or(|t| t.role == TensorRole::Input)
        };
        let there = names.iter().filter(|name| !given(name));
        let counted = counts.then_some(&SATURATED);
        there.chain(counted).map(ToString::to_string).collect()
    };
    let of = |role| -> Vec<&str> {
        let tensors = plan.tensors.iter().filter(|tensor| tensor.role == role);
        tensors.map(|tensor| &*tensor.name).collect()
    };
    let losses = of(TensorRole::Output).into_iter();
    let losses: Vec<&str> = losses.filter(|name| name.starts_with("loss.")).collect();
    let evaluated = [&["y"][..], &DECIDED].concat();
    [
        names(&evaluated, f16[0]),
        names(&DECIDED, false),
        names(&[evaluated, losses].concat(), f16[1]),
        names(&of(TensorRole::InputGradient), f16[2]),
    ]
}

/// A caller's memory.
struct Memory(Vec<(String, Buffer, usize)>);

impl Memory {
    fn holding<'t>(
        engine: &Engine,
        tensors: impl IntoIterator<Item = (&'t str, &'t [u8])>,
    ) -> Memory {
        let held = tensors.into_iter().map(|(name, bytes)| {
            let buffer = engine.device().alloc(bytes.len()).unwrap();
            engine.device().upload(bytes, &buffer, 0).unwrap();
            (name.to_string(), buffer, bytes.len())
        });
        Memory(held.collect())
    }

    /// The addresses of both.
    fn and<'m>(&'m self, other: &'m Memory) -> Vec<(&'m str, Ptr)> {
        let all = self.0.iter().chain(&other.0);
        all.map(|(name, buffer, _)| (&**name, buffer.ptr()))
            .collect()
    }

    fn bytes(&self, engine: &Engine) -> Bytes {
        let read = |(name, buffer, bytes): &(String, Buffer, usize)| {
            let mut host = vec![0; *bytes];
            engine.device().download(buffer, 0, &mut host).unwrap();
            (name.clone(), host)
        };
        self.0.iter().map(read).collect()
    }
}

/// Holds calls on device memory against calls on host memory, on every rank.
pub fn check(ranks: &impl Ranks, grid: impl Into<Grid>, case: &Case) {
    let grid = grid.into();
    ranks.each(grid.parallel, |engine, mesh| {
        let layer = grid.layer(engine, mesh, case, Some(Training::default()));
        let asked = Asked::new(&layer, case);
        let what = format!("rank {} of {grid:?}, {}", mesh.rank(), case.describe());
        let failed = |error: EngineError| panic!("{what}: {error}");
        let want = asked.by_host().unwrap_or_else(failed);
        let found = asked.by_address(engine).unwrap_or_else(failed);
        for (pass, (found, want)) in found.passes.iter().zip(&want.passes).enumerate() {
            assert!(found.keys().eq(want.keys()), "{what}");
            for (name, want) in want {
                assert!(found[name] == *want, "`{name}` of pass {pass}, {what}");
            }
        }
        assert!(found.gradients == want.gradients, "gradients of {what}");
    });
}

/// A layer with all that ranks do together: shared experts under a gate, a loss over ranks, a
/// capacity that they agree on.
const ALL: &str = "shape = { model_dim = 24, hidden_dim = 16, experts = 6, top_k = 2 }
     router = { renormalize = 'sum' }
     experts = { bias = true }
     capacity = { mode = 'max-count' }
     losses = [{ kind = 'global', coefficient = 0.3 }, { kind = 'switch', coefficient = 0.1 }]
     shared = [{ hidden_dim = 12, gate = 'sigmoid' }]";

const PLAIN: &str = "shape = { model_dim = 24, hidden_dim = 24, experts = 6, top_k = 3 }
     experts = { bias = true }
     shared = [{ hidden_dim = 8, gate = 'sigmoid' }]";

#[test]
fn calls_on_device_memory_are_calls_on_host_memory() {
    let engine = cpu();
    let case = Case::random(&spec(ALL), 41, 2);
    for parallel in [
        mesh(1, 1, 1),
        mesh(3, 1, 1),
        mesh(2, 2, 1),
        mesh(2, 1, 2),
        sharded(1, 2, 1),
        sharded(2, 2, 1),
    ] {
        check(&engine, parallel, &case);
    }
    // Two tokens on three ranks, and none.
    for tokens in [2, 0] {
        let case = Case::random(&spec(ALL), tokens, 3);
        check(&engine, mesh(3, 1, 1), &case);
        check(&engine, sharded(1, 2, 1), &case);
    }
}

#[test]
fn whatever_the_router_is() {
    let engine = cpu();
    for text in [
        "shape = { model_dim = 16, hidden_dim = 12, experts = 7, top_k = 3, output_dim = 9 }
         router = { kind = 'external' }
         precision = { weights = 'bf16', activations = 'bf16' }",
        // The layer rescales the caller's weights where they lie.
        "shape = { model_dim = 16, hidden_dim = 12, experts = 4, top_k = 2 }
         router = { kind = 'external' }
         capacity = { mode = 'factor', factor = 0.75, renormalize_after_drop = true }",
        "shape = { model_dim = 8, hidden_dim = 8, experts = 4, top_k = 2 }
         router = { kind = 'table', table_rows = 11 }",
        "shape = { model_dim = 17, hidden_dim = 8, experts = 6, top_k = 2 }
         router = { token_mask = true, noise = 1.5, noise_kind = 'gaussian' }
         losses = [{ kind = 'global', coefficient = 0.5 }]",
    ] {
        let case = Case::random(&spec(text), 30, 7);
        check(&engine, mesh(2, 1, 1), &case);
        check(&engine, mesh(1, 2, 1), &case);
    }
}

#[test]
fn whatever_the_strategy_is() {
    let engine = cpu();
    let case = Case::random(&spec(PLAIN), 41, 2);
    for (parallel, strategy) in [
        (mesh(4, 1, 1), "shadows=2"),
        (mesh(4, 1, 1), "overlap_degree=2,all_to_all=dedup,shadows=1"),
        (mesh(2, 2, 1), "r=1"),
        (mesh(2, 2, 1), "r=0"),
        (sharded(2, 2, 1), "r=1,overlap_degree=3/2"),
        (
            mesh(4, 1, 1),
            "overlap_degree=2/3,all_to_all=2dh-concurrent,comm_dtype=f16",
        ),
        (mesh(4, 1, 1), "all_to_all=dedup,comm_dtype=bf16/f16"),
        (mesh(4, 1, 1), "comm_dtype=f16/none"),
    ] {
        let placement = scattered(parallel.ep, 6, 11, Split::Even);
        let placement = (parallel.expert_tp == 1).then_some(&placement);
        check(&ranks(&engine, placement), grid(parallel, strategy), &case);
    }
}

#[test]
fn on_simulated_gpus() {
    for target in ["sim:sm_90a", "sim:gfx942"] {
        let text = "shape = { model_dim = 24, hidden_dim = 16, experts = 3, top_k = 2 }
             shared = [{ hidden_dim = 8, gate = 'sigmoid' }]";
        let case = Case::random(&spec(text), 19, 6);
        check(&open(target), sharded(1, 2, 1), &case);
    }
}

/// Each kind of call takes what the other keeps, in either order.
#[test]
fn passes_of_both_kinds_go_together() {
    let engine = cpu();
    let case = Case::random(&spec(PLAIN), 41, 2);
    on_ranks(&engine, sharded(1, 2, 1), |mesh| {
        let layer = layer_on(&engine, mesh, &case, Some(Training::default()));
        let asked = Asked::new(&layer, &case);
        let train = || layer.forward_train(asked.input.reading(&["y"]), RNG_KEY);
        let (_, by_host) = train().unwrap();
        let want = layer.backward(&by_host, &asked.dy, false).unwrap();
        let gradients = layer.gradients().unwrap();
        let dx = want.get("dx").unwrap().data.to_vec();
        assert_eq!(asked.back(&engine, &by_host).unwrap()["dx"], dx);
        assert_eq!(layer.gradients().unwrap(), gradients);

        let (by_address, _memory) = asked.train(&engine).unwrap();
        let found = layer.backward(&by_address, &asked.dy, false).unwrap();
        assert_eq!(found.get("dx"), want.get("dx"));
        assert_eq!(layer.gradients().unwrap(), gradients);
    });
}

/// A call that cannot be is an error on the rank before ranks exchange anything, so that all may
/// go on that were told the same.
#[test]
fn what_cannot_be_is_said_before_ranks_exchange() {
    for (engine, gpu) in [(cpu(), false), (open("sim:gfx942"), true)] {
        let case = Case::random(&spec(PLAIN), 12, 2);
        let errors = on_ranks(&engine, mesh(2, 1, 1), |mesh| {
            let layer = layer_on(&engine, mesh, &case, Some(Training::default()));
            let asked = Asked::new(&layer, &case);
            let (saved, memory) = asked.train(&engine).unwrap();
            let other = layer_on(&engine, mesh, &case, Some(Training::default()));
            let at = |name: &str| {
                let mut held = memory[0].0.iter().chain(&memory[1].0);
                held.find(|(held, ..)| held == name).unwrap().1.ptr()
            };
            let (x, y) = (at("x"), at("y"));
            let forward = |tensors: &[(&str, Ptr)]| {
                // SAFETY: nothing is launched.
                let call = unsafe { RawCall::new(asked.input.tokens, tensors) };
                layer.forward(call).unwrap_err().to_string()
            };
            let back = |layer: &Layer, tensors: &[(&str, Ptr)]| {
                // SAFETY: nothing is launched.
                let call = unsafe { RawBackward::new(tensors) };
                let error = layer.backward(&saved, call, false);
                error.unwrap_err().to_string()
            };
            let errors = [
                forward(&[("y", y)]),
                forward(&[("x", Ptr(0)), ("y", y)]),
                forward(&[("x", Ptr(x.0 + 2)), ("y", y)]),
                forward(&[("x", x), ("y", y), ("experts.up.weight", y)]),
                forward(&[("x", x), ("y", y), (SATURATED, Ptr(0))]),
                back(&layer, &[("dx", y)]),
                back(&layer, &[("dy", y), ("grad.experts.up.weight", y)]),
                back(&other, &[("dy", y), ("dx", x)]),
            ];
            // Both ranks go on.
            asked.back(&engine, &saved).unwrap();
            errors
        });
        let alignment = if gpu { 16 } else { 4 };
        let multiple = format!("is no multiple of {alignment} bytes");
        for rank in errors {
            for (error, part) in rank.iter().zip([
                "input `x`: has no address: add it to the call's tensors",
                "input `x`: lies at address 0",
                &multiple,
                "input `experts.up.weight`: stays in the layer's memory on a mesh; leave it out",
                "input `comm_cast.saturated`: lies at address 0",
                "input `dy`: has no address: add it to the call's tensors",
                "input `grad.experts.up.weight`: stays in the layer's memory on a mesh, where",
                "the saved state is of another layer",
            ]) {
                assert!(error.contains(part), "{part}: {error}");
            }
        }
    }
}

/// Steps and evaluations of ranks that choose how they carry them out, on device memory: `y`,
/// `dx` and gradients of a layer that chooses nothing.
pub fn check_adaptive(ranks: &impl Ranks, parallel: Parallel, case: &Case, tuner: &Tuner) {
    ranks.each(parallel, |engine, mesh| {
        let training = Some(Training::default());
        let plain = layer_on(engine, mesh, case, training);
        let asked = Asked::new(&plain, case);
        let want = asked.by_host().unwrap();
        let predict: Predict = Box::new(|_, _| Vec::new());
        let layer = layer_on(engine, mesh, case, training);
        let mut layer = layer;
        let tuner = LayerTuner::new(tuner.clone(), "this machine", predict);
        layer.set_tuner(Some(tuner.clone())).unwrap();
        let inputs = asked.inputs(engine);
        let dy = Memory::holding(engine, [("dy", &*asked.dy.data)]);
        for step in 0..8 {
            let [evaluated, trained, back] = [0, 2, 3].map(|pass| asked.results(engine, pass));
            let (evaluation, train) = (inputs.and(&evaluated), inputs.and(&trained));
            let gradients = dy.and(&back);
            // SAFETY: memory is of the plan's sizes, and downloads wait before anything is freed.
            let call = unsafe { RawBackward::new(&gradients) };
            layer.forward(asked.call(&evaluation)).unwrap();
            let saved = layer.forward_train(asked.call(&train), RNG_KEY);
            let (_, saved) = saved.unwrap();
            layer.backward(&saved, call, false).unwrap();
            let chosen = saved.strategy();
            let found = [&evaluated, &trained, &back].map(|memory| memory.bytes(engine));
            let want = [0, 2, 3].map(|pass| want.passes[pass].clone());
            assert!(found == want, "step {step} with {chosen}");
            assert_eq!(layer.strategy(), chosen);
        }
        // Sums of gradients over chunks are in another order.
        let gradients = [layer.gradients().unwrap()];
        near_everywhere("a step", case, &gradients, &want.gradients[..1]);
        for calls in [CallKind::Training, CallKind::Evaluation] {
            let events = tuner.events();
            let of_calls = |event: &&TunerDecision| event.key.calls == calls && is_whole(event);
            let tried = events.iter().filter(of_calls);
            assert_eq!(tried.count(), 2, "{events:?}");
        }
    });
}

/// Returns true if a strategy is tried, except for the fastest passes of two
/// together.
fn is_whole(event: &TunerDecision) -> bool {
    let What::Tried(strategy) = event.what else {
        return false;
    };
    strategy.overlap_degree.forward == strategy.overlap_degree.backward
}

#[test]
fn ranks_choose_how_they_carry_out_calls_on_device_memory() {
    let case = Case::random(&spec(PLAIN), 41, 2);
    check_adaptive(&cpu(), mesh(2, 1, 1), &case, &two_strategies());
}

/// Returns a tuner that tries two strategies with the same bytes.
pub fn two_strategies() -> Tuner {
    let options = TunerOptions {
        samples: 1,
        finals: 1,
        drift: f64::INFINITY,
        ..TunerOptions::default()
    };
    let space = StrategySpace {
        adaptive_r: vec![1],
        overlap_degrees: vec![1, 3],
        ..StrategySpace::of(mesh(2, 1, 1), 0)
    };
    Tuner::new(options, space)
}
