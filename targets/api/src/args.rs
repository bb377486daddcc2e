//! Kernel arguments in the form that GPU drivers take.

use crate::{Arg, DeviceError, LaunchDims, LaunchReason, MAP_BYTES, MapBytes, Ptr};
use moesaic_kernel::{Entry, Param, ParamType, Scalar, TensorMap};
use std::ffi::c_void;

/// Argument values, and the array of pointers to them that a driver reads during a launch. Drivers
/// know the size of each parameter from the binary. Reusing a block allocates nothing.
#[derive(Default)]
pub struct ArgBlock {
    values: Vec<Value>,
    pointers: Vec<*mut c_void>,
}

/// Storage for any argument. Drivers want a tensor map aligned to 64 bytes, those for CUDA 13 to
/// 128.
#[repr(align(128))]
struct Value([u8; MAP_BYTES]);

impl ArgBlock {
    /// Packs `args` after checking that they fit the entry's parameters in number and kind.
    ///
    /// # Errors
    /// [`DeviceError::Launch`] names the first argument that does not fit, or the first tensor map,
    /// which only [`ArgBlock::with_maps`] accepts.
    pub fn new(entry: &Entry, args: &[Arg]) -> Result<ArgBlock, DeviceError> {
        ArgBlock::with_maps(entry, args, |_, _, _| {
            Err(DeviceError::Launch {
                kernel: entry.symbol.clone(),
                reason: LaunchReason::NoTensorMaps,
            })
        })
    }

    /// Packs `args`. `encode` writes a tensor map from its declaration, the address of the tensor
    /// and its sizes, innermost first. A tensor without elements has no map: its bytes are zero,
    /// and no kernel copies through it.
    ///
    /// # Errors
    /// The errors of [`ArgBlock::new`] and of `encode`.
    pub fn with_maps(
        entry: &Entry,
        args: &[Arg],
        encode: impl FnMut(&TensorMap, Ptr, [u64; 5]) -> Result<MapBytes, DeviceError>,
    ) -> Result<ArgBlock, DeviceError> {
        let mut block = ArgBlock::default();
        block.pack(entry, args, encode)?;
        Ok(block)
    }

    /// Packs other arguments into the block; see [`ArgBlock::with_maps`].
    ///
    /// # Errors
    /// The same as [`ArgBlock::with_maps`].
    pub fn pack(
        &mut self,
        entry: &Entry,
        args: &[Arg],
        mut encode: impl FnMut(&TensorMap, Ptr, [u64; 5]) -> Result<MapBytes, DeviceError>,
    ) -> Result<(), DeviceError> {
        // Check everything before packing: drivers trust the pointers and would read beyond a
        // missing argument.
        check_count(entry, args)?;
        check_kinds(entry, args)?;
        self.values.clear();
        for (param, arg) in entry.params.iter().zip(args) {
            self.values.push(match (param.ty, arg) {
                (ParamType::TensorMap(_), Arg::TensorMap { dims, .. }) if dims.contains(&0) => {
                    Value([0; MAP_BYTES])
                }
                (ParamType::TensorMap(map), Arg::TensorMap { base, dims }) => {
                    Value(encode(&map, *base, *dims)?)
                }
                _ => Value(scalar(arg)),
            });
        }
        Ok(())
    }

    /// Returns one pointer per argument, valid while the block is borrowed and not moved.
    pub fn pointers(&mut self) -> &mut [*mut c_void] {
        let values = self.values.iter_mut();
        // The values may have moved since the last call, so take their addresses anew.
        self.pointers.clear();
        self.pointers
            .extend(values.map(|value| value.0.as_mut_ptr().cast()));
        &mut self.pointers
    }
}

/// Returns the grid of `dims` as drivers take it, or `None` if a dimension is zero and there is
/// nothing to launch.
///
/// # Errors
/// [`DeviceError::Launch`] if a dimension exceeds the limits of GPUs: 2^31-1 blocks in x, 65535 in
/// y.
pub fn gpu_grid(symbol: &str, dims: &LaunchDims) -> Result<Option<[u32; 2]>, DeviceError> {
    // The limits of CUDA's grids, used for both vendors.
    const MOST: [u64; 2] = [i32::MAX as u64, u16::MAX as u64];
    let [x, y] = dims.grid;
    if x == 0 || y == 0 {
        return Ok(None);
    }
    if x > MOST[0] || y > MOST[1] {
        return Err(DeviceError::Launch {
            kernel: symbol.to_string(),
            reason: LaunchReason::LargeGrid {
                grid: [x, y],
                most: Some(MOST),
            },
        });
    }
    Ok(Some([x as u32, y as u32]))
}

fn check_count(entry: &Entry, args: &[Arg]) -> Result<(), DeviceError> {
    let (expected, found) = (entry.params.len(), args.len());
    if expected == found {
        return Ok(());
    }
    Err(DeviceError::Launch {
        kernel: entry.symbol.clone(),
        reason: LaunchReason::ArgumentCount { expected, found },
    })
}

fn check_kinds(entry: &Entry, args: &[Arg]) -> Result<(), DeviceError> {
    let mut pairs = entry.params.iter().zip(args);
    let Some((param, arg)) = pairs.find(|(param, arg)| !fits(param, arg)) else {
        return Ok(());
    };
    Err(DeviceError::Launch {
        kernel: entry.symbol.clone(),
        reason: LaunchReason::Argument {
            argument: format!("`{}`", param.name),
            found: format!("{arg:?}"),
            expected: param.ty,
        },
    })
}

fn fits(param: &Param, arg: &Arg) -> bool {
    matches!(
        (param.ty, arg),
        (ParamType::Tensor(..), Arg::Ptr(_))
            | (ParamType::Scalar(Scalar::I64), Arg::I64(_))
            | (ParamType::Scalar(Scalar::F32), Arg::F32(_))
            | (ParamType::TensorMap(_), Arg::TensorMap { .. })
    )
}

/// Returns the value in the first bytes, little-endian as on all hosts of GPUs.
fn scalar(arg: &Arg) -> MapBytes {
    let value = match arg {
        Arg::Ptr(address) | Arg::TensorMap { base: address, .. } => address.0,
        Arg::I64(value) => value.cast_unsigned(),
        Arg::F32(value) => u64::from(value.to_bits()),
    };
    let mut bytes = [0; MAP_BYTES];
    bytes[..8].copy_from_slice(&value.to_le_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Ptr;
    use moesaic_kernel::{Access, DType, Launch, Size, Swizzle};

    fn entry() -> Entry {
        let factor = Param {
            name: "factor".to_string(),
            ty: ParamType::Scalar(Scalar::F32),
            shape: String::new(),
        };
        Entry {
            symbol: "scale".to_string(),
            summary: String::new(),
            params: vec![
                factor,
                Param::tensor("x", DType::Bf16, Access::Read, "[tokens]"),
                Param::i64("count"),
            ],
            launch: Launch {
                grid: [Size::Tokens, Size::Const(1)],
                threads: 64,
                shared_bytes: 0,
                cluster: 1,
                dependent: false,
            },
        }
    }

    #[test]
    fn each_pointer_leads_to_its_value() {
        let args = [
            Arg::F32(-1.5),
            Arg::Ptr(Ptr(0xdead_beef_0010)),
            Arg::I64(-7),
        ];
        let mut block = ArgBlock::new(&entry(), &args).unwrap();
        let pointers = block.pointers().to_vec();
        // SAFETY: the block lives, and each points to a value of this type.
        unsafe {
            assert_eq!(*pointers[0].cast::<f32>(), -1.5);
            assert_eq!(*pointers[1].cast::<u64>(), 0xdead_beef_0010);
            assert_eq!(*pointers[2].cast::<i64>(), -7);
        }
    }

    #[test]
    fn a_block_is_used_again_where_it_is() {
        let args = [Arg::F32(1.0), Arg::Ptr(Ptr(64)), Arg::I64(7)];
        let none = |_: &TensorMap, _, _| Ok([0; MAP_BYTES]);
        let mut block = ArgBlock::new(&entry(), &args).unwrap();
        let first = block.pointers().to_vec();
        block
            .pack(&entry(), &[Arg::F32(2.0), args[1], Arg::I64(9)], none)
            .unwrap();
        assert_eq!(block.pointers(), first);
        // SAFETY: the block lives, and each points to a value of this type.
        unsafe {
            assert_eq!(*first[0].cast::<f32>(), 2.0);
            assert_eq!(*first[2].cast::<i64>(), 9);
        }
        assert!(block.pack(&entry(), &args[..2], none).is_err());
    }

    /// Encoders refuse empty tensors, and a kernel without rows never uses their map.
    #[test]
    fn no_elements_no_map() {
        let map = TensorMap {
            dtype: DType::Bf16,
            access: Access::Read,
            rank: 2,
            tile: [64, 64, 1, 1, 1],
            swizzle: Swizzle::B128,
        };
        let entry = Entry {
            params: vec![Param::map("rows_map", map, "[rows, 64]")],
            ..entry()
        };
        let pack = |rows| {
            let dims = [64, rows, 1, 1, 1];
            let arg = Arg::TensorMap { base: Ptr(0), dims };
            let mut block = ArgBlock::with_maps(&entry, &[arg], |_, _, _| Ok([7; MAP_BYTES]))?;
            // SAFETY: the block lives, and a map has this many bytes.
            Ok(unsafe { *block.pointers()[0].cast::<MapBytes>() })
        };
        let pack = |rows| pack(rows).unwrap_or_else(|error: DeviceError| panic!("{error}"));
        assert_eq!(pack(0), [0; MAP_BYTES]);
        assert_eq!(pack(1), [7; MAP_BYTES]);
    }

    #[test]
    fn wrong_arguments_are_named() {
        let check = |args: &[Arg], expected: &str| {
            let Err(error) = ArgBlock::new(&entry(), args) else {
                panic!("packed {args:?}")
            };
            assert_eq!(
                error.to_string(),
                format!("launch of kernel `scale` failed: {expected}")
            );
        };
        let (f, p, n) = (Arg::F32(1.0), Arg::Ptr(Ptr(64)), Arg::I64(1));
        check(&[f, p], "it takes 3 arguments and got 2");
        check(
            &[f, n, p],
            "argument `x` is I64(1) and must be Tensor(Bf16, Read)",
        );
    }

    #[test]
    fn grids_are_checked() {
        let grid = |x, y| {
            let dims = LaunchDims {
                grid: [x, y],
                threads: 32,
                shared_bytes: 0,
                cluster: 1,
            };
            gpu_grid("k", &dims).map_err(|error| error.to_string())
        };
        assert_eq!(grid(0, 5), Ok(None));
        assert_eq!(grid(5, 0), Ok(None));
        assert_eq!(grid(0x7fff_ffff, 65535), Ok(Some([0x7fff_ffff, 65535])));
        assert!(
            grid(0x8000_0000, 1)
                .unwrap_err()
                .contains("a grid of 2147483648 x 1 blocks is too large")
        );
        assert!(grid(1, 65536).is_err());
    }
}
