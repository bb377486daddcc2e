//! The entries of a backward pass. Gradients of weights are f32 and take the
//! scalar `accumulate`: 0 overwrites them, 1 adds to them in place.

use super::{Follow, entry, one, operand, some, tokens_by, when};
use crate::config::*;
use crate::desc::*;
use moesaic_kernel::DType::{self, F32, I32, I64};
use moesaic_kernel::{Access, Entry, Param, Size};
use moesaic_spec::WeightSite;

pub(super) fn per_slot(top_k: usize) -> String {
    format!("[tokens, {top_k}]")
}

fn edges(experts: usize) -> String {
    format!("[{}]", experts + 1)
}

/// `combine_bwd`, which comes first, and `combine_bwd_weights`, which needs
/// what `grouped_gemm_dgrad` sums.
pub(super) fn combine_bwd(d: &CombineBwdDesc, c: &CombineBwdConfig) -> Vec<Entry> {
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

/// The gradient of what routed experts add up to, where that has a weight.
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

/// 16-bit elements of a line of the 128-byte swizzle. Operands whose lines are
/// steps of the sum come in boxes so wide.
const PANEL: usize = 64;

pub(super) fn grouped_gemm_dgrad(d: &GroupedGemmDgradDesc, c: &GroupedGemmConfig) -> Vec<Entry> {
    let (e, count) = (d.experts, if d.dense { "tokens" } else { "rows" });
    let shape = format!("[{e}, {}, {}]", d.inner, d.outer);
    let tile = [PANEL, c.tile_depth, 1];
    let weight = |name: &str| operand(c, name, d.weights, &shape, &tile);
    let (inner, outer) = (
        format!("[{count}, {}]", d.inner),
        format!("[{count}, {}]", d.outer),
    );
    let incoming = |name: &str| {
        let tile = [c.tile_depth, c.tile_rows];
        operand(c, name, d.activations, &inner, &tile)
    };
    let (down, up) = (d.half == Half::Down, d.half == Half::Up);
    let parts = d.outer.div_ceil(c.tile_columns);
    let result = |name: &str| Param::write(name, d.activations, &outer);
    let kept = |name: &str| Param::read(name, d.activations, &outer);
    let params = some([
        when(down, incoming("dout")),
        when(up && d.gated, incoming("dgate")),
        when(up, incoming("dup")),
        when(up && d.gated, weight("gate")),
        Some(weight(if down { "down" } else { "up" })),
        when(down && d.gated, kept("gate_pre")),
        when(down, kept("up_pre")),
        when(!d.dense, Param::read("offsets", I64, edges(e))),
        when(!d.dense, Param::read("row_tiles", I32, edges(e))),
        when(
            d.weighted && !d.dense,
            Param::read("row_slots", I32, "[rows]"),
        ),
        when(
            d.weighted,
            Param::read("topk_weights", F32, per_slot(d.top_k)),
        ),
        when(down, result("hidden")),
        when(down && d.gated, result("dgate")),
        when(down, result("dup")),
        when(
            d.weighted,
            Param::write("dweight_parts", F32, format!("[{count}, {parts}]")),
        ),
        when(up, result("drows")),
    ]);
    let (symbol, summary) = match d.half {
        Half::Down => ("grouped_gemm_dgrad_down", "gradients before the activation"),
        Half::Up => ("grouped_gemm_dgrad_up", "gradients of expert rows"),
    };
    let grid = Follow::dgrad(c).grid(
        super::tiles_of(d.dense, d.top_k, e, c),
        Size::Const(parts as u64),
    );
    let mut entry = entry(symbol, summary, params, grid, c.threads);
    entry.launch.shared_bytes = c.shared_bytes();
    vec![entry]
}

pub(super) fn grouped_gemm_wgrad(d: &GroupedGemmWgradDesc, c: &GroupedGemmConfig) -> Vec<Entry> {
    let mut list = vec![wgrad(d, c)];
    list.extend(d.bias.then(|| wgrad_bias(d, c)));
    list
}

/// Names of the left operands, and of the matrices they give.
fn lefts(d: &GroupedGemmWgradDesc) -> Vec<(&'static str, &'static str)> {
    match (d.half, d.gated) {
        (Half::Down, _) => vec![("dout", "down")],
        (Half::Up, true) => vec![("dgate", "gate"), ("dup", "up")],
        (Half::Up, false) => vec![("dup", "up")],
    }
}

fn wgrad(d: &GroupedGemmWgradDesc, c: &GroupedGemmConfig) -> Entry {
    let (e, count) = (d.experts, if d.dense { "tokens" } else { "rows" });
    let operand = |name: &str, dtype: DType, width: usize| {
        let shape = format!("[{count}, {width}]");
        operand(c, name, dtype, &shape, &[PANEL, c.tile_depth])
    };
    let right = match (d.half, c.gather()) {
        (Half::Down, _) => operand("hidden", d.right, d.width),
        (Half::Up, false) => operand("rows", d.right, d.width),
        (Half::Up, true) => Param::read("x", d.right, format!("[tokens, {}]", d.width)),
    };
    let shape = format!("[{e}, {}, {}]", d.height, d.width);
    let left = lefts(d).into_iter();
    let mut params: Vec<Param> = left
        .map(|(name, _)| operand(name, d.left, d.height))
        .collect();
    params.push(right);
    params.extend(when(!d.dense, Param::read("offsets", I64, edges(e))));
    params.extend(when(c.gather(), Param::read("row_slots", I32, "[rows]")));
    params.extend(
        lefts(d)
            .iter()
            .map(|(_, matrix)| gradient(matrix, "", &shape)),
    );
    params.push(Param::i64("accumulate"));
    let tiles = e * d.height.div_ceil(c.tile_rows);
    let columns = d.width.div_ceil(c.tile_columns);
    let grid = Follow::wgrad(c).grid(Size::Const(tiles as u64), Size::Const(columns as u64));
    let (symbol, summary) = match d.half {
        Half::Down => ("grouped_gemm_wgrad_down", "gradients of the down matrices"),
        Half::Up => (
            "grouped_gemm_wgrad_up",
            "gradients of the matrices before the activation",
        ),
    };
    let mut entry = entry(symbol, summary, params, grid, c.threads);
    entry.launch.shared_bytes = c.shared_bytes();
    entry
}

fn wgrad_bias(d: &GroupedGemmWgradDesc, c: &GroupedGemmConfig) -> Entry {
    let (e, count) = (d.experts, if d.dense { "tokens" } else { "rows" });
    let shape = format!("[{e}, {}]", d.height);
    let rows = format!("[{count}, {}]", d.height);
    let left = lefts(d).into_iter();
    let mut params: Vec<Param> = left
        .map(|(name, _)| Param::read(name, d.left, &rows))
        .collect();
    let weighted = d.weighted_bias;
    params.extend(when(!d.dense, Param::read("offsets", I64, edges(e))));
    params.extend(when(
        weighted && !d.dense,
        Param::read("row_slots", I32, "[rows]"),
    ));
    params.extend(when(
        weighted,
        Param::read("topk_weights", F32, per_slot(d.top_k)),
    ));
    params.extend(
        lefts(d)
            .iter()
            .map(|(_, matrix)| gradient(matrix, "_bias", &shape)),
    );
    params.push(Param::i64("accumulate"));
    let columns = d.height.div_ceil(c.bias_columns());
    let grid = [Size::Const(e as u64), Size::Const(columns as u64)];
    let (symbol, summary) = match d.half {
        Half::Down => (
            "grouped_gemm_wgrad_down_bias",
            "gradients of the down biases",
        ),
        Half::Up => (
            "grouped_gemm_wgrad_up_bias",
            "gradients of the biases before the activation",
        ),
    };
    entry(symbol, summary, params, grid, c.threads)
}

pub(super) fn gradient(matrix: &str, suffix: &str, shape: &str) -> Param {
    let name = format!("grad_{matrix}{suffix}");
    Param::tensor(&name, F32, Access::ReadWrite, shape)
}

pub(super) fn dispatch_bwd(d: &DispatchBwdDesc, c: &DispatchBwdConfig) -> Vec<Entry> {
    let (slots, identity, routed) = (per_slot(d.top_k), d.identity > 0, d.top_k > 0);
    let token =
        |name: &str, dtype: DType| Param::read(name, dtype, format!("[tokens, {}]", d.model_dim));
    let rows = format!("[rows, {}]", d.model_dim);
    let mut params = some([
        when(routed, Param::read("drows", d.activations, rows)),
        when(routed, Param::read("slot_rows", I32, &slots)),
        when(identity, Param::read("topk_ids", I32, &slots)),
        when(
            d.weighted || identity,
            Param::read("topk_weights", F32, &slots),
        ),
        when(identity, token("dy", d.activations)),
        when(d.router, token("router_dx", F32)),
    ]);
    for (i, shared) in d.shared.iter().enumerate() {
        params.push(token(&format!("shared_{i}_drows"), d.activations));
        if shared.gated {
            let logits = shared.logits();
            let weight = format!("[{logits}, {}]", d.model_dim);
            params.push(Param::read(
                &format!("shared_{i}_dlogit"),
                F32,
                format!("[tokens, {logits}]"),
            ));
            params.push(Param::read(&format!("shared_{i}_router"), F32, weight));
        }
    }
    let width = format!("[tokens, {}]", d.model_dim);
    params.push(Param::write("dx", d.activations, width));
    let grid = [tokens_by(c.tile_tokens), one()];
    let summary = "sums the gradients that reach each token";
    vec![entry("dispatch_bwd", summary, params, grid, c.threads)]
}
