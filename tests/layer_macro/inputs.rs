//! Every optional input, as an argument of a typed layer.

use super::{ENGINE, Stored, assert_close, f32s, tokens, upload};
use moesaic::reference::{self, rng::Draw};
use moesaic::typed::{In, Out, TypedLayer, tensor};
use moesaic::{RngKey, Training};

moesaic::layer! {
    /// Every optional input about tokens, in training.
    pub struct Told {
        shape = { model_dim = 11, hidden_dim = 7, experts = 5, top_k = 3 }
        router = { token_mask = true, active_k = true, noise = 0.4, noise_kind = "learned" }
        losses = [
            { kind = "sequence", coefficient = 0.5 },
            { kind = "global", coefficient = 0.25 },
            { kind = "importance-load-logits", coefficient = 0.125 },
        ]
    }

    /// A table router with a token mask.
    pub struct Listed {
        shape = { model_dim = 8, hidden_dim = 6, experts = 4, top_k = 2 }
        router = { kind = "table", table_rows = 3, token_mask = true, active_k = true }
    }

    /// An external router, with its gradients.
    pub struct Replayed {
        shape = { model_dim = 8, hidden_dim = 6, experts = 4, top_k = 2 }
        router = { kind = "external" }
        capacity = { mode = "fixed", rows = 4, order = "random" }
    }
}

const TOKENS: usize = 13;
const RNG_KEY: RngKey = RngKey {
    seed: 5,
    step: 7,
    layer: 2,
    first_token: 31,
};

fn drawn() -> Option<Draw> {
    Some(Draw {
        seed: RNG_KEY.seed,
        step: RNG_KEY.step,
        layer: RNG_KEY.layer as u32,
        first_token: RNG_KEY.first_token,
    })
}

fn f64s<const N: usize>(rows: &[[f32; N]]) -> Vec<f64> {
    rows.as_flattened().iter().map(|&v| v.into()).collect()
}

/// Masks every fourth token.
fn mask() -> Vec<i32> {
    (0..TOKENS as i32).map(|t| t % 4).collect()
}

/// Makes the layer, for training or for inference.
fn told(stored: &Stored, training: bool) -> Told {
    let names = ["router.weight", "router.noise.weight"];
    let [router, noise] = names.map(|name| f32s(stored, name));
    let names = ["gate", "up", "down"];
    let [gate, up, down] = names.map(|name| f32s(stored, &format!("experts.{name}.weight")));
    let weights = ToldWeights {
        router_weight: tensor(&router).unwrap(),
        router_noise_weight: tensor(&noise).unwrap(),
        experts_gate_weight: tensor(&gate).unwrap(),
        experts_up_weight: tensor(&up).unwrap(),
        experts_down_weight: tensor(&down).unwrap(),
    };
    if training {
        Told::training(&ENGINE, &weights, Training::default()).unwrap()
    } else {
        Told::new(&ENGINE, &weights).unwrap()
    }
}

#[test]
fn masks_and_fewer_experts_per_call() {
    let stored = Stored::new(&Told::spec(), 3);
    let layer = told(&stored, false);
    let (x, mut input) = tokens::<[f32; 11]>(TOKENS, |v| v as f32, f64::from);
    input.token_mask = Some(mask());
    for active in 0..=3 {
        input.active_k = Some(active);
        let expected = reference::forward(&Told::spec(), &stored.0, &input);
        let output = layer.forward_all(&x, &mask(), &[active as i32]).unwrap();
        assert_eq!(output.topk_ids.as_flattened(), expected.topk_ids);
        assert_eq!(output.counts[..], expected.counts);
        let y = layer.forward(&x, &mask(), &[active as i32]).unwrap();
        assert_eq!(y, output.y);
        match active {
            0 => assert_eq!(f64s(&y), expected.y, "nobody is asked"),
            _ => assert_close(f64s(&y), &expected.y, 1e-5),
        }
    }
    let short = layer.forward(&x, &mask()[1..], &[1]).unwrap_err();
    let want = "input `token_mask`: has shape [12], expected [13]";
    assert_eq!(short.to_string(), want);
    let many = layer.forward(&x, &mask(), &[4]).unwrap_err().to_string();
    assert!(many.starts_with("input `active_k`: has 4"), "{many}");
}

#[test]
fn masks_on_device_memory() {
    let layer = told(&Stored::new(&Told::spec(), 3), false);
    let (x, _) = tokens::<[f32; 11]>(TOKENS, |v| v as f32, f64::from);
    let (input, mask_there, active) = (upload(&x), upload(&mask()), upload(&[2i32]));
    let output = ENGINE.device().alloc(TOKENS * 11 * 4).unwrap();
    let call = ToldRaw {
        tokens: TOKENS,
        x: In::of(&input),
        token_mask: In::of(&mask_there),
        active_k: In::of(&active),
        y: Out::of(&output),
    };
    // SAFETY: the buffers have a value per token, one for `active_k`, and
    // outlive the download, which waits.
    unsafe { layer.forward_raw(&call).unwrap() };
    let y = layer.forward(&x, &mask(), &[2]).unwrap();
    assert_eq!(super::download(&output, TOKENS * 11), y.as_flattened());
}

#[test]
fn sequences_and_counts_of_a_group() {
    let (spec, stored) = (Told::spec(), Stored::new(&Told::spec(), 4));
    let layer = told(&stored, true);
    let (x, mut input) = tokens::<[f32; 11]>(TOKENS, |v| v as f32, f64::from);
    let sequences: Vec<i32> = (0..TOKENS as i32)
        .map(|t| t / 5 - (t % 7 / 6) * 9)
        .collect();
    input.token_mask = Some(mask());
    input.active_k = Some(2);
    input.sequence_ids = Some(sequences.clone());
    input.global = Some((vec![9, 0, 4, 7, 1], 21));
    input.draw = drawn();
    let (counts, group) = ([9, 0, 4, 7, 1], [21]);
    let forward = layer
        .forward_train(&x, &mask(), &[2], &sequences, &counts, &group, RNG_KEY)
        .unwrap();
    let losses = reference::losses(&spec, &stored.0, &input);
    for (name, found) in [
        ("loss.sequence", forward.loss_sequence),
        ("loss.global", forward.loss_global),
        (
            "loss.importance-load-logits",
            forward.loss_importance_load_logits,
        ),
    ] {
        assert_close([f64::from(found)], &[losses[name]], 1e-5);
    }
    let y = layer.forward(&x, &mask(), &[2]).unwrap();
    let for_inference = told(&stored, false).forward(&x, &mask(), &[2]);
    assert_eq!(y, for_inference.unwrap(), "an evaluation, without noise");
    assert_ne!(y, forward.output.y);
    let routed = layer.route_train(&x, &mask(), &[2], RNG_KEY).unwrap();
    assert_eq!(routed.topk_ids, forward.output.topk_ids);
    assert_eq!(routed.counts, forward.output.counts);
    let dy: Vec<[f32; 11]> = x.iter().rev().copied().collect();
    let expected = reference::backward(&spec, &stored.0, &input, &f64s(&dy));
    let back = layer.backward(&forward.saved, &dy, false).unwrap();
    assert_close(f64s(&back.dx), &expected.x, 1e-5);
    let found = layer.gradients().unwrap();
    for (name, found) in [
        ("router.weight", found.router_weight),
        ("router.noise.weight", found.router_noise_weight),
        ("experts.down.weight", found.experts_down_weight),
    ] {
        let found = found.iter().map(|&v| f64::from(v));
        assert_close(found, &expected.weights[name].data, 2e-5);
    }
}

#[test]
fn losses_on_device_memory() {
    let layer = told(&Stored::new(&Told::spec(), 4), true);
    let (x, _) = tokens::<[f32; 11]>(TOKENS, |v| v as f32, f64::from);
    let sequences = [0i32; TOKENS];
    let (counts, group) = ([9i64, 0, 4, 7, 1], [21i64]);
    let (x_there, mask_there, active) = (upload(&x), upload(&mask()), upload(&[2i32]));
    let (sequences_there, counts_there, group_there) =
        (upload(&sequences), upload(&counts), upload(&group));
    let room = |count: usize| ENGINE.device().alloc(4 * count).unwrap();
    let (y, losses) = (room(TOKENS * 11), [room(1), room(1), room(1)]);
    let call = ToldRawTraining {
        tokens: TOKENS,
        x: In::of(&x_there),
        token_mask: In::of(&mask_there),
        active_k: In::of(&active),
        sequence_ids: In::of(&sequences_there),
        global_counts: In::of(&counts_there),
        global_tokens: In::of(&group_there),
        y: Out::of(&y),
        loss_sequence: Out::of(&losses[0]),
        loss_global: Out::of(&losses[1]),
        loss_importance_load_logits: Out::of(&losses[2]),
    };
    // SAFETY: the buffers have what the fields say, and outlive the downloads, which wait.
    drop(unsafe { layer.forward_train_raw(&call, RNG_KEY).unwrap() });
    let want = layer
        .forward_train(&x, &mask(), &[2], &sequences, &counts, &group, RNG_KEY)
        .unwrap();
    assert_eq!(
        super::download(&y, TOKENS * 11),
        want.output.y.as_flattened()
    );
    let found = losses.each_ref().map(|loss| super::download(loss, 1)[0]);
    let want = [
        want.loss_sequence,
        want.loss_global,
        want.loss_importance_load_logits,
    ];
    assert_eq!(found, want);
}

#[test]
fn masked_tokens_of_a_table() {
    let mut stored = Stored::new(&Listed::spec(), 6);
    let table = [[0, 3], [2, 1], [1, 0]];
    let data = table.as_flattened().iter().map(|&id| f64::from(id));
    let listed = reference::Tensor {
        shape: vec![3, 2],
        data: data.collect(),
    };
    stored.0.0.insert("router.table".into(), listed);
    let router = f32s(&stored, "router.weight");
    let names = ["gate", "up", "down"];
    let [gate, up, down] = names.map(|name| f32s(&stored, &format!("experts.{name}.weight")));
    let weights = ListedWeights {
        router_weight: tensor(&router).unwrap(),
        router_table: &table,
        experts_gate_weight: tensor(&gate).unwrap(),
        experts_up_weight: tensor(&up).unwrap(),
        experts_down_weight: tensor(&down).unwrap(),
    };
    let layer = Listed::new(&ENGINE, &weights).unwrap();
    let (x, mut input) = tokens::<[f32; 8]>(TOKENS, |v| v as f32, f64::from);
    let ids: Vec<i32> = (0..TOKENS as i32).map(|t| t % 3).collect();
    (input.token_ids, input.token_mask) = (Some(ids.clone()), Some(mask()));
    input.active_k = Some(1);
    let expected = reference::forward(&Listed::spec(), &stored.0, &input);
    let output = layer.forward_all(&x, &ids, &mask(), &[1]).unwrap();
    assert_eq!(output.topk_ids.as_flattened(), expected.topk_ids);
    assert_close(f64s(&output.y), &expected.y, 1e-5);
}

#[test]
fn gradients_of_weights_from_outside() {
    let (spec, stored) = (Replayed::spec(), Stored::new(&Replayed::spec(), 8));
    let names = ["gate", "up", "down"];
    let [gate, up, down] = names.map(|name| f32s(&stored, &format!("experts.{name}.weight")));
    let weights = ReplayedWeights {
        experts_gate_weight: tensor(&gate).unwrap(),
        experts_up_weight: tensor(&up).unwrap(),
        experts_down_weight: tensor(&down).unwrap(),
    };
    let layer = Replayed::training(&ENGINE, &weights, Training::default()).unwrap();
    let (x, mut input) = tokens::<[f32; 8]>(TOKENS, |v| v as f32, f64::from);
    let ids: Vec<[i32; 2]> = (0..TOKENS as i32).map(|t| [t % 4, (t + 1) % 4]).collect();
    let shares: Vec<[f32; 2]> = (0..TOKENS).map(|t| [0.5, t as f32 / 16.0]).collect();
    input.routing = Some((ids.as_flattened().to_vec(), f64s(&shares)));
    input.draw = drawn();
    let expected = reference::forward(&spec, &stored.0, &input);
    let forward = layer.forward_train(&x, &ids, &shares, RNG_KEY).unwrap();
    let locations = forward.output.locations.as_flattened();
    assert!(locations.contains(&-1), "the test drops nothing");
    assert_eq!(locations, expected.locations);
    assert_close(f64s(&forward.output.y), &expected.y, 1e-5);
    let routed = layer.route_train(&ids, RNG_KEY).unwrap();
    assert_eq!(routed.locations, forward.output.locations);
    let expected = reference::backward(&spec, &stored.0, &input, &f64s(&x));
    let back = layer.backward(&forward.saved, &x, false).unwrap();
    assert_close(f64s(&back.dx), &expected.x, 1e-5);
    assert_close(f64s(&back.grad_topk_weights), &expected.topk_weights, 1e-5);
}
