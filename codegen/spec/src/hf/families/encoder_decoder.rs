//! Encoder-decoder families with a capacity: Switch Transformers and NLLB.
//!
//! Their layers have one numbering: first the encoder's, then the decoder's.

use super::super::HfError;
use super::super::config::Config;
use super::super::draft::{Draft, Sizes};
use super::family::Family;
use super::keys::{EXPERTS, MODEL};
use super::layers::Layers;
use crate::{CapacityMode, CapacityOrder, ExpertForm, Renormalize};

/// The families of this file.
pub(super) const FAMILIES: &[Family] = &[
    Family {
        names: &["switch_transformers"],
        layers: |c| Ok(switch_stacks(c)?.layers()),
        build: switch,
    },
    Family {
        names: &["nllb-moe", "nllb_moe"],
        layers: |c| Ok(nllb_stacks(c)?.layers()),
        build: nllb,
    },
];

/// Depth, and distance between sparse layers, of encoder and decoder.
struct Stacks {
    encoder: (usize, usize),
    decoder: (usize, usize),
    sparse: fn(usize, usize) -> bool,
}

impl Stacks {
    fn layers(&self) -> Layers {
        let total = self.encoder.0 + self.decoder.0;
        Layers::filtered(total, "the numbers or steps of sparse layers are 0", |i| {
            self.moe(i)
        })
    }

    fn moe(&self, layer: usize) -> bool {
        let (in_decoder, index) = self.place(layer);
        let step = if in_decoder {
            self.decoder.1
        } else {
            self.encoder.1
        };
        step > 0 && (self.sparse)(index, step)
    }

    /// Returns true for a decoder layer, and the layer's index in its stack.
    fn place(&self, layer: usize) -> (bool, usize) {
        match layer.checked_sub(self.encoder.0) {
            Some(index) => (true, index),
            None => (false, layer),
        }
    }
}

fn switch_stacks(c: &Config) -> Result<Stacks, HfError> {
    let depth = c.layers(&["num_layers", "num_hidden_layers"], 12)?;
    let decoder = c.layers(&["num_decoder_layers"], depth)?;
    // transformers writes these keys too, and recomputes them from the numbers of sparse layers.
    for derived in ["encoder_sparse_step", "decoder_sparse_step"] {
        c.find(&[derived]);
    }
    let step = |layers: usize, sparse: usize| layers.checked_div(sparse).unwrap_or(layers);
    Ok(Stacks {
        encoder: (
            depth,
            step(depth, c.size(&["num_sparse_encoder_layers"], 3)?),
        ),
        decoder: (
            decoder,
            step(decoder, c.size(&["num_sparse_decoder_layers"], 3)?),
        ),
        sparse: |i, step| step == 1 || i % step == 1,
    })
}

/// Builds Switch: top-1 by probability. An expert takes the first `expert_capacity` tokens of a
/// sequence; the rest add nothing.
fn switch(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let sizes = Sizes {
        model: c.size(MODEL, 768)?,
        hidden: c.size(&["d_ff"], 2048)?,
        experts: c.size(EXPERTS, 8)?,
        top_k: 1,
    };
    let mut d = Draft::new(c, sizes);
    d.spec.experts.form = ExpertForm::Plain;
    d.activation(c, &["dense_act_fn"], "relu")?;
    d.spec.router.jitter = c.number(&["router_jitter_noise"], 0.01)?;
    d.spec.capacity.mode = CapacityMode::Fixed;
    d.spec.capacity.rows = Some(c.size(&["expert_capacity"], 64)?);
    d.notes
        .push("expert_capacity counts rows of one sequence: run one sequence per call".to_string());
    let (in_decoder, index) = switch_stacks(c)?.place(layer);
    let (stack, part) = if in_decoder {
        ("decoder.block.", 2)
    } else {
        ("encoder.block.", 1)
    };
    d.rooted(&[stack], index, &[&format!("layer.{part}.mlp.")]);
    router(c, &mut d)?;
    for (part, leaf) in [("up", "wi"), ("down", "wo")] {
        let name = [format!("{leaf}.weight")];
        d.per_expert(&format!("experts.{part}.weight"), "experts.expert_", &name);
    }
    Ok(d)
}

fn router(c: &Config, d: &mut Draft) -> Result<(), HfError> {
    d.plain("router.weight", &["router.classifier.weight"]);
    if c.flag(&["router_bias"], false)? {
        d.spec.router.bias = true;
        d.plain("router.bias", &["router.classifier.bias"]);
    }
    Ok(())
}

fn nllb_stacks(c: &Config) -> Result<Stacks, HfError> {
    Ok(Stacks {
        encoder: (
            c.layers(&["encoder_layers"], 12)?,
            c.size(&["encoder_sparse_step"], 4)?,
        ),
        decoder: (
            c.layers(&["decoder_layers"], 12)?,
            c.size(&["decoder_sparse_step"], 4)?,
        ),
        sparse: |i, step| (i + 1).is_multiple_of(step),
    })
}

/// Builds NLLB: top-2, with weights normalized before or after dropping, and all outputs scaled by
/// the keep rate of the expert dropout.
fn nllb(c: &Config, layer: usize) -> Result<Draft, HfError> {
    let (in_decoder, index) = nllb_stacks(c)?.place(layer);
    let stack = if in_decoder { "decoder" } else { "encoder" };
    let sizes = Sizes {
        model: c.size(MODEL, 1024)?,
        hidden: c.size(&[&format!("{stack}_ffn_dim")], 4096)?,
        experts: c.size(EXPERTS, 128)?,
        top_k: 2,
    };
    if c.text(&["second_expert_policy"], "all")? != "all" {
        let axis = "a random choice of the second expert";
        return Err(c.unsupported("second_expert_policy", axis, "set it to `all`"));
    }
    let mut d = Draft::new(c, sizes);
    d.spec.experts.form = ExpertForm::Plain;
    d.spec.experts.bias = true.into();
    d.activation(c, &["activation_function"], "relu")?;
    d.spec.router.scale = 1.0 - c.number(&["moe_token_dropout"], 0.2)?;
    nllb_capacity(c, &mut d)?;
    d.rooted(
        &[
            &format!("model.{stack}.layers."),
            &format!("{stack}.layers."),
        ],
        index,
        &["ffn."],
    );
    router(c, &mut d)?;
    for (part, leaf) in [("up", "fc1"), ("down", "fc2")] {
        for kind in ["weight", "bias"] {
            let names = [format!("{leaf}.{kind}")];
            d.per_expert(&format!("experts.{part}.{kind}"), "experts.expert_", &names);
        }
    }
    Ok(d)
}

/// Sets NLLB's capacity. In evaluation it is a fraction of the tokens; from 1 on nothing can be
/// dropped. Zero or less turns the fraction off: then it is `expert_capacity` rows, or
/// `2·ceil(T/E)` without that key.
fn nllb_capacity(c: &Config, d: &mut Draft) -> Result<(), HfError> {
    let capacity = &mut d.spec.capacity;
    let fraction = c.number(&["moe_eval_capacity_token_fraction"], 1.0)?;
    if fraction > 0.0 && fraction < 1.0 {
        let axis = "a capacity that is a fraction of all tokens";
        let remedy = "set it to 1 (nothing is dropped) or 0 (expert_capacity rows)";
        return Err(c.unsupported("moe_eval_capacity_token_fraction", axis, remedy));
    }
    // transformers reads this key only when the fraction is off.
    c.find(&["expert_capacity"]);
    if fraction <= 0.0 {
        capacity.mode = CapacityMode::Fixed;
        capacity.rows = Some(c.size(&["expert_capacity"], 64)?);
        if c.is_null("expert_capacity") {
            capacity.mode = CapacityMode::Factor;
            capacity.rows = None;
        }
    }
    if c.flag(&["batch_prioritized_routing"], false)? {
        capacity.order = CapacityOrder::BatchPrioritized;
    }
    let before = c.flag(&["normalize_router_prob_before_dropping"], false)?;
    if before || !d.spec.may_drop() {
        d.spec.router.renormalize = Renormalize::Clamp;
        d.spec.router.renormalize_eps = f64::from(f32::EPSILON);
    } else {
        d.spec.capacity.renormalize_after_drop = true;
    }
    Ok(())
}
