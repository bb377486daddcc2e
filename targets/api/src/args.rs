//! Arguments in the form that GPU drivers take them.

use crate::{Arg, DeviceError, LaunchDims, Ptr};
use moesaic_kernel::{Entry, Param, ParamType, Scalar, TensorMap};
use std::ffi::c_void;

/// Argument values, and the array of pointers to them that a driver reads
/// during a launch. Drivers know the size of each parameter from the binary.
/// One that is used again allocates nothing.
#[derive(Default)]
pub struct ArgBlock {
    values: Vec<Value>,
    pointers: Vec<*mut c_void>,
}

/// Bytes of an encoded tensor map.
pub const MAP_BYTES: usize = 128;

/// An encoded tensor map.
pub type MapBytes = [u8; MAP_BYTES];

/// Room for any argument; drivers want a tensor map at a multiple of 64 bytes,
/// those for CUDA 13 of 128.
#[repr(align(128))]
struct Value([u8; MAP_BYTES]);

impl ArgBlock {
    /// Packs `args`, once they fit the entry's parameters in number and kind.
    ///
    /// # Errors
    /// [`DeviceError::Launch`] names the first that does not fit, or the
    /// first tensor map, which only [`ArgBlock::with_maps`] takes.
    pub fn new(entry: &Entry, args: &[Arg]) -> Result<ArgBlock, DeviceError> {
        ArgBlock::with_maps(entry, args, |_, _, _| {
            let reason = "this device has no tensor maps".to_string();
            Err(DeviceError::Launch {
                kernel: entry.symbol.clone(),
                reason,
            })
        })
    }

    /// Packs `args`; `encode` writes a tensor map from its declaration, the
    /// address of the tensor and its sizes, innermost first. There is no map of
    /// a tensor without elements: its bytes are zero, and no kernel copies by it.
    ///
    /// # Errors
    /// As [`ArgBlock::new`], and what `encode` returns.
    pub fn with_maps(
        entry: &Entry,
        args: &[Arg],
        encode: impl FnMut(&TensorMap, Ptr, [u64; 5]) -> Result<MapBytes, DeviceError>,
    ) -> Result<ArgBlock, DeviceError> {
        let mut block = ArgBlock::default();
        block.pack(entry, args, encode)?;
        Ok(block)
    }

    /// Packs other arguments into a block; see [`ArgBlock::with_maps`].
    ///
    /// # Errors
    /// As there.
    pub fn pack(
        &mut self,
        entry: &Entry,
        args: &[Arg],
        mut encode: impl FnMut(&TensorMap, Ptr, [u64; 5]) -> Result<MapBytes, DeviceError>,
    ) -> Result<(), DeviceError> {
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

    /// One pointer per argument, valid while the block lives and stays where
    /// it is borrowed.
    pub fn pointers(&mut self) -> &mut [*mut c_void] {
        let values = self.values.iter_mut();
        self.pointers.clear();
        self.pointers
            .extend(values.map(|value| value.0.as_mut_ptr().cast()));
        &mut self.pointers
    }
}

/// The grid of `dims` as drivers take it; `None` when a dimension is zero and
/// there is nothing to launch.
///
/// # Errors
/// [`DeviceError::Launch`] when a dimension is beyond what GPUs have: 2^31-1
/// blocks in x, 65535 in y.
pub fn gpu_grid(symbol: &str, dims: &LaunchDims) -> Result<Option<[u32; 2]>, DeviceError> {
    const MOST: [u64; 2] = [i32::MAX as u64, u16::MAX as u64];
    let [x, y] = dims.grid;
    if x == 0 || y == 0 {
        return Ok(None);
    }
    if x > MOST[0] || y > MOST[1] {
        let reason = format!(
            "a grid of {x} x {y} blocks is too large; the most are {} x {}",
            MOST[0], MOST[1]
        );
        return Err(DeviceError::Launch {
            kernel: symbol.to_string(),
            reason,
        });
    }
    Ok(Some([x as u32, y as u32]))
}

fn check_count(entry: &Entry, args: &[Arg]) -> Result<(), DeviceError> {
    let (want, got) = (entry.params.len(), args.len());
    if want == got {
        return Ok(());
    }
    let reason = format!("it takes {want} arguments and got {got}");
    Err(DeviceError::Launch {
        kernel: entry.symbol.clone(),
        reason,
    })
}

fn check_kinds(entry: &Entry, args: &[Arg]) -> Result<(), DeviceError> {
    let mut pairs = entry.params.iter().zip(args);
    let Some((param, arg)) = pairs.find(|(param, arg)| !fits(param, arg)) else {
        return Ok(());
    };
    let reason = format!(
        "argument `{}` is {arg:?} and must be {:?}",
        param.name, param.ty
    );
    Err(DeviceError::Launch {
        kernel: entry.symbol.clone(),
        reason,
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

/// The value in the first bytes, as hosts of GPUs are little-endian.
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

    /// Encoders refuse such sizes, and a kernel without rows asks for no box.
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
            // SAFETY: the block lives, and a map has so many bytes.
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
