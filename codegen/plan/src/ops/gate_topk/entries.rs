//! The entries of `gate_topk`.
//!
//! Entries that end in `_bwd`, and `gate_noise_add`, run in a backward pass, which draws the same
//! numbers again.

use super::{GateTopkConfig, GateTopkDesc, Histogram, Logits, logits};
use crate::ops::params::{entry, one, some, tokens_by, when};
use moesaic_kernel::DType::{F32, I32};
use moesaic_kernel::{Access, Entry, Param, Size};
use moesaic_spec::{Chooser, TokenBlocks};

pub(super) fn entries(d: &GateTopkDesc, c: &GateTopkConfig) -> Vec<Entry> {
    let mut list: Vec<Entry> = d.draws_input().then(|| draw(d, c)).into_iter().collect();
    list.extend(logits::entries(d, c));
    list.extend(d.noisy().then(|| noise(d, c)));
    if d.sinkhorn().is_some() {
        list.extend(sinkhorn(d, c));
    }
    if d.expert_choice().is_some() {
        list.extend(expert_choice(d, c));
    }
    if let Some(blocks) = d.blocks() {
        list.extend(agreement(d, c, blocks));
    }
    list.extend(d.select.then(|| select(d, c)));
    if d.learned_noise() {
        list.extend(noise_bwd(d, c));
    }
    list.extend(d.draws_input().then(|| draw_bwd(d, c)));
    list
}

/// Returns the parameters of the RNG key: seed, step, layer and first token.
pub(in crate::ops) fn rng_key_params() -> [Param; 4] {
    ["seed", "step", "layer", "first_token"].map(Param::i64)
}

fn per_expert(d: &GateTopkDesc) -> String {
    format!("[tokens, {}]", d.experts)
}

fn per_channel(d: &GateTopkDesc) -> String {
    format!("[tokens, {}]", d.model_dim)
}

/// Returns blocks and threads of an entry that goes over tokens element by element.
fn by_token(c: &GateTopkConfig) -> ([Size; 2], u32) {
    ([tokens_by(c.logits_tile_tokens), one()], c.logits_threads)
}

fn draw(d: &GateTopkDesc, c: &GateTopkConfig) -> Entry {
    let mut params = vec![
        Param::read("x", d.activations, per_channel(d)),
        Param::write("router_x", d.activations, per_channel(d)),
    ];
    params.extend(rng_key_params());
    let (grid, threads) = by_token(c);
    let summary = "multiplies the channels of what the router reads by random factors";
    entry("gate_draw", summary, params, grid, threads)
}

fn draw_bwd(d: &GateTopkDesc, c: &GateTopkConfig) -> Entry {
    let dx = Param::tensor("router_dx", F32, Access::ReadWrite, per_channel(d));
    let params = [dx].into_iter().chain(rng_key_params()).collect();
    let (grid, threads) = by_token(c);
    let summary = "multiplies the gradient of the router's input by the same factors";
    entry("gate_draw_bwd", summary, params, grid, threads)
}

fn noise(d: &GateTopkDesc, c: &GateTopkConfig) -> Entry {
    let of = |name: &str| Param::read(name, F32, per_expert(d));
    let params = some([
        Some(of("clean_logits")),
        when(d.learned_noise(), of("noise_logits")),
        Some(Param::write("logits", F32, per_expert(d))),
    ]);
    let params = params.into_iter().chain(rng_key_params()).collect();
    let (grid, threads) = by_token(c);
    entry("gate_noise", "adds noise to logits", params, grid, threads)
}

fn noise_bwd(d: &GateTopkDesc, c: &GateTopkConfig) -> [Entry; 2] {
    let of = |name: &str| Param::read(name, F32, per_expert(d));
    let scales = some([
        Some(of("dlogits")),
        Some(of("noise_logits")),
        when(d.scale_loss, of("dnoise_scale")),
        Some(Param::write("dnoise_logits", F32, per_expert(d))),
    ]);
    let parts = vec![
        Param::read("noise_dx", F32, per_channel(d)),
        Param::tensor("router_dx", F32, Access::ReadWrite, per_channel(d)),
    ];
    let (grid, threads) = by_token(c);
    let first = "the gradient of what the scale of the noise comes from";
    let second = "adds the noise's part of the gradient of the router's input";
    [
        entry(
            "gate_noise_bwd",
            first,
            scales.into_iter().chain(rng_key_params()).collect(),
            grid.clone(),
            threads,
        ),
        entry("gate_noise_add", second, parts, grid, threads),
    ]
}

fn token_mask(d: &GateTopkDesc) -> Option<Param> {
    when(
        d.router.token_mask,
        Param::read("token_mask", I32, "[tokens]"),
    )
}

fn load(d: &GateTopkDesc) -> Option<Param> {
    let load = Param::read("load", F32, format!("[{}]", d.experts));
    when(d.router.entropy.is_some(), load)
}

/// Returns the entries of Sinkhorn's iteration. One round is `rows`, then `columns`.
fn sinkhorn(d: &GateTopkDesc, c: &GateTopkConfig) -> [Entry; 3] {
    let columns =
        |access: Access| Param::tensor("columns", F32, access, format!("[{}]", d.experts));
    let parts = |access: Access| {
        // Behind the experts a tile has the number of its tokens that take part.
        let shape = format!("[tiles, {}]", d.experts + 1);
        Param::tensor("column_parts", F32, access, shape)
    };
    let rows = some([
        Some(Param::read("logits", F32, per_expert(d))),
        token_mask(d),
        Some(columns(Access::Read)),
        Some(parts(Access::Write)),
    ]);
    let (grid, threads) = by_token(c);
    let sums = vec![parts(Access::Read), columns(Access::Write)];
    [
        entry(
            "gate_sinkhorn_start",
            "column factors of one",
            vec![columns(Access::Write)],
            [one(), one()],
            threads,
        ),
        entry(
            "gate_sinkhorn_rows",
            "scales rows to equal sums, sums columns by tile",
            rows,
            grid,
            threads,
        ),
        entry(
            "gate_sinkhorn_columns",
            "scales columns to equal sums",
            sums,
            [one(), one()],
            threads,
        ),
    ]
}

/// Returns the keys by which experts or blocks choose, expert by expert, so that who chooses for one
/// reads adjacent keys.
fn choice_keys(d: &GateTopkDesc, access: Access) -> Param {
    let shape = format!("[{}, tokens]", d.experts);
    Param::tensor("choice_keys", I32, access, shape)
}

/// Returns the entry that writes these keys.
fn scores(d: &GateTopkDesc, c: &GateTopkConfig) -> Entry {
    let bias = Param::read("select_bias", F32, format!("[{}]", d.experts));
    let params = some([
        Some(Param::read("logits", F32, per_expert(d))),
        when(d.router.select_bias, bias),
        token_mask(d),
        load(d),
        Some(choice_keys(d, Access::Write)),
    ]);
    entry(
        "gate_scores",
        "scores of all experts, as integers of the same order",
        params,
        [tokens_by(c.select_tile_tokens), one()],
        c.select_threads,
    )
}

fn expert_choice(d: &GateTopkDesc, c: &GateTopkConfig) -> [Entry; 2] {
    let bounds = Param::write("choice_bounds", I32, format!("[{}, 2]", d.experts));
    let experts = Size::Const(d.experts as u64);
    [
        scores(d, c),
        entry(
            "gate_choose",
            "finds the last token that each expert takes",
            vec![choice_keys(d, Access::Read), bounds],
            [experts, one()],
            c.logits_threads,
        ),
    ]
}

/// Returns a flag for each expert that a block of tokens agrees on.
fn block_experts(d: &GateTopkDesc, access: Access) -> Option<Param> {
    let blocks = d.blocks()?;
    let shape = format!("[tokens / {}, {}]", blocks.tokens, d.experts);
    Some(Param::tensor("block_experts", I32, access, shape))
}

fn agreement(d: &GateTopkDesc, c: &GateTopkConfig, blocks: TokenBlocks) -> [Entry; 2] {
    // A launch of its own between keys and selection, because a block of tokens may lie in several
    // tiles of either, and blocks of a grid do not wait for each other.
    let params = some([
        Some(choice_keys(d, Access::Read)),
        block_experts(d, Access::Write),
    ]);
    [
        scores(d, c),
        entry(
            "gate_blocks",
            "finds the experts that each block of tokens agrees on",
            params,
            [tokens_by(blocks.tokens), one()],
            c.logits_threads,
        ),
    ]
}

fn select(d: &GateTopkDesc, c: &GateTopkConfig) -> Entry {
    let grid = [tokens_by(c.select_tile_tokens), one()];
    let summary = "scores, selects and weighs the experts of each token";
    let params = select_params(d, c);
    entry("gate_topk", summary, params, grid, c.select_threads)
}

fn select_params(d: &GateTopkDesc, c: &GateTopkConfig) -> Vec<Param> {
    let (e, k) = (d.experts, d.top_k);
    let per_expert = format!("[{e}]");
    let table = d.router.kind.chooser() == Chooser::Table;
    let has_logits = d.logits != Logits::None;
    let choice = d.expert_choice().is_some();
    let mut params = some([
        when(
            has_logits,
            Param::read("logits", F32, format!("[tokens, {e}]")),
        ),
        when(
            d.router.select_bias,
            Param::read("select_bias", F32, &per_expert),
        ),
        token_mask(d),
        when(d.router.active_k, Param::read("active_k", I32, "[1]")),
        load(d),
        when(
            d.sinkhorn().is_some(),
            Param::read("columns", F32, &per_expert),
        ),
        when(
            choice,
            Param::read("choice_keys", I32, format!("[{e}, tokens]")),
        ),
        when(
            choice,
            Param::read("choice_bounds", I32, format!("[{e}, 2]")),
        ),
        block_experts(d, Access::Read),
        when(
            d.router.expert_scale,
            Param::read("expert_scale", F32, &per_expert),
        ),
        when(
            table,
            Param::read("table", I32, format!("[table_rows, {k}]")),
        ),
        when(table, Param::i64("table_rows")),
        when(table, Param::read("token_ids", I32, "[tokens]")),
        Some(Param::write("topk_ids", I32, format!("[tokens, {k}]"))),
        Some(Param::write("topk_weights", F32, format!("[tokens, {k}]"))),
        when(d.best_score, Param::write("best_score", F32, "[tokens]")),
        when(
            c.histogram != Histogram::None,
            Param::write("tile_counts", I32, format!("[tiles, {e}]")),
        ),
    ]);
    params.extend(
        d.draws_selection()
            .then(rng_key_params)
            .into_iter()
            .flatten(),
    );
    params
}
