//! Experts behind several routers.

use super::Case;
use super::case::{floats, host};
use super::compare::{close, equal};
use super::layers::engine;
use super::simulated::{SIMULATORS, open};
use super::trained::RNG_KEY;
use super::user::{external, random_dy};
use moesaic::aot::{PrecompileJob, precompile};
use moesaic::experts::MultiGate;
use moesaic::reference;
use moesaic::spec::{LayerSpec, canonical_tensors};
use moesaic::{
    Compilers, Engine, EngineOptions, Input, LayerOptions, Output, Parallel, Recompute, RngKey,
};
use moesaic::{Store, Tensor, Tensors, Training};
use moesaic_harness::thorough::in_turns;
use std::sync::Arc;

/// The weights of a case whose names begin with `router.`, or the others.
pub fn weights_of(case: &Case, router: bool) -> Tensors<'static> {
    let mut weights = Tensors::new();
    for tensor in canonical_tensors(&case.spec) {
        if tensor.name.starts_with("router.") == router {
            let values = &case.weights.get(&tensor.name).data;
            weights.insert(&tensor.name, host(tensor.dtype, &tensor.shape, values));
        }
    }
    weights
}

#[test]
fn gates_share_experts() {
    let toml = "shape = { model_dim = 12, hidden_dim = 10, experts = 4, top_k = 4 }";
    let spec = LayerSpec::from_toml(toml).unwrap_or_else(|e| panic!("{e}"));
    let case = Case::random(&spec, 9, 1);
    let cases = [3, 4].map(|seed| {
        let mut other = Case::random(&spec, 9, seed);
        other.input = case.input.clone();
        for (name, tensor) in &case.weights.0 {
            if !name.starts_with("router.") {
                other.weights.0.insert(name.clone(), tensor.clone());
            }
        }
        other
    });
    let routers = [weights_of(&cases[0], true), weights_of(&cases[1], true)];
    let gates = engine().multi_gate(
        &spec,
        &weights_of(&case, false),
        &routers,
        LayerOptions::default(),
    );
    let gates = gates.unwrap_or_else(|e| panic!("{e}"));
    let outputs = gates
        .forward(&case.input())
        .unwrap_or_else(|e| panic!("{e}"));
    for (case, output) in cases.iter().zip(&outputs) {
        let alone = case.layer(&engine()).forward(&case.input());
        let alone = alone.unwrap_or_else(|e| panic!("{e}"));
        equal("y", &output.y().data, &alone.y().data);
    }
    // A new weight of an expert is every gate's.
    let name = "experts.down.weight";
    let zeros = Tensor::owned(&[4, 12, 10], vec![0.0f32; 480]);
    gates.layers()[0]
        .set_weight(name, &zeros)
        .unwrap_or_else(|e| panic!("{e}"));
    for output in gates
        .forward(&case.input())
        .unwrap_or_else(|e| panic!("{e}"))
    {
        assert!(output.y().to_f32().iter().all(|y| *y == 0.0));
    }
}

/// Two gates on one set of experts, and the same twice for the reference.
fn two_gates(toml: &str) -> [Case; 2] {
    let spec = LayerSpec::from_toml(toml).unwrap_or_else(|e| panic!("{e}"));
    let experts = reference::Weights::random(&spec, 1).rounded(&spec);
    [1, 2].map(|seed| {
        let mut case = Case::random(&spec, 17, seed);
        for (name, tensor) in &experts.0 {
            if !name.starts_with("router.") {
                case.weights.0.insert(name.clone(), tensor.clone());
            }
        }
        case
    })
}

#[test]
fn gradients_of_shared_experts_are_summed() {
    let mmoe = "shape = { model_dim = 9, hidden_dim = 6, experts = 3, top_k = 3 }\n\
                router.bias = true\n[[shared]]\nhidden_dim = 4\n";
    for toml in [external(""), mmoe.to_string()] {
        check_gates(&engine(), &two_gates(&toml));
    }
}

fn check_gates(engine: &Engine, cases: &[Case; 2]) {
    let spec = &cases[0].spec;
    let routers = cases.each_ref().map(|case| weights_of(case, true));
    let shared = weights_of(&cases[0], false);
    let gates = engine.multi_gate(spec, &shared, &routers, training(Recompute::None));
    let gates = gates.unwrap_or_else(|e| panic!("{e}"));
    let (dy, values) = random_dy(&cases[0]);
    let expected = cases
        .each_ref()
        .map(|case| reference::backward(spec, &case.weights, &case.input, &values));
    let dy = [dy.clone(), dy];
    // Overwritten, overwritten again, added to.
    for times in [1.0, 1.0, 2.0] {
        let saved = gates.layers().iter().zip(cases).map(|(layer, case)| {
            let input: Input = case.input();
            let forward = layer.forward_train(input.reading(&["y"]), RngKey::default());
            forward.unwrap_or_else(|e| panic!("{e}")).1
        });
        let saved: Vec<_> = saved.collect();
        let saved = saved.into();
        let back = gates
            .backward(&saved, &dy, times == 2.0)
            .unwrap_or_else(|e| panic!("{e}"));
        for (back, expected) in back.iter().zip(&expected) {
            close("dx", &floats(back, "dx"), &expected.x, 1e-5);
        }
        for name in expected[0].weights.keys() {
            let parts = expected.each_ref().map(|e| &e.weights[name].data);
            for (layer, own) in gates.layers().iter().zip(parts) {
                let sum: Vec<f64> = if name.starts_with("router.") {
                    own.iter().map(|g| times * g).collect()
                } else {
                    let pairs = parts[0].iter().zip(parts[1]);
                    pairs.map(|(a, b)| times * (a + b)).collect()
                };
                let found = layer.gradient(name).unwrap_or_else(|e| panic!("{e}"));
                let found: Vec<f64> = found.to_f32().into_iter().map(f64::from).collect();
                close(name, &found, &sum, 1e-5);
            }
        }
    }
}

/// Three gates over the experts of a spec, all on the same tokens.
pub fn three_gates(toml: &str, tokens: usize) -> [Case; 3] {
    let spec = LayerSpec::from_toml(toml).unwrap_or_else(|e| panic!("{toml}: {e}"));
    let first = Case::random(&spec, tokens, 1);
    [1, 2, 3].map(|seed| {
        let mut case = Case::random(&spec, tokens, seed);
        case.input = first.input.clone();
        for (name, tensor) in &first.weights.0 {
            if !name.starts_with("router.") {
                case.weights.0.insert(name.clone(), tensor.clone());
            }
        }
        case
    })
}

/// Options of layers that train.
fn training(recompute: Recompute) -> LayerOptions<'static> {
    LayerOptions::default().training(Training { recompute })
}

pub fn multi_gate(engine: &Engine, cases: &[Case; 3], options: LayerOptions<'_>) -> MultiGate {
    let routers = cases.each_ref().map(|case| weights_of(case, true));
    let gates = engine.multi_gate(
        &cases[0].spec,
        &weights_of(&cases[0], false),
        &routers,
        options,
    );
    gates.unwrap_or_else(|e| panic!("{}: {e}", cases[0].describe()))
}

pub const SMALL: &str = "shape = { model_dim = 12, hidden_dim = 10, experts = 5, top_k = 2 }\n";
const ALL: &str = "shape = { model_dim = 12, hidden_dim = 10, experts = 4, top_k = 4 }\n";

/// Returns layers with every option of routers and experts: with two experts
/// per token, and with all.
fn specs() -> Vec<String> {
    let of_two = [
        "router.renormalize = \"sum\"",
        "experts = { form = \"gated\", identity = 1, zero = 1, bias = true }",
        "router = { token_mask = true, active_k = true, select_bias = true }\n\
         [[shared]]\nhidden_dim = 6\ngate = \"sigmoid\"",
        "router = { weight_on = \"input\", score = \"sigmoid\" }\n[[shared]]\nhidden_dim = 7",
        "capacity.mode = \"max-count\"\nrouter.weight_on = \"activation\"",
        "router = { kind = \"table\", table_rows = 9 }",
        "router = { kind = \"cosine\", projection_dim = 6 }",
        "capacity = { mode = \"factor\", factor = 0.5 }",
        "precision = { weights = \"bf16\", activations = \"bf16\" }",
    ];
    let of_all = [
        "",
        "experts = { form = \"plain\", activation = \"relu\", bias = true }\n\
         [[shared]]\nhidden_dim = 6\ngate = \"sigmoid\"",
        "router = { select = { expert-choice = 1.5 } }",
        "router.weight_on = \"input\"",
        "router.token_mask = true",
    ];
    let two = of_two.iter().map(|rest| format!("{SMALL}{rest}\n"));
    let all = of_all.iter().map(|rest| format!("{ALL}{rest}\n"));
    two.chain(all).collect()
}

/// Every tensor of every layer, equal to the byte.
fn same(what: &str, together: &[Output], each: &[Output]) {
    for (gate, (one, alone)) in together.iter().zip(each).enumerate() {
        let names = |output: &Output| -> Vec<String> {
            output.clone().into_tensors().keys().cloned().collect()
        };
        assert_eq!(names(one), names(alone), "{what}");
        for name in names(alone) {
            let [one, alone] = [one, alone].map(|output| output.get(&name).expect("listed"));
            assert_eq!(one.shape, alone.shape, "{what}: {name}");
            let what = format!("{what}: gate {gate}, {name}, in bytes");
            equal(&what, &one.data, &alone.data);
        }
    }
}

#[test]
fn one_pass_gives_what_each_gate_does() {
    for (n, toml) in specs().into_iter().enumerate() {
        for tokens in in_turns(n, [0, 8, 1, 21]) {
            check_one_pass(&engine(), &toml, tokens);
        }
    }
    // In f32 and bf16 with two experts of a token, and with all.
    for index in in_turns(0, [0, 8, 10]) {
        check_one_pass(&open("cpu:portable"), &specs()[index], 21);
    }
}

fn check_one_pass(engine: &Engine, toml: &str, tokens: usize) {
    let cases = three_gates(toml, tokens);
    let what = format!("{tokens} tokens on {}: {toml}", engine.target());
    for training in [None, Some(Training::default())] {
        let gates = multi_gate(engine, &cases, LayerOptions::default().training(training));
        let (input, mut names) = (cases[0].input(), cases[0].outputs());
        // Past the last row it says nothing.
        names.retain(|name| *name != "row_slots");
        let together = gates.forward(input.reading(&names));
        let together = together.unwrap_or_else(|e| panic!("{what}: {e}"));
        let each = gates.layers().iter().zip(&cases).map(|(layer, case)| {
            let alone = layer.forward(input.reading(&names));
            let alone = alone.unwrap_or_else(|e| panic!("{what}: {e}"));
            let expected = reference::forward(&case.spec, &case.weights, &case.input).y;
            let bf16 = toml.contains("bf16");
            let tolerance = if bf16 { 2e-2 } else { 1e-5 };
            close(&what, &floats(&alone, "y"), &expected, tolerance);
            alone
        });
        let each: Vec<Output> = each.collect();
        same(&what, &together, &each);
    }
}

/// Training draws, has losses, and goes back through all.
fn trained() -> Vec<String> {
    let losses = "[[losses]]\nkind = \"switch\"\ncoefficient = 0.3\n\
                  [[losses]]\nkind = \"z\"\ncoefficient = 0.1\n";
    let of_two = [
        "router = { noise = 2.0, renormalize = \"sum\" }",
        "router = { noise = 1.0, noise_kind = \"learned\", jitter = 0.1 }",
        "router = { random_second = true, expert_scale = true }\n\
         [[shared]]\nhidden_dim = 6\ngate = \"sigmoid\"",
        "experts = { identity = 1, bias = true }\nrouter.bias = true",
        "experts.identity = 1\n[[shared]]\nhidden_dim = 5\ngate = \"residual\"",
        "router = { weight_on = \"input\", score = \"sigmoid\" }",
        "router = { kind = \"cosine\", projection_dim = 6, token_mask = true }",
        "capacity = { mode = \"fixed\", rows = 4 }",
    ];
    let two = of_two.iter().map(|rest| format!("{SMALL}{rest}\n{losses}"));
    let mmoe = format!("{ALL}[[shared]]\nhidden_dim = 5\n{losses}");
    two.chain([mmoe]).collect()
}

#[test]
fn one_pass_trains_what_each_gate_does() {
    for (n, toml) in trained().into_iter().enumerate() {
        for recompute in in_turns(n, [Recompute::None, Recompute::Hidden, Recompute::All]) {
            check_training(&engine(), &toml, recompute);
        }
    }
}

fn check_training(engine: &Engine, toml: &str, recompute: Recompute) {
    let cases = three_gates(toml, 21);
    let what = format!("{recompute:?} on {}: {toml}", engine.target());
    let gates = multi_gate(engine, &cases, training(recompute));
    let alone = multi_gate(engine, &cases, training(recompute));
    let input = cases[0].input();
    let names = ["y", "topk_ids", "topk_weights", "loss.switch", "loss.z"];
    let names = if toml.contains("losses") {
        &names[..]
    } else {
        &names[..3]
    };
    let dy = [8, 9, 10].map(|seed| random_dy_of(&cases[0], seed));
    // Overwritten, overwritten again, added to.
    for accumulate in [false, false, true] {
        let forward = gates.forward_train(input.reading(names), RNG_KEY);
        let (together, saved) = forward.unwrap_or_else(|e| panic!("{what}: {e}"));
        let each = alone.layers().iter().map(|layer| {
            let forward = layer.forward_train(input.reading(names), RNG_KEY);
            forward.unwrap_or_else(|e| panic!("{what}: {e}"))
        });
        let (each, each_saved): (Vec<Output>, Vec<_>) = each.unzip();
        same(&what, &together, &each);
        // An evaluation in between leaves what backward needs.
        let evaluated = gates.forward(input.reading(&["y"]));
        evaluated.unwrap_or_else(|e| panic!("{what}: {e}"));
        let together = gates.backward(&saved, &dy, accumulate);
        let together = together.unwrap_or_else(|e| panic!("{what}: {e}"));
        let each = alone.backward(&each_saved.into(), &dy, accumulate);
        let each = each.unwrap_or_else(|e| panic!("{what}: {e}"));
        for (one, alone) in together.iter().zip(&each) {
            for name in alone.clone().into_tensors().keys() {
                let what = format!("{what}: {name}");
                close(&what, &floats(one, name), &floats(alone, name), 2e-6);
            }
        }
        for (one, alone) in gates.layers().iter().zip(alone.layers()) {
            let [one, alone] = [one, alone].map(|layer| {
                let gradients = layer.gradients();
                gradients.unwrap_or_else(|e| panic!("{what}: {e}"))
            });
            for (name, expected) in &alone {
                let values = |host: &Tensor<'_>| -> Vec<f64> {
                    host.to_f32().into_iter().map(f64::from).collect()
                };
                let what = format!("{what}: gradient of {name}");
                close(&what, &values(&one[name]), &values(expected), 2e-6);
            }
        }
    }
}

pub fn random_dy_of(case: &Case, seed: u64) -> Tensor<'static> {
    let shape = [case.input.tokens, case.spec.output_dim()];
    let values = reference::Random::new(seed).vec(shape[0] * shape[1]);
    host(case.spec.precision.activations, &shape, &values)
}

#[test]
fn gates_run_on_simulated_gpus() {
    for (n, target) in SIMULATORS.into_iter().enumerate() {
        let engine = open(target);
        check_gates(&engine, &two_gates(&external("")));
        for index in in_turns(n, [2, 10]) {
            check_one_pass(&engine, &specs()[index], 9);
        }
        check_training(&engine, &trained()[2], Recompute::None);
    }
}

#[test]
fn what_one_pass_left_is_not_for_other_gates() {
    let cases = three_gates(SMALL, 3);
    let [one, other] = [(); 2].map(|()| multi_gate(&engine(), &cases, training(Recompute::None)));
    let (_, saved) = one
        .forward_train((cases[0].input()).reading(&["y"]), RNG_KEY)
        .unwrap_or_else(|e| panic!("{e}"));
    let dy = [8, 9, 10].map(|seed| random_dy_of(&cases[0], seed));
    let error = other.backward(&saved, &dy, false).expect_err("of another");
    assert!(error.to_string().contains("another layer"), "{error}");
    let inference = multi_gate(&engine(), &cases, LayerOptions::default());
    let error = inference.forward_train((cases[0].input()).reading(&["y"]), RNG_KEY);
    assert!(error.is_err_and(|e| e.to_string().contains("made for inference")));
    let error = one.forward((cases[0].input()).reading(&["nothing"]));
    assert!(error.is_err_and(|e| e.to_string().contains("no output `nothing`")));
}

/// The kernels of one pass are none of the layer's. A strict engine that lacks them runs gate by
/// gate, with the same bytes.
#[test]
fn kernels_of_one_pass_are_compiled_ahead() {
    let cases = three_gates(SMALL, 9);
    let dir = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
    let store = Arc::new(Store::open(dir.path()));
    let compilers = Compilers::new(None);
    let compile = |job: PrecompileJob| {
        precompile(&[job], &store, &Default::default(), &|_| {}).unwrap_or_else(|e| panic!("{e}"));
    };
    let job = || {
        let job = compilers.job(&cases[0].spec, engine().target(), Some(Training::default()));
        job.unwrap_or_else(|e| panic!("{e}"))
    };
    let strict = || {
        let options = EngineOptions {
            store: Some(Arc::clone(&store)),
            strict: true,
            ..EngineOptions::default()
        };
        Engine::open("cpu", options).unwrap_or_else(|e| panic!("{e}"))
    };
    let run = |together: bool| {
        let engine = strict();
        let gates = multi_gate(&engine, &cases, training(Recompute::None));
        assert_eq!(gates.in_one_pass(), together);
        let outputs = gates.forward((cases[0].input()).reading(&["y"]));
        let outputs = outputs.unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(engine.stats().compiled, 0);
        outputs
    };
    compile(job());
    let alone = run(false);
    compile(
        job()
            .multi_gate()
            .unwrap_or_else(|| panic!("they can be one pass")),
    );
    for (together, alone) in run(true).iter().zip(&alone) {
        equal("y", &together.y().data, &alone.y().data);
    }
    let with_mesh = PrecompileJob {
        mesh: Some(Parallel::default().into()),
        ..job()
    };
    assert!(with_mesh.multi_gate().is_none());
}
