//! The memory of an operation, reachable from the host.

use crate::Slice;
use moesaic_kernel::Target;
use moesaic_target::{Buffer, Device, DeviceError};
use std::sync::Arc;

/// Memory that messages are sent from or received into. Of a CPU's buffer it is the
/// buffer itself; of any other device's it is a copy on the host.
pub(crate) struct Region {
    address: *mut u8,
    bytes: usize,
    owner: Owner,
    /// Where to put the copy when all has been received.
    back: Option<Slice>,
}

/// What keeps the memory.
enum Owner {
    Buffer { _buffer: Arc<Buffer> },
    Host(Box<[u8]>),
}

// SAFETY: an address and what keeps its memory; each use says why it is sound.
unsafe impl Send for Region {}

impl Region {
    /// What is in the slice, when all that was launched before has run.
    pub fn input(device: &dyn Device, slice: &Slice) -> Result<Region, DeviceError> {
        if let Some(region) = Region::direct(device, slice)? {
            return Ok(region);
        }
        let mut bytes = vec![0; slice.bytes()];
        device.download(slice.buffer(), slice.offset(), &mut bytes)?;
        Ok(Region::host(bytes))
    }

    /// Where the slice will be written.
    pub fn output(device: &dyn Device, slice: &Slice) -> Result<Region, DeviceError> {
        if let Some(region) = Region::direct(device, slice)? {
            return Ok(region);
        }
        Ok(Region {
            back: Some(slice.clone()),
            ..Region::host(vec![0; slice.bytes()])
        })
    }

    /// A slice that is read and written.
    pub fn both(device: &dyn Device, slice: &Slice) -> Result<Region, DeviceError> {
        Ok(Region {
            back: Region::output(device, slice)?.back,
            ..Region::input(device, slice)?
        })
    }

    /// Memory of the host.
    pub fn host(bytes: Vec<u8>) -> Region {
        let mut bytes = bytes.into_boxed_slice();
        Region {
            address: bytes.as_mut_ptr(),
            bytes: bytes.len(),
            owner: Owner::Host(bytes),
            back: None,
        }
    }

    /// Buffers of CPUs are at ordinary addresses.
    fn direct(device: &dyn Device, slice: &Slice) -> Result<Option<Region>, DeviceError> {
        if !matches!(device.info().target, Target::Cpu(_)) {
            return Ok(None);
        }
        device.synchronize()?;
        Ok(Some(Region {
            address: std::ptr::with_exposed_provenance_mut(slice.address() as usize),
            bytes: slice.bytes(),
            owner: Owner::Buffer {
                _buffer: Arc::clone(slice.buffer()),
            },
            back: None,
        }))
    }

    /// The address of `offset`, if `bytes` bytes fit behind it.
    pub fn at(&self, offset: usize, bytes: usize) -> Option<*mut u8> {
        let end = offset.checked_add(bytes)?;
        (end <= self.bytes).then(|| self.address.wrapping_add(offset))
    }

    /// Puts a copy on the host where it belongs.
    pub fn write_back(&self, device: &dyn Device) -> Result<(), DeviceError> {
        match (&self.back, &self.owner) {
            (Some(slice), Owner::Host(bytes)) => {
                device.upload(bytes, slice.buffer(), slice.offset())
            }
            _ => Ok(()),
        }
    }

    /// What was received in memory of the host.
    pub fn into_host(self) -> Vec<u8> {
        match self.owner {
            Owner::Host(bytes) => bytes.into_vec(),
            Owner::Buffer { .. } => Vec::new(),
        }
    }
}
