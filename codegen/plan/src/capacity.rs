//! What a call tells the scan of its capacity factor.

use moesaic_spec::LayerSpec;

/// The scalar `row_limit` of `expert_scan_offsets`, for a factor by Tutel's
/// formula. From zero on it is the rows of an expert, `K·int(f·ceil(T/E))`; below
/// zero `!limit` are the most, and an expert has the largest count where that is
/// less. `align` is applied to both on the device.
pub fn row_limit(spec: &LayerSpec, factor: f64, tokens: u64) -> i64 {
    let share = tokens.div_ceil(spec.shape.experts as u64) as f64;
    let rows = spec.shape.top_k as i64 * (factor.abs() * share) as i64;
    match factor {
        0.0 => i64::MIN,
        f if f < 0.0 => !rows,
        _ => rows,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_tutels() {
        let text = r#"{"shape":{"model_dim":8,"hidden_dim":8,"experts":8,"top_k":2}}"#;
        let spec: LayerSpec = serde_json::from_str(text).unwrap();
        let limit = |factor| row_limit(&spec, factor, 100);
        assert_eq!([1.0, 1.25, 0.3].map(limit), [26, 32, 6]);
        assert_eq!([-1.0, -1.25].map(limit), [!26, !32]);
        assert_eq!([0.0, -0.0].map(limit), [i64::MIN; 2]);
        assert_eq!(!limit(0.0), i64::MAX);
        assert_eq!(row_limit(&spec, 1.0, 0), 0);
    }
}
