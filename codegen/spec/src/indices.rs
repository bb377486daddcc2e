//! The numbers of tensors that kernels take for indices.

use crate::LayerSpec;
use std::ops::RangeInclusive;

/// A number that kernels would take for an index outside their tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("has {found} at element {at}, expected {least}..={most}")]
pub struct IndexError {
    /// The number.
    pub found: i32,
    /// Its place among the tensor's elements.
    pub at: usize,
    /// The least number that callers may give.
    pub least: i32,
    /// The greatest.
    pub most: i32,
}

impl LayerSpec {
    /// Checks the numbers of a tensor that a caller gives, an input or a weight, by its canonical
    /// name. One that has no indices is never refused.
    ///
    /// # Errors
    /// The first number out of range.
    pub fn check_indices(&self, name: &str, numbers: &[i32]) -> Result<(), IndexError> {
        let Some(range) = self.indices(name) else {
            return Ok(());
        };
        match numbers.iter().position(|number| !range.contains(number)) {
            None => Ok(()),
            Some(at) => Err(IndexError {
                found: numbers[at],
                at,
                // Ids below -1 come from a training pass of this library alone, so the message does
                // not offer them.
                least: *range.start().max(&-1),
                most: *range.end(),
            }),
        }
    }

    /// Returns whether a tensor has numbers that kernels take for indices.
    pub fn has_indices(&self, name: &str) -> bool {
        self.indices(name).is_some()
    }

    fn indices(&self, name: &str) -> Option<RangeInclusive<i32>> {
        let experts = self.routed_experts() as i32;
        Some(match name {
            "token_ids" => 0..=self.router.table_rows.unwrap_or(0) as i32 - 1,
            // Below -1: a second expert that training let go.
            "topk_ids" => -1 - experts..=experts - 1,
            "router.table" => 0..=experts - 1,
            "active_k" => 0..=self.shape.top_k as i32,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_out_of_range_are_named() {
        let text = "shape = { model_dim = 8, hidden_dim = 16, experts = 4, top_k = 2 }";
        let spec = LayerSpec::from_toml(text).unwrap();
        assert_eq!(spec.check_indices("topk_ids", &[-5, -1, 3]), Ok(()));
        let error = spec.check_indices("topk_ids", &[0, -6]).unwrap_err();
        assert_eq!(error.to_string(), "has -6 at element 1, expected -1..=3");
        assert!(spec.check_indices("router.table", &[-1]).is_err());
        assert!(spec.check_indices("active_k", &[3]).is_err());
        assert_eq!(spec.check_indices("counts", &[99]), Ok(()));
        assert!(spec.has_indices("token_ids") && !spec.has_indices("x"));
    }
}
