//! A layer, its weights and its input, and what every stage must give.

use super::compare::{close, equal};
use moesaic::reference::{self, Decision, Random};
use moesaic::spec::{LayerSpec, RouterKind};
use moesaic::{DType, Engine, Input, Layer, Output, Tensor, Tensors};

/// One layer with one input.
#[derive(Clone)]
pub struct Case {
    pub spec: LayerSpec,
    pub weights: reference::Weights,
    pub input: reference::Input,
}

impl Case {
    /// Random weights and tokens, rounded to the spec's element types.
    pub fn random(spec: &LayerSpec, tokens: usize, seed: u64) -> Case {
        let weights = reference::Weights::random(spec, seed).rounded(spec);
        let mut random = Random::new(seed ^ 0x5eed);
        let round = |v: f64| reference::round_to(spec.precision.activations, v);
        let x = random
            .vec(tokens * spec.shape.model_dim)
            .into_iter()
            .map(round)
            .collect();
        let input = reference::Input {
            tokens,
            x,
            token_ids: token_ids(spec, tokens, &mut random),
            routing: routing(spec, tokens, &mut random),
            token_mask: spec
                .router
                .token_mask
                .then(|| (0..tokens as i32).map(|t| t * 7 % 5).collect()),
            active_k: spec.router.active_k.then(|| spec.shape.top_k.div_ceil(2)),
            ..reference::Input::default()
        };
        Case {
            spec: spec.clone(),
            weights,
            input,
        }
    }

    /// The weights as an engine takes them.
    pub fn host_weights(&self) -> Tensors<'static> {
        let mut weights = Tensors::new();
        for tensor in moesaic::spec::canonical_tensors(&self.spec) {
            let found = self.weights.get(&tensor.name);
            weights.insert(&tensor.name, host(tensor.dtype, &tensor.shape, &found.data));
        }
        weights
    }

    /// The layer on an engine.
    pub fn layer(&self, engine: &Engine) -> Layer {
        engine
            .layer(&self.spec, &self.host_weights())
            .unwrap_or_else(|e| panic!("{}: {e}", self.describe()))
    }

    /// The input as the engine takes it.
    pub fn input(&self) -> Input<'static> {
        let (t, k) = (self.input.tokens, self.spec.shape.top_k);
        let mut input = Input {
            tokens: t,
            capacity_factor: self.input.capacity_factor,
            ..Input::default()
        };
        let x = host(
            self.spec.precision.activations,
            &[t, self.spec.shape.model_dim],
            &self.input.x,
        );
        input.insert("x", x);
        if let Some(mask) = &self.input.token_mask {
            input.insert("token_mask", Tensor::owned(&[t], mask.clone()));
        }
        if let Some(active) = self.input.active_k {
            input.insert("active_k", Tensor::owned(&[1], vec![active as i32]));
        }
        if let Some(ids) = &self.input.sequence_ids {
            input.insert("sequence_ids", Tensor::owned(&[t], ids.clone()));
        }
        if let Some((counts, tokens)) = &self.input.global {
            let counts = Tensor::owned(&[counts.len()], counts.clone());
            input.insert("global_counts", counts);
            let tokens = Tensor::owned(&[1], vec![*tokens as i64]);
            input.insert("global_tokens", tokens);
        }
        if let Some(ids) = &self.input.token_ids {
            input.insert("token_ids", Tensor::owned(&[t], ids.clone()));
        }
        if let Some((ids, weights)) = &self.input.routing {
            let weights: Vec<f32> = weights.iter().map(|&w| w as f32).collect();
            input.insert("topk_ids", Tensor::owned(&[t, k], ids.clone()));
            input.insert("topk_weights", Tensor::owned(&[t, k], weights));
        }
        input
    }

    /// Runs the layer and holds every stage against the reference.
    pub fn check(&self, engine: &Engine) {
        self.check_layer(&self.layer(engine));
    }

    /// Evaluates a layer that was made of this case, and holds every stage
    /// against the reference.
    pub fn check_layer(&self, layer: &Layer) {
        let names = self.outputs();
        let output = layer
            .forward(self.input().reading(&names))
            .unwrap_or_else(|e| panic!("{}: {e}", self.describe()));
        self.check_logits(&output);
        let decision = self.check_decision(&output);
        let placed = self.check_scan(&output, &decision);
        self.check_y(&output, &decision, &placed);
    }

    /// The outputs this spec has.
    pub fn outputs(&self) -> Vec<&'static str> {
        let mut names = vec![
            "y",
            "topk_ids",
            "topk_weights",
            "counts",
            "locations",
            "offsets",
        ];
        names.extend(["slot_rows", "row_slots"]);
        names.extend(self.spec.has_logits().then_some("router.logits"));
        let mode = self.spec.capacity.mode;
        let limited = mode != moesaic::spec::CapacityMode::Dropless;
        names.extend(limited.then_some("capacity"));
        names.extend((mode == moesaic::spec::CapacityMode::Bounded).then_some("overflow"));
        names
    }

    fn check_logits(&self, output: &Output) {
        if self.spec.has_logits() {
            let expected =
                reference::logits(&self.spec, &self.weights, &self.input.x, self.input.tokens);
            close(
                &self.what("gate_topk: logits"),
                &floats(output, "router.logits"),
                &expected,
                4e-6,
            );
        }
    }

    /// Ids and weights, given the logits the device computed.
    fn check_decision(&self, output: &Output) -> Decision {
        let logits = self
            .spec
            .has_logits()
            .then(|| floats(output, "router.logits"));
        let (spec, weights) = (&self.spec, &self.weights);
        let mut expected = reference::decide(spec, weights, &self.input, logits.as_deref());
        equal(
            &self.what("gate_topk: ids"),
            &ints(output, "topk_ids"),
            &expected.ids,
        );
        if !spec.capacity.renormalize_after_drop {
            let found = floats(output, "topk_weights");
            close(
                &self.what("gate_topk: weights"),
                &found,
                &expected.weights,
                4e-6,
            );
            expected.weights = found;
        }
        expected
    }

    /// Locations, counts and maps, given the decision.
    fn check_scan(&self, output: &Output, decision: &Decision) -> reference::AssignmentPlaces {
        let placed = reference::scan(&self.spec, decision, &self.input);
        equal(
            &self.what("expert_scan: counts"),
            &longs(output, "counts"),
            &placed.counts,
        );
        let locations = ints(output, "locations");
        equal(
            &self.what("expert_scan: locations"),
            &locations,
            &placed.locations,
        );
        if let Some(capacity) = placed.capacity {
            equal(
                &self.what("expert_scan: capacity"),
                &longs(output, "capacity"),
                &[capacity],
            );
        }
        if output.get("overflow").is_some() {
            equal(
                &self.what("expert_scan: overflow"),
                &longs(output, "overflow"),
                &[placed.overflow],
            );
        }
        if self.spec.capacity.renormalize_after_drop {
            let found = floats(output, "topk_weights");
            close(
                &self.what("expert_scan: weights"),
                &found,
                &placed.weights,
                4e-6,
            );
        }
        self.check_maps(output, &decision.ids, &locations);
        placed
    }

    /// Rows are the kept assignments, expert by expert, in placement order.
    fn check_maps(&self, output: &Output, ids: &[i32], locations: &[i32]) {
        let offsets = longs(output, "offsets");
        let (slot_rows, row_slots) = (ints(output, "slot_rows"), ints(output, "row_slots"));
        let mut rows = 0;
        for (slot, (&id, &at)) in ids.iter().zip(locations).enumerate() {
            let expected = if at < 0 {
                -1
            } else {
                offsets[id as usize] as i32 + at
            };
            assert_eq!(
                slot_rows[slot],
                expected,
                "{}",
                self.what("expert_scan: slot_rows")
            );
            if at >= 0 {
                let back = row_slots[expected as usize];
                assert_eq!(back, slot as i32, "{}", self.what("expert_scan: row_slots"));
                rows += 1;
            }
        }
        let last = offsets[self.spec.shape.experts];
        assert_eq!(last, rows, "{}", self.what("expert_scan: offsets"));
    }

    fn check_y(&self, output: &Output, decision: &Decision, placed: &reference::AssignmentPlaces) {
        let ids = &decision.ids;
        let expected = reference::combine(&self.spec, &self.weights, &self.input, ids, placed);
        let rounding = if self.spec.precision.tf32 {
            2f64.powi(-11) // the factors' own
        } else {
            self.spec.precision.activations.unit_roundoff()
        };
        // Hidden, expert output and y are each rounded once; sums of products
        // in f32 add a little.
        let tolerance = 2e-5 + 8.0 * rounding;
        let found = floats(output, "y");
        match self.spec.precision.expert_activations {
            None => close(&self.what("y"), &found, &expected, tolerance),
            Some(_) => self.check_coarse_y(&found, &expected, tolerance),
        }
    }

    /// Where hidden values become codes, one that lies between two may go to either side. That
    /// changes its token's y by a part of a step, and in f32 it is rare.
    fn check_coarse_y(&self, found: &[f64], expected: &[f64], tolerance: f64) {
        const STEP: f64 = 5e-2;
        close(&self.what("y"), found, expected, STEP);
        if self.spec.precision.activations != DType::F32 {
            return;
        }
        let width = self.spec.output_dim();
        let largest = expected.iter().filter(|value| value.is_finite());
        let largest = largest.fold(0f64, |most, value| most.max(value.abs()));
        let off = |pair: (&f64, &f64)| (pair.0 - pair.1).abs() > tolerance * largest;
        let rows = found.chunks(width).zip(expected.chunks(width));
        let coarse = rows.filter(|(found, expected)| found.iter().zip(*expected).any(off));
        let (coarse, all) = (coarse.count(), self.input.tokens);
        assert!(
            coarse <= all / 8 + 1,
            "{}: {coarse} of {all} rows",
            self.what("y")
        );
    }

    pub fn what(&self, stage: &str) -> String {
        format!("{stage} of {}", self.describe())
    }

    pub fn describe(&self) -> String {
        format!("T = {} of\n{}", self.input.tokens, self.spec.to_toml())
    }
}

fn token_ids(spec: &LayerSpec, tokens: usize, random: &mut Random) -> Option<Vec<i32>> {
    let rows = spec
        .router
        .table_rows
        .filter(|_| spec.router.kind == RouterKind::Table)? as u64;
    Some((0..tokens).map(|_| (random.bits() % rows) as i32).collect())
}

/// A decision from outside: distinct experts, some slots masked.
fn routing(spec: &LayerSpec, tokens: usize, random: &mut Random) -> Option<(Vec<i32>, Vec<f64>)> {
    if spec.router.kind != RouterKind::External {
        return None;
    }
    let (experts, k) = (spec.routed_experts(), spec.shape.top_k);
    let mut ids = Vec::with_capacity(tokens * k);
    for _ in 0..tokens {
        let start = random.bits() as usize % experts;
        let masked = random.bits() as usize % (k + 1);
        ids.extend((0..k).map(|j| {
            if j == masked {
                -1
            } else {
                ((start + j) % experts) as i32
            }
        }));
    }
    let weight = |id: &i32| {
        if *id < 0 {
            0.0
        } else {
            f64::from(random.signed() as f32)
        }
    };
    let weights = ids.iter().map(weight).collect();
    Some((ids, weights))
}

/// Values as a tensor of the given type; they are representable in it.
pub fn host(dtype: DType, shape: &[usize], values: &[f64]) -> Tensor<'static> {
    let values = values.iter();
    match dtype {
        DType::F32 => Tensor::owned(shape, values.map(|&v| v as f32).collect()),
        DType::F16 => Tensor::owned(
            shape,
            values.map(|&v| moesaic::half::f16::from_f64(v)).collect(),
        ),
        DType::Bf16 => Tensor::owned(
            shape,
            values.map(|&v| moesaic::half::bf16::from_f64(v)).collect(),
        ),
        DType::I32 => Tensor::owned(shape, values.map(|&v| v as i32).collect()),
        DType::I64 => Tensor::owned(shape, values.map(|&v| v as i64).collect()),
    }
}

fn tensor<'o>(output: &'o Output, name: &str) -> &'o Tensor<'static> {
    output
        .get(name)
        .unwrap_or_else(|| panic!("no output {name}"))
}

pub fn floats(output: &Output, name: &str) -> Vec<f64> {
    tensor(output, name)
        .to_f32()
        .into_iter()
        .map(f64::from)
        .collect()
}

pub fn ints(output: &Output, name: &str) -> Vec<i32> {
    tensor(output, name).to_vec().expect("ids and maps are i32")
}

pub fn longs(output: &Output, name: &str) -> Vec<i64> {
    tensor(output, name)
        .to_vec()
        .expect("counts and offsets are i64")
}
