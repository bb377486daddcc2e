//! A loop over experts around the `gemm` crate: gather, gate and up in one
//! product, activation, down, and a weighted sum per token.

use crate::layer::{Files, Layer, floats};
use crate::{Block, Result};
use gemm::Parallelism;
use rayon::prelude::*;
use safetensors::tensor::TensorView;

/// The layer in f32; the crate has no bf16.
pub struct GemmLoop {
    layer: Layer,
    threads: usize,
    router: Vec<f32>,
    router_bias: Option<Vec<f32>>,
    select_bias: Option<Vec<f32>>,
    experts: Mlp,
    shared: Option<Mlp>,
    x: Vec<f32>,
    y: Vec<f32>,
    room: Room,
}

/// The two matrices of one expert after another.
struct Mlp {
    /// `[E, inner, d]`.
    into: Vec<f32>,
    into_bias: Option<Vec<f32>>,
    /// `[E, d, h]`.
    out: Vec<f32>,
    out_bias: Option<Vec<f32>>,
}

/// Memory of a call, kept for the next one.
#[derive(Default)]
struct Room {
    logits: Vec<f32>,
    rows: Vec<f32>,
    inner: Vec<f32>,
    hidden: Vec<f32>,
    out: Vec<f32>,
}

/// Who goes where: rows of expert `e` are `offsets[e]..offsets[e + 1]`.
struct Routing {
    offsets: Vec<usize>,
    /// The token of each row.
    tokens: Vec<usize>,
    /// `[T, K]`: row and weight of each choice.
    choices: Vec<(usize, f32)>,
}

impl GemmLoop {
    pub fn new(layer: Layer, files: &Files<'_>, threads: usize) -> Result<GemmLoop> {
        if layer.dtype != "f32" {
            return Err(format!("the crate has no {}", layer.dtype).into());
        }
        let some = |name: &str| files.get(name).as_ref().map(floats);
        let need = |name: &str| {
            files
                .need(name)
                .as_ref()
                .map(floats)
                .map_err(|e| e.to_string())
        };
        let shared = (layer.shared_dim > 0).then(|| -> Result<Mlp> {
            Ok(Mlp {
                into: need("shared.0.gate_up.weight")?,
                into_bias: None,
                out: need("shared.0.down.weight")?,
                out_bias: None,
            })
        });
        Ok(GemmLoop {
            threads,
            router: need("router.weight")?,
            router_bias: some("router.bias"),
            select_bias: some("router.select_bias"),
            experts: Mlp {
                into: need(&layer.first("weight"))?,
                into_bias: some(&layer.first("bias")),
                out: need("experts.down.weight")?,
                out_bias: some("experts.down.bias"),
            },
            shared: shared.transpose()?,
            layer,
            x: Vec::new(),
            y: Vec::new(),
            room: Room::default(),
        })
    }

    fn tokens(&self) -> usize {
        self.x.len() / self.layer.model_dim
    }

    fn all_threads(&self) -> Parallelism {
        match self.threads {
            1 => Parallelism::None,
            n => Parallelism::Rayon(n),
        }
    }

    fn route(&mut self) -> Routing {
        let (experts, d, tokens) = (self.layer.experts, self.layer.model_dim, self.tokens());
        self.room.logits.resize(tokens * experts, 0.0);
        let threads = self.all_threads();
        let logits = &mut self.room.logits[..tokens * experts];
        product(&self.x, &self.router, logits, [tokens, d, experts], threads);
        let chosen: Vec<Vec<(usize, f32)>> = logits
            .par_chunks_mut(experts)
            .map(|row| {
                add(row, self.router_bias.as_deref());
                self.layer.choose(row, self.select_bias.as_deref())
            })
            .collect();
        Routing::new(&chosen, experts)
    }

    /// The experts' outputs, `[T * K, d]` in expert order, into `room.out`.
    fn experts(&mut self, routing: &Routing, way: &str) {
        let (d, h, inner) = (
            self.layer.model_dim,
            self.layer.hidden_dim,
            self.layer.inner(),
        );
        let rows = routing.tokens.len();
        let threads = self.all_threads();
        let room = &mut self.room;
        room.rows.resize(rows * d, 0.0);
        room.inner.resize(rows * inner, 0.0);
        room.hidden.resize(rows * h, 0.0);
        room.out.resize(rows * d, 0.0);
        let gather = room.rows.par_chunks_mut(d).zip(&routing.tokens);
        gather.for_each(|(row, t)| row.copy_from_slice(&self.x[t * d..(t + 1) * d]));
        let mut parts = Vec::new();
        let mut rest = (
            &room.rows[..],
            &mut room.inner[..],
            &mut room.hidden[..],
            &mut room.out[..],
        );
        for e in 0..self.layer.experts {
            let n = routing.offsets[e + 1] - routing.offsets[e];
            let (x, rest0) = rest.0.split_at(n * d);
            let (a, rest1) = rest.1.split_at_mut(n * inner);
            let (b, rest2) = rest.2.split_at_mut(n * h);
            let (y, rest3) = rest.3.split_at_mut(n * d);
            rest = (rest0, rest1, rest2, rest3);
            if n > 0 {
                parts.push((e, x, a, b, y));
            }
        }
        let (layer, experts) = (&self.layer, &self.experts);
        match way {
            "outer" => parts.into_par_iter().for_each(|(e, x, a, b, y)| {
                experts.run(layer, h, e, [x], [a, b, y], Parallelism::None);
            }),
            _ => {
                for (e, x, a, b, y) in parts {
                    experts.run(layer, h, e, [x], [a, b, y], threads);
                }
            }
        }
    }

    fn combine(&mut self, routing: &Routing) {
        let (d, k) = (self.layer.model_dim, self.layer.top_k);
        let out = &self.room.out;
        self.y.resize(self.x.len(), 0.0);
        let tokens = self.y.par_chunks_mut(d).zip(routing.choices.par_chunks(k));
        tokens.for_each(|(y, choices)| {
            y.fill(0.0);
            for (row, weight) in choices {
                let out = &out[row * d..(row + 1) * d];
                y.iter_mut().zip(out).for_each(|(y, v)| *y += weight * v);
            }
        });
    }

    fn shared(&mut self) {
        let Some(shared) = &self.shared else { return };
        let (tokens, width) = (self.tokens(), self.layer.shared_dim);
        let threads = self.all_threads();
        let room = &mut self.room;
        room.inner.resize(tokens * 2 * width, 0.0);
        room.hidden.resize(tokens * width, 0.0);
        room.out.resize(self.x.len(), 0.0);
        let out = &mut room.out[..self.x.len()];
        let inner = &mut room.inner[..tokens * 2 * width];
        let room = [inner, &mut room.hidden[..tokens * width], &mut *out];
        shared.run(&self.layer, width, 0, [&self.x], room, threads);
        let sums = self.y.par_iter_mut().zip(out.par_iter());
        sums.for_each(|(y, v)| *y += v);
    }
}

impl Block for GemmLoop {
    fn ways(&self) -> &'static [&'static str] {
        &["inner", "outer"]
    }

    fn input(&mut self, x: &TensorView<'_>) -> Result {
        self.x = floats(x);
        self.y.clear();
        self.room = Room::default();
        Ok(())
    }

    fn run(&mut self, way: &str) -> Result {
        let routing = self.route();
        self.experts(&routing, way);
        self.combine(&routing);
        self.shared();
        Ok(())
    }

    fn y(&self) -> Result<Vec<f32>> {
        Ok(self.y.clone())
    }
}

impl Routing {
    fn new(chosen: &[Vec<(usize, f32)>], experts: usize) -> Routing {
        let mut offsets = vec![0; experts + 1];
        for (e, _) in chosen.iter().flatten() {
            offsets[e + 1] += 1;
        }
        for e in 0..experts {
            offsets[e + 1] += offsets[e];
        }
        let mut next = offsets.clone();
        let mut tokens = vec![0; offsets[experts]];
        let mut choices = Vec::with_capacity(tokens.len());
        for (t, row) in chosen.iter().enumerate() {
            for (e, weight) in row {
                tokens[next[*e]] = t;
                choices.push((next[*e], *weight));
                next[*e] += 1;
            }
        }
        Routing {
            offsets,
            tokens,
            choices,
        }
    }
}

impl Mlp {
    /// One expert on its rows.
    fn run(
        &self,
        layer: &Layer,
        h: usize,
        e: usize,
        [x]: [&[f32]; 1],
        [inner, hidden, y]: [&mut [f32]; 3],
        threads: Parallelism,
    ) {
        let d = layer.model_dim;
        let rows = x.len() / d;
        let width = inner.len() / rows;
        let bias = |all: &Option<Vec<f32>>, n: usize| {
            all.as_ref().map(|all| all[e * n..(e + 1) * n].to_vec())
        };
        let into = &self.into[e * width * d..][..width * d];
        product(x, into, inner, [rows, d, width], threads);
        let (into_bias, out_bias) = (bias(&self.into_bias, width), bias(&self.out_bias, d));
        let activate = |(inner, hidden): (&mut [f32], &mut [f32])| {
            add(inner, into_bias.as_deref());
            activation(&layer.activation, inner, hidden);
        };
        match threads {
            Parallelism::None => inner
                .chunks_mut(width)
                .zip(hidden.chunks_mut(h))
                .for_each(activate),
            _ => inner
                .par_chunks_mut(width)
                .zip(hidden.par_chunks_mut(h))
                .for_each(activate),
        }
        product(
            hidden,
            &self.out[e * d * h..][..d * h],
            y,
            [rows, h, d],
            threads,
        );
        y.chunks_mut(d)
            .for_each(|row| add(row, out_bias.as_deref()));
    }
}

fn add(row: &mut [f32], bias: Option<&[f32]>) {
    if let Some(bias) = bias {
        row.iter_mut().zip(bias).for_each(|(v, b)| *v += b);
    }
}

fn activation(kind: &str, inner: &[f32], hidden: &mut [f32]) {
    let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
    if kind == "relu" {
        hidden
            .iter_mut()
            .zip(inner)
            .for_each(|(a, v)| *a = v.max(0.0));
        return;
    }
    let (gate, up) = inner.split_at(hidden.len());
    let pairs = hidden.iter_mut().zip(gate.iter().zip(up));
    match kind {
        "clamped" => pairs.for_each(|(a, (g, u))| {
            let (g, u) = (g.min(7.0), u.clamp(-7.0, 7.0));
            *a = g * sigmoid(1.702 * g) * (u + 1.0);
        }),
        _ => pairs.for_each(|(a, (g, u))| *a = g * sigmoid(*g) * u),
    }
}

/// `y [m, n] = x [m, k] · wᵀ`, `w [n, k]`.
fn product(x: &[f32], w: &[f32], y: &mut [f32], [m, k, n]: [usize; 3], threads: Parallelism) {
    assert!(x.len() == m * k && w.len() == n * k && y.len() == m * n);
    let (columns, depth) = (n as isize, k as isize);
    // SAFETY: the lengths are those of the strides, just checked, and only y
    // is written.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            y.as_mut_ptr(),
            1,
            columns,
            false,
            x.as_ptr(),
            1,
            depth,
            w.as_ptr(),
            depth,
            1,
            0.0,
            1.0,
            false,
            false,
            false,
            threads,
        );
    }
}
