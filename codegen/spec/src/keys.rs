//! State dictionaries of other libraries: the names of a layer's tensors in them.
//!
//! | canonical | Tutel | FastMoE |
//! |---|---|---|
//! | `router.weight` | `gates.G.wg.weight` | `gate.gate.weight`; `gate.w_gate`, transposed |
//! | `router.bias` | – | `gate.gate.bias` |
//! | `router.noise.weight` | – | `gate.w_noise`, transposed |
//! | weights of other routers | `gates.G.` and [`tutel`](crate::RouterWeight::tutel) | – |
//! | `experts.up.weight`, `bias` | `experts.batched_fc1_w`, `batched_fc1_bias` | `experts.htoh4.*`, `experts.N.htoh4.*` |
//! | `experts.down.weight`, `bias` | `experts.batched_fc2_w`, transposed, `batched_fc2_bias` | `experts.h4toh.*`, `experts.N.h4toh.*` |
//! | gated `gate`, `up`, `down` | `experts.W_fc1`, `W_fc2`, `W_fc3`, flat or not, transposed | – |

use crate::hf::{Alternative, TensorParts, TensorSource, TensorStep};
use crate::{Chooser, LayerSpec, TensorSpec, canonical_tensors};

/// A library whose checkpoints moesaic reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckpointLibrary {
    /// microsoft/Tutel, `MOELayer` with experts `ffn` or `llama_ffn`.
    Tutel,
    /// laekov/fastmoe, `FMoETransformerMLP`, and experts of an `FMoELinear` pair.
    FastMoe,
}

/// A layer inside a state dictionary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keys {
    /// The library whose names they are.
    pub library: CheckpointLibrary,
    /// The prefix before the layer's own names, with its dot: `blocks.3.moe.`.
    pub prefix: String,
    /// The index of Tutel's gate; FastMoE has one.
    pub gate: usize,
}

/// Returns the tensors of a rank that holds `share` experts of the layer and the whole router.
pub fn rank_tensors(spec: &LayerSpec, share: usize) -> Vec<TensorSpec> {
    let mut tensors = canonical_tensors(spec);
    let experts = tensors
        .iter_mut()
        .filter(|t| t.name.starts_with("experts."));
    experts.for_each(|tensor| tensor.shape[0] = share);
    tensors
}

impl CheckpointLibrary {
    /// Both libraries.
    pub const ALL: [CheckpointLibrary; 2] = [CheckpointLibrary::Tutel, CheckpointLibrary::FastMoe];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            CheckpointLibrary::Tutel => "tutel",
            CheckpointLibrary::FastMoe => "fastmoe",
        }
    }

    /// Returns names of which every layer has one, without a prefix.
    pub fn marks(self) -> &'static [&'static str] {
        match self {
            CheckpointLibrary::Tutel => &["experts.batched_fc1_w", "experts.W_fc1"],
            CheckpointLibrary::FastMoe => &["experts.htoh4.weight", "experts.0.htoh4.weight"],
        }
    }

    /// Returns the prefix of each layer in a dictionary with these names, in their order.
    pub fn prefixes<'a>(self, names: impl IntoIterator<Item = &'a str>) -> Vec<String> {
        let prefix = |name: &'a str| {
            let mut marks = self.marks().iter();
            let before = marks.find_map(|mark| name.strip_suffix(mark))?;
            (before.is_empty() || before.ends_with('.')).then(|| before.to_string())
        };
        names.into_iter().filter_map(prefix).collect()
    }
}

impl Keys {
    /// Returns a recipe for each of these tensors. A tensor that the library has no name for gets
    /// no alternative.
    pub fn sources(&self, spec: &LayerSpec, tensors: &[TensorSpec]) -> Vec<TensorSource> {
        let source = |tensor: &TensorSpec| TensorSource {
            name: tensor.name.clone(),
            alternatives: match self.library {
                CheckpointLibrary::Tutel => self.tutel(tensor, spec),
                CheckpointLibrary::FastMoe => self.fastmoe(tensor, spec),
            },
        };
        tensors.iter().map(source).collect()
    }

    /// Returns the name prefixes of the layer's parts that the spec uses: the experts always, the
    /// gate if the router has weights.
    pub fn owned(&self, spec: &LayerSpec) -> Vec<String> {
        let mut parts = vec![format!("{}experts.", self.prefix)];
        if spec.router.kind.chooser() != Chooser::Caller {
            parts.push(self.gate_prefix());
        }
        parts
    }

    /// Returns the name under which Tutel stores the number of experts of all ranks.
    pub fn count(&self) -> Option<String> {
        let tutel = self.library == CheckpointLibrary::Tutel;
        tutel.then(|| format!("{}_num_global_experts", self.prefix))
    }

    /// Returns the gate numbers that occur among these names.
    pub fn gates<'a>(&self, names: impl IntoIterator<Item = &'a str>) -> Vec<usize> {
        let before = format!("{}gates.", self.prefix);
        let number = |name: &'a str| {
            let (number, _) = name.strip_prefix(before.as_str())?.split_once('.')?;
            number.parse().ok()
        };
        let mut gates: Vec<usize> = names.into_iter().filter_map(number).collect();
        gates.sort_unstable();
        gates.dedup();
        gates
    }

    fn gate_prefix(&self) -> String {
        match self.library {
            CheckpointLibrary::Tutel => format!("{}gates.{}.", self.prefix, self.gate),
            CheckpointLibrary::FastMoe => format!("{}gate.", self.prefix),
        }
    }

    fn named(&self, name: &str, steps: Vec<TensorStep>) -> Alternative {
        Alternative {
            parts: TensorParts::One(format!("{}{name}", self.prefix)),
            steps,
        }
    }

    fn of_gate(&self, name: &str, steps: Vec<TensorStep>) -> Alternative {
        Alternative {
            parts: TensorParts::One(self.gate_prefix() + name),
            steps,
        }
    }

    fn tutel(&self, tensor: &TensorSpec, spec: &LayerSpec) -> Vec<Alternative> {
        let gated = spec.gated();
        let swapped = || vec![TensorStep::Transpose];
        // Tutel's oldest versions keep biases as [E, 1, h].
        let flat = || vec![TensorStep::Reshape(tensor.shape.clone())];
        // Parameters of llama_ffn are flat, so that ranks may shard them.
        let turned = || {
            let [experts, columns, rows] = [0, 1, 2].map(|axis| tensor.shape[axis]);
            vec![
                TensorStep::Reshape(vec![experts, rows, columns]),
                TensorStep::Transpose,
            ]
        };
        let of_router = spec.router.kind.def().weight(&tensor.name);
        if let Some(name) = of_router.and_then(|weight| weight.tutel) {
            return vec![self.of_gate(name, vec![])];
        }
        vec![match (tensor.name.as_str(), gated) {
            ("experts.gate.weight", true) => self.named("experts.W_fc1", turned()),
            ("experts.up.weight", true) => self.named("experts.W_fc2", turned()),
            ("experts.down.weight", true) => self.named("experts.W_fc3", turned()),
            ("experts.up.weight", false) => self.named("experts.batched_fc1_w", vec![]),
            ("experts.up.bias", false) => self.named("experts.batched_fc1_bias", flat()),
            ("experts.down.weight", false) => self.named("experts.batched_fc2_w", swapped()),
            ("experts.down.bias", false) => self.named("experts.batched_fc2_bias", flat()),
            _ => return Vec::new(),
        }]
    }

    fn fastmoe(&self, tensor: &TensorSpec, spec: &LayerSpec) -> Vec<Alternative> {
        let swapped = || vec![TensorStep::Transpose];
        match tensor.name.as_str() {
            "router.weight" => vec![
                self.of_gate("gate.weight", vec![]),
                self.of_gate("w_gate", swapped()),
            ],
            "router.bias" => vec![self.of_gate("gate.bias", vec![])],
            "router.noise.weight" => vec![self.of_gate("w_noise", swapped())],
            _ if spec.gated() => Vec::new(),
            "experts.up.weight" => self.fastmoe_expert("htoh4.weight", tensor),
            "experts.up.bias" => self.fastmoe_expert("htoh4.bias", tensor),
            "experts.down.weight" => self.fastmoe_expert("h4toh.weight", tensor),
            "experts.down.bias" => self.fastmoe_expert("h4toh.bias", tensor),
            _ => Vec::new(),
        }
    }

    /// Returns the forms of FastMoE's experts: all in one tensor, or one module per expert.
    fn fastmoe_expert(&self, name: &str, tensor: &TensorSpec) -> Vec<Alternative> {
        let each = Alternative {
            parts: TensorParts::PerExpert {
                before: format!("{}experts.", self.prefix),
                after: format!(".{name}"),
                first: 0,
                count: tensor.shape[0],
            },
            steps: vec![TensorStep::Reshape(tensor.shape[1..].to_vec())],
        };
        vec![self.named(&format!("experts.{name}"), vec![]), each]
    }
}
