//! Gradients of weights in the form in which peers give theirs.

use crate::Result;
use crate::data::floats;
use moesaic::{DType, Layer};
use rayon::prelude::*;

/// The gradient of a weight times a fixed vector along its last dimension,
/// by the name that peers have: gate and up of each expert after one another.
///
/// # Errors
/// When there is none.
pub fn of(layer: &Layer, name: &str) -> Result<Vec<f32>> {
    if !name.contains(".gate_up.") {
        return Ok(projected(layer, name, 0)?.1);
    }
    let bias = name.ends_with(".bias");
    let (shape, gate) = projected(layer, &name.replace(".gate_up.", ".gate."), 0)?;
    // Of a bias both lie in the last dimension, of a weight before it.
    let first = if bias { shape[shape.len() - 1] } else { 0 };
    let (_, up) = projected(layer, &name.replace(".gate_up.", ".up."), first)?;
    if bias {
        return Ok(gate.iter().zip(&up).map(|(g, u)| g + u).collect());
    }
    let part = if name.starts_with("experts.") {
        gate.len() / shape[0]
    } else {
        gate.len()
    };
    let pairs = gate.chunks(part).zip(up.chunks(part));
    Ok(pairs.flat_map(|(g, u)| [g, u].concat()).collect())
}

/// With the vector from element `first` on.
fn projected(layer: &Layer, name: &str, first: usize) -> Result<(Vec<usize>, Vec<f32>)> {
    let tensor = layer.gradient(name)?;
    let width = *tensor.shape.last().unwrap_or(&1);
    let rows = tensor.data.par_chunks(width * 4);
    let dot = |row: &[u8]| {
        floats(row, DType::F32)
            .iter()
            .zip(first..)
            .map(spread)
            .sum()
    };
    Ok((tensor.shape.clone(), rows.map(dot).collect()))
}

/// A value times the vector's value at its place.
fn spread((value, at): (&f32, usize)) -> f32 {
    value * ((at * 7919 % 1000) as f32 / 1000.0 - 0.5)
}
