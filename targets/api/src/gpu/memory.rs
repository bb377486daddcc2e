//! Device memory, and host memory that the device can access.

use super::lane::Lane;
use super::pinned::Pinned;
use super::shared::Gpu;
use super::{Fault, Vendor};
use crate::{Buffer, DeviceError, FreeMemory, HostBuffer, Ptr};
use std::sync::Arc;

/// The code for exhausted memory in both drivers.
const OUT_OF_MEMORY: i32 = 2;
const NOT_SUPPORTED: i32 = 801;

/// Device memory that is freed on drop, in the order of its stream. During a capture the graph
/// keeps it, because a free would become part of the graph.
pub(super) struct Block<V: Vendor> {
    address: u64,
    pooled: bool,
    lane: Arc<Lane<V>>,
}

impl<V: Vendor> Drop for Block<V> {
    fn drop(&mut self) {
        if let Some(capture) = self.lane.capturing() {
            return capture.keep_block(Box::new(Block {
                lane: self.lane.clone(),
                ..*self
            }));
        }
        let (address, stream) = (self.address, self.lane.stream);
        // SAFETY: allocated once, freed once; in stream order, so that earlier launches finish
        // first, or when the device has finished.
        self.lane.gpu.call_quietly(|f| unsafe {
            if self.pooled {
                (f.free_async)(address, stream)
            } else {
                (f.free)(address)
            }
        });
    }
}

pub(super) fn allocate<V: Vendor>(
    lane: &Arc<Lane<V>>,
    bytes: usize,
) -> Result<Buffer, DeviceError> {
    lane.forbid(|| format!("an allocation of {bytes} bytes"))?;
    let gpu = &lane.gpu;
    let operation = format!("allocation of {bytes} bytes");
    gpu.enter(&operation)?;
    // Allocate one byte for zero, so that the address is always real.
    match address(lane, bytes.max(1)) {
        Ok((address, pooled)) => {
            let owner = Block {
                address,
                pooled,
                lane: lane.clone(),
            };
            Ok(Buffer::new(Ptr(address), bytes, Box::new(owner)))
        }
        Err(fault) if fault.code == OUT_OF_MEMORY => Err(out_of_memory(gpu, bytes)),
        Err(fault) => Err(gpu.error(&operation, &fault)),
    }
}

/// Allocates from the pool, or from the driver itself without a pool.
fn address<V: Vendor>(lane: &Lane<V>, bytes: usize) -> Result<(u64, bool), Fault> {
    let (gpu, mut address) = (&lane.gpu, 0);
    let functions = gpu.vendor.functions();
    if gpu.gpu_info.pools {
        // SAFETY: the pointer is valid for a write, the stream is live.
        let code = unsafe { (functions.alloc_async)(&mut address, bytes, lane.stream) };
        match gpu.check(code) {
            Err(fault) if fault.code == NOT_SUPPORTED => {}
            outcome => return outcome.map(|()| (address, true)),
        }
    }
    // SAFETY: the pointer is valid for a write.
    let code = unsafe { (functions.alloc)(&mut address, bytes) };
    gpu.check(code).map(|()| (address, false))
}

fn out_of_memory<V: Vendor>(gpu: &Gpu<V>, asked: usize) -> DeviceError {
    let free = free_and_total(gpu);
    let free = free.map_or(FreeMemory::Unknown, |(free, _)| FreeMemory::Bytes(free));
    DeviceError::OutOfMemory { asked, free }
}

/// Returns free and total memory in bytes.
pub(super) fn free_and_total<V: Vendor>(gpu: &Gpu<V>) -> Result<(usize, usize), DeviceError> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: both pointers are valid for a write.
    gpu.call("memory query", |f| unsafe {
        (f.memory_info)(&mut free, &mut total)
    })?;
    Ok((free, total))
}

pub(super) fn pinned<V: Vendor>(lane: &Lane<V>, bytes: usize) -> Result<HostBuffer, DeviceError> {
    let operation = format!("an allocation of {bytes} bytes of pinned memory");
    lane.forbid(|| operation.clone())?;
    let owner = Pinned::new(&lane.gpu, bytes, &operation)?;
    let start = owner.start();
    // SAFETY: the driver gave this many bytes; they are initialized first, and belong to nobody
    // else until the owner is dropped.
    unsafe {
        start.write_bytes(0, bytes);
        Ok(HostBuffer::new(start, bytes, Box::new(owner)))
    }
}
