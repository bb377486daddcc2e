//! Strided views, which apply the steps of a recipe without moving elements.

use moesaic_spec::hf::TensorStep;
use std::ops::Range;

/// The positions of a tensor's elements, counted in elements from its start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub shape: Vec<usize>,
    pub strides: Vec<usize>,
    pub start: usize,
}

impl Layout {
    /// Returns the layout of a row-major tensor.
    pub fn dense(shape: &[usize]) -> Layout {
        Layout {
            shape: shape.to_vec(),
            strides: dense_strides(shape),
            start: 0,
        }
    }

    /// Returns the layout after a step that reorders elements; other steps leave it unchanged. The
    /// error is the shape that the step needs.
    pub(crate) fn apply(mut self, step: &TensorStep) -> Result<Layout, String> {
        match step {
            TensorStep::Reshape(shape) => {
                let count = |shape: &[usize]| {
                    let sizes = shape.iter();
                    sizes.fold(1usize, |count, size| count.saturating_mul(*size))
                };
                let same = count(shape) == count(&self.shape);
                let moved = self.strides != dense_strides(&self.shape);
                if !same || moved || !regroups(&self.shape, shape) {
                    return Err(format!("{shape:?}, flat or not"));
                }
                Ok(Layout {
                    start: self.start,
                    ..Layout::dense(shape)
                })
            }
            TensorStep::Transpose => {
                let rank = self.shape.len();
                if rank < 2 {
                    return Err("at least two dimensions".to_string());
                }
                self.shape.swap(rank - 1, rank - 2);
                self.strides.swap(rank - 1, rank - 2);
                Ok(self)
            }
            TensorStep::Take {
                axis,
                start,
                step,
                count,
                of,
            } => {
                if self.shape.get(*axis) != Some(of) {
                    return Err(format!("{of} elements along dimension {axis}"));
                }
                self.start += start * self.strides[*axis];
                self.strides[*axis] *= step;
                self.shape[*axis] = *count;
                Ok(self)
            }
            TensorStep::Dequantize(_)
            | TensorStep::Factor(_)
            | TensorStep::MulColumns(_)
            | TensorStep::DivColumns(_)
            | TensorStep::Plus(_) => Ok(self),
        }
    }

    /// Returns some rows of the first dimension.
    pub fn rows(&self, rows: Range<usize>) -> Layout {
        let mut part = self.clone();
        if let (Some(size), Some(stride)) = (part.shape.first_mut(), self.strides.first()) {
            *size = rows.len();
            part.start += rows.start * stride;
        }
        part
    }

    /// Returns the range of the elements, if they are contiguous in row-major order.
    pub fn contiguous(&self) -> Option<Range<usize>> {
        let mut dense = 1;
        for (size, stride) in self.shape.iter().zip(&self.strides).rev() {
            if *size != 1 && *stride != dense {
                return None;
            }
            dense *= size;
        }
        Some(self.start..self.start + dense)
    }

    /// Returns the range from the first element to the last.
    pub fn span(&self) -> Range<usize> {
        let each = self.shape.iter().zip(&self.strides);
        let last: usize = each
            .map(|(size, stride)| size.saturating_sub(1) * stride)
            .sum();
        let empty = self.shape.contains(&0);
        self.start..self.start + if empty { 0 } else { last + 1 }
    }

    /// Returns sizes and strides of the two inner dimensions, padded with ones in front.
    pub fn inner(&self) -> ([usize; 2], [usize; 2]) {
        let last = |list: &[usize], back: usize, default: usize| {
            list.len().checked_sub(back).map_or(default, |i| list[i])
        };
        (
            [last(&self.shape, 2, 1), last(&self.shape, 1, 1)],
            [last(&self.strides, 2, 0), last(&self.strides, 1, 1)],
        )
    }

    /// Returns the start of each matrix of the two inner dimensions, in order.
    pub fn matrices(&self) -> Vec<usize> {
        let outer = self.shape.len().saturating_sub(2);
        let mut starts = vec![self.start];
        for (size, stride) in self.shape[..outer].iter().zip(&self.strides) {
            starts = starts
                .iter()
                .flat_map(|base| (0..*size).map(move |i| base + i * stride))
                .collect();
        }
        starts
    }
}

/// Returns true if two shapes with equal element counts differ only by joining or splitting
/// dimensions: `[E·h, d]` is `[E, h, d]`, but `[d, E·h]` is another tensor.
fn regroups(a: &[usize], b: &[usize]) -> bool {
    let bare = |shape: &[usize]| -> Vec<usize> {
        let sizes = shape.iter().copied();
        sizes.filter(|size| *size != 1).collect()
    };
    let (a, b) = (bare(a), bare(b));
    let (fine, coarse) = if a.len() < b.len() { (b, a) } else { (a, b) };
    let mut fine = fine.into_iter();
    coarse.into_iter().all(|size| {
        let mut product = 1usize;
        while product < size {
            match fine.next() {
                Some(part) if part > 0 => product = product.saturating_mul(part),
                _ => return false,
            }
        }
        // An empty dimension holds nothing whose order could be wrong.
        product == size || size == 0
    })
}

fn dense_strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1usize; shape.len()];
    for i in (1..shape.len()).rev() {
        // Sizes beside a zero may be huge, so saturate; no element uses these strides.
        strides[i - 1] = strides[i].saturating_mul(shape[i]);
    }
    strides
}
