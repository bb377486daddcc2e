//! Tensor maps: the rules of `cuTensorMapEncodeTiled` (CUDA driver API), and
//! its call. The driver answers every broken rule with the same code, so this
//! module checks them first.

use crate::driver::DriverTable;
use moesaic_kernel::{DType, Swizzle, TensorMap};
use moesaic_target::gpu::{TensorMapError, VendorError};
use moesaic_target::{MAP_BYTES, MapBytes, Ptr};

/// Bytes that addresses, strides and boxes are multiples of.
const UNIT: u64 = 16;
const MOST_BOX: u32 = 256;
const MOST_SIZE: u64 = 1 << 32;
const MOST_STRIDE: u64 = 1 << 40;

/// Asks L2 for 256 bytes at a time, because tiles are read whole.
const PROMOTE_256: u32 = 3;

/// Writes zeros where a box reaches beyond the tensor.
const FILL_ZERO: u32 = 0;

/// A valid map in the driver's form.
#[derive(Debug, PartialEq)]
struct Tiled {
    data_type: u32,
    rank: u32,
    sizes: [u64; 5],
    /// Bytes from one element to the next, for every dimension but the first.
    strides: [u64; 4],
    tile: [u32; 5],
    swizzle: u32,
}

/// Storage of a map, aligned as drivers for CUDA 13 require.
#[repr(align(128))]
struct Room(MapBytes);

/// Encodes a map. `table` is the driver of a GPU with tensor maps, `None` for one without.
pub(super) fn encode(
    table: Option<&DriverTable>,
    map: &TensorMap,
    base: Ptr,
    sizes: [u64; 5],
) -> Result<MapBytes, VendorError> {
    let refused = |problem: String| {
        VendorError::TensorMap(Box::new(TensorMapError {
            map: *map,
            base,
            sizes,
            problem,
        }))
    };
    let tiled = check(map, base, &sizes).map_err(refused)?;
    let encoder = table.and_then(|table| Some((table, table.own.encode_tiled?)));
    let Some((table, encode)) = encoder else {
        let problem = "it needs sm_90 or later and a driver for CUDA 12.0 or later";
        return Err(refused(problem.to_string()));
    };
    let (ones, mut room) = ([1; 5], Room([0; MAP_BYTES]));
    // SAFETY: the map is written to 128 aligned bytes; the arrays hold at
    // least `rank` elements; the address is only put into the map.
    let code = unsafe {
        encode(
            room.0.as_mut_ptr().cast(),
            tiled.data_type,
            tiled.rank,
            base.0 as *mut _,
            tiled.sizes.as_ptr(),
            tiled.strides.as_ptr(),
            tiled.tile.as_ptr(),
            ones.as_ptr(),
            0,
            tiled.swizzle,
            PROMOTE_256,
            FILL_ZERO,
        )
    };
    match code {
        0 => Ok(room.0),
        code => Err(refused(table.words(code))),
    }
}

fn check(map: &TensorMap, base: Ptr, sizes: &[u64; 5]) -> Result<Tiled, String> {
    let rank = usize::from(map.rank);
    if !(1..=5).contains(&rank) {
        return Err(format!("rank {rank} is not 1 to 5"));
    }
    if !base.0.is_multiple_of(UNIT) {
        return Err(format!("the address is not a multiple of {UNIT}"));
    }
    check_box(map, rank)?;
    for (i, size) in sizes[..rank].iter().enumerate() {
        if !(1..=MOST_SIZE).contains(size) {
            return Err(format!("size {size} of dimension {i} is not 1 to 2^32"));
        }
    }
    Ok(Tiled {
        data_type: data_type(map.dtype),
        rank: u32::from(map.rank),
        sizes: *sizes,
        strides: strides(map.dtype, rank, sizes)?,
        tile: map.tile,
        swizzle: swizzle(map.swizzle).0,
    })
}

fn check_box(map: &TensorMap, rank: usize) -> Result<(), String> {
    for (i, tile) in map.tile[..rank].iter().enumerate() {
        if !(1..=MOST_BOX).contains(tile) {
            return Err(format!(
                "the box's size {tile} of dimension {i} is not 1 to {MOST_BOX}"
            ));
        }
    }
    let bytes = u64::from(map.tile[0]) * map.dtype.size() as u64;
    if !bytes.is_multiple_of(UNIT) {
        return Err(format!(
            "a row of the box has {bytes} bytes, not a multiple of {UNIT}"
        ));
    }
    match swizzle(map.swizzle).1 {
        Some(most) if bytes > most => Err(format!(
            "a row of the box has {bytes} bytes, and the swizzle allows {most}"
        )),
        _ => Ok(()),
    }
}

/// Returns the strides of a dense row-major tensor in bytes.
fn strides(dtype: DType, rank: usize, sizes: &[u64; 5]) -> Result<[u64; 4], String> {
    let (mut strides, mut stride) = ([0; 4], dtype.size() as u64);
    for i in 0..rank - 1 {
        stride = stride.saturating_mul(sizes[i]);
        if !stride.is_multiple_of(UNIT) {
            return Err(format!(
                "the stride of dimension {} is {stride} bytes, not a multiple of {UNIT}",
                i + 1
            ));
        }
        if stride >= MOST_STRIDE {
            return Err(format!(
                "the stride of dimension {} is {stride} bytes, not less than 2^40",
                i + 1
            ));
        }
        strides[i] = stride;
    }
    Ok(strides)
}

fn data_type(dtype: DType) -> u32 {
    match dtype {
        DType::I32 => 3,
        DType::I64 => 5,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::Bf16 => 9,
    }
}

/// Returns the driver's number, and the bytes that it allows for a row of the
/// box.
fn swizzle(swizzle: Swizzle) -> (u32, Option<u64>) {
    match swizzle {
        Swizzle::None => (0, None),
        Swizzle::B32 => (1, Some(32)),
        Swizzle::B64 => (2, Some(64)),
        Swizzle::B128 => (3, Some(128)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moesaic_kernel::Access;

    fn map(dtype: DType, tile: &[u32], swizzle: Swizzle) -> TensorMap {
        let mut all = [1; 5];
        all[..tile.len()].copy_from_slice(tile);
        TensorMap {
            dtype,
            access: Access::Read,
            rank: tile.len() as u8,
            tile: all,
            swizzle,
        }
    }

    fn refusal(map: TensorMap, base: u64, sizes: [u64; 5]) -> String {
        check(&map, Ptr(base), &sizes).unwrap_err()
    }

    #[test]
    fn a_map_becomes_what_the_driver_wants() {
        let weights = map(DType::Bf16, &[64, 128, 1], Swizzle::B128);
        let tiled = check(&weights, Ptr(4096), &[2048, 768, 128, 1, 1]).unwrap();
        let expected = Tiled {
            data_type: 9,
            rank: 3,
            sizes: [2048, 768, 128, 1, 1],
            strides: [4096, 4096 * 768, 0, 0],
            tile: [64, 128, 1, 1, 1],
            swizzle: 3,
        };
        assert_eq!(tiled, expected);
        let line = map(DType::F32, &[256], Swizzle::None);
        assert_eq!(check(&line, Ptr(16), &[7, 1, 1, 1, 1]).unwrap().rank, 1);
    }

    #[test]
    fn each_rule_is_named() {
        let good = map(DType::Bf16, &[64, 8], Swizzle::B128);
        let sizes = [128, 100, 1, 1, 1];
        assert!(check(&good, Ptr(0x100), &sizes).is_ok());
        let check = |got: String, expected: &str| assert_eq!(got, expected);
        check(
            refusal(good, 0x108, sizes),
            "the address is not a multiple of 16",
        );
        check(
            refusal(good, 0, [100, 100, 1, 1, 1]),
            "the stride of dimension 1 is 200 bytes, not a multiple of 16",
        );
        check(
            refusal(good, 0, [128, 0, 1, 1, 1]),
            "size 0 of dimension 1 is not 1 to 2^32",
        );
        check(
            refusal(good, 0, [128, (1 << 32) + 1, 1, 1, 1]),
            "size 4294967297 of dimension 1 is not 1 to 2^32",
        );
        check(
            refusal(map(DType::Bf16, &[72, 8], Swizzle::B128), 0, sizes),
            "a row of the box has 144 bytes, and the swizzle allows 128",
        );
        check(
            refusal(map(DType::F32, &[12, 8], Swizzle::B32), 0, sizes),
            "a row of the box has 48 bytes, and the swizzle allows 32",
        );
        check(
            refusal(map(DType::F16, &[4, 8], Swizzle::None), 0, sizes),
            "a row of the box has 8 bytes, not a multiple of 16",
        );
        check(
            refusal(map(DType::F16, &[64, 257], Swizzle::None), 0, sizes),
            "the box's size 257 of dimension 1 is not 1 to 256",
        );
        let far = map(DType::F32, &[16, 16, 16], Swizzle::B64);
        check(
            refusal(far, 0, [1 << 30, 1 << 9, 2, 1, 1]),
            "the stride of dimension 2 is 2199023255552 bytes, not less than 2^40",
        );
        let mut flat = good;
        flat.rank = 0;
        check(refusal(flat, 0, sizes), "rank 0 is not 1 to 5");
        flat.rank = 6;
        check(refusal(flat, 0, sizes), "rank 6 is not 1 to 5");
    }
}
