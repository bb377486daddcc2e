//! Quantized rows: what an expert multiplies by its codes.

use moesaic_spec::format::code;
use moesaic_spec::{ActivationFormat, LayerSpec, WeightFormat};

/// The quantization of the rows of one GEMM.
#[derive(Clone, Copy, Debug)]
pub struct QuantizedRows {
    /// The codes; `None` where rows stay numbers.
    format: Option<ActivationFormat>,
    /// Elements of a group.
    group: usize,
}

impl QuantizedRows {
    /// Rows that stay numbers.
    pub const NUMBERS: QuantizedRows = QuantizedRows {
        format: None,
        group: 1,
    };

    /// Returns the rows of gate and up, and of down, of a layer's routed experts.
    pub fn routed(spec: &LayerSpec) -> [QuantizedRows; 2] {
        let precision = &spec.precision;
        [precision.experts, precision.down_format()].map(|weights| QuantizedRows {
            format: precision.expert_activations,
            group: weights.map_or(1, |format: WeightFormat| format.depth()),
        })
    }

    /// Returns what a row becomes: each group's codes times its scale, which are f32.
    pub fn of(&self, row: &[f64]) -> Vec<f64> {
        let Some(format) = self.format else {
            return row.to_vec();
        };
        let group = |group: &[f64]| coded(format, group);
        row.chunks(self.group).flat_map(group).collect()
    }
}

/// The magnitude below which all of a group are zeros.
const SMALLEST: f32 = f32::from_bits((127 - 100) << 23);

fn coded(format: ActivationFormat, group: &[f64]) -> Vec<f64> {
    let row = group.iter().map(|value| *value as f32);
    // Comparisons of bits, which put NaN above infinity.
    let largest = row.clone().map(|value| value.to_bits() & 0x7fff_ffff).max();
    let largest = f32::from_bits(largest.unwrap_or(0));
    if !largest.is_finite() {
        return vec![f64::NAN; group.len()];
    }
    if largest < SMALLEST {
        return vec![0.0; group.len()];
    }
    let (factor, scale) = (format.largest() / largest, largest / format.largest());
    let code = |value: f32| match format {
        ActivationFormat::Int8 => f64::from((value * factor).round_ties_even()),
        ActivationFormat::Fp8 => f64::from(code::nearest_e4m3(value * factor)),
    };
    row.map(|value| code(value) * f64::from(scale)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(format: ActivationFormat, row: &[f64]) -> Vec<f64> {
        let rows = QuantizedRows {
            format: Some(format),
            group: 4,
        };
        rows.of(row)
    }

    #[test]
    fn groups_have_scales_of_their_own() {
        let row = [1.27, -0.014, 0.5, 0.0, -254.0, 1.0, 3.0, 1e-3];
        let found = of(ActivationFormat::Int8, &row);
        let wanted = [1.27, -0.01, 0.5, 0.0, -254.0, 0.0, 4.0, 0.0];
        for (found, wanted) in found.iter().zip(wanted) {
            assert!((found - wanted).abs() < 1e-6, "{found} {wanted}");
        }
        let found = of(ActivationFormat::Fp8, &[448.0, 17.0, 0.01, -447.0]);
        assert_eq!(found, [448.0, 16.0, 0.009765625, -448.0]);
    }

    #[test]
    fn a_group_is_nan_or_zero_as_a_whole() {
        for format in [ActivationFormat::Int8, ActivationFormat::Fp8] {
            let found = of(
                format,
                &[1.0, f64::INFINITY, 0.0, 0.0, 1e-31, 0.0, 0.0, 0.0],
            );
            assert!(found[..4].iter().all(|value| value.is_nan()));
            assert_eq!(found[4..], [0.0; 4]);
        }
    }
}
