//! Layers over the experts of another layer.

use super::Case;
use super::case::host;
use super::compare::{close, equal};
use super::layers::engine;
use super::mesh::{layer_on, mesh, on_ranks, part, shares};
use super::simulated::{SIMULATORS, open};
use super::user::random_dy;
use moesaic::reference;
use moesaic::spec::{LayerSpec, canonical_tensors};
use moesaic::{DType, Input, Recompute, RngKey, Tensor, Tensors, Training};

const TOKENS: usize = 17;
const UP: &str = "experts.up.weight";

/// Layers of other routers, choices and shared experts over one bank of experts: results are those
/// of layers alone, a weight is in memory once, and the experts' gradients are sums.
#[test]
fn layers_share_a_bank_of_experts() {
    let cases = cases();
    for engine in [engine(), open(SIMULATORS[0])] {
        let bank = cases[0].layer(&engine);
        let other =
            engine.layer_over_experts_of(&bank, &cases[1].spec, &without_experts(&cases[1]));
        let other = other.unwrap_or_else(|e| panic!("{e}"));
        for (case, layer) in cases.iter().zip([&bank, &other]) {
            let found = layer
                .forward(&case.input())
                .unwrap_or_else(|e| panic!("{e}"));
            let alone = case.layer(&engine).forward(&case.input());
            equal("y", &found.y().data, &alone.expect("it runs").y().data);
        }
        let zeros = Tensor::owned(&[5, 20, 24], vec![0.0f32; 5 * 20 * 24]);
        bank.set_weight("experts.down.weight", &zeros)
            .expect("it is a weight");
        let mut silent = cases[1].clone();
        let down = silent
            .weights
            .0
            .get_mut("experts.down.weight")
            .expect("a weight");
        down.data.fill(0.0);
        let found = other.forward(&silent.input()).expect("it runs");
        let alone = silent.layer(&engine).forward(&silent.input());
        equal("y", &found.y().data, &alone.expect("it runs").y().data);
    }
    gradients_of_a_bank(&cases);
}

/// Two layers with the experts of the first.
fn cases() -> [Case; 2] {
    let shape = "shape = { model_dim = 20, hidden_dim = 24, experts = 5, top_k = ";
    let second = "3 }\nrouter = { score = 'sigmoid' }\n[[shared]]\nhidden_dim = 12\n\
                  gate = 'sigmoid'\n";
    let [first, second] = ["2 }\n[[shared]]\nhidden_dim = 8\n", second]
        .map(|rest| LayerSpec::from_toml(&format!("{shape}{rest}")).expect("a spec"));
    let mut cases = [
        Case::random(&first, TOKENS, 1),
        Case::random(&second, TOKENS, 2),
    ];
    let experts = cases[0].weights.0.clone();
    for (name, tensor) in experts
        .iter()
        .filter(|(name, _)| name.starts_with("experts."))
    {
        cases[1].weights.0.insert(name.clone(), tensor.clone());
    }
    cases
}

fn without_experts(case: &Case) -> Tensors<'static> {
    let mut weights = Tensors::new();
    let tensors = canonical_tensors(&case.spec).into_iter();
    for tensor in tensors.filter(|tensor| !tensor.name.starts_with("experts.")) {
        let values = &case.weights.get(&tensor.name).data;
        weights.insert(&tensor.name, host(tensor.dtype, &tensor.shape, values));
    }
    weights
}

/// The gradients of both layers by the reference; those of the experts are sums over both.
fn gradients(cases: &[Case; 2], dy: &[f64]) -> [Tensors<'static>; 2] {
    let each = cases
        .each_ref()
        .map(|case| reference::backward(&case.spec, &case.weights, &case.input, dy).weights);
    each.each_ref().map(|own| {
        let mut all = Tensors::new();
        for (name, tensor) in own {
            let mut values = tensor.data.clone();
            if name.starts_with("experts.") {
                let [first, second] = each.each_ref().map(|one| &one[name].data);
                values = first.iter().zip(second).map(|(a, b)| a + b).collect();
            }
            all.insert(name, host(DType::F32, &tensor.shape, &values));
        }
        all
    })
}

fn gradients_of_a_bank(cases: &[Case; 2]) {
    let engine = engine();
    let whole = |case: &Case| {
        let mut weights = without_experts(case);
        for (name, tensor) in &case.weights.0 {
            if name.starts_with("experts.") {
                weights.insert(name, host(DType::F32, &tensor.shape, &tensor.data));
            }
        }
        weights
    };
    let training = Training::default();
    let bank = engine.training_layer(&cases[0].spec, &whole(&cases[0]), training);
    let bank = bank.unwrap_or_else(|e| panic!("{e}"));
    let own = without_experts(&cases[1]);
    let other = engine.layer_over_experts_of(&bank, &cases[1].spec, &own);
    let layers = [&bank, &other.unwrap_or_else(|e| panic!("{e}"))];
    let [a, b] = layers.map(|layer| layer.weight_ptr(UP).expect("a weight"));
    assert_eq!(a.0, b.0, "one copy");
    let (dy, values) = random_dy(&cases[0]);
    let expected = gradients(cases, &values);
    for _ in 0..2 {
        for layer in layers {
            layer.zero_gradients().expect("it trains");
        }
        for (case, layer) in cases.iter().zip(layers) {
            let input: Input = case.input();
            let passed = layer.forward_train(input.reading(&["y"]), RngKey::default());
            let saved = passed.unwrap_or_else(|e| panic!("{e}")).1;
            layer
                .backward(&saved, &dy, true)
                .unwrap_or_else(|e| panic!("{e}"));
        }
        let found = layers[1].gradient(UP).expect("it trains").to_f64();
        close(UP, &found, &expected[0][UP].to_f64(), 1e-5);
        for (layer, expected) in layers.iter().zip(&expected) {
            let own = layer.gradient("router.weight").expect("it trains").to_f64();
            close(
                "router.weight",
                &own,
                &expected["router.weight"].to_f64(),
                1e-5,
            );
        }
    }
}

/// A layer of other experts has no place in the bank, nor has one of another device.
#[test]
fn a_bank_of_another_width_is_refused() {
    let spec = |hidden: usize| {
        let text =
            format!("shape = {{ model_dim = 8, hidden_dim = {hidden}, experts = 3, top_k = 2 }}");
        LayerSpec::from_toml(&text).expect("a spec")
    };
    let case = Case::random(&spec(8), 3, 1);
    let engine = engine();
    let bank = case.layer(&engine);
    let wrong = engine.layer_over_experts_of(&bank, &spec(16), &without_experts(&case));
    let said = wrong.expect_err("another width").to_string();
    let elsewhere = open(SIMULATORS[0]).layer_over_experts_of(&bank, &spec(8), &Tensors::new());
    let elsewhere = elsewhere.expect_err("another device").to_string();
    assert!(elsewhere.contains("another engine"), "{elsewhere}");
    assert!(
        said.contains("experts.") && said.contains("another form"),
        "{said}"
    );
}

/// A layer would add f32 to gradients of 16 bits.
#[test]
fn a_bank_whose_gradients_have_another_dtype_is_refused() {
    let mut case = cases()[0].clone();
    case.spec.precision.weights = DType::Bf16;
    let engine = engine();
    let bank = case.training_layer(&engine, Recompute::None);
    let mut other = case.spec.clone();
    other.precision.expert_gradients = DType::Bf16;
    let refused = engine.layer_over_experts_of(&bank, &other, &without_experts(&case));
    let error = refused.expect_err("another dtype").to_string();
    assert!(error.contains("grad.experts."), "{error}");
    let same = engine.layer_over_experts_of(&bank, &case.spec, &without_experts(&case));
    assert!(same.is_ok(), "{:?}", same.err());
}

/// Over ranks the experts' gradients are the sums over the tokens of all ranks and both layers.
#[test]
fn ranks_share_a_bank_of_experts() {
    let (engine, cases) = (engine(), cases());
    let (_, values) = random_dy(&cases[0]);
    let expected = gradients(&cases, &values);
    let alone = cases.each_ref().map(|case| {
        let output = case.layer(&engine).forward(&case.input());
        output.expect("it runs").y().to_f64()
    });
    for parallel in [mesh(2, 1, 1), mesh(1, 1, 2), mesh(2, 1, 2)] {
        on_ranks(&engine, parallel, |mesh| {
            let bank = layer_on(&engine, mesh, &cases[0], Some(Training::default()));
            let own = without_experts(&cases[1]);
            let other = engine.layer_over_experts_of(&bank, &cases[1].spec, &own);
            let layers = [bank, other.unwrap_or_else(|e| panic!("{e}"))];
            let tokens = &shares(TOKENS, parallel.ranks())[mesh.rank()];
            let of = |all: &[f64]| all[tokens.start * 20..tokens.end * 20].to_vec();
            let dy = host(DType::F32, &[tokens.len(), 20], &of(&values));
            for layer in &layers {
                layer.zero_gradients().expect("it trains");
            }
            for ((layer, case), alone) in layers.iter().zip(&cases).zip(&alone) {
                let own = part(case, tokens);
                let passed = layer.forward_train(&own.input(), RngKey::default());
                let (output, saved) = passed.unwrap_or_else(|e| panic!("{e}"));
                close("y", &output.y().to_f64(), &of(alone), 1e-5);
                let back = layer.backward(&saved, &dy, true);
                back.unwrap_or_else(|e| panic!("{e}"));
            }
            for (layer, expected) in layers.iter().zip(&expected).rev() {
                layer.reduce_gradients().unwrap_or_else(|e| panic!("{e}"));
                let router = layer.gradient("router.weight").expect("it trains");
                let want = expected["router.weight"].to_f64();
                close("router.weight", &router.to_f64(), &want, 1e-5);
            }
            for (layer, expected) in layers.iter().zip(&expected) {
                let want = layers[0].weights_of(expected).expect("a part of it");
                let found = layer.gradient(UP).expect("it trains").to_f64();
                close(UP, &found, &want[UP].to_f64(), 1e-5);
            }
        });
    }
}
