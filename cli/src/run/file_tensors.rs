//! Tensors of input files: found by name, checked, and read in the layer's types.

use crate::failure::{Failure, Result};
use moesaic::weights::{Checkpoint, TensorRef};
use moesaic::{DType, Tensor};

/// Returns a tensor of a file by its name.
pub fn find<'a>(file: &'a Checkpoint, name: &str) -> Result<TensorRef<'a>> {
    file.tensor(name).ok_or_else(|| {
        let names: Vec<&str> = file.names().take(9).collect();
        let list = match names.len() {
            0 => "it is empty".to_string(),
            9 => format!("it has {} and more", names[..8].join(", ")),
            _ => format!("it has {}", names.join(", ")),
        };
        Failure::input(format!(
            "{} has no tensor `{name}`; {list}",
            file.path().display()
        ))
    })
}

/// Checks a shape and returns its first size. `None` stands for any size.
pub fn expect_shape(tensor: &TensorRef<'_>, sizes: &[Option<usize>], words: &str) -> Result<usize> {
    let fits = tensor.shape.len() == sizes.len()
        && tensor
            .shape
            .iter()
            .zip(sizes)
            .all(|(have, want)| want.is_none_or(|want| want == *have));
    if fits {
        return Ok(tensor.shape[0]);
    }
    let expected: Vec<String> = sizes
        .iter()
        .map(|size| size.map_or("tokens".to_string(), |n| n.to_string()))
        .collect();
    let failure = Failure::input(format!(
        "`{}` in {} has shape {:?}, expected [{}], which is {words}",
        tensor.name,
        tensor.file.display(),
        tensor.shape,
        expected.join(", ")
    ));
    if tensor.shape.len() > sizes.len()
        && tensor.shape.last() == sizes.last().and_then(Option::as_ref)
    {
        Err(failure.hint("flatten its outer dimensions into one"))
    } else {
        Err(failure)
    }
}

fn wrong_dtype(tensor: &TensorRef<'_>, expected: &str) -> Failure {
    let found = match tensor.dtype {
        Ok(dtype) => dtype.to_string(),
        Err(other) => format!("{other:?}").to_lowercase(),
    };
    Failure::input(format!(
        "`{}` in {} is {found}, expected {expected}",
        tensor.name,
        tensor.file.display()
    ))
}

/// Returns floats in the wanted type, without a copy if they have it.
pub fn floats<'a>(tensor: &TensorRef<'a>, wanted: DType) -> Result<Tensor<'a>> {
    let wrong = || wrong_dtype(tensor, "f32, f16 or bf16");
    let held = tensor.tensor().map_err(|_| wrong())?;
    match held.dtype {
        DType::I32 | DType::I64 => Err(wrong()),
        dtype if dtype == wanted => Ok(held),
        _ => Ok(convert(&held, wanted)),
    }
}

/// The number of values converted at a time, because a file may be much larger than the spare
/// memory.
const PIECE: usize = 1 << 20;

fn convert(tensor: &Tensor<'_>, wanted: DType) -> Tensor<'static> {
    let mut converted = Tensor::zeros(wanted, &tensor.shape);
    let from = tensor.data.chunks(PIECE * tensor.dtype.size());
    let to = converted.data.to_mut().chunks_mut(PIECE * wanted.size());
    for (from, to) in from.zip(to) {
        let piece = Tensor {
            dtype: tensor.dtype,
            shape: vec![from.len() / tensor.dtype.size()],
            data: from.into(),
        };
        to.copy_from_slice(&Tensor::rounded(wanted, &piece.shape, &piece.to_f32()).data);
    }
    converted
}

/// Counts infinite values.
pub fn infinite(tensor: &Tensor<'_>) -> usize {
    let pieces = tensor.data.chunks(PIECE * tensor.dtype.size());
    let piece = |from: &[u8]| {
        let piece = Tensor {
            dtype: tensor.dtype,
            shape: vec![from.len() / tensor.dtype.size()],
            data: from.into(),
        };
        piece.to_f32().iter().filter(|v| v.is_infinite()).count()
    };
    pieces.map(piece).sum()
}

/// Returns numbers of tokens, which are i64.
pub fn counts<'a>(tensor: &TensorRef<'a>) -> Result<Tensor<'a>> {
    match tensor.tensor() {
        Ok(held) if held.dtype == DType::I64 => Ok(held),
        _ => Err(wrong_dtype(tensor, "i64")),
    }
}

/// Returns a mask as i32. Any value but zero counts as set.
pub fn mask_of<'a>(tensor: &TensorRef<'a>) -> Result<Tensor<'a>> {
    let held = tensor.tensor().ok();
    let wide = held.as_ref().and_then(|held| held.values::<i64>());
    let Some(wide) = wide else {
        return integers(tensor);
    };
    let bits = wide.iter().map(|value| i32::from(*value != 0)).collect();
    Ok(Tensor::owned(tensor.shape, bits))
}

/// Returns integers as i32, which is the type of all integers in the layer.
pub fn integers<'a>(tensor: &TensorRef<'a>) -> Result<Tensor<'a>> {
    let wrong = || wrong_dtype(tensor, "i32 or i64");
    let held = tensor.tensor().map_err(|_| wrong())?;
    match (held.dtype, held.values::<i64>()) {
        (DType::I32, _) => Ok(held),
        (_, Some(values)) => {
            let narrow = |(at, value): (usize, &i64)| {
                i32::try_from(*value).map_err(|_| {
                    Failure::input(format!(
                        "`{}` in {} has {value} at element {at}, which no i32 can be",
                        tensor.name,
                        tensor.file.display()
                    ))
                })
            };
            let values = values.iter().enumerate().map(narrow);
            Ok(Tensor::owned(&held.shape, values.collect::<Result<_>>()?))
        }
        _ => Err(wrong()),
    }
}
