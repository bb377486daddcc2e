//! The norm of experts' outputs and its gradients, alone: on this CPU's instruction sets and on
//! simulators, against a plain f64 loop.

use crate::rms_norm::{EPS, Norm, RowKind, on_cpus, on_simulators};
use moesaic_kernel::DType;
use moesaic_plan::{RmsNormBwdDesc, RmsNormDesc};
use moesaic_reference::{Random, round_to};
use moesaic_target::Buffer;

/// Experts of the layer; the second one has no rows.
const EXPERTS: usize = 3;
const TOP_K: usize = 2;

/// Tokens of a call, and the rows that they have: some slots have none.
const CALLS: [[usize; 2]; 4] = [[0, 0], [1, 0], [1, 2], [33, 57]];

/// The rows of a call, in the layer's type.
struct Rows {
    width: usize,
    tokens: usize,
    x: Vec<f64>,
    weight: Vec<f64>,
    dy: Vec<f64>,
    /// The slot of each row.
    slots: Vec<i32>,
    /// The weights of all slots.
    slot_weights: Vec<f64>,
}

/// The results of both kernels.
#[derive(Default)]
struct Results {
    y: Vec<f64>,
    dx: Vec<f64>,
    dweights: Vec<f64>,
    dscale: Vec<f64>,
}

impl Rows {
    fn random(dtype: DType, width: usize, [tokens, rows]: [usize; 2]) -> Rows {
        let mut random = Random::new((width * 100 + tokens) as u64);
        let mut values = |count: usize, dtype: DType| -> Vec<f64> {
            let values = random.vec(count).into_iter();
            values.map(|value| round_to(dtype, value)).collect()
        };
        let all = (tokens * TOP_K).max(1) as i32;
        Rows {
            width,
            tokens,
            x: values(rows * width, dtype),
            weight: values(width, DType::F32),
            dy: values(rows * width, dtype),
            // No order of slots, and no slot twice: 7 divides no number of slots here.
            slots: (0..rows as i32).map(|row| row * 7 % all).collect(),
            slot_weights: values(tokens * TOP_K, DType::F32),
        }
    }

    /// The same by a plain loop over rows.
    fn expected(&self) -> Results {
        let mut results = Results {
            dscale: vec![0.0; self.width],
            ..Results::default()
        };
        let rows = self.x.chunks(self.width).zip(self.dy.chunks(self.width));
        for ((x, dy), slot) in rows.zip(&self.slots) {
            let scaled: Vec<f64> = x.iter().zip(&self.weight).map(|(x, s)| x * s).collect();
            let squares: f64 = scaled.iter().map(|u| u * u).sum();
            let inverse = (squares / self.width as f64 + EPS).sqrt().recip();
            let product: f64 = scaled.iter().zip(dy).map(|(u, d)| u * d).sum();
            let along = product * inverse * inverse / self.width as f64;
            let weight = self.slot_weights[*slot as usize];
            results.dweights.push(product * inverse);
            for i in 0..self.width {
                results.y.push(scaled[i] * inverse);
                let back = (dy[i] - scaled[i] * along) * inverse * weight;
                results.dx.push(back * self.weight[i]);
                results.dscale[i] += back * x[i];
            }
        }
        results
    }
}

/// Returns the two kernels' descs.
fn descs(width: usize, activations: DType) -> (RmsNormDesc, RmsNormBwdDesc) {
    let forward = RmsNormDesc {
        width,
        activations,
        eps: EPS,
        experts: EXPERTS,
        top_k: TOP_K,
    };
    let backward = RmsNormBwdDesc {
        width,
        activations,
        eps: EPS,
        experts: EXPERTS,
        top_k: TOP_K,
        clears: false,
    };
    (forward, backward)
}

/// Runs forward, then backward twice, the second time adding to the gradient of the scale. Memory
/// behind the last row is full of NaN.
fn run(norm: &Norm, rows: &Rows) -> Results {
    let (count, all) = (rows.slots.len(), rows.tokens * TOP_K);
    let behind = vec![f64::NAN; (all - count) * rows.width];
    let [x, dy] = [&rows.x, &rows.dy].map(|values| {
        let whole = [values.as_slice(), &behind].concat();
        norm.buffer(norm.dtype, &whole)
    });
    let scale = norm.buffer(DType::F32, &rows.weight);
    let first = count.div_ceil(3);
    let offsets = [0, first, first, count].map(|edge| (edge as i64).to_le_bytes());
    let offsets = norm.upload(&offsets.concat());
    let mut slots = rows.slots.clone();
    slots.resize(all, -1);
    let slots: Vec<[u8; 4]> = slots.iter().map(|slot| slot.to_le_bytes()).collect();
    let slots = norm.upload(&slots.concat());
    let weights = norm.buffer(DType::F32, &rows.slot_weights);
    let [y, dx] = [(); 2].map(|()| norm.poisoned(norm.dtype, all * rows.width));
    let factors = norm.poisoned(DType::F32, 2 * all);
    let dweights = norm.poisoned(DType::F32, all);
    let dscale = norm.poisoned(DType::F32, rows.width);
    let tokens = rows.tokens as i64;
    let forward: [&Buffer; 4] = [&x, &scale, &offsets, &y];
    norm.launch(&norm.forward, "rms_norm", &forward, &[tokens]);
    for accumulate in 0..2 {
        let buffers = [&x, &scale, &dy, &offsets, &slots, &weights];
        let buffers = [&buffers[..], &[&factors, &dweights, &dx]].concat();
        norm.launch(&norm.backward, "rms_norm_bwd", &buffers, &[tokens]);
        let buffers = [&x, &scale, &dy, &offsets, &factors, &dscale];
        let scalars = [accumulate, tokens];
        norm.launch(&norm.backward, "rms_norm_bwd_weight", &buffers, &scalars);
    }
    Results {
        y: norm.read(norm.dtype, &y, count * rows.width),
        dx: norm.read(norm.dtype, &dx, count * rows.width),
        dweights: norm.read(DType::F32, &dweights, count),
        dscale: norm.read(DType::F32, &dscale, rows.width),
    }
}

fn check(kind: RowKind) {
    let RowKind { width, dtype, .. } = kind;
    let norm = Norm::new(kind.target, descs(width, dtype));
    for call in CALLS {
        let rows = Rows::random(dtype, width, call);
        let (found, mut want) = (run(&norm, &rows), rows.expected());
        want.dscale.iter_mut().for_each(|sum| *sum *= 2.0);
        let stored = match dtype {
            DType::F32 => 2e-6,
            DType::F16 => 1e-3,
            _ => 6e-3,
        };
        norm.close("y", &found.y, &want.y, stored);
        norm.close("dx", &found.dx, &want.dx, stored);
        norm.close("dweight_parts", &found.dweights, &want.dweights, 4e-6);
        norm.close("grad.weight", &found.dscale, &want.dscale, 4e-6);
    }
}

#[test]
fn norms_of_outputs_on_cpus_are_those_of_a_plain_loop() {
    on_cpus(check);
}

#[test]
fn norms_of_outputs_on_simulated_gpus_are_those_of_a_plain_loop() {
    on_simulators(check);
}
