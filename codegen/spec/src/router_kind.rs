//! The kinds of routers, one definition each. Validation, the list of weights, their first values,
//! plans, readers of checkpoints, the command line and random layers of tests read it. A formula of
//! logits is known by its name only where it is computed: in plans, templates and the f64
//! reference.

use crate::{BiasedValues, LayerSpec, MAX_DIM, MAX_TABLE_ROWS, Router, Score};
use moesaic_kernel::DType;
use serde::{Deserialize, Serialize};

/// The source of the logits, or of the decision itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RouterKind {
    /// `logits = x · Wᵀ (+ b)`.
    Linear,
    /// `logits = norm(x · Pᵀ + p) · norm(S) · exp(min(t, ln 100))` (Tutel).
    Cosine,
    /// The token id looks up the token's experts in a table. Weights still come from the linear
    /// logits, unless `score = "one"`.
    Table,
    /// The caller passes `topk_ids` and `topk_weights`, or a gate in Rust decides (TRAINING). An id
    /// of -1 masks a slot.
    External,
}

/// The definition of a kind of router.
#[derive(Debug)]
pub struct RouterDef {
    /// The word in a spec.
    pub name: &'static str,
    /// The origin of a token's experts.
    pub chooser: Chooser,
    /// The logits; `None` for a kind that computes none.
    pub logits: Option<&'static LogitsDef>,
    /// The weights of the choice itself, which come after those of all options.
    pub choice_weights: &'static [RouterWeight],
    /// The option that says a size of this kind's own. Kinds may share a key.
    pub size: Option<RouterSize>,
}

/// The origin of a token's experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chooser {
    /// The scores, which follow from logits.
    Scores,
    /// A table, by the token's id.
    Table,
    /// The caller, who passes their weights, too.
    Caller,
}

/// The formula of logits, by which operators and the reference compute them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitsFormula {
    /// `x · Wᵀ (+ b)`.
    Linear,
    /// `norm(x · Pᵀ + p) · norm(S) · exp(min(t, ln 100))`.
    Cosine,
}

/// The definition of logits. Each begins with a product of tokens and a matrix.
#[derive(Debug)]
pub struct LogitsDef {
    /// The formula.
    pub formula: LogitsFormula,
    /// The weights, which come before those of options.
    pub weights: &'static [RouterWeight],
    /// The name before `.weight` and `.bias` of the matrix that tokens are multiplied by.
    pub matrix: &'static str,
    /// The columns of that product.
    pub width: RouterAxis,
    /// The tensor of that product; `None` where it is the logits.
    pub projected: Option<&'static str>,
    /// Whether the matrix always has a bias. The logits then have none, so `router.bias` is
    /// refused.
    pub own_bias: bool,
}

/// A weight tensor of a kind of router.
#[derive(Debug)]
pub struct RouterWeight {
    /// The canonical name.
    pub name: &'static str,
    /// Element type in device memory.
    pub dtype: DType,
    /// Sizes, outermost first.
    pub shape: &'static [RouterAxis],
    /// Its meaning, in one line.
    pub meaning: &'static str,
    /// The parameter of kernels that takes it.
    pub param: &'static str,
    /// Its name behind `gates.G.` in Tutel's checkpoints.
    pub tutel: Option<&'static str>,
    /// Its value in a layer that is trained from nothing.
    pub start: WeightStart,
}

/// The first values of a router's weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum WeightStart {
    /// As in any matrix, or in the bias of one.
    Matrix,
    /// Normal, with this standard deviation.
    Normal(f32),
    /// One number.
    Constant(f32),
}

/// A size of a router's weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterAxis {
    /// The size 1.
    One,
    /// The model dimension.
    Model,
    /// The experts that the router scores.
    Experts,
    /// Experts of a token.
    TopK,
    /// The size that [`RouterDef::size`] reads.
    Own,
}

/// An option that a kind of router needs, and that kinds without it refuse.
#[derive(Debug)]
pub struct RouterSize {
    /// The key in a spec.
    pub key: &'static str,
    /// The line to add where it is missing.
    pub add: &'static str,
    /// The largest value.
    pub most: usize,
    /// The reason for this limit.
    pub because: &'static str,
    /// Reads the value from a spec.
    pub value: fn(&Router) -> Option<usize>,
    /// Writes the value into a spec.
    pub set: fn(&mut Router, usize),
}

const LINEAR_LOGITS: LogitsDef = LogitsDef {
    formula: LogitsFormula::Linear,
    weights: &[RouterWeight {
        name: "router.weight",
        param: "weight",
        dtype: DType::F32,
        shape: &[RouterAxis::Experts, RouterAxis::Model],
        meaning: "projection of tokens to logits",
        tutel: Some("wg.weight"),
        start: WeightStart::Matrix,
    }],
    matrix: "router",
    width: RouterAxis::Experts,
    projected: None,
    own_bias: false,
};

const COSINE_LOGITS: LogitsDef = LogitsDef {
    formula: LogitsFormula::Cosine,
    weights: &[
        RouterWeight {
            name: "router.projector.weight",
            param: "projector_weight",
            dtype: DType::F32,
            shape: &[RouterAxis::Own, RouterAxis::Model],
            meaning: "projection of tokens",
            tutel: Some("cosine_projector.weight"),
            start: WeightStart::Matrix,
        },
        RouterWeight {
            name: "router.projector.bias",
            param: "projector_bias",
            dtype: DType::F32,
            shape: &[RouterAxis::Own],
            meaning: "bias of the projection",
            tutel: Some("cosine_projector.bias"),
            start: WeightStart::Matrix,
        },
        RouterWeight {
            name: "router.similarity",
            param: "similarity",
            dtype: DType::F32,
            shape: &[RouterAxis::Own, RouterAxis::Experts],
            meaning: "one direction per expert, in columns",
            tutel: Some("sim_matrix"),
            start: WeightStart::Normal(0.01),
        },
        RouterWeight {
            name: "router.temperature",
            param: "temperature",
            dtype: DType::F32,
            shape: &[RouterAxis::One],
            meaning: "logarithm of the logit scale",
            tutel: Some("temperature"),
            // Tutel's gate begins with the logits doubled.
            start: WeightStart::Constant(std::f32::consts::LN_2),
        },
    ],
    matrix: "router.projector",
    width: RouterAxis::Own,
    projected: Some("router.projected"),
    own_bias: true,
};

const LINEAR: RouterDef = RouterDef {
    name: "linear",
    chooser: Chooser::Scores,
    logits: Some(&LINEAR_LOGITS),
    choice_weights: &[],
    size: None,
};

const COSINE: RouterDef = RouterDef {
    name: "cosine",
    logits: Some(&COSINE_LOGITS),
    size: Some(RouterSize {
        key: "router.projection_dim",
        add: "projection_dim = 256, the width tokens are projected to",
        most: MAX_DIM,
        because: "the widest layer kernels are generated for",
        value: |router| router.projection_dim,
        set: |router, size| router.projection_dim = Some(size),
    }),
    ..LINEAR
};

const TABLE: RouterDef = RouterDef {
    name: "table",
    chooser: Chooser::Table,
    choice_weights: &[RouterWeight {
        name: "router.table",
        param: "table",
        dtype: DType::I32,
        shape: &[RouterAxis::Own, RouterAxis::TopK],
        meaning: "experts of each token id",
        tutel: None,
        start: WeightStart::Matrix,
    }],
    size: Some(RouterSize {
        key: "router.table_rows",
        add: "table_rows = 32000, the number of token ids",
        most: MAX_TABLE_ROWS,
        because: "the largest table of token ids",
        value: |router| router.table_rows,
        set: |router, size| router.table_rows = Some(size),
    }),
    ..LINEAR
};

const EXTERNAL: RouterDef = RouterDef {
    name: "external",
    chooser: Chooser::Caller,
    logits: None,
    ..LINEAR
};

impl RouterKind {
    /// Every kind.
    pub const ALL: [RouterKind; 4] = [
        RouterKind::Linear,
        RouterKind::Cosine,
        RouterKind::Table,
        RouterKind::External,
    ];

    /// Returns the definition of the kind.
    pub const fn def(self) -> &'static RouterDef {
        match self {
            RouterKind::Linear => &LINEAR,
            RouterKind::Cosine => &COSINE,
            RouterKind::Table => &TABLE,
            RouterKind::External => &EXTERNAL,
        }
    }

    /// Returns the origin of a token's experts.
    pub const fn chooser(self) -> Chooser {
        self.def().chooser
    }

    /// Returns every kind with a weight of this canonical name.
    pub fn with_weight(name: &str) -> impl Iterator<Item = RouterKind> {
        let kinds = RouterKind::ALL.into_iter();
        kinds.filter(move |kind| kind.def().weight(name).is_some())
    }
}

impl RouterDef {
    /// Returns the weights of the kind: of its logits, then of its choice.
    pub fn weights(&self) -> impl Iterator<Item = &'static RouterWeight> {
        let of_logits = self.logits.map_or(&[][..], |logits| logits.weights);
        of_logits.iter().chain(self.choice_weights)
    }

    /// Returns the kind's weight of this canonical name. Another kind's weight of that name may
    /// have another shape, so a name alone means nothing.
    pub fn weight(&self, name: &str) -> Option<&'static RouterWeight> {
        self.weights().find(|weight| weight.name == name)
    }
}

impl LogitsDef {
    /// Returns a part, `weight` or `bias`, of the matrix that tokens are multiplied by; `None` for
    /// a bias that is an option of the router.
    pub fn of_matrix(&self, part: &str) -> Option<&'static RouterWeight> {
        let mut weights = self.weights.iter();
        weights.find(|weight| {
            let behind = weight.name.strip_prefix(self.matrix);
            behind.and_then(|behind| behind.strip_prefix('.')) == Some(part)
        })
    }

    /// Returns the weight with a row or a column for each expert.
    pub fn expert_weight(&self) -> &'static str {
        let mut weights = self.weights.iter();
        let found = weights.find(|weight| weight.shape.contains(&RouterAxis::Experts));
        found.map_or("router.weight", |weight| weight.name)
    }
}

impl RouterAxis {
    /// Returns the size in a layer.
    pub fn size(self, spec: &LayerSpec) -> usize {
        match self {
            RouterAxis::One => 1,
            RouterAxis::Model => spec.shape.model_dim,
            RouterAxis::Experts => spec.routed_experts(),
            RouterAxis::TopK => spec.shape.top_k,
            RouterAxis::Own => spec.router.own_size().unwrap_or_default(),
        }
    }
}

impl Router {
    /// Returns the size that its kind alone has, where the spec says it.
    pub fn own_size(&self) -> Option<usize> {
        let size = self.kind.def().size.as_ref()?;
        (size.value)(self)
    }

    /// Returns true if selection compares logits instead of scores. Without a bias and groups they
    /// have the order of the scores, and not the ties that rounding would add to these.
    pub fn compares_logits(&self) -> bool {
        if self.select_bias {
            self.select_bias_on == BiasedValues::Logits
        } else {
            self.groups.is_none()
        }
    }
}

impl LayerSpec {
    /// Returns the logits that the layer computes; `None` if weights come from elsewhere.
    pub fn logits(&self) -> Option<&'static LogitsDef> {
        let def = self.router.kind.def();
        // The scores of a table without logits are all one.
        let unweighted = def.chooser == Chooser::Table && self.router.score == Score::One;
        def.logits.filter(|_| !unweighted)
    }

    /// Returns true if the layer computes router logits.
    pub fn has_logits(&self) -> bool {
        self.logits().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_the_words_of_a_spec() {
        for kind in RouterKind::ALL {
            let word = serde_json::to_value(kind).unwrap();
            assert_eq!(word, kind.def().name);
        }
    }

    #[test]
    fn a_weight_is_that_of_its_kind() {
        let kinds = |name| RouterKind::with_weight(name).collect::<Vec<_>>();
        assert_eq!(
            kinds("router.weight"),
            [RouterKind::Linear, RouterKind::Table]
        );
        assert_eq!(kinds("router.similarity"), [RouterKind::Cosine]);
        assert_eq!(kinds("router.load"), []);
        assert!(LINEAR.weight("router.table").is_none());

        const WEIGHTED: RouterDef = RouterDef {
            choice_weights: &[RouterWeight {
                name: "router.table",
                param: "table",
                dtype: DType::F32,
                shape: &[RouterAxis::Own, RouterAxis::Model],
                meaning: "a row for each token id",
                tutel: Some("rows"),
                start: WeightStart::Constant(1.0),
            }],
            ..TABLE
        };
        for (def, shape, tutel) in [
            (&TABLE, [RouterAxis::Own, RouterAxis::TopK], None),
            (
                &WEIGHTED,
                [RouterAxis::Own, RouterAxis::Model],
                Some("rows"),
            ),
        ] {
            let weight = def.weight("router.table").unwrap();
            assert_eq!((weight.shape, weight.tutel), (&shape[..], tutel));
        }
    }

    /// The templates of both backends add one to what they project.
    #[test]
    fn a_projection_has_a_bias() {
        for def in RouterKind::ALL
            .into_iter()
            .filter_map(|kind| kind.def().logits)
        {
            let bias = format!("{}.bias", def.matrix);
            let has = def.own_bias && def.weights.iter().any(|weight| weight.name == bias);
            assert!(def.projected.is_none() || has, "{def:?}");
        }
    }

    #[test]
    fn own_sizes_are_read_and_needed() {
        for kind in RouterKind::ALL {
            let mut own = kind.def().weights().flat_map(|weight| weight.shape);
            let uses = own.any(|axis| *axis == RouterAxis::Own);
            assert_eq!(uses, kind.def().size.is_some(), "{kind:?}");
        }
    }
}
