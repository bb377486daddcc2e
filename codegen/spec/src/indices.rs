//! The numbers of tensors that kernels take for indices.

use crate::LayerSpec;

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

/// The range of the numbers of a tensor that kernels take for indices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexRange {
    /// The least number that callers may give.
    pub least: i32,
    /// The greatest.
    pub most: i32,
    /// The least number that kernels take. A training pass of this library writes ids below
    /// `least`, and its caller may hand them on.
    lowest: i32,
}

impl IndexRange {
    /// Checks the numbers of a tensor.
    ///
    /// # Errors
    /// The first number out of range.
    pub fn check(&self, numbers: &[i32]) -> Result<(), IndexError> {
        let IndexRange {
            least,
            most,
            lowest,
        } = *self;
        let range = lowest..=most;
        match numbers.iter().position(|number| !range.contains(number)) {
            None => Ok(()),
            Some(at) => Err(IndexError {
                found: numbers[at],
                at,
                least,
                most,
            }),
        }
    }
}

impl LayerSpec {
    /// Returns the range of the indices in a tensor that a caller gives, an input or a weight, by
    /// its canonical name; `None` for a tensor of other numbers.
    pub fn indices(&self, name: &str) -> Option<IndexRange> {
        let experts = self.routed_experts() as i32;
        let range = |least: i32, most: i32| IndexRange {
            least,
            most,
            lowest: least,
        };
        Some(match name {
            "token_ids" => range(0, self.router.table_rows.unwrap_or(0) as i32 - 1),
            "topk_ids" => IndexRange {
                // Below -1: a second expert that training let go.
                lowest: -1 - experts,
                ..range(-1, experts - 1)
            },
            "router.table" => range(0, experts - 1),
            "active_k" => range(0, self.shape.top_k as i32),
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
        let check = |name: &str, numbers: &[i32]| spec.indices(name).unwrap().check(numbers);
        assert_eq!(check("topk_ids", &[-5, -1, 3]), Ok(()));
        let error = check("topk_ids", &[0, -6]).unwrap_err();
        assert_eq!(error.to_string(), "has -6 at element 1, expected -1..=3");
        assert!(check("router.table", &[-1]).is_err());
        assert!(check("active_k", &[3]).is_err());
        assert!(spec.indices("token_ids").is_some());
        assert_eq!((spec.indices("counts"), spec.indices("x")), (None, None));
    }
}
