//! Compares a routing key with what a layer computes.

use super::config::Config;
use super::families::keys;
use crate::{Chooser, GroupStat, LayerSpec, Renormalize, Score};
use serde_json::Value;

/// A key with its value, and the layer to compare it with.
pub(super) struct Said<'a> {
    pub value: &'a Value,
    pub config: &'a Config,
    pub spec: &'a LayerSpec,
    /// The layer's index in the stack that the configuration describes, if known.
    pub layer: Option<usize>,
}

impl Said<'_> {
    /// Returns true if the flag has this value.
    pub fn is(&self, flag: bool) -> bool {
        self.value.as_bool() == Some(flag)
    }

    /// Returns true if a table of token ids chooses the experts.
    pub fn by_table(&self) -> bool {
        self.spec.router.kind.chooser() == Chooser::Table
    }

    /// Returns true if the number, or each one of a list, is accepted by `wanted`.
    pub fn numbers(&self, wanted: impl Fn(f64) -> bool) -> bool {
        match self.value {
            Value::Array(list) => list.iter().all(|n| n.as_f64().is_some_and(&wanted)),
            value => value.as_f64().is_some_and(&wanted),
        }
    }

    /// Returns a count of the layer without the experts that every token chooses, which
    /// configurations count apart.
    pub fn others(&self, count: usize) -> f64 {
        count.saturating_sub(self.spec.router.always_chosen) as f64
    }

    /// Returns true if the number is that of the experts per token.
    pub fn counts_top_k(&self) -> bool {
        self.numbers(|n| n == self.others(self.spec.shape.top_k))
    }

    /// Returns true if the number is above zero for a layer with shared experts, and zero for one
    /// without.
    pub fn counts_shared(&self) -> bool {
        let some = !self.spec.shared.is_empty() || self.spec.router.always_chosen > 0;
        self.numbers(|n| (n > 0.0) == some)
    }

    pub fn score(&self) -> bool {
        let score = self.spec.router.score;
        match self.value.as_str().unwrap_or_default() {
            "softmax" => matches!(score, Score::Softmax | Score::SoftmaxSelected),
            "sigmoid" => score == Score::Sigmoid,
            "sqrtsoftplus" => score == Score::SqrtSoftplus,
            // Some families' files put the method's name under this key.
            "noaux_tc" => score == Score::Sigmoid && self.spec.router.select_bias,
            _ => false,
        }
    }

    pub fn method(&self) -> bool {
        let router = &self.spec.router;
        let groups_by = |stat| {
            router
                .groups
                .as_ref()
                .is_none_or(|groups| groups.stat == stat)
        };
        let method = self.value.as_str().unwrap_or_default();
        match method {
            _ if self.by_table() => true,
            "greedy" => router.groups.is_none() && !router.select_bias,
            "group_limited_greedy" => !router.select_bias && groups_by(GroupStat::Max),
            "noaux_tc" => router.select_bias && groups_by(GroupStat::Top2Sum),
            _ => false,
        }
    }

    /// Returns true if weights sum to one: the softmax of the selected logits does so without a
    /// division.
    pub fn normalised(&self) -> bool {
        let router = &self.spec.router;
        let divided = router.renormalize != Renormalize::None;
        router.score == Score::SoftmaxSelected || self.is(divided)
    }

    /// Returns true if there is one group, or if no group is dropped.
    pub fn one_group(&self) -> bool {
        let number = |keys: [&str; 3]| keys.into_iter().find_map(|k| self.config.peek(k)?.as_f64());
        let count = number(["n_group", "num_expert_group", "num_expert_groups"]).unwrap_or(1.0);
        let keep = number(["topk_group", "num_limited_groups", "topk_group"]).unwrap_or(count);
        count <= 1.0 || keep >= count
    }

    pub fn grouped(&self, of: impl Fn(&crate::Groups) -> usize) -> bool {
        // Here the method, not the group count, says that groups are not used.
        let greedy = self
            .config
            .peek("topk_method")
            .is_some_and(|m| m == "greedy");
        match &self.spec.router.groups {
            Some(groups) => self.numbers(|n| n == of(groups) as f64),
            None => self.one_group() || greedy || self.by_table(),
        }
    }

    /// Returns true if `width` is that of one shared expert or of several merged, or if there is no
    /// shared expert.
    pub fn shared_width(&self, width: f64) -> bool {
        let widths = self
            .spec
            .shared
            .iter()
            .map(|expert| expert.hidden_dim as f64);
        let mut widths = widths.peekable();
        if width == 0.0 || widths.peek().is_none() {
            return (width == 0.0) == self.spec.shared.is_empty();
        }
        let count = keys::SHARED
            .iter()
            .find_map(|key| self.config.peek(key)?.as_f64());
        widths.all(|hidden| hidden == width || hidden == width * count.unwrap_or(1.0))
    }

    pub fn biased(&self) -> bool {
        let shared = 0..self.spec.shared.len();
        let none = self.spec.experts.bias == crate::Biases::None
            && shared
                .map(|i| self.spec.shared_bias(i))
                .all(|b| b == crate::Biases::None);
        self.is(!none)
    }

    /// Returns true if a number agrees that this layer has experts. A list of layer types overrides
    /// such numbers.
    pub fn placed(&self, has: impl Fn(usize, usize) -> bool) -> bool {
        let Some(layer) = self
            .layer
            .filter(|_| self.config.peek("mlp_layer_types").is_none())
        else {
            return true;
        };
        let number = self.value.as_u64().and_then(|n| usize::try_from(n).ok());
        number.is_some_and(|n| has(layer, n))
    }

    pub fn frequent(&self) -> bool {
        match (self.value, self.layer) {
            (Value::Array(list), Some(layer)) => list
                .get(layer)
                .and_then(Value::as_u64)
                .is_some_and(|n| n > 0),
            _ => self.placed(|layer, n| n > 0 && layer.is_multiple_of(n)),
        }
    }

    /// Returns true if a list of layers, as numbers or as text, contains this one.
    pub fn lists_layer(&self) -> bool {
        let Some(layer) = self.layer else {
            return false;
        };
        match self.value {
            Value::Array(list) => list.iter().any(|n| n.as_u64() == Some(layer as u64)),
            Value::String(text) => text.split(',').any(|n| n.trim().parse() == Ok(layer)),
            _ => false,
        }
    }
}
