//! Nested fixed-size arrays as tensors: `[[f32; 64]; 8]` is an f32 tensor of shape `[8, 64]`, and
//! every other shape is another type.

use half::{bf16, f16};
use moesaic_tensor::Element;
use std::panic::Location;

/// A tensor with its shape and element type in its Rust type: an [`Element`], or an array of
/// smaller tensors. Row major, without gaps.
pub trait Array: Copy + sealed::Sealed + 'static {
    /// The scalar type.
    type Element: Element;

    /// The number of scalars.
    const ELEMENTS: usize;

    /// Returns the sizes, outermost first; empty for a scalar.
    fn shape() -> Vec<usize>;

    /// Views scalars as consecutive tensors. `None` if the last one would be incomplete.
    fn cast(elements: &[Self::Element]) -> Option<&[Self]>;

    /// Views consecutive tensors as their scalars.
    fn flatten(arrays: &[Self]) -> &[Self::Element];
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! scalars {
    ($($scalar:ty),*) => {$(
        impl sealed::Sealed for $scalar {}

        impl Array for $scalar {
            type Element = $scalar;
            const ELEMENTS: usize = 1;

            fn shape() -> Vec<usize> {
                Vec::new()
            }

            fn cast(elements: &[$scalar]) -> Option<&[$scalar]> {
                Some(elements)
            }

            fn flatten(arrays: &[$scalar]) -> &[$scalar] {
                arrays
            }
        }
    )*};
}

scalars!(f32, f16, bf16, i32, i64);

impl<A: Array, const N: usize> sealed::Sealed for [A; N] {}

impl<A: Array, const N: usize> Array for [A; N] {
    type Element = A::Element;
    const ELEMENTS: usize = N * A::ELEMENTS;

    fn shape() -> Vec<usize> {
        [vec![N], A::shape()].concat()
    }

    fn cast(elements: &[A::Element]) -> Option<&[[A; N]]> {
        let (chunks, rest) = A::cast(elements)?.as_chunks::<N>();
        rest.is_empty().then_some(chunks)
    }

    fn flatten(arrays: &[[A; N]]) -> &[A::Element] {
        A::flatten(arrays.as_flattened())
    }
}

/// The error of a flat slice whose length does not fit the wanted shape.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{at}: {found} elements do not make {wanted}")]
#[non_exhaustive]
pub struct ShapeError {
    /// Length of the slice.
    pub found: usize,
    /// The wanted shape, and its number of elements.
    pub wanted: String,
    /// The place of the call.
    pub at: &'static Location<'static>,
}

/// Views a flat slice as one tensor; the context gives the shape.
///
/// ```
/// # mod moesaic { pub use moesaic_typed as typed; }
/// use moesaic::typed::tensor;
///
/// let flat = vec![0.5f32; 8 * 64];
/// let weight: &[[f32; 64]; 8] = tensor(&flat)?;
/// assert!(tensor::<[[f32; 64]; 9]>(&flat).is_err());
/// # Ok::<(), moesaic::typed::ShapeError>(())
/// ```
///
/// # Errors
/// If the slice is too short or too long.
#[track_caller]
pub fn tensor<A: Array>(elements: &[A::Element]) -> Result<&A, ShapeError> {
    match A::cast(elements) {
        Some([array]) => Ok(array),
        _ => Err(ShapeError {
            found: elements.len(),
            wanted: format!(
                "a tensor of shape {:?}, which takes {}",
                A::shape(),
                A::ELEMENTS
            ),
            at: Location::caller(),
        }),
    }
}

/// Views a flat slice as rows, one per token: `[f32; 64]` is a row of 64.
///
/// ```
/// # mod moesaic { pub use moesaic_typed as typed; }
/// use moesaic::typed::rows;
///
/// let flat = vec![0.5f32; 5 * 64];
/// let x: &[[f32; 64]] = rows(&flat)?;
/// assert_eq!(x.len(), 5);
/// # Ok::<(), moesaic::typed::ShapeError>(())
/// ```
///
/// # Errors
/// If the length is not a multiple of the row's.
#[track_caller]
pub fn rows<A: Array>(elements: &[A::Element]) -> Result<&[A], ShapeError> {
    A::cast(elements).ok_or_else(|| ShapeError {
        found: elements.len(),
        wanted: format!("whole rows of {}", A::ELEMENTS),
        at: Location::caller(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_keep_row_major_order() {
        let flat: Vec<i32> = (0..24).collect();
        let view: &[[[i32; 4]; 3]; 2] = tensor(&flat).unwrap();
        assert_eq!(view[1][2], [20, 21, 22, 23]);
        assert_eq!(<[[[i32; 4]; 3]; 2]>::shape(), [2, 3, 4]);
        assert_eq!(Array::flatten(std::slice::from_ref(view)), flat);
    }

    #[test]
    fn a_wrong_length_is_named_with_its_place() {
        let flat = [0i64; 7];
        let error = tensor::<[[i64; 4]; 2]>(&flat).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("array.rs:"), "{text}");
        assert!(text.ends_with("7 elements do not make a tensor of shape [2, 4], which takes 8"));
        let text = rows::<[i64; 4]>(&flat).unwrap_err().to_string();
        assert!(
            text.ends_with("7 elements do not make whole rows of 4"),
            "{text}"
        );
        assert!(
            tensor::<[i64; 7]>(&[0; 14]).is_err(),
            "twice as many is wrong too"
        );
        assert!(tensor::<[i64; 7]>(&[]).is_err());
        assert_eq!(rows::<[i64; 4]>(&[]).unwrap().len(), 0);
    }
}
