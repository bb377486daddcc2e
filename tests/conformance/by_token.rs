//! One router for each token over the same experts: routers by modality.

use super::Case;
use super::case::{floats, host, ints, longs};
use super::compare::close;
use super::gates::{SMALL, multi_gate, random_dy_of, three_gates};
use super::layers::{engine, engines, poisoned};
use super::mesh::{mesh, on_ranks, part, shares};
use super::quick;
use super::simulated::SIMULATORS;
use super::trained::RNG_KEY;
use moesaic::experts::MultiGate;
use moesaic::reference;
use moesaic::spec::hf;
use moesaic::weights::{Checkpoint, LayerReader, LoadOptions, write_safetensors};
use moesaic::{DType, Engine, LayerOptions, Parallel, Recompute, Tensors, Training};

const TOKENS: usize = 21;

/// Text, images and audio in no order, by tokens of a call.
fn modalities(tokens: usize) -> Vec<i32> {
    let of = |token: i32| (token * token + token / 4) % 3;
    (0..tokens as i32).map(of).collect()
}

/// Ling 3's router, and routers and experts with other inputs by token.
fn specs() -> [String; 4] {
    [
        "router = { score = \"sigmoid\", select_bias = true, renormalize = \"sum\", scale = 2.5 }\n\
         [[shared]]\nhidden_dim = 6",
        "router = { bias = true, token_mask = true }\nexperts.identity = 1",
        "router = { kind = \"table\", table_rows = 9 }\nlatent = { dim = 9, norm_eps = 0.02 }\n\
         experts.output_norm_eps = 0.05",
        "precision = { weights = \"bf16\", activations = \"bf16\" }\ncapacity.mode = \"max-count\"\n\
         router.weight_on = \"input\"",
    ]
    .map(|rest| format!("{SMALL}{rest}\n"))
}

/// Every token visits every expert.
const ALL: &str = "shape = { model_dim = 12, hidden_dim = 10, experts = 4, top_k = 4 }\n";

fn training(recompute: Recompute) -> LayerOptions<'static> {
    LayerOptions::default().training(Training { recompute })
}

/// Holds `y`, choices and counts against what the reference gives each token by its router.
fn check_forward(engine: &Engine, toml: &str, router_ids: &[i32]) {
    let cases = three_gates(toml, router_ids.len());
    let what = format!("{router_ids:?} on {}: {toml}", engine.target());
    let gates = multi_gate(engine, &cases, LayerOptions::default());
    let input = cases[0].input();
    let names = ["y", "topk_ids", "topk_weights", "counts"];
    let output = gates.forward_by_token(input.reading(&names), router_ids);
    let output = output.unwrap_or_else(|e| panic!("{what}: {e}"));
    let spec = &cases[0].spec;
    let tolerance = if toml.contains("bf16") { 2e-2 } else { 1e-5 };
    let (mut y, mut ids, mut weights) = (Vec::new(), Vec::<i32>::new(), Vec::new());
    let of_routers = cases.each_ref().map(|case| {
        let logits = spec
            .has_logits()
            .then(|| reference::logits(spec, &case.weights, &case.input.x, case.input.tokens));
        let decision = reference::decide(spec, &case.weights, &case.input, logits.as_deref());
        (
            reference::forward(spec, &case.weights, &case.input).y,
            decision,
        )
    });
    let mut counts = vec![0i64; spec.routed_experts()];
    let (k, width) = (spec.shape.top_k, spec.output_dim());
    for (token, &router) in router_ids.iter().enumerate() {
        let (all, decision) = &of_routers[router as usize];
        y.extend(&all[token * width..][..width]);
        ids.extend(&decision.ids[token * k..][..k]);
        weights.extend(&decision.weights[token * k..][..k]);
    }
    for &id in ids.iter().filter(|id| **id >= 0) {
        counts[id as usize] += 1;
    }
    assert_eq!(ints(&output, "topk_ids"), ids, "{what}");
    let found = longs(&output, "counts");
    assert_eq!(found, counts[..found.len()], "{what}");
    close(&what, &floats(&output, "topk_weights"), &weights, tolerance);
    close(&what, &floats(&output, "y"), &y, tolerance);
}

/// Holds gradients against the sum over routers of the reference's, with `dy` zero for tokens of
/// other routers.
fn check_training(engine: &Engine, toml: &str, router_ids: &[i32], recompute: Recompute) {
    let cases = three_gates(toml, router_ids.len());
    let what = format!(
        "{recompute:?} {router_ids:?} on {}: {toml}",
        engine.target()
    );
    let gates = multi_gate(engine, &cases, training(recompute));
    let (input, dy) = (cases[0].input(), random_dy_of(&cases[0], 8));
    let (spec, width) = (&cases[0].spec, cases[0].spec.output_dim());
    let expected: Vec<_> = cases
        .iter()
        .enumerate()
        .map(|(router, case)| {
            let of_router = |token: usize| router_ids[token] == router as i32;
            let dy = dy.to_f64().into_iter().enumerate();
            let dy: Vec<f64> = dy
                .map(|(at, dy)| if of_router(at / width) { dy } else { 0.0 })
                .collect();
            reference::backward(spec, &case.weights, &case.input, &dy)
        })
        .collect();
    let dx: Vec<f64> = (0..expected[0].x.len())
        .map(|at| expected.iter().map(|e| e.x[at]).sum())
        .collect();
    let tolerance = if toml.contains("bf16") { 4e-2 } else { 2e-5 };
    // Overwritten, overwritten again, added to.
    for times in [1.0, 1.0, 2.0] {
        let call = gates.forward_train_by_token(input.reading(&["y"]), router_ids, RNG_KEY);
        let (_, saved) = call.unwrap_or_else(|e| panic!("{what}: {e}"));
        // An evaluation in between leaves what backward needs.
        let evaluated = gates.forward_by_token(&input, router_ids);
        evaluated.unwrap_or_else(|e| panic!("{what}: {e}"));
        let back = gates.backward_by_token(&saved, &dy, times == 2.0);
        let back = back.unwrap_or_else(|e| panic!("{what}: {e}"));
        close(&format!("dx, {what}"), &floats(&back, "dx"), &dx, tolerance);
        for (layer, own) in gates.layers().iter().zip(&expected) {
            let gradients = layer.gradients().unwrap_or_else(|e| panic!("{what}: {e}"));
            for (name, found) in &gradients {
                let of_router = name.starts_with("router.");
                let sum = |at: usize| -> f64 {
                    let all = expected.iter().map(|e| e.weights[name].data[at]);
                    times
                        * if of_router {
                            own.weights[name].data[at]
                        } else {
                            all.sum()
                        }
                };
                let want: Vec<f64> = (0..own.weights[name].data.len()).map(sum).collect();
                close(
                    &format!("{name}, {what}"),
                    &found.to_f64(),
                    &want,
                    tolerance,
                );
            }
        }
    }
}

/// All modalities, two of three, one alone, and no token at all.
fn mixes() -> Vec<Vec<i32>> {
    let two = modalities(TOKENS).into_iter().map(|id| id.min(1) * 2);
    vec![
        modalities(TOKENS),
        two.collect(),
        vec![1; 8],
        vec![2],
        vec![],
    ]
}

#[test]
fn each_token_has_its_router() {
    for router_ids in mixes() {
        for toml in specs().iter().map(String::as_str).chain([ALL]) {
            check_forward(&engine(), toml, &router_ids);
        }
    }
    // Every instruction set of this CPU, with memory full of NaN.
    for engine in engines() {
        check_forward(&engine, &specs()[0], &modalities(TOKENS));
    }
}

#[test]
fn gradients_are_of_each_tokens_router() {
    for router_ids in mixes() {
        for (toml, recompute) in specs().iter().map(String::as_str).chain([ALL]).zip(
            [Recompute::None, Recompute::Hidden, Recompute::All]
                .into_iter()
                .cycle(),
        ) {
            check_training(&engine(), toml, &router_ids, recompute);
        }
    }
}

#[test]
fn simulated_gpus_take_a_router_for_each_token() {
    for target in SIMULATORS {
        let engine = quick::open(target, poisoned()).unwrap();
        check_forward(&engine, &specs()[0], &modalities(TOKENS));
        check_training(&engine, &specs()[0], &modalities(9), Recompute::None);
    }
}

/// A NaN in a token reaches its own results and its own router's gradients, and no other token.
#[test]
fn a_nan_stays_with_its_token_and_router() {
    let router_ids = modalities(TOKENS);
    let spoilt = router_ids.iter().position(|&id| id == 1).unwrap();
    let run = |nan: bool| {
        let mut cases = three_gates(&specs()[0], TOKENS);
        if nan {
            cases
                .iter_mut()
                .for_each(|case| case.input.x[spoilt * 12] = f64::NAN);
        }
        let gates = multi_gate(&engine(), &cases, training(Recompute::None));
        let input = cases[0].input();
        let call = gates.forward_train_by_token(&input, &router_ids, RNG_KEY);
        let (output, saved) = call.unwrap();
        let dy = random_dy_of(&cases[0], 8);
        let back = gates.backward_by_token(&saved, &dy, false).unwrap();
        let routers = [0, 1, 2].map(|router: usize| {
            let gradient = gates.layers()[router].gradient("router.weight").unwrap();
            gradient.to_f64()
        });
        (floats(&output, "y"), floats(&back, "dx"), routers)
    };
    let (clean, found) = (run(false), run(true));
    for (clean, found) in [(clean.0, found.0), (clean.1, found.1)] {
        for (token, (clean, found)) in clean.chunks(12).zip(found.chunks(12)).enumerate() {
            if token == spoilt {
                assert!(found.iter().any(|value| value.is_nan()));
            } else {
                assert_eq!(clean, found, "token {token}");
            }
        }
    }
    assert_eq!(clean.2[0], found.2[0]);
    assert!(found.2[1].iter().any(|value| value.is_nan()));
    assert_eq!(clean.2[2], found.2[2]);
}

/// The results of one process, or of a rank on its tokens.
fn step(gates: &MultiGate, case: &Case, router_ids: &[i32], dy: &[f64]) -> [Vec<f64>; 3] {
    let shape = [router_ids.len(), case.spec.output_dim()];
    let dy = host(case.spec.precision.activations, &shape, dy);
    let input = case.input();
    let evaluated = gates.forward_by_token(&input, router_ids).unwrap();
    let call = gates.forward_train_by_token(&input, router_ids, RNG_KEY);
    let (_, saved) = call.unwrap();
    let back = gates.backward_by_token(&saved, &dy, false).unwrap();
    gates.reduce_gradients().unwrap();
    let routers = gates.layers().iter().flat_map(|layer| {
        let gradient = layer.gradient("router.weight").unwrap();
        gradient.to_f64()
    });
    [
        floats(&evaluated, "y"),
        floats(&back, "dx"),
        routers.collect(),
    ]
}

#[test]
fn routers_of_tokens_over_ranks_are_those_of_one_process() {
    // The last rank has no token of the second modality.
    let mut router_ids = modalities(TOKENS);
    router_ids[14..].iter_mut().for_each(|id| *id &= 2);
    let check = |toml: &str, parallel: Parallel| {
        let cases = three_gates(toml, TOKENS);
        let dy = random_dy_of(&cases[0], 8).to_f64();
        let whole = multi_gate(&engine(), &cases, training(Recompute::None));
        let whole = step(&whole, &cases[0], &router_ids, &dy);
        let ranks = on_ranks(&engine(), parallel, |mesh| {
            let options = LayerOptions {
                mesh: Some(mesh),
                ..training(Recompute::None)
            };
            let gates = multi_gate(&engine(), &cases, options);
            let share = shares(TOKENS, parallel.ranks())[mesh.rank()].clone();
            let rows = share.start * 12..share.end * 12;
            step(
                &gates,
                &part(&cases[0], &share),
                &router_ids[share],
                &dy[rows],
            )
        });
        let joined = |at: usize| -> Vec<f64> { ranks.iter().flat_map(|r| r[at].clone()).collect() };
        assert_eq!(joined(0), whole[0], "y of {parallel:?}");
        close("dx", &joined(1), &whole[1], 1e-5);
        for rank in &ranks {
            close("gradients of routers", &rank[2], &whole[2], 1e-5);
        }
    };
    check(&specs()[0], mesh(3, 1, 1));
    check(&specs()[2], mesh(2, 1, 1));
}

#[test]
fn what_a_router_for_each_token_cannot_have_is_refused() {
    let of_shape = |shape: &str, toml: &str, router_ids: &[i32], names: &[&str]| {
        let cases = three_gates(&format!("{shape}{toml}\n"), 5);
        let gates = multi_gate(&engine(), &cases, training(Recompute::None));
        let input = cases[0].input();
        let call = input.reading(names);
        let evaluated = gates.forward_by_token(call, router_ids).err();
        let trained = gates
            .forward_train_by_token(call, router_ids, RNG_KEY)
            .err();
        [evaluated, trained].map(|error| error.map_or(String::new(), |error| error.to_string()))
    };
    let refused =
        |toml: &str, router_ids: &[i32], names: &[&str]| of_shape(SMALL, toml, router_ids, names);
    let of_all = [
        (
            SMALL,
            "capacity = { mode = \"factor\", factor = 0.5 }",
            "capacity",
        ),
        (
            ALL,
            "router = { select = { expert-choice = 1.5 } }",
            "router.select",
        ),
        (
            SMALL,
            "router.blocks = { tokens = 4, experts = 3 }",
            "router.blocks",
        ),
    ];
    for (shape, toml, key) in of_all {
        for said in of_shape(shape, toml, &[0; 5], &["y"]) {
            assert!(said.contains(key), "{toml}: {said}");
        }
    }
    let [evaluated, trained] = refused("router.noise = 1.0", &[0; 5], &["y"]);
    assert_eq!(evaluated, "");
    assert!(trained.contains("draws"), "{trained}");
    for (router_ids, words) in [
        (&[0, 1, 2, 3, 0][..], "has 3 at element 3, of 3 routers"),
        (&[0, -1, 0, 0, 0], "has -1 at element 1"),
        (&[0, 1], "has 2 ids for 5 tokens"),
    ] {
        for said in refused("", router_ids, &["y"]) {
            assert!(said.contains(words), "{said}");
        }
    }
    for said in refused("", &[0; 5], &["offsets"]) {
        assert!(said.contains("offsets"), "{said}");
    }
    for said in refused("", &[0; 5], &["nothing"]) {
        assert!(said.contains("no output `nothing`"), "{said}");
    }
}

/// Ling's configuration with a router for each of text, images and audio.
const LING: &str = r#"{ "model_type": "bailing_hybrid", "hidden_size": 12,
    "moe_intermediate_size": 10, "num_experts": 5, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "num_shared_experts": 1, "num_hidden_layers": 2, "first_k_dense_replace": 1,
    "torch_dtype": "float32", "router_type": "MultiRouter" }"#;

/// The tensors of a checkpoint, under the names that SGLang reads.
fn ling() -> Tensors<'static> {
    let mut random = reference::Random::new(4);
    let mut tensors = Tensors::new();
    let mut add = |name: &str, shape: &[usize]| {
        let values = random.vec(shape.iter().product());
        let name = format!("model.layers.1.mlp.{name}");
        tensors.insert(name, host(DType::F32, shape, &values));
    };
    for gate in ["gate", "image_gate", "audio_gate"] {
        add(&format!("{gate}.weight"), &[5, 12]);
        add(&format!("{gate}.expert_bias"), &[5]);
    }
    let experts = (0..5).map(|expert| format!("experts.{expert}"));
    for module in experts.chain(["shared_experts".to_string()]) {
        for (part, shape) in [("gate", [10, 12]), ("up", [10, 12]), ("down", [12, 10])] {
            add(&format!("{module}.{part}_proj.weight"), &shape);
        }
    }
    tensors
}

/// Routers by modality are read from a checkpoint, and route the tokens that have them.
#[test]
fn lings_routers_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let tensors = ling();
    write_safetensors(&path, &tensors).unwrap();
    let file = Checkpoint::open(&path).unwrap();
    let import = hf::import(LING, 1).unwrap();
    let names: Vec<&str> = import.routers.iter().map(|router| &*router.name).collect();
    assert_eq!(names, ["image", "audio"]);
    let options = LoadOptions::default();
    let own = LayerReader::of_import(&import, &file, options).unwrap();
    let more = LayerReader::of_routers(&import, &file, options).unwrap();
    let routers: Vec<Tensors<'static>> = std::iter::once(&own)
        .chain(&more)
        .map(|reader| reader.load().unwrap())
        .collect();
    let gates = engine().multi_gate(&import.spec, &own, &routers, LayerOptions::default());
    let (gates, router_ids) = (gates.unwrap(), modalities(TOKENS));
    let mut case = Case::random(&import.spec, TOKENS, 3);
    let found = gates.forward_by_token(&case.input(), &router_ids).unwrap();
    let each = ["gate", "image_gate", "audio_gate"].map(|gate| {
        let all = reference::Weights::from(&routers[0]);
        case.weights = all;
        for (name, own) in [("weight", "weight"), ("select_bias", "expert_bias")] {
            let own = &tensors[&*format!("model.layers.1.mlp.{gate}.{own}")];
            let own = reference::Tensor::from(own);
            case.weights.0.insert(format!("router.{name}"), own);
        }
        reference::forward(&case.spec, &case.weights, &case.input).y
    });
    let row = |(token, id): (usize, &i32)| each[*id as usize][token * 12..][..12].to_vec();
    let want: Vec<f64> = router_ids.iter().enumerate().flat_map(row).collect();
    close("y", &floats(&found, "y"), &want, 1e-5);
    // A router that is not there is an error that names it.
    let mut without = ling();
    without.remove("model.layers.1.mlp.audio_gate.weight");
    write_safetensors(folder.path().join("less.safetensors"), &without).unwrap();
    let file = Checkpoint::open(folder.path().join("less.safetensors")).unwrap();
    let error = LayerReader::of_routers(&import, &file, options)
        .err()
        .unwrap();
    assert!(error.to_string().contains("router.weight"), "{error}");
}
