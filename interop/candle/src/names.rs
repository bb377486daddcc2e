//! Weights under the names that other libraries give them.

use crate::host::{copied, named};
use candle_core::{Error, Result, Tensor};
use moesaic::spec::{TensorSpec, canonical_tensors};
use moesaic::tensor::{SourceError, WeightSource};
use moesaic::{DType, LayerSpec, Tensor as HostTensor};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;

/// The names of a layer's weights, below the MoE block of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Names {
    /// moesaic's own, such as `router.weight` and `experts.up.weight`, with all experts in one
    /// tensor.
    Canonical,
    /// Qwen2-MoE's, Qwen3-MoE's, OLMoE's and DeepSeek's: `gate.weight`,
    /// `experts.0.up_proj.weight`, `shared_expert.up_proj.weight`, `shared_expert_gate.weight`.
    Qwen,
    /// Mixtral's: `gate.weight`, `experts.0.w3.weight`.
    Mixtral,
}

/// The tensors behind a weight.
enum Parts {
    Whole(String),
    /// The name of each expert's tensor.
    PerExpert(Vec<String>),
}

impl Names {
    /// Returns the tensors of a canonical weight, `None` if these names have none.
    fn parts(self, tensor: &TensorSpec) -> Option<Parts> {
        let name = tensor.name.as_str();
        if self == Names::Canonical {
            return Some(Parts::Whole(name.to_string()));
        }
        let matrix = |part: &str| match (self, part) {
            (Names::Mixtral, "gate") => Some("w1"),
            (Names::Mixtral, "up") => Some("w3"),
            (Names::Mixtral, "down") => Some("w2"),
            (_, "gate") => Some("gate_proj"),
            (_, "up") => Some("up_proj"),
            (_, "down") => Some("down_proj"),
            _ => None,
        };
        if name == "router.weight" {
            return Some(Parts::Whole("gate.weight".to_string()));
        }
        let of = |prefix| matrix(name.strip_prefix(prefix)?.strip_suffix(".weight")?);
        if let Some(matrix) = of("experts.") {
            let each = 0..tensor.shape[0];
            let names = each.map(|expert| format!("experts.{expert}.{matrix}.weight"));
            return Some(Parts::PerExpert(names.collect()));
        }
        if self != Names::Qwen {
            return None;
        }
        if name == "shared.0.router.weight" {
            return Some(Parts::Whole("shared_expert_gate.weight".to_string()));
        }
        let matrix = of("shared.0.")?;
        Some(Parts::Whole(format!("shared_expert.{matrix}.weight")))
    }
}

/// A weight and the tensors behind it.
struct Weight {
    dtype: DType,
    shape: Vec<usize>,
    parts: Parts,
}

/// The weights of a layer, each read when the engine asks for it.
pub struct WeightsByName<G> {
    weights: BTreeMap<String, Weight>,
    get: G,
    /// The last tensor that was read, because the engine asks for some rows at a time.
    last: RefCell<Option<(String, Tensor)>>,
}

impl<G: Fn(&[usize], &str) -> Result<Tensor>> WeightsByName<G> {
    /// Finds the names of all weights of `spec`.
    ///
    /// # Errors
    /// `names` has no name for a weight.
    pub fn new(spec: &LayerSpec, names: Names, get: G) -> Result<WeightsByName<G>> {
        let mut weights = BTreeMap::new();
        for tensor in canonical_tensors(spec) {
            let Some(parts) = names.parts(&tensor) else {
                candle_core::bail!(
                    "`Names::{names:?}` has no name for `{}`, pass the weights by their canonical \
                     names",
                    tensor.name
                )
            };
            let weight = Weight {
                dtype: tensor.dtype,
                shape: tensor.shape,
                parts,
            };
            weights.insert(tensor.name, weight);
        }
        Ok(WeightsByName {
            weights,
            get,
            last: RefCell::default(),
        })
    }

    /// Reads a tensor, and checks its shape.
    fn read(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        let last = self.last.borrow().clone();
        if let Some((_, tensor)) = last.filter(|(last, _)| last == name) {
            return Ok(tensor);
        }
        let tensor = (self.get)(shape, name).map_err(|error| named(name, error))?;
        if tensor.dims() != shape {
            let found = tensor.dims();
            candle_core::bail!("`{name}` has shape {found:?}, expected {shape:?}");
        }
        *self.last.borrow_mut() = Some((name.to_string(), tensor.clone()));
        Ok(tensor)
    }

    fn some_rows(&self, weight: &Weight, rows: Range<usize>) -> Result<HostTensor<'static>> {
        let Weight {
            dtype,
            shape,
            parts,
        } = weight;
        match parts {
            Parts::Whole(name) => {
                let whole = self.read(name, shape)?;
                let part = match shape.first() {
                    Some(_) => whole.narrow(0, rows.start, rows.len())?,
                    None => whole,
                };
                let sizes = part.dims().to_vec();
                copied(&part, *dtype, &sizes).map_err(|error| named(name, error))
            }
            Parts::PerExpert(names) => {
                let name = &names[rows.start];
                let one = self.read(name, &shape[1..])?;
                let sizes = [&[1], &shape[1..]].concat();
                copied(&one, *dtype, &sizes).map_err(|error| named(name, error))
            }
        }
    }
}

impl<G: Fn(&[usize], &str) -> Result<Tensor>> WeightSource for WeightsByName<G> {
    fn describe(&self, name: &str) -> Option<(DType, Vec<usize>)> {
        let weight = self.weights.get(name)?;
        Some((weight.dtype, weight.shape.clone()))
    }

    fn rows(
        &self,
        name: &str,
        rows: Range<usize>,
    ) -> std::result::Result<HostTensor<'_>, SourceError> {
        let none = || SourceError::from(format!("the layer has no weight `{name}`"));
        let weight = self.weights.get(name).ok_or_else(none)?;
        // candle's errors name their cause and, with a backtrace, much else: the text is enough.
        let read = self.some_rows(weight, rows);
        read.map_err(|error: Error| SourceError::from(error.to_string()))
    }
}
