//! Specs of layers.

use crate::info::{Role, TensorInfo};
use crate::pointers::{Out, borrow, free, text};
use crate::status::{Failure, Status, guard};
use moesaic::LayerSpec;
use moesaic::spec::{TensorSpec, canonical_tensors, hf};
use std::ffi::{CString, c_char};
use std::path::PathBuf;

/// The description of a layer.
pub struct Spec {
    pub(crate) spec: LayerSpec,
    toml: CString,
    weights: Vec<Weight>,
}

/// A weight, with its name as C takes it.
struct Weight {
    name: CString,
    tensor: TensorSpec,
}

impl Spec {
    pub(crate) fn new(spec: LayerSpec) -> Spec {
        let weight = |tensor: TensorSpec| Weight {
            name: CString::new(&*tensor.name).unwrap_or_default(),
            tensor,
        };
        Spec {
            toml: CString::new(spec.to_toml()).unwrap_or_default(),
            weights: canonical_tensors(&spec).into_iter().map(weight).collect(),
            spec,
        }
    }
}

fn parsed(toml: &str, file: &str) -> Result<Spec, Failure> {
    let spec = LayerSpec::from_toml(toml);
    let spec = spec.map_err(|error| Failure::Spec(error.render(file, false)))?;
    Ok(Spec::new(spec))
}

fn read(path: &str) -> Result<String, Failure> {
    let path = PathBuf::from(path);
    std::fs::read_to_string(&path).map_err(|source| moesaic::Error::Io { path, source }.into())
}

/// Reads a spec in TOML; docs/SPEC.md has the keys. The error shows the mistakes in the text. Free
/// it by moesaic_spec_free.
///
/// # Safety
/// `toml` ends in NUL; `out` is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_spec_from_toml(
    toml: *const c_char,
    out: *mut *mut Spec,
) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let (out, toml) = unsafe { (Out::handle(out)?, text(toml, "toml")?) };
        out.give(parsed(toml, "spec")?);
        Ok(())
    })
}

/// Reads a file with a spec in TOML, as moesaic_spec_from_toml.
///
/// # Safety
/// `path` ends in NUL; `out` is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_spec_from_file(
    path: *const c_char,
    out: *mut *mut Spec,
) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let (out, path) = unsafe { (Out::handle(out)?, text(path, "path")?) };
        out.give(parsed(&read(path)?, path)?);
        Ok(())
    })
}

/// Makes the spec of a layer of a model from a config.json of transformers, given by its path.
/// Layers count from zero.
///
/// # Safety
/// `path` ends in NUL; `out` is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_spec_from_config(
    path: *const c_char,
    layer: usize,
    out: *mut *mut Spec,
) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let (out, path) = unsafe { (Out::handle(out)?, text(path, "path")?) };
        let import = hf::import(&read(path)?, layer).map_err(moesaic::Error::from)?;
        out.give(Spec::new(import.spec));
        Ok(())
    })
}

/// Returns the canonical TOML of a spec, equal for equal layers. Valid as long as the spec; NULL
/// for NULL.
///
/// # Safety
/// `spec` is NULL or a live spec.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_spec_toml(spec: *const Spec) -> *const c_char {
    // SAFETY: the caller vouches for it.
    match unsafe { spec.as_ref() } {
        Some(spec) => spec.toml.as_ptr(),
        None => std::ptr::null(),
    }
}

/// Returns the number of weights of a spec; 0 for NULL.
///
/// # Safety
/// `spec` is NULL or a live spec.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_spec_weight_count(spec: *const Spec) -> usize {
    // SAFETY: the caller vouches for it.
    unsafe { spec.as_ref() }.map_or(0, |spec| spec.weights.len())
}

/// Writes name, type and shape of a weight of the whole layer, by its number.
///
/// # Safety
/// `spec` is NULL or a live spec; `out` is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_spec_weight(
    spec: *const Spec,
    number: usize,
    out: *mut TensorInfo,
) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let (out, spec) = unsafe { (Out::new(out, "out")?, borrow(spec, "spec")?) };
        let weight = spec.weights.get(number).ok_or_else(|| {
            let problem = format!("is {number}, the spec has {} weights", spec.weights.len());
            Failure::argument("number", problem)
        })?;
        let Weight { name, tensor } = weight;
        out.set(TensorInfo::new(
            name,
            tensor.dtype,
            Role::Weight,
            &tensor.shape,
        ));
        Ok(())
    })
}

/// Frees a spec; NULL is allowed.
///
/// # Safety
/// `spec` is NULL or a live spec that no other thread uses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_spec_free(spec: *mut Spec) {
    // SAFETY: the caller vouches for it.
    unsafe { free(spec) }
}
