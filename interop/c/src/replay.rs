//! Records of the experts that layers chose, and layers that choose by a record.

use crate::pointers::{Out, borrow, free, text};
use crate::spec::Spec;
use crate::status::{Failure, Status, guard};
use crate::tensors::{Given, Tensor};
use moesaic::DType;
use moesaic::train::replay::{IdType, RecordShape, RoutedExperts};
use std::ffi::c_char;
use std::path::Path;

/// The experts that every layer of a model chose for each token.
pub struct Record(RoutedExperts);

/// Makes a record of "routed_experts" [tokens, layers, K], i32, in host memory, which is copied.
/// Calls write one where you want it: in each layer name "topk_ids" at `layer * K` elements into the
/// array, with the strides {layers * K, 1}. Free it by moesaic_record_free.
///
/// # Safety
/// `routed_experts` is valid; `out` is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_record_open(
    routed_experts: *const Tensor,
    out: *mut *mut Record,
) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let (out, given) = unsafe {
            let out = Out::handle(out)?;
            (out, Given::read(borrow(routed_experts, "routed_experts")?)?)
        };
        let &[tokens, layers, top_k] = given.shape.as_slice() else {
            let problem = format!("has shape {:?}, expected [tokens, layers, K]", given.shape);
            return Err(Failure::tensor(given.name, problem));
        };
        given.check_kind(DType::I32, &[tokens, layers, top_k])?;
        // SAFETY: as above.
        let ids = unsafe { given.host() }?.to_vec().unwrap_or_default();
        let shape = RecordShape {
            tokens,
            layers,
            top_k,
        };
        out.give(Record(RoutedExperts::new(shape, ids)?));
        Ok(())
    })
}

/// Reads a record from an .npy file, as vLLM sends and NumPy saves it. Free it by
/// moesaic_record_free.
///
/// # Safety
/// `file` ends in NUL; `out` is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_record_read(file: *const c_char, out: *mut *mut Record) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let (out, file) = unsafe { (Out::handle(out)?, text(file, "file")?) };
        out.give(Record(RoutedExperts::read(Path::new(file))?));
        Ok(())
    })
}

/// Writes a record as an .npy file, of the smallest integers that hold its ids.
///
/// # Safety
/// `record` is live, `file` ends in NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_record_write(
    record: *const Record,
    file: *const c_char,
) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let (Record(record), file) = unsafe { (borrow(record, "record")?, text(file, "file")?) };
        let most = record.ids().iter().copied().max().unwrap_or(0);
        let element = IdType::for_experts(most.max(0) as usize + 1);
        Ok(record.write(Path::new(file), element)?)
    })
}

/// Writes the sizes of a record: `sizes` has room for tokens, layers and K.
///
/// # Safety
/// `record` is live, `sizes` is valid for three writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_record_sizes(record: *const Record, sizes: *mut usize) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let Record(record) = unsafe { borrow(record, "record") }?;
        if sizes.is_null() {
            return Err(Failure::Null("sizes"));
        }
        let RecordShape {
            tokens,
            layers,
            top_k,
        } = record.shape();
        // SAFETY: the caller vouches for the room.
        unsafe { sizes.copy_from_nonoverlapping([tokens, layers, top_k].as_ptr(), 3) };
        Ok(())
    })
}

/// Makes the spec of a layer that takes its experts from layer `layer` of a record, and writes the
/// weight "router.table" [tokens, K] that it then has to `count` elements at `table`. All other
/// weights are those of `spec`. Calls of such a layer take "token_ids" [T] i32, rows of the record;
/// weights of the experts, and the gradients of the router, follow from its own logits. Free the spec
/// by moesaic_spec_free.
///
/// # Safety
/// Handles are live, `table` has room for `count` elements; `out` is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_record_replay(
    record: *const Record,
    spec: *const Spec,
    layer: usize,
    table: *mut i32,
    count: usize,
    out: *mut *mut Spec,
) -> Status {
    guard(|| {
        // SAFETY: the caller vouches for its pointers.
        let (out, Record(record), spec) = unsafe {
            let out = Out::handle(out)?;
            (out, borrow(record, "record")?, borrow(spec, "spec")?)
        };
        let replay = record.replay(&spec.spec, layer)?;
        let ids: Vec<i32> = replay.table.to_vec().unwrap_or_default();
        if ids.len() != count {
            let problem = format!("is {count}, the table has {} elements", ids.len());
            return Err(Failure::argument("count", problem));
        }
        if table.is_null() && count > 0 {
            return Err(Failure::Null("table"));
        }
        // SAFETY: the caller vouches for the room.
        unsafe { std::ptr::copy_nonoverlapping(ids.as_ptr(), table, count) };
        out.give(Spec::new(replay.spec));
        Ok(())
    })
}

/// Frees a record; NULL is allowed.
///
/// # Safety
/// `record` is NULL or live, and no other thread uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moesaic_record_free(record: *mut Record) {
    // SAFETY: the caller vouches for it.
    unsafe { free(record) }
}
