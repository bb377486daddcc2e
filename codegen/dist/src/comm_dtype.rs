//! The table of dtypes in which rows travel between nodes.

use moesaic_kernel::DType;
use serde::{Deserialize, Serialize};

/// The dtype of rows between nodes.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum CommDtype {
    /// No cast.
    #[default]
    #[serde(rename = "none")]
    Unchanged,
    /// IEEE half precision; larger values saturate and are counted.
    F16,
    /// bfloat16.
    Bf16,
    /// FP8 E4M3 with an f32 scale for each 128 numbers of a row.
    Fp8,
    /// MXFP8 of OCP MX v1.0: E4M3 with an E8M0 scale, a power of two, for each 32 numbers of a row.
    Mxfp8,
}

/// The scales of a dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommScales {
    /// The number of adjacent values of a row that share a scale: a power of two, at most 128,
    /// because the threads of a GPU that find a scale are of one warp.
    pub span: usize,
    /// The bytes of one scale.
    pub bytes: usize,
}

/// One row of [`COMM_DTYPES`].
#[derive(Clone, Copy, Debug)]
pub struct CommDtypeRow {
    /// The dtype.
    pub comm_dtype: CommDtype,
    /// Its name in the text of a strategy.
    pub name: &'static str,
    /// The dtype of rows that need no cast, because they have it already.
    pub same_as: Option<DType>,
    /// The bytes of one value; `None` where rows travel as they are.
    pub value_bytes: Option<usize>,
    /// The scales of a row; `None` where values have none.
    pub scales: Option<CommScales>,
    /// Whether values of a layer may leave its range, so that the kernels count them.
    pub saturates: bool,
}

/// The dtypes, in the order of [`CommDtype`].
pub const COMM_DTYPES: [CommDtypeRow; 5] = [
    CommDtypeRow {
        comm_dtype: CommDtype::Unchanged,
        name: "none",
        same_as: None,
        value_bytes: None,
        scales: None,
        saturates: false,
    },
    CommDtypeRow {
        comm_dtype: CommDtype::F16,
        name: "f16",
        same_as: Some(DType::F16),
        value_bytes: Some(2),
        scales: None,
        saturates: true,
    },
    CommDtypeRow {
        comm_dtype: CommDtype::Bf16,
        name: "bf16",
        same_as: Some(DType::Bf16),
        value_bytes: Some(2),
        scales: None,
        saturates: false,
    },
    CommDtypeRow {
        comm_dtype: CommDtype::Fp8,
        name: "fp8",
        same_as: None,
        value_bytes: Some(1),
        scales: Some(CommScales {
            span: 128,
            bytes: 4,
        }),
        saturates: false,
    },
    CommDtypeRow {
        comm_dtype: CommDtype::Mxfp8,
        name: "mxfp8",
        same_as: None,
        value_bytes: Some(1),
        scales: Some(CommScales { span: 32, bytes: 1 }),
        saturates: false,
    },
];

impl CommDtype {
    /// Returns the dtype's row of the table.
    #[doc(hidden)]
    pub fn row(self) -> &'static CommDtypeRow {
        &COMM_DTYPES[self as usize]
    }
}

impl CommDtypeRow {
    /// Returns whether rows of a dtype travel as they are.
    pub fn keeps(&self, rows: DType) -> bool {
        self.value_bytes.is_none() || self.same_as == Some(rows)
    }

    /// Returns the bytes of the values of a row of `width` values that have `size` bytes each in
    /// memory.
    pub fn values(&self, width: usize, size: usize) -> usize {
        width * self.value_bytes.unwrap_or(size)
    }

    /// Returns the bytes of the scales of a row of `width` values; the last scale serves what is
    /// left.
    pub fn scale_bytes(&self, width: usize) -> usize {
        let scales = self.scales.as_ref();
        scales.map_or(0, |scales| width.div_ceil(scales.span) * scales.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A wider span would be two scales on NVIDIA GPUs, and wrong without an error.
    #[test]
    fn scales_are_found_by_one_warp() {
        for scales in COMM_DTYPES.iter().filter_map(|row| row.scales) {
            assert!(
                scales.span.is_power_of_two() && scales.span <= 128,
                "{scales:?}"
            );
        }
    }

    #[test]
    fn every_dtype_has_its_own_row() {
        for (at, row) in COMM_DTYPES.iter().enumerate() {
            assert_eq!(row.comm_dtype as usize, at, "{}", row.name);
            let parsed: CommDtype = row.name.parse().unwrap();
            assert_eq!(parsed, row.comm_dtype);
            let json = serde_json::to_string(&row.comm_dtype).unwrap();
            assert_eq!(json, format!("\"{}\"", row.name));
        }
        assert_eq!(CommDtype::Mxfp8 as usize + 1, COMM_DTYPES.len());
    }

    #[test]
    fn bytes_of_a_row_are_those_of_values_and_scales() {
        let bytes = |comm_dtype: CommDtype| {
            let row = comm_dtype.row();
            [row.values(160, 4), row.scale_bytes(160)]
        };
        assert_eq!(bytes(CommDtype::Unchanged), [640, 0]);
        assert_eq!(bytes(CommDtype::Bf16), [320, 0]);
        assert_eq!(bytes(CommDtype::Fp8), [160, 8]);
        assert_eq!(bytes(CommDtype::Mxfp8), [160, 5]);
        assert!(
            CommDtype::Bf16.row().keeps(DType::Bf16) && !CommDtype::F16.row().keeps(DType::F32)
        );
    }
}
