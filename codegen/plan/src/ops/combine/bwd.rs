//! `combine_bwd`: the output's gradient to expert rows, and gradients of weights.

use crate::layer::{Builder, Part, TensorRole, borrowed, constant, owned, tensor};
use crate::ops::copies::{COPY_THREADS, row_tiling};
use crate::ops::grouped_gemm::{self, ExpertGemm};
use crate::ops::params::{edges, entry, one, per_slot, some, tokens_by, when};
use crate::ops::shared::{SharedBwdDesc, adds_later, apart, shared_bwd};
use crate::ops::{Op, Operator, TileMachine};
use moesaic_kernel::DType::{self, F32, I32, I64};
use moesaic_kernel::{Entry, Param, Size};
use moesaic_spec::{LayerSpec, SharedGate, WeightSite};
use serde::{Deserialize, Serialize};

/// `combine_bwd`: dy `[T, d_out]` to `dout [R, d_out]`, later the sums of
/// `grouped_gemm_dgrad` to the gradient of `topk_weights`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CombineBwdDesc {
    /// d.
    pub model_dim: usize,
    /// d_out.
    pub output_dim: usize,
    /// Experts with rows; ids from here on are identity experts.
    pub experts: usize,
    /// Identity experts.
    pub identity: usize,
    /// Zero experts, with the ids after those.
    pub zero: usize,
    /// K.
    pub top_k: usize,
    /// Element type of x, rows and gradients of both.
    pub activations: DType,
    /// Element type of biases.
    pub weights: DType,
    /// Where the weight acts: at `Input` its gradient is `<drows, x>`.
    pub weight_on: WeightSite,
    /// The down bias is weighted, so it has a part in the weight's gradient.
    pub bias: bool,
    /// Columns of `dweight_parts`: the column tiles of `grouped_gemm_dgrad`.
    pub parts: usize,
    /// The router's scale where weights were renormalised after dropping.
    pub renormalized: Option<f64>,
    /// Shared experts, in order.
    pub shared: Vec<SharedBwdDesc>,
}

/// Tiling of `combine_bwd`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CombineBwdConfig {
    /// Threads per block.
    pub threads: u32,
    /// Rows per block of `combine_bwd`.
    pub tile_rows: usize,
    /// Adjacent threads that copy one row.
    pub row_threads: u32,
    /// Tokens per block of the other entries.
    pub tile_tokens: usize,
    /// Adjacent threads that see to one token.
    pub token_threads: u32,
}

/// Returns the backward of `combine`, of as many experts as that adds up.
fn desc(spec: &LayerSpec, parts: usize, shared_parts: &[usize]) -> CombineBwdDesc {
    let shared_parts = if apart(spec) { &[] } else { shared_parts };
    CombineBwdDesc {
        model_dim: spec.expert_input_dim(),
        output_dim: spec.expert_output_dim(),
        experts: spec.shape.experts,
        identity: spec.experts.identity,
        zero: spec.experts.zero,
        top_k: spec.shape.top_k,
        activations: spec.precision.activations,
        weights: spec.precision.weights,
        weight_on: spec.router.weight_on,
        // A weight on the input does not multiply the bias, which then has no part in its gradient.
        // Behind a norm the bias is a part of the row.
        bias: spec.experts.bias.down() && spec.weighs_gemms(),
        parts,
        renormalized: spec
            .capacity
            .renormalize_after_drop
            .then_some(spec.router.scale),
        shared: shared_bwd(spec, shared_parts),
    }
}

/// Returns the backward of `combine_later`, where a shared expert has a gate.
fn later_desc(spec: &LayerSpec, shared_parts: &[usize]) -> CombineBwdDesc {
    CombineBwdDesc {
        model_dim: spec.shape.model_dim,
        output_dim: spec.output_dim(),
        experts: 0,
        identity: 0,
        zero: 0,
        top_k: 0,
        activations: spec.precision.activations,
        weights: spec.precision.weights,
        weight_on: WeightSite::Output,
        bias: false,
        parts: 0,
        renormalized: None,
        shared: shared_bwd(spec, shared_parts),
    }
}

impl Operator for CombineBwdDesc {
    type Config = CombineBwdConfig;

    fn tiling(&self, machine: TileMachine) -> CombineBwdConfig {
        match machine {
            TileMachine::Cpu(_) => on_cpu(),
            TileMachine::Gpu(gpu) => on_gpu(self, gpu.wave()),
        }
    }

    fn with(self, config: CombineBwdConfig) -> Op {
        Op::CombineBwd { desc: self, config }
    }

    fn entries(&self, config: &CombineBwdConfig) -> Vec<Entry> {
        entries(self, config)
    }
}

fn on_cpu() -> CombineBwdConfig {
    CombineBwdConfig {
        threads: 1,
        tile_rows: 64,
        row_threads: 1,
        tile_tokens: 32,
        token_threads: 1,
    }
}

fn on_gpu(d: &CombineBwdDesc, wave: u32) -> CombineBwdConfig {
    let tiling = row_tiling(d.output_dim, d.activations, wave);
    CombineBwdConfig {
        threads: COPY_THREADS,
        tile_rows: tiling.rows,
        row_threads: tiling.row_threads,
        // A warp for each token, because its sums end in a reduction over lanes.
        tile_tokens: (COPY_THREADS / wave) as usize,
        token_threads: wave,
    }
}

/// Returns `combine_bwd`, which comes first, and `combine_bwd_weights`, which needs what
/// `grouped_gemm_dgrad` sums.
fn entries(d: &CombineBwdDesc, c: &CombineBwdConfig) -> Vec<Entry> {
    let shared = d.shared.iter().any(|shared| shared.gated);
    let list = [
        (d.top_k > 0).then(|| combine_rows(d, c)),
        shared.then(|| combine_shared(d, c)),
        combine_routed(d, c),
        Some(combine_weights(d, c)),
    ];
    list.into_iter().flatten().collect()
}

fn combine_rows(d: &CombineBwdDesc, c: &CombineBwdConfig) -> Entry {
    let width = d.output_dim;
    let params = vec![
        Param::read("dy", d.activations, format!("[tokens, {width}]")),
        Param::read("row_slots", I32, "[rows]"),
        Param::read("offsets", I64, edges(d.experts)),
        Param::write("dout", d.activations, format!("[rows, {width}]")),
    ];
    let rows = Size::Tokens * d.top_k as u64;
    let grid = [rows.ceil_div(c.tile_rows as u64), one()];
    let summary = "copies rows of the output's gradient into expert order";
    entry("combine_bwd", summary, params, grid, c.threads)
}

fn combine_shared(d: &CombineBwdDesc, c: &CombineBwdConfig) -> Entry {
    let gated = (0..d.shared.len()).filter(|&i| d.shared[i].gated);
    let params = gated.flat_map(|i| {
        let shape = format!("[tokens, {}]", d.shared[i].logits());
        let logit = Param::read(&format!("shared_{i}_logit"), F32, shape);
        let weight = Param::write(&format!("shared_{i}_weight"), F32, "[tokens, 1]");
        [logit, weight]
    });
    let grid = [tokens_by(c.tile_tokens), one()];
    let summary = "weights of shared experts from their logits";
    let symbol = "combine_bwd_shared";
    entry(symbol, summary, params.collect(), grid, c.threads)
}

/// Returns the gradient of what routed experts add up to, where that has a weight.
fn combine_routed(d: &CombineBwdDesc, c: &CombineBwdConfig) -> Option<Entry> {
    let index = d.shared.iter().position(|shared| shared.residual)?;
    let width = format!("[tokens, {}]", d.output_dim);
    let params = vec![
        Param::read("dy", d.activations, &width),
        Param::read(&format!("shared_{index}_weight"), F32, "[tokens, 1]"),
        Param::write("drouted", d.activations, &width),
    ];
    let grid = [tokens_by(c.tile_rows), one()];
    let summary = "multiplies the output's gradient by the weight of the routed experts";
    let symbol = "combine_bwd_routed";
    Some(entry(symbol, summary, params, grid, c.threads))
}

fn combine_weights(d: &CombineBwdDesc, c: &CombineBwdConfig) -> Entry {
    let (slots, identity) = (per_slot(d.top_k), d.identity > 0);
    let residual = d.shared.iter().any(|shared| shared.residual);
    let (input, routed) = (d.weight_on == WeightSite::Input, d.top_k > 0);
    let shared_bias = d.shared.iter().any(|shared| shared.gated && shared.bias);
    let token =
        |name: &str, width: usize| Param::read(name, d.activations, format!("[tokens, {width}]"));
    let row =
        |name: &str, width: usize| Param::read(name, d.activations, format!("[rows, {width}]"));
    let renormalized = d.renormalized.is_some();
    let bias_shape = format!("[{}, {}]", d.experts, d.output_dim);
    let mut params = some([
        when(routed, Param::read("topk_ids", I32, &slots)),
        when(routed, Param::read("slot_rows", I32, &slots)),
        when(
            routed && !input,
            Param::read("dweight_parts", F32, format!("[rows, {}]", d.parts)),
        ),
        when(d.bias, row("dout", d.output_dim)),
        when(d.bias, Param::read("down_bias", d.weights, bias_shape)),
        // A weight that acts on the input has the gradient `<drows, x>`, which no GEMM sums on its
        // way.
        when(input, row("drows", d.model_dim)),
        when(input || identity, token("x", d.model_dim)),
        when(
            identity || shared_bias || residual,
            token("dy", d.output_dim),
        ),
        when(residual, token("routed", d.output_dim)),
        when(renormalized, Param::read("topk_weights", F32, &slots)),
        when(renormalized, Param::read("kept_sums", F32, "[tokens]")),
    ]);
    for (i, shared) in d.shared.iter().enumerate().filter(|(_, s)| s.gated) {
        let parts = format!("[tokens, {}]", shared.parts);
        let bias = Param::read(
            &format!("shared_{i}_down_bias"),
            d.weights,
            format!("[1, {}]", d.output_dim),
        );
        params.push(Param::read(&format!("shared_{i}_parts"), F32, parts));
        params.extend(when(shared.bias, bias));
        params.push(Param::read(
            &format!("shared_{i}_weight"),
            F32,
            "[tokens, 1]",
        ));
        params.push(Param::write(
            &format!("shared_{i}_dlogit"),
            F32,
            format!("[tokens, {}]", shared.logits()),
        ));
    }
    params.extend(when(routed, Param::write("grad_topk_weights", F32, &slots)));
    let grid = [tokens_by(c.tile_tokens), one()];
    let summary = "gradients of the weights of each token's choices";
    entry("combine_bwd_weights", summary, params, grid, c.threads)
}

/// The kernels behind the sums of a forward pass.
pub(crate) struct CombineBwd {
    pub routed: usize,
    /// The kernel of shared experts with gates that another kernel adds.
    pub later: Option<usize>,
}

impl Builder {
    /// Adds the steps before the experts.
    pub(crate) fn combine_bwd(&mut self) -> CombineBwd {
        let spec = &self.plan.spec;
        let shared = self.shared_parts();
        // Experts on another rank are tiled as their rank's plan says, and that many columns
        // arrive.
        let normed = spec.experts.output_norm_eps.is_some();
        let parts = match self.part {
            // The norm sums the whole gradient of a row's weight, on the rank of its token.
            _ if normed => 1,
            Part::Tokens { parts } => parts,
            _ => self.parts(&grouped_gemm::dgrad::routed(spec, ExpertGemm::Down)),
        };
        let routed = desc(spec, parts, &shared);
        let gated = spec
            .shared
            .iter()
            .any(|shared| shared.gate != SharedGate::None);
        let later = (gated && adds_later(spec)).then(|| later_desc(spec, &shared));
        let rows = Size::Tokens * spec.shape.top_k as u64;
        // Declared here and not with all tensors, because their widths follow from the tilings of
        // other kernels.
        if !normed {
            self.declare_parts("dweight_parts", rows, parts);
        }
        self.declare_shared_parts(&shared);
        // In the reverse order of forward: what was added last goes back first.
        let later = later.map(|desc| self.combine_bwd_first("combine_bwd_later", desc));
        self.latent_up_bwd();
        let routed = self.combine_bwd_first("combine_bwd", routed);
        self.expert_norm_bwd();
        CombineBwd { routed, later }
    }

    /// Declares the parts of the gradient of each shared expert's weight.
    pub(crate) fn declare_shared_parts(&mut self, columns: &[usize]) {
        for (i, &parts) in columns.iter().enumerate() {
            self.declare_parts(&format!("shared.{i}.dweight_parts"), Size::Tokens, parts);
        }
    }

    fn declare_parts(&mut self, name: &str, rows: Size, parts: usize) {
        let parts = tensor(name, F32, &[rows, constant(parts)], TensorRole::Scratch);
        self.plan.tensors.push(parts);
    }

    /// Adds all entries but the last, which reads the experts' gradients, and returns the kernel.
    fn combine_bwd_first(&mut self, name: &str, desc: CombineBwdDesc) -> usize {
        let kernel = self.kernel(name, desc);
        let bind = self.combine_bwd_names(kernel);
        for index in 0..self.plan.kernels[kernel].entries.len() - 1 {
            self.step(kernel, index, &borrowed(&bind));
        }
        kernel
    }

    /// Returns the parameters of `combine_bwd`. Where shared experts are added later, the kernel of
    /// the routed ones has no other tokens than theirs.
    fn combine_bwd_names(&self, kernel: usize) -> Vec<(String, String)> {
        let mut names = self.shared_names(0);
        if self.plan.kernels[kernel].name == "combine_bwd" {
            names.extend(owned(&self.around()));
            names.extend(owned(self.normed_rows()));
        }
        names
    }

    /// Adds the entries that read the experts' gradients.
    pub(crate) fn combine_bwd_weights(&mut self, kernel: usize) {
        let mut bind = self.combine_bwd_names(kernel);
        let mut add = |from: &str, to: &str| bind.push((from.to_string(), to.to_string()));
        add("down_bias", "experts.down.bias");
        add("grad_topk_weights", "grad.topk_weights");
        let last = self.plan.kernels[kernel].entries.len() - 1;
        self.step(kernel, last, &borrowed(&bind));
    }
}
