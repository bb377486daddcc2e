//! Owned, borrowed and mapped tensors look alike to their readers.

use half::{bf16, f16};
use moesaic_kernel::DType;
use moesaic_tensor::{
    Bytes, Map, Tensor, TensorError, Tensors, WeightSource, read_float, round_float, write_f32s,
    write_float,
};
use std::io::Write;
use std::sync::Arc;

/// Maps a file of these bytes.
fn mapped(bytes: &[u8]) -> Arc<Map> {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    Arc::new(Map::new(&file).unwrap())
}

fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|i| i as f32 - 2.5).collect()
}

#[test]
fn bytes_are_the_same_wherever_they_lie() {
    let values = numbers(12);
    let raw: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let map = mapped(&[&[7u8; 3][..], &raw, &[9]].concat());
    let of = |data| Tensor {
        dtype: DType::F32,
        shape: vec![3, 4],
        data,
    };
    let owned = Tensor::owned(&[3, 4], values.clone());
    let kinds = [
        of(Bytes::from(&raw[..])),
        of(Bytes::mapped(&map, 3..51)),
        owned.lend(),
        of(Bytes::mapped(&map, 3..51)).into_static(),
    ];
    for tensor in kinds {
        assert_eq!(tensor, owned);
        assert_eq!(tensor.values::<f32>().unwrap(), values);
        assert_eq!(tensor.values::<i32>(), None);
        assert_eq!(tensor.to_vec::<f32>().unwrap(), values);
        assert_eq!(tensor.to_f64()[11], 8.5);
        let rows = tensor.rows(1..3).unwrap();
        assert_eq!(rows.shape, [2, 4]);
        assert_eq!(rows.to_f32(), values[4..]);
        tensor.data.release();
        assert_eq!(tensor, owned, "a file's bytes come back");
        let mut changed = tensor.clone();
        changed.values_mut::<f32>().unwrap()[0] = 4.0;
        assert_eq!(changed.to_f32()[0], 4.0);
        assert_eq!(tensor, owned, "who writes to what is not his gets a copy");
    }
}

#[test]
fn pages_of_a_file_are_given_back() {
    let map = mapped(&vec![3u8; 1 << 20]);
    let whole = Bytes::mapped(&map, 0..1 << 20);
    assert!(whole.iter().all(|b| *b == 3));
    #[cfg(target_os = "linux")]
    let held = resident(&whole);
    whole.release();
    #[cfg(target_os = "linux")]
    assert_eq!((held, resident(&whole)), (1 << 10, 0), "kB in memory");
    assert!(whole.part(5..70_000).unwrap().iter().all(|b| *b == 3));
    assert!(whole.is_mapped());
    assert!(whole.part(0..(1 << 20) + 1).is_none());
}

/// Returns the kilobytes in memory of the mapping that begins with these bytes.
#[cfg(target_os = "linux")]
fn resident(bytes: &[u8]) -> usize {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let start = format!("{:x}-", bytes.as_ptr() as usize);
    let mut lines = maps.lines().skip_while(|line| !line.starts_with(&start));
    let line = lines.find_map(|line| line.strip_prefix("Rss:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn values_are_rounded_to_nearest() {
    let values = [1.0f32, 1.0 + 1.0 / 512.0, -3.1];
    let half = Tensor::rounded(DType::Bf16, &[3], &values);
    let expected = values.map(bf16::from_f32);
    assert_eq!(half.to_vec::<bf16>().unwrap(), expected);
    let half = Tensor::rounded(DType::F16, &[3], &values);
    assert_eq!(half.to_vec::<f16>().unwrap(), values.map(f16::from_f32));
    assert_eq!(Tensor::rounded(DType::F32, &[3], &values).to_f32(), values);
}

#[test]
fn what_does_not_fit_is_said() {
    let tensor = Tensor::zeros(DType::I32, &[3, 2]);
    let said =
        |found: Result<Tensor<'_>, TensorError>| found.expect_err("it cannot be").to_string();
    assert_eq!(said(tensor.rows(2..4)), "has 3 rows, not those of 2..4");
    let short = Tensor {
        shape: vec![4, 2],
        ..tensor.clone()
    };
    assert_eq!(said(short.rows(0..1)), "has 24 bytes, its shape needs 32");
    let other = tensor.check(DType::F32, &[3, 2]);
    let expected = TensorError::DType {
        found: DType::I32,
        wanted: DType::F32,
    };
    assert_eq!(other.expect_err("a type"), expected);
    let other = tensor.check(DType::I32, &[6]);
    let expected = "has shape [3, 2], expected [6]";
    assert_eq!(other.expect_err("a shape").to_string(), expected);
}

#[test]
fn tensors_by_name_are_a_source_of_weights() {
    let values = numbers(6);
    let weights = Tensors::new().with("a", &[3, 2], &values);
    assert_eq!(weights.describe("a"), Some((DType::F32, vec![3, 2])));
    assert_eq!(weights.describe("b"), None);
    assert_eq!(weights.rows("a", 1..2).unwrap().to_f32(), values[2..4]);
    let missing = weights.rows("b", 0..1).expect_err("there is none");
    assert_eq!(missing.to_string(), "there is no tensor `b`");
}

/// The cases are an f32 above the middle of two bf16s by less than the upper half of an f64's bits
/// can express, one in the middle, and one just below.
#[test]
fn the_nearest_number_is_stored() {
    for (bits, expected) in [
        (0x3f80_8001, 0x3f81u16),
        (0x3f80_8000, 0x3f80),
        (0x3f80_7fff, 0x3f80),
        (0x3f81_7fff, 0x3f81),
        (0x3f81_8000, 0x3f82),
    ] {
        let value = f64::from(f32::from_bits(bits));
        let mut stored = [0; 2];
        write_float(DType::Bf16, value, &mut stored);
        assert_eq!(u16::from_le_bytes(stored), expected, "{bits:x}");
        assert_eq!(
            read_float(DType::Bf16, &stored),
            round_float(DType::Bf16, value)
        );
        assert_eq!(bf16::from_f32(value as f32).to_bits(), expected, "{bits:x}");
    }
}

/// Storing many floats equals storing each alone, for halves of a step, overflows, subnormals and
/// NaN.
#[test]
fn many_floats_are_stored_as_one() {
    let some = (0..u32::MAX).step_by(65_537 * 3).map(f32::from_bits);
    let halves = (0..1000u32).map(|i| f32::from_bits(0x3f80_0000 + (i << 11)));
    let values: Vec<f32> = some.chain(halves).collect();
    for dtype in [DType::F32, DType::F16, DType::Bf16, DType::I32, DType::I64] {
        let mut stored = vec![0; values.len() * dtype.size()];
        write_f32s(dtype, &values, &mut stored);
        for (value, found) in values.iter().zip(stored.chunks(dtype.size())) {
            let mut one = vec![0; dtype.size()];
            write_float(dtype, f64::from(*value), &mut one);
            let [found, one] = [found, &one].map(|bytes| read_float(dtype, bytes));
            let same = found.to_bits() == one.to_bits() || found.is_nan() && one.is_nan();
            assert!(same, "{value:e} as {dtype}: {found:e}, {one:e}");
        }
    }
}
