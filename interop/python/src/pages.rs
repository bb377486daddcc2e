//! Memory for large results.
//!
//! A page that is new to a process has to be cleared first, which takes longer than the kernels
//! that write to it. So pages are huge where the system has such, and those of a dropped result
//! are kept for the next ones.

use crate::dlpack::{Exported, export};
use memmap2::{Advice, MmapMut};
use moesaic::DType;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use std::io;
use std::sync::Mutex;

/// A huge page of x86-64, and of aarch64 with small pages of 4 KiB.
const HUGE: usize = 2 << 20;

/// The bytes that are kept at most.
const KEPT: usize = 256 << 20;

/// Dropped memory, longest unused first.
static POOL: Mutex<Vec<Mapping>> = Mutex::new(Vec::new());

/// Whole huge pages, and one more, because a mapping may start anywhere.
struct Mapping(MmapMut);

impl Mapping {
    fn new(bytes: usize) -> io::Result<Mapping> {
        let map = MmapMut::map_anon(bytes.next_multiple_of(HUGE) + HUGE)?;
        // A system that refuses gives small pages.
        let _ = map.advise(Advice::HugePage);
        Ok(Mapping(map))
    }

    fn bytes(&self) -> usize {
        self.0.len() - HUGE
    }

    /// Returns the first byte of the first whole huge page.
    fn start(&mut self) -> *mut u8 {
        let before = self.0.as_ptr().align_offset(HUGE);
        self.0[before..].as_mut_ptr()
    }
}

/// A mapping that goes back to the pool.
struct Pages(Option<Mapping>);

impl Drop for Pages {
    fn drop(&mut self) {
        let Some(mapping) = self.0.take().filter(|own| own.bytes() <= KEPT) else {
            return;
        };
        // Whoever holds the lock may be a thread that did not come along in a fork.
        let Ok(mut pool) = POOL.try_lock() else {
            return;
        };
        pool.push(mapping);
        let mut kept: usize = pool.iter().map(Mapping::bytes).sum();
        while kept > KEPT {
            kept -= pool.remove(0).bytes();
        }
    }
}

fn kept(bytes: usize) -> Option<Mapping> {
    let mut pool = POOL.try_lock().ok()?;
    let found = |own: &Mapping| own.bytes() == bytes.next_multiple_of(HUGE);
    pool.iter().position(found).map(|at| pool.remove(at))
}

/// Returns the DLPack capsule of f32 memory for `count` elements, and whether they are zero: new
/// pages are, and take no memory until they are touched.
#[pyfunction]
pub fn memory(py: Python<'_>, count: usize) -> PyResult<(Bound<'_, PyCapsule>, bool)> {
    let bytes = count * size_of::<f32>();
    let old = kept(bytes);
    let is_zero = old.is_none();
    let mut mapping = match old {
        Some(mapping) => mapping,
        None => Mapping::new(bytes)?,
    };
    let exported = Exported {
        data: mapping.start().cast(),
        dtype: DType::F32,
        shape: vec![count],
    };
    // SAFETY: the mapping stays where it is until it is dropped, and has one owner.
    let capsule = unsafe { export(py, exported, Box::new(Pages(Some(mapping)))) }?;
    Ok((capsule, is_zero))
}
