//! Conversions between candle's tensors and the engine's.

use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, Error, Result, Storage, Tensor};
use moesaic::half::{bf16, f16};
use moesaic::{DType, Tensor as HostTensor};

/// Passes a tensor's elements to a function, as `dtype` and under a shape with
/// as many elements: in place, or as a converted copy.
///
/// # Errors
/// The tensor is not on the CPU, or a conversion would be no rounding.
pub fn lend<R>(
    tensor: &Tensor,
    dtype: DType,
    shape: &[usize],
    read: impl FnOnce(HostTensor<'_>) -> Result<R>,
) -> Result<R> {
    if !tensor.device().is_cpu() {
        let device = tensor.device().location();
        candle_core::bail!("a tensor is on {device:?}, a layer takes those of Device::Cpu");
    }
    let tensor = converted(tensor, dtype)?.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let (Storage::Cpu(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets())
    else {
        candle_core::bail!("a tensor is not contiguous after all")
    };
    read(match storage {
        CpuStorage::F32(data) => HostTensor::new(shape, &data[start..end]),
        CpuStorage::F16(data) => HostTensor::new(shape, &data[start..end]),
        CpuStorage::BF16(data) => HostTensor::new(shape, &data[start..end]),
        CpuStorage::I32(data) => HostTensor::new(shape, &data[start..end]),
        CpuStorage::I64(data) => HostTensor::new(shape, &data[start..end]),
        _ => candle_core::bail!("a layer has no {:?}", tensor.dtype()),
    })
}

/// Returns the elements as [`lend`] passes them, in a copy that stays.
pub fn copied(tensor: &Tensor, dtype: DType, shape: &[usize]) -> Result<HostTensor<'static>> {
    lend(tensor, dtype, shape, |host| Ok(host.into_static()))
}

/// Converts a tensor to another type, outside the graph. Floats are rounded;
/// integers, of which candle has more types than the engine, must fit.
fn converted(tensor: &Tensor, dtype: DType) -> Result<Tensor> {
    let (given, wanted) = (tensor.dtype(), candle_type(dtype));
    match (given.is_int(), wanted.is_int()) {
        _ if given == wanted => Ok(tensor.clone()),
        (false, false) => tensor.detach().to_dtype(wanted),
        (true, true) => fitting(&tensor.to_dtype(candle_core::DType::I64)?, wanted),
        _ => candle_core::bail!("is {given:?}, expected {wanted:?}"),
    }
}

/// Converts 64-bit integers to a type that may be narrower.
fn fitting(wide: &Tensor, wanted: candle_core::DType) -> Result<Tensor> {
    let values = wide.flatten_all()?.to_vec1::<i64>()?;
    let fits = |value: &i64| i32::try_from(*value).is_ok();
    match values.iter().find(|value| !fits(value)) {
        Some(value) if wanted == candle_core::DType::I32 => {
            candle_core::bail!("has {value}, which is no 32-bit integer")
        }
        _ => wide.to_dtype(wanted),
    }
}

/// Returns the error for an `x` of another type than the layer's: a conversion would be a copy that
/// nobody asked for.
pub fn wrong_type(given: candle_core::DType, wanted: candle_core::DType) -> Error {
    Error::Msg(format!(
        "`x` is {given:?}, the layer computes in {wanted:?}: convert it"
    ))
    .bt()
}

/// Returns candle's name of an engine type.
pub fn candle_type(dtype: DType) -> candle_core::DType {
    match dtype {
        DType::F32 => candle_core::DType::F32,
        DType::F16 => candle_core::DType::F16,
        DType::Bf16 => candle_core::DType::BF16,
        DType::I32 => candle_core::DType::I32,
        DType::I64 => candle_core::DType::I64,
    }
}

/// Returns the engine's name of a candle type.
///
/// # Errors
/// The engine has no such type.
pub fn host_type(dtype: candle_core::DType) -> Result<DType> {
    Ok(match dtype {
        candle_core::DType::F32 => DType::F32,
        candle_core::DType::F16 => DType::F16,
        candle_core::DType::BF16 => DType::Bf16,
        candle_core::DType::I32 => DType::I32,
        candle_core::DType::I64 => DType::I64,
        _ => candle_core::bail!("a layer has no {dtype:?}, only f32, f16, bf16, i32 and i64"),
    })
}

/// Returns the elements of an engine tensor.
pub fn storage(host: &HostTensor<'_>) -> CpuStorage {
    let same = "the type was just matched";
    match host.dtype {
        DType::F32 => CpuStorage::F32(host.to_vec().expect(same)),
        DType::F16 => CpuStorage::F16(host.to_vec::<f16>().expect(same)),
        DType::Bf16 => CpuStorage::BF16(host.to_vec::<bf16>().expect(same)),
        DType::I32 => CpuStorage::I32(host.to_vec().expect(same)),
        DType::I64 => CpuStorage::I64(host.to_vec().expect(same)),
    }
}

/// Returns an engine tensor under a shape with as many elements.
pub fn tensor(host: &HostTensor<'_>, shape: &[usize]) -> Tensor {
    let storage = Storage::Cpu(storage(host));
    Tensor::from_storage(storage, shape, BackpropOp::none(), false)
}

/// Adds the name of the tensor to an error, and drops the backtrace that `RUST_BACKTRACE` adds: a
/// list of errors would have one in each line.
pub fn named(name: &str, error: Error) -> Error {
    match error {
        Error::WithBacktrace { inner, .. } => named(name, *inner),
        error => Error::Msg(format!("`{name}`: {error}")),
    }
}
