//! Weights under the names that other libraries give them.

use crate::host::{copied, named};
use candle_core::{Error, Result, Tensor};
use moesaic::spec::{TensorSpec, canonical_tensors};
use moesaic::{DType, LayerSpec, SourceError, Tensor as HostTensor, WeightSource};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;

/// The names of a layer's weights, below the MoE block of a model. [`InferenceLayer::load`] lists
/// them.
///
/// [`InferenceLayer::load`]: crate::InferenceLayer::load
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Names {
    /// moesaic's own, such as `router.weight` and `experts.up.weight`, with all experts in one
    /// tensor.
    Canonical,
    /// Qwen2-MoE's, Qwen3-MoE's and OLMoE's: `gate.weight`, `experts.0.up_proj.weight`,
    /// `shared_expert.up_proj.weight`, `shared_expert_gate.weight`. DeepSeek's are the same but for
    /// shared experts.
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
    /// Whether a tensor could not be read.
    failed: Cell<bool>,
}

impl<G: Fn(&[usize], &str) -> Result<Tensor>> WeightsByName<G> {
    /// Finds the names of all weights of `spec`.
    ///
    /// # Errors
    /// `names` has no name for some weights.
    pub fn new(spec: &LayerSpec, names: Names, get: G) -> Result<WeightsByName<G>> {
        let (mut weights, mut unnamed) = (BTreeMap::new(), Vec::new());
        for tensor in canonical_tensors(spec) {
            let Some(parts) = names.parts(&tensor) else {
                unnamed.push(format!("`{}`", tensor.name));
                continue;
            };
            let weight = Weight {
                dtype: tensor.dtype,
                shape: tensor.shape,
                parts,
            };
            weights.insert(tensor.name, weight);
        }
        if !unnamed.is_empty() {
            candle_core::bail!(
                "`Names::{names:?}` has no name for {}: pass the weights by their canonical names",
                unnamed.join(", ")
            )
        }
        Ok(WeightsByName {
            weights,
            get,
            last: RefCell::default(),
            failed: Cell::default(),
        })
    }

    /// Returns one error with every tensor that cannot be read; `None` if no read has failed. The
    /// engine ends at the first, so this reads all tensors again, one at a time.
    pub fn every_error(&self) -> Option<Error> {
        if !self.failed.get() {
            return None;
        }
        let weights = self.weights.values();
        let lines: Vec<String> = weights.flat_map(|weight| self.errors(weight)).collect();
        match &lines[..] {
            [] => None,
            [one] => Some(Error::Msg(one.clone())),
            _ => {
                let list: String = lines.iter().map(|line| format!("\n  {line}")).collect();
                Some(Error::Msg(format!(
                    "weights are missing or do not fit:{list}"
                )))
            }
        }
    }

    /// Returns a line for a weight whose tensors cannot be read: experts share one.
    fn errors(&self, weight: &Weight) -> Option<String> {
        let (tensors, shape) = match &weight.parts {
            Parts::Whole(_) => (1, &weight.shape[..]),
            Parts::PerExpert(names) => (names.len(), &weight.shape[1..]),
        };
        let whole = 0..weight.shape.first().copied().unwrap_or(1);
        let wrong = (0..tensors).filter_map(|at| {
            let rows = match weight.parts {
                Parts::Whole(_) => whole.clone(),
                Parts::PerExpert(_) => at..at + 1,
            };
            Some((at, self.some_rows(weight, rows).err()?))
        });
        let mut wrong = wrong.collect::<Vec<_>>().into_iter();
        let (_, first) = wrong.next()?;
        let others: Vec<usize> = wrong.map(|(expert, _)| expert).collect();
        let others = match others.len() {
            0 => String::new(),
            1 => format!("; expert {} fails, too", others[0]),
            _ => format!("; experts {} fail, too", runs(&others)),
        };
        Some(format!("{first}, expected {shape:?}{others}"))
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
            return Err(Error::Msg(format!("`{name}`: has shape {found:?}")));
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
        read.map_err(|error: Error| {
            self.failed.set(true);
            SourceError::from(error.to_string())
        })
    }
}

/// Returns ascending numbers as runs: `1-3, 7`.
fn runs(numbers: &[usize]) -> String {
    let runs = numbers.chunk_by(|one, next| one + 1 == *next);
    let runs = runs.map(|run| match run {
        [first, .., last] => format!("{first}-{last}"),
        _ => run[0].to_string(),
    });
    runs.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table of `InferenceLayer::load` has a row for every weight that other names have.
    #[test]
    fn the_documentation_lists_the_names() {
        let page = include_str!("inference.rs");
        let spec = "shape = { model_dim = 8, hidden_dim = 4, experts = 2, top_k = 1 }
                    shared = [{ hidden_dim = 4, gate = \"sigmoid\" }]";
        let tensors = canonical_tensors(&LayerSpec::from_toml(spec).expect("a spec"));
        assert_eq!(tensors.len(), 8);
        for tensor in tensors {
            let cells = [Names::Canonical, Names::Qwen, Names::Mixtral].map(|names| {
                match names.parts(&tensor) {
                    Some(Parts::Whole(name)) => format!("`{name}`"),
                    Some(Parts::PerExpert(each)) => format!("`{}`", each[0].replace(".0.", ".E.")),
                    None => "–".to_string(),
                }
            });
            let row = format!("/// | {} |", cells.join(" | "));
            assert!(page.contains(&row), "{row}");
        }
    }
}
