//! The entries of `gate_topk_bwd`. Those of the losses run forward, the others
//! backward.

use super::{GateTopkBwdConfig, GateTopkBwdDesc};
use crate::ops::gate_topk::WARP_EXPERTS;
use crate::ops::gate_topk::logits::{BackwardBlocks, backward_entries};
use crate::ops::params::{entry, gradient, one, per_slot, some, tokens_by, when};
use moesaic_kernel::DType::{F32, I32, I64};
use moesaic_kernel::{Access, Entry, Param, Size};

pub(super) fn entries(d: &GateTopkBwdDesc, c: &GateTopkBwdConfig) -> Vec<Entry> {
    let mut list = Vec::new();
    if !d.losses.is_empty() {
        list.extend(d.over_tokens().then(|| losses(d, c)));
        list.extend(d.sequences().then(|| sequences(d, c)));
        list.push(losses_sum(d, c));
    }
    list.push(logits(d, c));
    list.extend(d.gate.router.expert_scale.then(|| expert_scale(d, c)));
    let blocks = BackwardBlocks {
        tile_tokens: c.tile_tokens,
        threads: c.threads,
    };
    list.extend(backward_entries(&d.gate, blocks));
    if d.rms_scaled() {
        list.extend(rms(d, c));
    }
    list
}

fn per_expert(d: &GateTopkBwdDesc) -> String {
    format!("[tokens, {}]", d.gate.experts)
}

/// Returns the logits as selection saw them, and where losses need them those without noise and the
/// input of the learned noise scale.
fn all_logits(d: &GateTopkBwdDesc) -> [Option<Param>; 3] {
    let of = |name: &str| Param::read(name, F32, per_expert(d));
    [
        when(d.logits(), of("logits")),
        when(d.noisy(), of("clean_logits")),
        when(d.gate.scale_loss, of("noise_logits")),
    ]
}

fn choices(d: &GateTopkBwdDesc) -> Param {
    Param::read("topk_ids", I32, per_slot(d.gate.top_k))
}

fn sequence_slopes(d: &GateTopkBwdDesc, access: Access) -> [Option<Param>; 2] {
    let rows = match d.sequence_length {
        Some(length) => format!("[tokens / {length}, {}]", d.gate.experts),
        None => per_expert(d),
    };
    // Sequences of one length need no table: a token's index says which is its own.
    let named = d.sequences() && d.sequence_length.is_none();
    [
        when(
            d.sequences(),
            Param::tensor("sequence_slopes", F32, access, rows),
        ),
        when(
            named,
            Param::tensor("sequence_first", I32, access, "[tokens]"),
        ),
    ]
}

fn losses(d: &GateTopkBwdDesc, c: &GateTopkBwdConfig) -> Entry {
    let [logits, clean, noise] = all_logits(d);
    let parts = format!("[tiles, {}, {}]", d.sums.len(), d.gate.experts);
    let params = some([
        logits,
        clean,
        noise,
        Some(choices(d)),
        when(!d.sums.is_empty(), Param::write("loss_parts", F32, parts)),
        Some(Param::write("token_parts", F32, "[tiles, 2]")),
    ]);
    let grid = [tokens_by(c.tile_tokens), one()];
    let summary = "sums what auxiliary losses need over each tile of tokens";
    entry("gate_losses", summary, params, grid, c.threads)
}

fn sequences(d: &GateTopkBwdDesc, c: &GateTopkBwdConfig) -> Entry {
    let [logits, ..] = all_logits(d);
    let [slopes, first] = sequence_slopes(d, Access::Write);
    let named = d.sequence_length.is_none();
    let params = some([
        logits,
        Some(choices(d)),
        when(named, Param::read("sequence_ids", I32, "[tokens]")),
        slopes,
        first,
        Some(Param::write("sequence_parts", F32, "[tiles, 2]")),
    ]);
    let grid = [tokens_by(c.tile_tokens), one()];
    let summary = "the loss of each sequence that starts in a tile of tokens";
    entry("gate_sequences", summary, params, grid, c.threads)
}

fn losses_sum(d: &GateTopkBwdDesc, c: &GateTopkBwdConfig) -> Entry {
    use moesaic_spec::LossKind::Global;
    let e = d.gate.experts;
    // The last row is for the sums, where shared memory has no room for them.
    let (access, tiles) = if e > WARP_EXPERTS {
        (Access::ReadWrite, "tiles + 1")
    } else {
        (Access::Read, "tiles")
    };
    let parts = format!("[{tiles}, {}, {e}]", d.sums.len());
    let global = d.losses.iter().any(|loss| loss.kind == Global);
    let mut params = some([
        when(
            !d.sums.is_empty(),
            Param::tensor("loss_parts", F32, access, parts),
        ),
        when(
            d.counts_tokens(),
            Param::read("token_parts", F32, "[tiles, 2]"),
        ),
        when(
            d.sequences(),
            Param::read("sequence_parts", F32, "[tiles, 2]"),
        ),
        when(global, Param::read("global_counts", I64, format!("[{e}]"))),
        when(global, Param::read("global_tokens", I64, "[1]")),
    ]);
    for loss in &d.losses {
        let name = format!("loss_{}", loss.kind.name().replace('-', "_"));
        params.push(Param::write(&name, F32, "[1]"));
    }
    let slopes = format!("[{}, {e}]", d.slopes.len());
    params.push(Param::write("loss_slopes", F32, slopes));
    let summary = "auxiliary losses, and the factors of their gradients";
    // One block, because each loss is one number over all tiles, and sums in a fixed order.
    let grid = [one(), one()];
    entry("gate_losses_sum", summary, params, grid, c.sum_threads)
}

fn logits(d: &GateTopkBwdDesc, c: &GateTopkBwdConfig) -> Entry {
    let (e, slots) = (d.gate.experts, per_slot(d.gate.top_k));
    let [logits, clean, noise] = all_logits(d);
    // The cap's slope is that of the capped logits, and noise is added behind the cap.
    let clean = clean.or_else(|| {
        let clean = Param::read("clean_logits", F32, per_expert(d));
        when(d.caps_clean_logits(), clean)
    });
    let [sequence_slopes, sequence_first] = sequence_slopes(d, Access::Read);
    let scaled = d.gate.router.expert_scale;
    let slopes = format!("[{}, {e}]", d.slopes.len());
    let params = some([
        logits,
        clean,
        noise,
        Some(choices(d)),
        when(scaled, Param::read("expert_scale", F32, format!("[{e}]"))),
        when(
            d.logits() && d.gate.router.entropy.is_some(),
            Param::read("load", F32, format!("[{e}]")),
        ),
        Some(Param::read("grad_topk_weights", F32, slots)),
        when(
            !d.losses.is_empty(),
            Param::read("loss_slopes", F32, slopes),
        ),
        sequence_slopes,
        sequence_first,
        when(d.logits(), Param::write("dlogits", F32, per_expert(d))),
        when(
            d.gate.scale_loss,
            Param::write("dnoise_scale", F32, per_expert(d)),
        ),
        when(
            scaled,
            Param::write("scale_parts", F32, format!("[tiles, {e}]")),
        ),
    ]);
    let grid = [tokens_by(c.tile_tokens), one()];
    let summary = "gradients of router logits";
    entry("gate_topk_bwd", summary, params, grid, c.threads)
}

fn expert_scale(d: &GateTopkBwdDesc, c: &GateTopkBwdConfig) -> Entry {
    let e = d.gate.experts;
    let params = vec![
        Param::read("scale_parts", F32, format!("[tiles, {e}]")),
        gradient("expert_scale", "", &format!("[{e}]")),
        Param::i64("accumulate"),
    ];
    let columns = Size::Const(e.div_ceil(c.columns) as u64);
    let summary = "gradients of the experts' scales";
    entry(
        "gate_scale_bwd",
        summary,
        params,
        [columns, one()],
        c.threads,
    )
}

fn rms(d: &GateTopkBwdDesc, c: &GateTopkBwdConfig) -> [Entry; 3] {
    let model = d.gate.model_dim;
    let of =
        |name: &str, access: Access| Param::tensor(name, F32, access, format!("[tokens, {model}]"));
    let x = || Param::read("x", d.gate.activations, format!("[tokens, {model}]"));
    let scale = || Param::read("input_scale", F32, format!("[{model}]"));
    let inverse = |access: Access| Param::tensor("inverse_rms", F32, access, "[tokens]");
    let input = vec![
        x(),
        scale(),
        of("router_input", Access::Write),
        inverse(Access::Write),
    ];
    let columns = vec![
        x(),
        inverse(Access::Read),
        of("router_dx", Access::Read),
        gradient("input_scale", "", &format!("[{model}]")),
        Param::i64("accumulate"),
    ];
    let tokens = vec![
        x(),
        scale(),
        inverse(Access::Read),
        of("router_dx", Access::ReadWrite),
    ];
    let column_tiles = Size::Const(model.div_ceil(c.columns) as u64);
    let tiles = || [tokens_by(c.tile_tokens), one()];
    [
        entry(
            "gate_input",
            "what the router read: tokens divided by their root mean square, scaled",
            input,
            tiles(),
            c.threads,
        ),
        entry(
            "gate_input_scale_bwd",
            "gradients of the input's scales",
            columns,
            [column_tiles, one()],
            c.threads,
        ),
        entry(
            "gate_rms_bwd",
            "gradients of what the router read to those of tokens, in place",
            tokens,
            tiles(),
            c.threads,
        ),
    ]
}
