//! The canonical TOML of a spec.

use crate::{
    Activation, Biases, Capacity, Entropy, Experts, Groups, Latent, LayerSpec, Loss, Precision,
    Router, Select, SharedExpert,
};
use serde::Serialize;

impl LayerSpec {
    /// The spec as TOML that [`LayerSpec::from_toml`] reads back equal.
    ///
    /// Values equal to their default are left out, so equal specs have equal
    /// texts. An invalid spec is written too, though it cannot be read back.
    pub fn to_toml(&self) -> String {
        // Destructured, here and below, so that a new field cannot be
        // forgotten.
        let LayerSpec {
            name,
            shape,
            precision,
            router,
            capacity,
            experts,
            latent,
            shared,
            losses,
        } = self;
        let mut text = format!("name = {}\n", name.value());
        let mut section = Lines::default();
        section.add("model_dim", &shape.model_dim);
        section.add("hidden_dim", &shape.hidden_dim);
        section.add("experts", &shape.experts);
        section.add("top_k", &shape.top_k);
        section.add_some("output_dim", shape.output_dim.as_ref());
        section.under("[shape]", &mut text);
        precision_lines(precision).under("[precision]", &mut text);
        router_lines(router).under("[router]", &mut text);
        capacity_lines(capacity).under("[capacity]", &mut text);
        experts_lines(experts).under("[experts]", &mut text);
        if let Some(Latent { dim, bias }) = latent {
            let mut lines = Lines::default();
            lines.add("dim", dim);
            lines.differing("bias", bias, &false);
            lines.under("[latent]", &mut text);
        }
        for expert in shared {
            shared_lines(expert).under("[[shared]]", &mut text);
        }
        for loss in losses {
            loss_lines(loss).under("[[losses]]", &mut text);
        }
        text
    }
}

fn precision_lines(precision: &Precision) -> Lines {
    let default = Precision::default();
    let Precision {
        weights,
        activations,
        router,
        accumulate,
        tf32,
    } = precision;
    let mut lines = Lines::default();
    lines.differing("weights", weights, &default.weights);
    lines.differing("activations", activations, &default.activations);
    lines.differing("router", router, &default.router);
    lines.differing("accumulate", accumulate, &default.accumulate);
    lines.differing("tf32", tf32, &default.tf32);
    lines
}

fn router_lines(router: &Router) -> Lines {
    let default = Router::default();
    let Router {
        kind,
        bias,
        input,
        score,
        select,
        select_bias,
        groups,
        renormalize,
        renormalize_eps,
        norm_order,
        scale,
        expert_scale,
        weight_on,
        table_rows,
        projection_dim,
        token_mask,
        active_k,
        entropy,
        jitter,
        input_dropout,
        noise,
        noise_kind,
        random_second,
    } = router;
    let mut lines = Lines::default();
    lines.differing("kind", kind, &default.kind);
    lines.add_some("table_rows", table_rows.as_ref());
    lines.add_some("projection_dim", projection_dim.as_ref());
    lines.differing("bias", bias, &default.bias);
    lines.differing("input", input, &default.input);
    lines.differing("score", score, &default.score);
    lines.differing("select", select, &default.select);
    lines.differing("select_bias", select_bias, &default.select_bias);
    lines.add_some("groups", groups.as_ref());
    lines.differing("renormalize", renormalize, &default.renormalize);
    lines.differing("renormalize_eps", renormalize_eps, &default.renormalize_eps);
    lines.differing("norm_order", norm_order, &default.norm_order);
    lines.differing("scale", scale, &default.scale);
    lines.differing("expert_scale", expert_scale, &default.expert_scale);
    lines.differing("weight_on", weight_on, &default.weight_on);
    lines.differing("token_mask", token_mask, &default.token_mask);
    lines.differing("active_k", active_k, &default.active_k);
    lines.add_some("entropy", entropy.as_ref());
    lines.differing("jitter", jitter, &default.jitter);
    lines.differing("input_dropout", input_dropout, &default.input_dropout);
    lines.differing("noise", noise, &default.noise);
    lines.differing("noise_kind", noise_kind, &default.noise_kind);
    lines.differing("random_second", random_second, &default.random_second);
    lines
}

fn capacity_lines(capacity: &Capacity) -> Lines {
    let default = Capacity::default();
    let Capacity {
        mode,
        factor,
        eval_factor,
        rows,
        order,
        align,
        renormalize_after_drop,
    } = capacity;
    let mut lines = Lines::default();
    lines.differing("mode", mode, &default.mode);
    lines.differing("factor", factor, &default.factor);
    lines.add_some("eval_factor", eval_factor.as_ref());
    lines.add_some("rows", rows.as_ref());
    lines.differing("order", order, &default.order);
    lines.differing("align", align, &default.align);
    lines.differing(
        "renormalize_after_drop",
        renormalize_after_drop,
        &default.renormalize_after_drop,
    );
    lines
}

fn experts_lines(experts: &Experts) -> Lines {
    let default = Experts::default();
    let Experts {
        form,
        activation,
        bias,
        clamp,
        alpha,
        up_offset,
        layout,
        identity,
        zero,
    } = experts;
    let mut lines = Lines::default();
    lines.differing("form", form, &default.form);
    lines.differing("activation", activation, &default.activation);
    lines.differing("bias", bias, &default.bias);
    lines.add_some("clamp", clamp.as_ref());
    lines.differing("alpha", alpha, &default.alpha);
    lines.differing("up_offset", up_offset, &default.up_offset);
    lines.differing("layout", layout, &default.layout);
    lines.differing("identity", identity, &default.identity);
    lines.differing("zero", zero, &default.zero);
    lines
}

fn shared_lines(expert: &SharedExpert) -> Lines {
    let SharedExpert {
        hidden_dim,
        gate,
        bias,
    } = expert;
    let mut lines = Lines::default();
    lines.add("hidden_dim", hidden_dim);
    lines.differing("gate", gate, &Default::default());
    lines.add_some("bias", bias.as_ref());
    lines
}

fn loss_lines(loss: &Loss) -> Lines {
    let Loss {
        kind,
        coefficient,
        sequence_length,
    } = loss;
    let mut lines = Lines::default();
    lines.add("kind", kind);
    lines.add("coefficient", coefficient);
    lines.add_some("sequence_length", sequence_length.as_ref());
    lines
}

/// The lines of one table.
#[derive(Default)]
struct Lines(Vec<String>);

impl Lines {
    fn add(&mut self, key: &str, value: &impl Value) {
        self.0.push(format!("{key} = {}", value.value()));
    }

    fn add_some(&mut self, key: &str, value: Option<&impl Value>) {
        if let Some(value) = value {
            self.add(key, value);
        }
    }

    fn differing<V: Value + PartialEq>(&mut self, key: &str, value: &V, default: &V) {
        if value != default {
            self.add(key, value);
        }
    }

    /// Appends the table to a text; nothing when it has no lines.
    fn under(self, header: &str, text: &mut String) {
        if !self.0.is_empty() {
            text.push_str(&format!("\n{header}\n{}\n", self.0.join("\n")));
        }
    }
}

/// What can stand behind an equals sign.
trait Value {
    fn value(&self) -> String;
}

impl Value for usize {
    fn value(&self) -> String {
        self.to_string()
    }
}

impl Value for bool {
    fn value(&self) -> String {
        self.to_string()
    }
}

impl Value for f64 {
    /// The shortest digits that read back equal, always with a point or an
    /// exponent.
    fn value(&self) -> String {
        format!("{self:?}").replace("NaN", "nan")
    }
}

impl Value for String {
    fn value(&self) -> String {
        // Every JSON string is a TOML basic string.
        serde_json::Value::String(self.clone()).to_string()
    }
}

impl Value for Biases {
    fn value(&self) -> String {
        match self {
            Biases::None => "false".to_string(),
            Biases::Up => "\"up\"".to_string(),
            Biases::Down => "\"down\"".to_string(),
            Biases::All => "true".to_string(),
        }
    }
}

impl Value for Groups {
    fn value(&self) -> String {
        let Groups {
            count,
            keep,
            stat,
            mask,
        } = self;
        let mut lines = Lines::default();
        lines.add("count", count);
        lines.add("keep", keep);
        lines.add("stat", stat);
        lines.differing("mask", mask, &Default::default());
        format!("{{ {} }}", lines.0.join(", "))
    }
}

impl Value for Entropy {
    fn value(&self) -> String {
        let Entropy { temperature, load } = self;
        let mut lines = Lines::default();
        lines.add("temperature", temperature);
        lines.differing("load", load, &0.0);
        format!("{{ {} }}", lines.0.join(", "))
    }
}

impl Value for Select {
    fn value(&self) -> String {
        match self {
            Select::TopK => "\"top-k\"".to_string(),
            Select::SparseMixer(epsilon) => format!("{{ sparse-mixer = {} }}", epsilon.value()),
            Select::ExpertChoice(share) => format!("{{ expert-choice = {} }}", share.value()),
            Select::Sinkhorn(rounds) => format!("{{ sinkhorn = {rounds} }}"),
        }
    }
}

impl Value for Activation {
    fn value(&self) -> String {
        match self {
            Activation::Custom(expression) => {
                format!("{{ expr = {} }}", expression.text().to_string().value())
            }
            named => format!("\"{}\"", word(named)),
        }
    }
}

macro_rules! words {
    ($($name:ty),+ $(,)?) => {
        $(impl Value for $name {
            fn value(&self) -> String {
                format!("\"{}\"", word(self))
            }
        })+
    };
}

words!(
    moesaic_kernel::DType,
    crate::RouterKind,
    crate::RouterInput,
    crate::Score,
    crate::GroupStat,
    crate::GroupMask,
    crate::Renormalize,
    crate::WeightSite,
    crate::CapacityMode,
    crate::CapacityOrder,
    crate::ExpertForm,
    crate::GateLayout,
    crate::SharedGate,
    crate::NoiseKind,
    crate::LossKind,
);

/// The TOML spelling of a value of a plain enum.
pub(crate) fn word(value: &impl Serialize) -> String {
    match toml::Value::try_from(value) {
        Ok(toml::Value::String(word)) => word,
        other => unreachable!("not a plain enum: {other:?}"),
    }
}
